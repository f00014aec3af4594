"""Enforces the write rule, which ``taas.rank_storage`` states.

A *wall* is the write protection of one rank.

* ``boundary``: where the project begins and ends, which directories beneath it stay writable, and
  the error for a rank that tries to write to a protected path.
* ``walls``: the three mechanisms of protection, and which one this machine supports.
* ``table``: a rank's view of the project: its own files first, then the live ones.
* ``diversion``: how Python's ``os`` functions use this view.
* ``saves``: files that other ranks write into the saves of rank 0.
* ``rescued``: the files that other ranks wrote, at the end of a run; ``%taas recover``;
  checkpoints of all ranks, which rank 0 completes.
* ``missed``: errors of C code that does not find a file that a rank wrote.
"""

"""Enforces the write rule; ``taas.rank_storage`` says what the rule is.

* ``boundary``: where the project begins and ends, what beneath it stays writable, and the error for
  a rank that meets its wall.
* ``walls``: the three mechanisms, and which one this machine has.
* ``table``: a rank's view of the project: its own files first, then the live ones.
* ``diversion``: how the calls of Python's ``os`` use this view.
* ``saves``: files that other ranks write into the saves of rank 0.
* ``rescued``: the files that other ranks wrote, at the end of a run; ``%taas recover``; checkpoints
  of all ranks, which rank 0 completes.
* ``missed``: errors of C code that does not find a file that a rank wrote.
"""

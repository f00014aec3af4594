"""How the write rule is kept; ``taas.rank_storage`` says what the rule is.

* ``boundary``: where the project begins and ends, what beneath it stays writable, and what a rank
  that meets its wall is told.
* ``walls``: the three mechanisms, and which one this machine has.
* ``table``: what a rank sees of the project: its own files first, then the live ones.
* ``diversion``: what the calls of Python's ``os`` do with it.
* ``saves``: what other ranks write into the saves of rank 0.
* ``kept``: checkpoints of all ranks, which rank 0 completes; the end of a run; ``%taas recover``.
* ``missed``: errors of C code that does not find what a rank wrote.
"""

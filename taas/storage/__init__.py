"""How the write rule is kept; ``taas.rank_storage`` says what it is.

``boundary``   where the project begins and ends, and what beneath it stays writable; what a rank is
told that meets it ``walls``      the three mechanisms, and which one this machine gives
``table``      what a rank sees of the project: its own files first, then the live ones
``diversion``  what the calls of Python's ``os`` mean over it
``saves``      what other ranks write into what rank 0 saves
``kept``       checkpoints that all ranks write, made whole by rank 0; the end of a run, and
``%taas recover``
"""

"""How the write rule is kept; ``taas.rank_storage`` says what it is.

``boundary``    where the project begins and ends: links, aliases, what beneath it stays writable
``walls``       the three mechanisms, and what came from before them
``denial``      what a rank is told that meets one
``overlay``     a rank's own version of the project: its diverted files first, then the live ones
``view``, ``diversion``  what Python's reading and writing calls mean over it; ``calls`` puts them in place
``gathering``   checkpoints that all ranks write, made whole by rank 0
``settlement``  the end of a run: what was replicated, what is kept
``recovery``    kept writes brought into the project, and how long they are kept
``probe``       which mechanism this machine gives
"""

"""``python -m taas.supervisor``: started by the launcher, told what it needs on standard input."""

import os

if __name__ == "__main__":
    if os.fork():
        # A kernel that is shut down ends its children: the supervisor must not be one.
        os._exit(0)
    os.setsid()
    from taas.supervisor.loop import main

    main()
    os._exit(0)  # without a wait for work threads, which a stuck file system may hold

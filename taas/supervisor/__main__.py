"""``python -m taas.supervisor``: started by the launcher, which writes to its standard input."""

import os

if __name__ == "__main__":
    if os.fork():
        # A kernel that shuts down ends its children, so the supervisor must not be one of them.
        os._exit(0)
    os.setsid()
    from taas.supervisor.loop import main

    main()
    os._exit(0)  # do not wait for work threads: a stuck file system may block them

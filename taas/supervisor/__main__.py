"""``python -m taas.supervisor``: started by the launcher, told what it needs on standard input."""

import os

if __name__ == "__main__":
    if os.fork():
        os._exit(
            0
        )  # the supervisor is nobody's child: a kernel ends its children when it is shut down
    os.setsid()
    from taas.supervisor.loop import main

    main()

"""``python -m taas.supervisor``: started by the launcher, told what it needs on standard input."""

from taas.supervisor.loop import main

if __name__ == "__main__":
    main()

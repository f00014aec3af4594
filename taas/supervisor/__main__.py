"""``python -m taas.supervisor``: started by the launcher, told what it needs on standard input."""

from taas.supervisor.sweeper import leave_a_sweeper

if __name__ == "__main__":
    folder = leave_a_sweeper()  # while next to nothing is imported, for the sweeper keeps what there is
    from taas.supervisor.loop import main

    main(folder)

"""``python -m taas.agent``: started by an engine, with its configuration on standard input."""

from taas.agent.loop import main

if __name__ == "__main__":
    main()

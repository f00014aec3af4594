"""``taas VERB`` in a terminal: the verbs of ``%taas``, beside a kernel that may be busy."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from taas import verbs
from taas.cell_output import Screen, TerminalOutput, say
from taas.errors import TaasError
from taas.records import RunRecord
from taas.status import Shown, line

__all__ = ["main"]


class TerminalDesk:
    """A terminal, as :mod:`taas.verbs` sees it."""

    kernel = 0

    def show(self, what: Shown) -> None:
        """Print the view's text."""
        sys.stdout.write(_here(what.text) + "\n")

    def show_status(self) -> None:
        """Print which runs go on now."""
        from taas.records import read_records
        from taas.status import status

        self.show(status(read_records()))

    def screen(self, plain: int | None) -> Screen:
        """Return standard output and error."""
        return TerminalOutput(plain)

    def attach(self, record: RunRecord) -> None:
        """Follow a run."""
        from taas.attach import follow

        try:
            record = follow(record, record.shown_ranks(), TerminalOutput())
        except KeyboardInterrupt:
            say(f"detached; {record.name} goes on. `taas stop {record.name}` ends it")
            return
        say(line(record).text)
        if record.background and record.outcome == "done":
            say(f"%taas attach {record.name} in a notebook brings its names")


def _here(text: str) -> str:
    """A message as a terminal's user has to type it."""
    return re.sub(r"(?<!%)%taas", "taas", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Returns:
        0; 2 for a wrong line; 1 for anything else that failed.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        from taas import __version__

        sys.stdout.write(f"taas {__version__}\n")
        return 0
    try:
        verbs.do(shlex.join(words), TerminalDesk())
    except TaasError as error:
        from taas.errors import HeaderError

        sys.stderr.write(f"taas: {_here(str(error))}\n")
        return 2 if isinstance(error, HeaderError) else 1
    except BrokenPipeError:  # `taas logs | head`
        sys.stderr.close()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``taas VERB`` in a terminal: the verbs of ``%taas``, even while the kernel is busy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TextIO

from taas import __version__
from taas.base.wording import visible
from taas.errors import HeaderError, TaasError
from taas.notebook.steering import Frontend, as_in_terminal, do


class _TerminalStream:
    """A stream to the terminal that removes all control sequences except colours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))

    def flush(self) -> None:
        self._stream.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the command line.

    Returns:
        0 on success, 2 if the command line is invalid, and 1 for any other failure.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        sys.stdout.write(f"taas {__version__}\n")
        return 0
    try:
        with (
            redirect_stdout(_TerminalStream(sys.stdout)),
            redirect_stderr(_TerminalStream(sys.stderr)),
        ):
            if words[:1] == ["run"] and words[1:] and not {"--help", "-h"} & set(words):
                # imported here, because it imports IPython, which no other verb needs
                from taas.frontend import run_script

                return 0 if run_script(words[1], shlex.join(words[2:])) else 1
            do(shlex.join(words), Frontend())
    except TaasError as error:
        sys.stderr.write(visible(f"taas: {as_in_terminal(str(error))}\n"))
        return 2 if isinstance(error, HeaderError) else 1
    except BrokenPipeError:  # `taas logs | head`
        sys.stderr.close()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

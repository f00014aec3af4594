"""``taas run``: a script as a cell, in the terminal where it was typed."""

from __future__ import annotations

import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from taas.errors import HeaderError
from taas.header.grammar import find_header, parse_magic_line
from taas.notebook.frontend import run_cell
from taas.wording import shown


def run_script(path: str, options: str) -> bool:
    """Run a script in ranks; returns whether it ended well.

    Args:
        path: the script, whose first lines may be a header.
        options: of a header; empty where the script has its own.

    Raises:
        HeaderError: it cannot be read, or has no header, or one too many.
    """
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise HeaderError(f"taas run {shown(path)}: {getattr(error, 'strerror', None) or error}") from None
    header = find_header(text)
    if (header is None) == (not options):
        has = "no header" if header is None else "a header of its own"
        raise HeaderError(
            f"taas run {shown(path)}: the script has {has}: allowed is one, in its first lines or as options "
            "(taas run SCRIPT --gpus 8 --on g2.8)"
        )
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    sys.argv = [path]
    try:
        run_cell(header or parse_magic_line(options), text, shell)
    except HeaderError:
        raise
    except BaseException:  # the cell's own, whatever it is
        shell.showtraceback()
        return False
    return True

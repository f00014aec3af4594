"""The notebook's front end: run cells with a header, and show the views of ``%taas``.

`taas.magics` imports this module when it first needs it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from traitlets.config import Config

from taas.base.wording import shown, visible
from taas.capture import check_syntax
from taas.capture.settings import setup_cells
from taas.config import load_catalog, project_folder
from taas.dataloader_registry import list_registered
from taas.engines.gpus import visible_gpus
from taas.errors import HeaderError
from taas.header.grammar import (
    HeaderText,
    find_header,
    has_code,
    is_setup,
    parse_header,
    parse_magic_line,
)
from taas.launcher import debug_rank, launch, notebook_path
from taas.notebook.doctor import Finding, report
from taas.notebook.run_handle import RunHandle
from taas.notebook.steering import Frontend, do
from taas.notebook.supervisor_client import release_ahead, start_ahead
from taas.notebook.view.cell_output import CellOutput, Screen
from taas.notebook.view.live_view import UpdatedView, attach, mend_lines, show_live_table
from taas.notebook.view.shown import Shown
from taas.protocol.records import RunRecord, in_words

__all__ = [
    "NotebookFrontend",
    "check_syntax",
    "debug_rank",
    "do",
    "may_be_setup",
    "mend",
    "note_setup",
    "release_ahead",
    "run_cell",
    "run_script",
    "start_ahead",
]

_NO_CODE = "a header and no code below it: write the code below the header, in the same cell"
_NO_FRAME = 1 << 30
"""A depth at which there is no frame.

So variables in a header are looked up in the notebook, and not in a function of IPython.
"""


def run_cell(header: HeaderText, cell: str, shell: Any) -> RunHandle | None:
    """Run a cell in ranks.

    Raises:
        HeaderError: the header makes a request that cannot be met, or has no code below it.
    """
    mend(shell)
    if is_setup(header) and (why := _why_no_setup(cell)) is not None:
        raise HeaderError(why)
    spec = parse_header(
        header,
        expand=lambda text: shell.var_expand(text, depth=_NO_FRAME),
        catalog=load_catalog(),
        visible_gpus=len(visible_gpus()),
        registered=[loader.name for loader in list_registered(shell.user_ns)],
    )
    if not has_code(cell):
        raise HeaderError(_NO_CODE)
    record = launch(spec, cell, shell)
    return None if record is None else RunHandle(record)


def mend(shell: Any) -> None:
    """Update the status lines of runs of earlier kernels in this notebook, if the front end can."""
    with contextlib.suppress(HeaderError):  # the project's folder was removed
        mend_lines(shell, notebook_path(shell), str(project_folder()))


def may_be_setup(cell: str) -> bool:
    """Tell whether the code of a setup cell can run without IPython."""
    return _why_no_setup(cell) is None


def _why_no_setup(cell: str) -> str | None:
    if not has_code(cell):
        return _NO_CODE
    try:
        compile(cell, "<setup>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return (
            f"--setup, and line {error.lineno} is not plain Python, which also runs where there is"
            " no IPython: put magics, !commands and await into a cell of their own"
        )
    return None


def note_setup(identity: str, result: Any, text: str | None) -> None:
    """Record a setup cell that has run without an error.

    If ``text`` is None, the cell is no longer a setup cell, and its entry is removed.
    """
    if text is None:
        setup_cells.forget(identity)
    elif result.success:
        setup_cells.remember(identity, result.execution_count or 0, text)


def run_script(path: str, options: str) -> bool:
    """Run a script as a cell; return whether it succeeded.

    The header is in the first lines of the script, or in ``options``.
    """
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise HeaderError(f"taas run: {error}") from None
    header = find_header(text)
    if (header is None) == (not options):
        raise HeaderError(
            f"taas run {shown(path)}: the script has"
            f" {'no header' if header is None else 'a header of its own'}: allowed is one, in its"
            " first lines or as options (taas run SCRIPT --gpus 8 --on g2.8)"
        )
    if is_setup(header or parse_magic_line(options)):
        raise HeaderError(
            "--setup in a script: write that code into the script itself, below its header"
        )
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    sys.argv = [path]
    try:
        run_cell(header or parse_magic_line(options), text, shell)
    except HeaderError:
        raise
    except BaseException:  # the code of the cell may raise any exception
        shell.showtraceback()
        return False
    return True


class NotebookFrontend(Frontend):
    """The front end in a notebook, for the verbs of :mod:`taas.notebook.steering`."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.kernel, self.notebook = os.getpid(), notebook_path(shell)
        with contextlib.suppress(HeaderError):  # the project's folder was removed
            self.project = str(project_folder())
        self.place = in_words(self.notebook, self.project)

    def show(self, what: Shown) -> None:
        """Show a view, as a table in a notebook or as text in a terminal."""
        if hasattr(self._shell, "kernel"):
            self._shell.display_pub.publish(what._repr_mimebundle_())
        else:
            sys.stdout.write(visible(f"{what}\n"))

    def show_status(self) -> None:
        """Show a table of all runs; in a notebook it is updated continuously."""
        if hasattr(self._shell, "kernel"):
            show_live_table(self._shell.display_pub)
        else:
            super().show_status()

    def show_ranks(self, record: RunRecord) -> None:
        """Show a run, with its ranks folded below it; in a notebook it is updated in place."""
        if not hasattr(self._shell, "kernel"):
            super().show_ranks(record)
        else:
            display(RunHandle(record))

    def show_findings(self, findings: Iterable[Finding]) -> None:
        """Show findings as they come in; in a notebook one table is updated."""
        if not hasattr(self._shell, "kernel"):
            super().show_findings(findings)
            return
        display, known = UpdatedView(self._shell.display_pub), list[Finding]()
        for finding in findings:
            known.append(finding)
            display.show(report(known, goes_on=True))
        display.show(report(known))

    def screen(self, plain: int | None) -> Screen:
        """Return the object that writes to the output of this cell."""
        return CellOutput(self._shell, plain)

    def attach(self, record: RunRecord) -> None:
        """Show a run in this cell until it ends, and transfer its variables to the notebook."""
        attach(record, self._shell)

"""A notebook as the verbs see it, and the start of its cells: all that `taas.magics` loads when it is first used."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from taas.capture import check_syntax
from taas.config import load_catalog, project_folder
from taas.dataloader_registry import registered
from taas.engines.local import visible_gpus
from taas.errors import HeaderError
from taas.header.grammar import HeaderText, has_code, parse_header
from taas.launcher import debug_rank, launch, notebook_path
from taas.notebook.background import RunHandle, attach
from taas.notebook.cell_output import CellOutput, Screen
from taas.notebook.live_view import LiveDisplay, LiveTable
from taas.notebook.steering import Frontend, do
from taas.notebook.tables import Shown
from taas.notebook.watched_run import WatchedRun
from taas.runs.records import RunRecord, in_words, read_record
from taas.wording import visible

__all__ = ["NotebookFrontend", "check_syntax", "debug_rank", "do", "run_cell"]

_NO_FRAME = 1 << 30
"""Where no frame is: names in a header are the notebook's, not those of a function of IPython."""


def run_cell(header: HeaderText, cell: str, shell: Any) -> RunHandle | None:
    """Run a cell in ranks.

    Raises:
        HeaderError: the header asks for what cannot be, or nothing stands below it.
    """
    spec = parse_header(
        header,
        expand=lambda text: shell.var_expand(text, depth=_NO_FRAME),
        catalog=load_catalog(),
        visible_gpus=len(visible_gpus()),
        registered=[loader.name for loader in registered(shell.user_ns)],
    )
    if not has_code(cell):
        raise HeaderError(
            "a header and no code below it: allowed is both in one cell; write the code below the header"
        )
    return launch(spec, cell, shell)


class NotebookFrontend(Frontend):
    """A notebook, as :mod:`taas.notebook.steering` sees it."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.kernel, self.notebook = os.getpid(), notebook_path(shell)
        with contextlib.suppress(HeaderError):  # somebody removed it
            self.project = str(project_folder())

    @property
    def place(self) -> str:
        """The notebook's name, or its project."""
        return in_words(self.notebook, self.project)

    def show(self, what: Shown) -> None:
        """Show a view: as a table in a front end, as text in a terminal."""
        if hasattr(self._shell, "kernel"):
            self._shell.display_pub.publish(what._repr_mimebundle_())
        else:
            sys.stdout.write(visible(f"{what}\n"))

    def show_status(self) -> None:
        """Show a table that is updated, where there is a front end to do so."""
        if hasattr(self._shell, "kernel"):
            LiveTable(self._shell.display_pub, self.own)
        else:
            super().show_status()

    def show_ranks(self, record: RunRecord) -> None:
        """Show a run with its ranks, updated in place where there is a front end to do so."""
        if not hasattr(self._shell, "kernel"):
            super().show_ranks(record)
            return
        view = WatchedRun()

        def look() -> tuple[Shown, bool]:
            now = read_record(record.folder) or record
            return view.in_full(now), now.live

        LiveDisplay(self._shell.display_pub, look)

    def screen(self, plain: int | None) -> Screen:
        """Return this cell."""
        return CellOutput(self._shell, plain)

    def attach(self, record: RunRecord) -> None:
        """Follow a run in this cell, and take its names."""
        attach(record, self._shell)

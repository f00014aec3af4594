"""IPython glue: the cell header, ``%%taas`` and ``%taas``."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from taas.catalog import load_catalog
from taas.dataloader_registry import registered
from taas.errors import HeaderError
from taas.header import HeaderText, find_header, parse_header, parse_magic_line
from taas.options import OPTIONS, options_table

if TYPE_CHECKING:
    from taas.background import RunHandle
    from taas.cell_output import Screen
    from taas.records import RunRecord
    from taas.status import Shown

_MAGIC_LINE = re.compile(r"%%taas(?!\w)")
_NO_FRAME = 1 << 30
"""Where no frame is: names in a header are the notebook's, not those of a function of IPython."""


def headed_cell(lines: list[str]) -> list[str]:
    """Turn a cell with a header into a call of :meth:`TaasMagics.run_cell`; IPython's last cleanup step.

    Raises:
        SyntaxError: the cell does not compile. IPython shows one that is raised here as that of any cell;
            raised later, it would come below frames of IPython and taas.
    """
    from taas.capture import check_syntax

    cell = "".join(lines)
    header = find_header(cell)
    if header is None:
        if lines and _MAGIC_LINE.match(lines[0]):
            check_syntax("\n" + "".join(lines[1:]), get_ipython())
        return lines
    if header.problem is None:
        check_syntax(cell, get_ipython())
    return [f"get_ipython().run_cell_magic('taas', '', {cell!r})\n"]


# IPython asks transformers without side effects whether a cell that is being typed is complete.
headed_cell.has_side_effects = True  # type: ignore[attr-defined]


class NotebookDesk:
    """A notebook, as :mod:`taas.verbs` sees it."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.kernel = os.getpid()

    def show(self, what: Shown) -> None:
        """Show a view: as a table in a front end, as text in a terminal."""
        if hasattr(self._shell, "kernel"):
            self._shell.display_pub.publish(what._repr_mimebundle_())
        else:
            sys.stdout.write(f"{what}\n")

    def show_status(self) -> None:
        """Show a table that is updated, where there is a front end to do so."""
        from taas.live_table import LiveTable
        from taas.records import read_records
        from taas.status import status

        if hasattr(self._shell, "kernel"):
            LiveTable(self._shell.display_pub)
        else:
            self.show(status(read_records()))

    def screen(self, plain: int | None) -> Screen:
        """Return this cell."""
        from taas.cell_output import CellOutput

        return CellOutput(self._shell, plain)

    def attach(self, record: RunRecord) -> None:
        """Follow a run in this cell, and take its names."""
        from taas.attach import attach

        attach(record, self._shell)


@magics_class
class TaasMagics(Magics):
    """The magics of taas."""

    @cell_magic("taas")
    def run_cell(self, line: str, cell: str) -> RunHandle | None:
        """Run the cell in ranks: ``%%taas --on g2.8 --gpus 16``, the same thing as the two header lines."""
        header = find_header(cell)
        if line.strip():
            twice = "%%taas with options above #!TYPE or #pragma taas: allowed is one; leave one out"
            header = replace(parse_magic_line(line), problem=None if header is None else twice)
        return self._launch(
            header or parse_magic_line(line), cell if header and not header.magic else "\n" + cell
        )

    @line_magic("taas")
    def command(self, line: str) -> None:
        """See and steer runs (the text is the table's, see :func:`activate`)."""
        from taas import verbs

        try:
            verbs.do(line, NotebookDesk(self.shell))
        except HeaderError as error:
            raise UsageError(str(error)) from None

    def _launch(self, header: HeaderText, cell: str) -> RunHandle | None:
        from taas.devices import visible_gpus
        from taas.launcher import check_options, launch

        try:
            spec = parse_header(
                header,
                expand=lambda text: self.shell.var_expand(text, depth=_NO_FRAME),
                catalog=load_catalog(Path.cwd()),
                visible_gpus=len(visible_gpus()),
                registered=[loader.name for loader in registered(self.shell.user_ns)],
            )
            check_options(spec)
            return launch(spec, cell, self.shell)
        except HeaderError as error:
            raise UsageError(str(error)) from None


def _offer(shell: Any, event: Any) -> list[str]:
    """Complete a line that begins with ``%taas``, ``%%taas`` or ``#pragma taas``."""
    del shell
    head, _, line = event.line.partition("taas")
    if head.strip() == "%":
        from taas.verbs import complete

        return complete(line.lstrip())
    return [f"--{name}" for name in OPTIONS] if event.symbol.startswith("-") or line.endswith(" ") else []


_COMPLETED = ("%taas", "%%taas", "#pragma")


def activate(shell: Any) -> None:
    """Register the magics, the header and their completion; a second time is harmless."""
    if headed_cell not in shell.input_transformers_cleanup:
        from taas.verbs import help_text

        TaasMagics.command.__doc__ = help_text()
        TaasMagics.run_cell.__doc__ = (
            "Run the cell in ranks: `%%taas --on g2.8 --gpus 16` above it, the same thing as the header lines\n"
            f"`#!g2.8` and `#pragma taas --gpus 16`.\n\n{options_table()}"
        )
        shell.register_magics(TaasMagics)
        shell.input_transformers_cleanup.append(headed_cell)
        for key in _COMPLETED:
            shell.set_hook("complete_command", _offer, str_key=key)


def deactivate(shell: Any) -> None:
    """Undo :func:`activate`."""
    if headed_cell in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(headed_cell)
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("taas", None)
        for key in _COMPLETED:
            shell.strdispatchers["complete_command"].strs.pop(key, None)

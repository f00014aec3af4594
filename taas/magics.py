"""The integration into IPython: the cell header, ``%%taas``, ``%taas`` and ``%debug``."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from taas.base.import_hooks import note_files
from taas.errors import HeaderError
from taas.header.grammar import find_header, is_setup, parse_magic_line
from taas.header.options import options_table
from taas.notebook.verbs import help_text

if TYPE_CHECKING:
    from taas.notebook.run_handle import RunHandle

_MAGIC_LINE = re.compile(r"%%taas(?!\w)")

try:
    from taas.notebook.completion import header_matcher
except ImportError:
    # In IPython 7, as on Colab, matchers do not see the cell, so headers have no Tab completion.
    _MATCHERS = []
else:
    _MATCHERS = [header_matcher]


def _frontend() -> ModuleType:
    """Import the module that runs cells and controls runs, when it is first needed.

    This keeps ``import taas`` below 50 ms.
    """
    return importlib.import_module("taas.frontend")


def headed_cell(lines: list[str]) -> list[str]:
    """Turn a cell with a header into a call to :meth:`TaasMagics.run_cell`.

    IPython calls this function as the last of its cleanup transformers.

    Raises:
        SyntaxError: the cell does not compile. If it is raised here, IPython shows it as for any
            other cell; if it were raised later, frames of IPython and taas would precede it.
    """
    cell = "".join(lines)
    header = find_header(cell)
    if is_setup(header) and _frontend().may_be_setup(cell):
        return lines  # an ordinary cell, which `_note_setup` records after it has run
    if (
        header is None
        and lines
        and _is_setup_magic(lines[0])
        and _frontend().may_be_setup("".join(lines[1:]))
    ):
        return ["\n", *lines[1:]]
    if header is None:
        if len(lines) == 1 and _MAGIC_LINE.match(cell) and not cell.rstrip().endswith("?"):
            return [f"{cell.rstrip()}\n", "# no code\n"]  # otherwise IPython would suggest %taas
        if lines and _MAGIC_LINE.match(lines[0]):
            _frontend().check_syntax("\n" + "".join(lines[1:]), get_ipython())
        return lines
    if header.problem is None:
        _frontend().check_syntax(cell, get_ipython())
    # Import IPython, because the user may have rebound the notebook's ``get_ipython``.
    return [f"__import__('IPython').get_ipython().run_cell_magic('taas', '', {cell!r})\n"]


def _is_setup_magic(line: str) -> bool:
    return _MAGIC_LINE.match(line) is not None and is_setup(
        parse_magic_line(line.removeprefix("%%taas"))
    )


def _note_setup(result: Any) -> None:
    """After a cell, record whether it is a setup cell, and whether it has succeeded."""
    info = result.info
    first, _, rest = info.raw_cell.partition("\n")
    if _is_setup_magic(first):
        is_one, text = True, "\n" + rest
    else:
        is_one, text = is_setup(find_header(info.raw_cell)), info.raw_cell
    if is_one or "taas.frontend" in sys.modules:
        identity = getattr(info, "cell_id", None) or info.raw_cell
        _frontend().note_setup(identity, result, text if is_one else None)


# Otherwise IPython would also call this transformer to find out whether a cell that is being typed
# is complete.
headed_cell.has_side_effects = True  # type: ignore[attr-defined]


@magics_class
class TaasMagics(Magics):
    """The magics ``%%taas``, ``%taas`` and ``%debug``."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._native_debug = shell.find_line_magic("debug")

    @cell_magic("taas")
    def run_cell(self, line: str, cell: str) -> RunHandle | None:
        """Run the cell in ranks; :func:`activate` sets the help text."""
        header = find_header(cell)
        if line.strip():
            twice = "%%taas with options above #!TYPE or #pragma taas: leave one of the two out"
            header = replace(parse_magic_line(line), problem=None if header is None else twice)
        if header is None or header.magic:
            # an empty line replaces that of the magic, so that the lines below keep their numbers
            cell = "\n" + cell
        header = header or parse_magic_line(line)
        try:
            run: RunHandle | None = _frontend().run_cell(header, cell, self.shell)
        except HeaderError as error:
            raise UsageError(str(error)) from None
        return run

    @line_magic("taas")
    def command(self, line: str) -> None:
        """Monitor and control runs; :func:`activate` sets the help text."""
        try:
            _frontend().do(line, _frontend().NotebookFrontend(self.shell))
        except HeaderError as error:
            raise UsageError(str(error)) from None

    @line_magic("debug")
    def debug(self, line: str) -> None:
        """Debug as IPython's ``%debug`` does, or in the kept rank that raised the last error."""
        if line.strip() or not _frontend().debug_rank(self.shell):
            self._native_debug(line)


def activate(shell: Any) -> None:
    """Register the magics, the header and Tab completion; calling this twice is harmless."""
    if headed_cell not in shell.input_transformers_cleanup:
        TaasMagics.command.__doc__ = help_text()
        TaasMagics.run_cell.__doc__ = (
            "Run the cell in ranks: `%%taas --on g2.8 --gpus 16` above it, the same thing as the"
            f" header lines\n`#!g2.8` and `#pragma taas --gpus 16`.\n\n{options_table()}"
        )
        shell.register_magics(TaasMagics)
        shell.input_transformers_cleanup.append(headed_cell)
        shell.Completer.custom_matchers += _MATCHERS
        shell.events.register("post_run_cell", note_files)
        shell.events.register("post_run_cell", _note_setup)
        _tell_late_header(shell)
        if hasattr(shell, "kernel"):
            # imported here, because the package comm may be missing in IPython without a kernel
            from taas.rank.comms import let_comms_travel

            let_comms_travel()


def start_ahead(shell: Any) -> None:
    """If a cell of the user loads taas, start the processes that the first run will need.

    This does not happen if a file in the startup folder of the IPython profile loads taas, because
    these files also run in kernels that never train.
    """
    if sys.displayhook is shell.displayhook:
        _frontend().start_ahead()
        _frontend().mend(shell)


def _release_what_is_left(_result: object) -> None:
    """After a cell that has unloaded taas, end kept ranks, and all processes that wait for cells.

    They stay alive if the same cell has loaded taas again (``%reload_ext``).
    """
    shell = get_ipython()
    shell.events.unregister("post_run_cell", _release_what_is_left)
    if (
        headed_cell not in shell.input_transformers_cleanup
        and "taas.notebook.supervisor_client" in sys.modules
    ):
        _frontend().release_ahead()


def _tell_late_header(shell: Any) -> None:
    """Tell the user if the running cell, which loads taas, has a header: it has had no effect."""
    cell = shell.history_manager.input_hist_raw[-1]
    if sys.displayhook is shell.displayhook and find_header(cell) is not None:
        line = "%load_ext taas" if "load_ext" in cell else "import taas"
        sys.stderr.write(
            f"taas: {line} came too late for the header of its own cell, which was a comment this"
            " time: taas is loaded now, so run this cell again; and give it a cell of its own"
            " above\n"
        )


def deactivate(shell: Any) -> None:
    """Undo :func:`activate`."""
    if headed_cell in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(headed_cell)
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("taas", None)
        shell.register_magic_function(
            shell.find_line_magic("debug").__self__._native_debug, "line", "debug"
        )
        shell.Completer.custom_matchers[:] = (
            m for m in shell.Completer.custom_matchers if m not in _MATCHERS
        )
        shell.events.unregister("post_run_cell", note_files)
        shell.events.unregister("post_run_cell", _note_setup)
        shell.events.register("post_run_cell", _release_what_is_left)

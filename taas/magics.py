"""IPython glue: the cell header, ``%%taas`` and ``%taas``."""

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
    # Matchers of IPython 7, as on Colab, do not see the cell, so there is no Tab in headers.
    _MATCHERS = []
else:
    _MATCHERS = [header_matcher]


def _frontend() -> ModuleType:
    """Import the module that runs and steers cells, at its first use.

    ``import taas`` has to take less than 50 ms.
    """
    return importlib.import_module("taas.frontend")


def headed_cell(lines: list[str]) -> list[str]:
    """Turn a cell with a header into a call of :meth:`TaasMagics.run_cell`.

    This is IPython's last cleanup step.

    Raises:
        SyntaxError: the cell does not compile. Raised here, IPython shows it as that of any cell;
            raised later, it would stand below frames of IPython and taas.
    """
    cell = "".join(lines)
    header = find_header(cell)
    if is_setup(header) and _frontend().may_be_setup(cell):
        return lines  # an ordinary cell, which `_note_setup` notes after it has run
    if (
        header is None
        and lines
        and _is_setup_magic(lines[0])
        and _frontend().may_be_setup("".join(lines[1:]))
    ):
        return ["\n", *lines[1:]]
    if header is None:
        if len(lines) == 1 and _MAGIC_LINE.match(cell) and not cell.rstrip().endswith("?"):
            return [f"{cell.rstrip()}\n", "# no code\n"]  # otherwise IPython would advise %taas
        if lines and _MAGIC_LINE.match(lines[0]):
            _frontend().check_syntax("\n" + "".join(lines[1:]), get_ipython())
        return lines
    if header.problem is None:
        _frontend().check_syntax(cell, get_ipython())
    # The user may have rebound the notebook's ``get_ipython``.
    return [f"__import__('IPython').get_ipython().run_cell_magic('taas', '', {cell!r})\n"]


def _is_setup_magic(line: str) -> bool:
    return _MAGIC_LINE.match(line) is not None and is_setup(
        parse_magic_line(line.removeprefix("%%taas"))
    )


def _note_setup(result: Any) -> None:
    """Note, after a cell, that it is a setup cell and has succeeded, or is no longer one."""
    info = result.info
    first, _, rest = info.raw_cell.partition("\n")
    if _is_setup_magic(first):
        is_one, text = True, "\n" + rest
    else:
        is_one, text = is_setup(find_header(info.raw_cell)), info.raw_cell
    if is_one or "taas.frontend" in sys.modules:
        identity = getattr(info, "cell_id", None) or info.raw_cell
        _frontend().note_setup(identity, result, text if is_one else None)


# IPython asks transformers without side effects whether a cell that is being typed is complete.
headed_cell.has_side_effects = True  # type: ignore[attr-defined]


@magics_class
class TaasMagics(Magics):
    """The magics of taas."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._native_debug = shell.find_line_magic("debug")

    @cell_magic("taas")
    def run_cell(self, line: str, cell: str) -> RunHandle | None:
        """Run the cell in ranks: ``%%taas --on g2.8 --gpus 16``, as the two header lines do."""
        header = find_header(cell)
        if line.strip():
            twice = "%%taas with options above #!TYPE or #pragma taas: leave one of the two out"
            header = replace(parse_magic_line(line), problem=None if header is None else twice)
        if header is None or header.magic:
            # the magic's own line stays, empty, so that the lines below it keep their numbers
            cell = "\n" + cell
        header = header or parse_magic_line(line)
        try:
            run: RunHandle | None = _frontend().run_cell(header, cell, self.shell)
        except HeaderError as error:
            raise UsageError(str(error)) from None
        return run

    @line_magic("taas")
    def command(self, line: str) -> None:
        """See and steer runs (:func:`activate` sets the text from the table)."""
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
    """Register the magics, the header and their completion; a second time is harmless."""
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
            # imported here, because an IPython without a kernel may lack the package comm
            from taas.rank.comms import let_comms_travel

            let_comms_travel()


def start_ahead(shell: Any) -> None:
    """Start what the first cell will need, if a cell of the user's loads taas.

    The profile's startup folder may load taas in every kernel, even in those that never train.
    """
    if sys.displayhook is shell.displayhook:
        _frontend().start_ahead()
        _frontend().mend(shell)


def _release_what_is_left(_result: object) -> None:
    """After the cell that has unloaded taas, end kept ranks, and all that waits for cells.

    They stay if the cell loads taas again (``%reload_ext``).
    """
    shell = get_ipython()
    shell.events.unregister("post_run_cell", _release_what_is_left)
    if (
        headed_cell not in shell.input_transformers_cleanup
        and "taas.notebook.supervisor_client" in sys.modules
    ):
        _frontend().release_ahead()


def _tell_late_header(shell: Any) -> None:
    """Tell the user that the running cell loads taas, too late for its own header."""
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

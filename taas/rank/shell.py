"""The IPython shell that runs a cell in a rank."""

from __future__ import annotations

import builtins
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Instance, Type
from traitlets.config import Config

from taas.rank.streams import Outlet


class RankPublisher(DisplayPublisher):
    """Sends ``display`` and its updates to the cell."""

    outlet = Instance(Outlet)

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Send one MIME bundle."""
        self.outlet.publish(
            "update" if update else "display", data=data, metadata=metadata or {}, transient=transient or {}
        )

    def clear_output(self, wait: bool = False) -> None:
        """Ask the cell to clear what it shows."""
        self.outlet.publish("clear", wait=wait)


class RankDisplayHook(DisplayHook):
    """Sends the last expression's value to the cell."""

    outlet = Instance(Outlet)

    def write_output_prompt(self) -> None:
        """The notebook writes its own."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Send the value's MIME bundle."""
        self.outlet.publish("result", data=format_dict, metadata=md_dict or {})

    def finish_displayhook(self) -> None:
        """Nothing to finish: the message is sent."""
        self._is_active = False


class RankShell(InteractiveShell):
    """A shell without a terminal, history or input, on the rank's ``__main__``."""

    display_pub_class = Type(RankPublisher)
    displayhook_class = Type(RankDisplayHook)
    outlet = Instance(Outlet)
    last_traceback: tuple[str, ...] = ()

    def init_display_pub(self) -> None:
        """Make the publisher that writes to the outlet."""
        self.display_pub = self.display_pub_class(parent=self, shell=self, outlet=self.outlet)

    def init_displayhook(self) -> None:
        """Make the display hook that writes to the outlet."""
        super().init_displayhook()
        self.displayhook.set_trait("outlet", self.outlet)

    def enable_gui(self, gui: str | None = None) -> None:
        """A rank runs no event loop of a GUI toolkit."""

    def ask_exit(self) -> None:
        """``exit`` in a cell ends it as ``sys.exit(0)`` does."""
        raise SystemExit(0)

    def atexit_operations(self) -> None:
        """Leave the names as they are: clearing them, a full garbage collection, takes longer than the start."""

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Note the traceback of an error of the cell.

        An interrupt that comes while it is made is that of a run which another rank's error ends already.
        """
        with _interrupts_ignored():
            etype, error, tb = self._get_exc_info(exc_tuple)
            if _holds_group(error):  # IPython has no form for these, and prints Python's
                lines = "".join(traceback.format_exception(etype, error, tb and (tb.tb_next or tb)))
                self._showtraceback(etype, error, lines.splitlines())
            else:
                super().showtraceback(exc_tuple, *args, **options)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.last_traceback = tuple(stb)

    def run(self, cell: str) -> ExecutionResult:
        """Run a cell as the notebook would, without storing history."""
        result: ExecutionResult = self.run_cell(_magic_on_top(cell), store_history=False, silent=False)
        return result


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _holds_group(error: BaseException | None) -> bool:
    """Tell whether an exception, or one that it came from, is a group."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        error = error.__cause__ or error.__context__
    return error is not None


def _magic_on_top(cell: str) -> str:
    """Blank the header lines of a cell whose own first line is a cell magic: IPython wants it on top."""
    lines = cell.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("%%"):
            return "\n" * number + "\n".join(lines[number:])
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return cell


def make_main() -> types.ModuleType:
    """Put a fresh module in place as ``__main__``: what the notebook's own is to the notebook."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def make_shell(main: types.ModuleType, outlet: Outlet, *, colors: str) -> RankShell:
    """Build the shell on a module."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = colors
    RankShell.clear_instance()
    shell: RankShell = RankShell.instance(
        config=config, user_module=main, user_ns=main.__dict__, outlet=outlet
    )
    for prompt in ("ps1", "ps2", "ps3"):  # Lightning takes a process that has them for a notebook
        if hasattr(sys, prompt):
            delattr(sys, prompt)
    builtins.input = _no_input
    sys.breakpointhook = _no_debugger
    return shell


def _no_input(prompt: object = "", /) -> str:
    if str(prompt).lstrip("(").lower().startswith(("pdb", "ipdb")):
        _no_debugger()
    raise RuntimeError(
        f"input({str(prompt)!r}) cannot ask: a rank has no keyboard. Ask in a cell of its own before the run, and use the answer's name in this one."
    )


def _no_debugger(*_args: object, **_kwargs: object) -> NoReturn:
    """Stand in for ``breakpoint()``."""
    raise RuntimeError(
        "a debugger cannot ask: a rank has no keyboard. Print what you want to see, let %taas stacks show where all ranks stand, or call the code in a cell without #pragma taas."
    )

"""The IPython shell that runs a cell in a rank, and the preparation of its process."""

from __future__ import annotations

import builtins
import io
import multiprocessing.context
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Instance, Type, default
from traitlets.config import Config

from taas.base.wording import fitting_lines, text_of
from taas.capture.cells import magic_on_top
from taas.capture.settings.process_state import ProcessState
from taas.protocol.ranks import Preparation
from taas.rank.async_cells import LOOP_RUNNERS
from taas.rank.comms import open_comms_to
from taas.rank.debugger import leave_debuggers, show_users_frames
from taas.rank.outlet import Outlet
from taas.rank.users_traceback import hide_machinery


class _Publisher(DisplayPublisher):
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
        arguments = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        self.outlet.publish("update" if update else "display", **arguments)

    def clear_output(self, wait: bool = False) -> None:
        self.outlet.publish("clear", wait=wait)


class _DisplayHook(DisplayHook):
    outlet = Instance(Outlet)

    def write_output_prompt(self) -> None:
        """The notebook writes its own prompt."""

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        self.outlet.publish("result", data=format_dict, metadata=md_dict or {})

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """A shell without a terminal, history or input, on the rank's ``__main__``."""

    display_pub_class = Type(_Publisher)
    displayhook_class = Type(_DisplayHook)
    outlet = Instance(Outlet)
    loop_runner_map = LOOP_RUNNERS
    is_rank = True
    last_traceback: tuple[str, ...] = ()
    _own: ExecutionResult | None = None  # of the cell, not of a cell that runs within it

    def init_display_pub(self) -> None:
        """Create the publisher that writes to the outlet."""
        self.display_pub = self.display_pub_class(parent=self, shell=self, outlet=self.outlet)

    def init_displayhook(self) -> None:
        """Create the display hook that writes to the outlet."""
        super().init_displayhook()
        self.displayhook.set_trait("outlet", self.outlet)

    @default("loop_runner")
    def _default_loop_runner(self) -> Any:
        return self.loop_runner_map["asyncio"][0]

    def enable_gui(self, gui: str | None = None) -> None:
        """A rank runs no event loop of a GUI toolkit."""

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Keep no copy of the cell's output: it is in the rank's files.

        IPython's own version leaves ``write`` as an attribute of the stream; a captured stream is
        sent back to the notebook.
        """
        stream = getattr(sys, channel)
        yield
        stream.write = stream.write

    def ask_exit(self) -> None:
        """``exit`` in a cell ends it as ``sys.exit(0)`` does."""
        raise SystemExit(0)

    def atexit_operations(self) -> None:
        """Leave the variables as they are: a full collection takes longer than the start."""

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Format the traceback of an error.

        An interrupt that comes meanwhile belongs to a run that another rank's error is already
        ending.
        """
        with _interrupts_ignored():
            etype, error, tb = self._get_exc_info(exc_tuple)
            hide_machinery(error)
            # IPython does not format exception groups, and prints Python's format
            if _holds_group(error):
                lines = "".join(traceback.format_exception(etype, error, tb and (tb.tb_next or tb)))
                self._showtraceback(etype, error, lines.splitlines())
            else:
                super().showtraceback(exc_tuple, *args, **options)

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        """Store the cell's own traceback; show one after which IPython goes on (``%run``)."""
        own = self._own
        if own is None or evalue is own.error_in_exec or evalue is own.error_before_exec:
            self.last_traceback = tuple(stb)
        else:
            self.outlet.publish(
                "error",
                ename=etype.__name__,
                evalue=text_of(evalue),
                traceback=fitting_lines(tuple(stb)),
            )

    def _format_exception_for_storage(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}  # the notebook keeps the history

    async def run_code(
        self, code_obj: Any, result: ExecutionResult | None = None, **options: Any
    ) -> bool:
        """Run code; the first code that runs is the cell's."""
        self._own = self._own or result
        failed: bool = await super().run_code(code_obj, result, **options)
        return failed

    def run(self, cell: str) -> ExecutionResult:
        """Run a cell as the notebook would."""
        self._own = None
        try:
            return self.run_cell(magic_on_top(cell), store_history=True, silent=False)
        finally:
            leave_debuggers()
            self.outlet.take_back()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    # Not SIG_IGN: an interrupt that finds it is repeated, as after os.system
    # (rank/main_thread.py).
    before = signal.signal(signal.SIGINT, lambda number, frame: None) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _holds_group(error: BaseException | None) -> bool:
    """Whether an exception, or one in its chain of causes, is a group."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        error = error.__cause__ or error.__context__
    return error is not None


# --------------------------------------------- preparation that does not depend on the rank
#
# Spare processes do it in advance.


def make_ready(preparation: Preparation, outlet: Outlet) -> RankShell:
    """Do everything that is the same in every rank; return the shell on a fresh ``__main__``.

    The outlet may be opened later.
    """
    _forget_forkserver()
    show_users_frames()
    os.environ.clear()
    os.environ.update(preparation.environ)
    os.chdir(preparation.project)
    shell = _make_shell(preparation, outlet)
    shell.run_cell("pass", silent=True, store_history=False)
    ProcessState({}, None).mark()
    return shell


def _forget_forkserver() -> None:
    """Drop state that the forkserver left in this process and a fresh Python would not have."""
    tempfile.tempdir = None
    default: Any = multiprocessing.context._default_context
    default._actual_context = None  # the cell may call set_start_method, as a script may
    default._default_context = multiprocessing.get_context("fork")  # whatever Python's default is
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _make_shell(preparation: Preparation, outlet: Outlet) -> RankShell:
    """Build the shell on a fresh ``__main__``.

    Libraries that draw bars and tables check the name of its class, and whether a kernel
    configured it; they find what they would find in the notebook's own shell.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    config = Config()
    RankShell.__name__ = preparation.shell_class
    of_kernel = preparation.shell_class != "TerminalInteractiveShell"
    if of_kernel:
        config.IPKernelApp = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = preparation.colors
    RankShell.clear_instance()
    shell: RankShell = RankShell.instance(
        config=config, user_module=main, user_ns=main.__dict__, outlet=outlet
    )
    if of_kernel:
        shell.kernel = None  # pandas checks whether the attribute exists
    for prompt in ("ps1", "ps2", "ps3"):  # Lightning treats a process that has them as a notebook
        if hasattr(sys, prompt):
            delattr(sys, prompt)
    warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)
    open_comms_to(partial(outlet.publish, "comm"))
    return shell

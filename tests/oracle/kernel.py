"""A kernel in a process of the test, and what is seen in it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import multiprocessing
import os
import re
import sys
import traceback
import types
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from notebook_harness import Ran

from oracle.graph import Graph, describe
from oracle.program import Played, Program
from oracle.state import process_state
from taas.protocol.clients import RunRequest, RunState, Submit
from taas.protocol.framing import MessageReader, pack

__all__ = ["RUN", "be_kernel"]

RUN = "oracle"
_SEEDS = (
    "import random as _r, numpy as _n, torch as _t\n"
    "_r.seed(1); _n.random.seed(1); _t.manual_seed(1)\n"
)
_OF_IPYTHON = {"In", "Out", "_oh", "_ih", "_dh", "_i", "_ii", "_iii", "get_ipython"}
_OWN = ("open", "exit", "quit", "display")  # IPython's, unless the notebook has its own
_read_said = MessageReader(RunState)


def _look(notebook: dict[str, Any]) -> tuple[Graph, dict[str, Any]]:
    """Describe a notebook's names, IPython's values, its modules and its process, in its kernel."""
    gc.collect()  # pandas asks which objects are alive
    names = {
        name: value
        for name, value in notebook.items()
        if name not in _OF_IPYTHON
        and not name.startswith("_i")
        and not (name[:2] == "__" == name[-2:])
    }
    for name in _OWN:
        if (
            getattr(type(names.get(name)), "__module__", "").startswith("IPython")
            or name == "display"
        ):
            names.pop(name, None)
    for number, value in notebook["_oh"].items():
        names[f"Out[{number}]"] = value
    names["__annotations__"] = notebook.get("__annotations__")
    project = str(Path.cwd())
    for module in [module for module in sys.modules.values() if _is_of_project(module, project)]:
        names |= {
            f"{module.__name__}.{name}": value
            for name, value in vars(module).items()
            if not name.startswith("__")
        }
    state = process_state()
    state["imported"] = _imported(notebook["_ih"])
    return describe(names, notebook), state


def _is_of_project(module: Any, project: str) -> bool:
    # there are thousands of modules
    return (getattr(module, "__file__", None) or "").rpartition("/")[0] == project


def _imported(cells: list[str]) -> dict[str, bool]:
    """Return which of the modules that cells import by a dotted name are there."""
    found = re.findall(
        r"^\s*(?:import|from) +([\w.]+)", "\n".join(cells).replace("\\n", "\n"), re.M
    )
    return {name: name in sys.modules for name in found}


def be_kernel(pipe: Connection, program: Program, folder: str, *, plain: bool) -> None:
    """Be a kernel, and run the notebook."""
    gc.freeze()  # what it was forked with is no garbage: each look would read, and copy, all of it
    try:
        kernel = _Kernel(folder)
        if not plain:
            kernel.load_taas(_Wire(pipe))
        pipe.send(("played", _played(kernel, program, plain=plain)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    pipe.close()
    os._exit(0)


def _played(kernel: _Kernel, program: Program, *, plain: bool) -> Played:
    played = Played()
    last = len(program.cells) - 1
    for number in range(last + 1):
        played.cells.append(kernel.run(program.text(number, plain=plain)))
        if number in program.headed or number == last:
            played.left.append((number, *kernel.look()))
    return played


class _Kernel:
    """ipykernel, in this process and without sockets."""

    def __init__(self, folder: str) -> None:
        from ipykernel.inprocess.ipkernel import InProcessKernel
        from ipykernel.inprocess.manager import InProcessKernelManager

        # NumPy's and decimal's settings live there
        context = self._context = contextvars.copy_context()

        class Kernel(InProcessKernel):
            async def dispatch_shell(self, *args: Any) -> None:
                loop = asyncio.get_running_loop()
                await loop.create_task(super().dispatch_shell(*args), context=context)

            async def do_execute(self, *args: Any, **options: Any) -> Any:
                # an await asks for it
                self.shell_channel_thread = types.SimpleNamespace(parent_thread=None)
                try:
                    return await super().do_execute(*args, **options)
                finally:
                    self.shell_channel_thread = None

        from traitlets.config import Config

        # as a kernel has it: its locks have no names
        multiprocessing.set_start_method("fork", force=True)
        os.chdir(folder)
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        sys.path[:] = dict.fromkeys(["", *sys.path])  # forks have some entries twice
        sys.argv = ["ipykernel_launcher.py", "-f", "kernel.json"]
        sys.modules["torch"].set_num_threads(1)
        self.main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(_SEEDS, {})
        config = Config()
        config.HistoryManager.enabled = False
        manager = InProcessKernelManager(config=config)
        manager.kernel = self._kernel = Kernel(
            parent=manager,
            session=manager.session,
            user_module=self.main,
            user_ns=self.main.__dict__,
        )
        self._client = manager.client()
        self._client.start_channels()

    def load_taas(self, wire: _Wire) -> None:
        """Load the extension, on a wire of the test's."""
        import taas
        from taas import launcher

        launcher.get_supervisor = lambda **_: wire  # type: ignore[assignment]
        taas.load_ipython_extension(self._kernel.shell)

    def run(self, cell: str) -> Ran:
        """Execute a cell."""
        self._client.execute(cell)
        for stream in (self._kernel.stdout, self._kernel.stderr):
            stream.flush()
        ran, messages = Ran(), self._client.iopub_channel
        while messages.msg_ready():
            ran.take(messages.get_msg())
        return ran

    def look(self) -> tuple[Graph, dict[str, Any]]:
        """Describe what there is now."""
        return self._context.run(_look, self.main.__dict__)


class _Wire:
    """A pipe to the test, where a kernel has its wire to the supervisor."""

    alive = True

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, message: Any) -> None:
        """Submit a run, or take its answer."""
        if isinstance(message, Submit):
            self._pipe.send(("submit", pack(message)))
        elif isinstance(message, RunRequest):
            self._pipe.send(("taken", b""))

    def hear(self, timeout_ms: int, reader: Any = None) -> list[Any]:
        """Return what the test answers."""
        wait([self._pipe, *([reader] if reader is not None else [])], timeout_ms / 1000)
        return [_read_said(self._pipe.recv_bytes())] if self._pipe.poll(0) else []

    def kill(self) -> None:
        """There is no supervisor to kill."""

"""A real notebook kernel, driven as a front end drives it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from taas.rank import lifeline

_NOT_A_RANK_YET = (lifeline.SPARE_NAME, lifeline.FORKSERVER_NAME)
_STATE = "import os, sys; print((dict(os.environ), sys.path, set(sys.modules)))"
_RENEW = """
import os, sys
import taas
from taas import launcher
from taas.dataloader_registry import list_registered
launcher._kept = None
environ, path, modules = {state}
for entry in list_registered():
    taas.unregister(entry.loader)
for name in sys.modules.keys() - modules:
    if str(getattr(sys.modules[name], "__file__", "")).startswith({projects!r}):
        del sys.modules[name]
os.environ.clear(); os.environ.update(environ); sys.path[:] = path
os.chdir({folder!r})
"""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Ran:
    """What a cell printed, displayed and raised, and its ``In[n]``.

    Attributes:
        shown: standard output, displays and the last value in their order; standard error has none
            among them.
    """

    status: str = ""
    count: int = 0
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    shown: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def own(self) -> str:
        """Standard output without taas' own lines."""
        return "".join(
            line for line in self.stdout.splitlines(True) if not line.startswith("taas: ")
        )

    def take(self, message: dict[str, Any]) -> None:
        """Add one message of the kernel."""
        content = message["content"]
        match message["msg_type"]:
            case "execute_input":
                self.count = content["execution_count"]
            case "stream":
                setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
                if content["name"] == "stdout":
                    self.shown.append(("stdout", content["text"]))
            case "display_data":
                self.displays.append(content)
                self.shown.append(("display", content))
            case "update_display_data":
                self.updates.append(content)
                self.shown.append(("update", content))
            case "clear_output":
                self.shown.append(("clear", content))
            case "execute_result":
                self.result = content["data"]
                self.shown.append(("result", content))
            case "error":
                self.ename, self.evalue = content["ename"], content["evalue"]
                self.traceback = _COLOURS.sub("", "\n".join(content["traceback"]))


@dataclass(frozen=True)
class Processes:
    """The processes of taas on this machine for one notebook, from the process table."""

    supervisor: list[psutil.Process]
    agents: list[psutil.Process]
    forkservers: list[psutil.Process]
    ranks: list[psutil.Process]
    data_processes: list[psutil.Process]
    spares: list[psutil.Process]
    others: list[psutil.Process]


class Notebook:
    """A kernel in a project folder.

    Args:
        folder: the project.
        manager: what starts the kernel, where it is not simply a process of this machine.
        environ: variables for the kernel, besides this process's.
    """

    def __init__(
        self,
        folder: Path,
        manager: KernelManager | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._of_others = {child.pid for child in psutil.Process().children(recursive=True)}
        self._manager = manager or KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env={**os.environ, **(environ or {})})
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=120)
        except RuntimeError:
            self.close()  # the next test would find it
            raise
        self.pid: int = self._manager.provisioner.process.pid  # type: ignore[union-attr]
        self.hidden = False
        self._pending = ""
        self._ran = Ran()
        self._ended = self._pressed = False
        self._as_started = ""

    def renew(self, folder: Path) -> None:
        """Have it as it was when this was first called, in another folder."""
        self._as_started = self._as_started or self.good(_STATE).own
        renew = _RENEW.format(
            state=self._as_started.strip(), folder=str(folder), projects=f"{self.folder.parent}/"
        )
        self.folder = folder
        self.good(f"%taas release\n{renew}")
        # ``%reset`` takes ``__spec__`` away, which multiprocessing asks for where it does not fork
        # (Python 3.14)
        self.good("%reset -f\n__spec__ = None")

    def run(self, code: str, seconds: float = 120, *, store_history: bool = True) -> Ran:
        """Execute a cell and wait for its end."""
        self.start(code, store_history=store_history)
        return self.end(seconds)

    def start_cell(self, identity: str, code: str) -> None:
        """Execute a cell as a front end does that tells which of its cells it is."""
        self._ran, self._ended, self._pressed = Ran(), False, False
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        content |= {"user_expressions": {}, "stop_on_error": False}
        message = self._client.session.msg(
            "execute_request", content, metadata={"cellId": identity}
        )
        self._client.shell_channel.send(message)
        self._pending = message["header"]["msg_id"]

    def start(self, code: str, *, store_history: bool = True, keyboard: bool = False) -> None:
        """Execute a cell; with a keyboard, it may ask.

        A kernel drops cells that reach it right after one with an error, which no person's second
        cell does.
        """
        self._ran, self._ended, self._pressed = Ran(), False, False
        self._pending = self._client.execute(
            code, store_history=store_history, allow_stdin=keyboard, stop_on_error=False
        )

    def asked(self, seconds: float = 120) -> str:
        """Wait until the running cell asks; returns its prompt."""
        message = self._client.get_stdin_msg(timeout=seconds)
        assert message["msg_type"] == "input_request"
        self.hidden = message["content"]["password"]
        return str(message["content"]["prompt"])

    def answer(self, text: str) -> None:
        """Type an answer."""
        self._client.input(text)

    def end(self, seconds: float = 120) -> Ran:
        """Wait for the end of the cell that was started."""
        deadline = time.monotonic() + seconds
        try:
            while not self._next(deadline):
                pass
        except queue.Empty:
            shown = replace(self._ran, updates=self._ran.updates[-1:], shown=[])
            raise AssertionError(
                f"the cell has not ended in {seconds} s: {shown}\n{_stacks()}"
            ) from None
        self._ran.status = self._status_in_reply()
        return self._ran

    def _status_in_reply(self) -> str:
        """Return how the cell ended, as the kernel replies.

        An interrupt right after the cell's end takes ipykernel's reply away, and is only logged.
        """
        while True:
            try:
                reply = self._client.get_shell_msg(timeout=30)
            except queue.Empty:
                if not self._pressed:
                    raise
                return "error" if self._ran.ename else "ok"
            if reply["parent_header"].get("msg_id") == self._pending:
                return str(reply["content"]["status"])

    def ends_within(self, seconds: float) -> bool:
        """Tell whether the cell that was started ends so soon.

        :meth:`end` returns it all the same.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while not self._ended:
                self.hear(self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic())))
        return self._ended

    def wait_for(self, text: str, seconds: float = 120) -> Ran:
        """Wait until the running cell has printed a text."""
        deadline = time.monotonic() + seconds
        while text not in self._ran.stdout + self._ran.stderr:
            ended = self._next(deadline)
            assert not ended, f"the cell ended without printing {text!r}: {self._ran}"
        return self._ran

    def wait_for_line(self, text: str, seconds: float = 120) -> None:
        """Wait until the running cell's live line says something."""
        deadline = time.monotonic() + seconds
        while not any(text in update["data"]["text/plain"] for update in self._ran.updates):
            ended = self._next(deadline)
            assert not ended, f"the cell ended without a line that says {text!r}: {self._ran}"

    def _next(self, deadline: float) -> bool:
        if not self._ended:
            self.hear(self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic())))
        ended, self._ended = self._ended, False  # said once: its display may change after its end
        return ended

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what the kernel says, if it is of the cell that was started."""
        if message["parent_header"].get("msg_id") == self._pending:
            self._ran.take(message)
            self._ended |= (
                message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            )

    def good(self, code: str, seconds: float = 120) -> Ran:
        """Execute a cell that has to succeed."""
        ran = self.run(code, seconds)
        assert ran.status == "ok", ran.traceback or ran
        return ran

    def value(self, expression: str) -> str:
        """Return what printing an expression prints."""
        return self.good(f"print({expression})").own.rstrip("\n")

    def interrupt(self) -> None:
        """Press the interrupt button."""
        self._pressed = True
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """SIGKILL the kernel."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Shut the kernel down."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def _is_anothers(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents:
            if pid in self._of_others:
                return True
            pid = parents[pid]
        return False

    def processes(self) -> Processes:
        """Return what taas runs for this notebook.

        They are descendants of this process, which adopts orphans. What descends from a process
        that was there before this notebook is another notebook's.
        """
        found: dict[str, list[psutil.Process]] = {
            name: [] for name in Processes.__dataclass_fields__
        }
        table = [
            row
            for child in psutil.Process().children(recursive=True)
            if (row := _row(child)) is not None
        ]
        parents = {process.pid: parent for process, _, parent, _ in table}
        table = [row for row in table if not self._is_anothers(row[0].pid, parents)]
        commands = {process.pid: command for process, command, _, _ in table}

        def is_one(command: str, parent: int, module: str) -> bool:
            """Return whether it is one itself, and not a child that becomes another program."""
            return command.endswith(f"-m {module}") and commands.get(parent) != command

        agents = {p.pid for p, command, parent, _ in table if is_one(command, parent, "taas.agent")}
        forkservers = {
            process.pid
            for process, command, parent, _ in table
            if parent in agents and "multiprocessing.forkserver" in command
        }
        for process, command, parent, name in table:
            if process.pid == self.pid or "resource_tracker" in command:
                continue
            if is_one(command, parent, "taas.supervisor"):
                found["supervisor"].append(process)
            elif process.pid in agents:
                found["agents"].append(process)
            elif process.pid in forkservers:
                found["forkservers"].append(process)
            elif name in ("taas-planner", "taas-pool"):
                found["data_processes" if parent in forkservers else "others"].append(process)
            elif parent in forkservers and name in _NOT_A_RANK_YET:
                found["spares"].append(process)
            elif parent in forkservers:
                found["ranks"].append(process)
            else:
                found["others"].append(process)
        return Processes(**found)


def terminal(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``taas`` in a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "taas.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _stacks() -> str:
    """Where the ranks of the run stand, if there is one."""
    done = terminal("stacks")
    return done.stdout + done.stderr


def _row(process: psutil.Process) -> tuple[psutil.Process, str, int, str] | None:
    """A process with its command, parent and name; None for one that has ended."""
    try:
        row = process, " ".join(process.cmdline()), process.ppid(), process.name()
        return None if process.status() == psutil.STATUS_ZOMBIE else row
    except psutil.NoSuchProcess:
        return None


def there(pids: Iterable[int]) -> list[psutil.Process]:
    """Those of the processes that have not gone yet."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def gone(processes: list[psutil.Process], seconds: float = 90) -> bool:
    """Wait until processes are gone; returns whether they are."""
    left = [process for process in processes if process.is_running()]
    _, alive = psutil.wait_procs(left, seconds)
    return not alive

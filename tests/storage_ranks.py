"""Ranks for the storage tests: real processes behind real walls, forked from the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas import rank_storage
from taas.project.wall.boundary import clock_of
from taas.rank_storage import Guard


class Run:
    """One run's folders: a project, the ranks' scratch, and where kept writes go."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.project = base / "project"
        self.scratch = base / "scratch"
        self.kept = base / "kept"
        self.project.mkdir()

    def now(self) -> int:
        """The time in nanoseconds by the clock of the file system.

        What is done from now on is later.
        """
        first = now = clock_of(str(self.base))
        while now == first:  # it ticks some hundred times a second
            now = clock_of(str(self.base))
        return first

    def policy(self, rank: int, **options: Any) -> dict[str, Any]:
        """Arguments of ``rank_storage.guard``."""
        scratch = rank_storage.scratch_of(self.scratch, rank)
        scratch.mkdir(parents=True, exist_ok=True)
        return {"project": str(self.project), "rank": rank, "scratch": scratch, **options}

    def rank(self, body: Callable[[Guard], Any], **options: Any) -> Any:
        """Run ``body`` in one rank and return what it returns; what it raises fails the test."""
        return join(self.start(body, **options))

    def start(
        self,
        body: Callable[[Guard], Any],
        rank: int = 1,
        mechanism: str | None = None,
        **options: Any,
    ) -> tuple[int, int]:
        """Let one rank run ``body``; give what this returns to ``join``."""
        policy = self.policy(rank, **options)
        if mechanism is not None:
            policy["mechanisms"] = (mechanism,)

        def guarded() -> Any:
            guard = rank_storage.guard(**policy)
            os.chdir(self.project)
            return body(guard)

        return fork(guarded)


class Turns:
    """A rank and the test take turns."""

    def __init__(self) -> None:
        self._told, self._go = os.pipe(), os.pipe()

    def give(self) -> None:
        """In the rank: let the test do something."""
        os.write(self._told[1], b".")
        os.read(self._go[0], 1)

    def take(self) -> None:
        """In the test: wait for the rank."""
        os.read(self._told[0], 1)

    def give_back(self) -> None:
        """In the test: let the rank go on."""
        os.write(self._go[1], b".")

    def close(self) -> None:
        for fd in (*self._told, *self._go):
            os.close(fd)


def diverted(run: Run, rank: int = 1) -> list[list[Any]]:
    """What a rank has in its scratch in the project's place: paths, and sizes in bytes."""
    tree = rank_storage.scratch_of(run.scratch, rank) / "tree"
    found = subprocess.run(
        ["find", str(tree), "-type", "f", "-printf", "%P %s\\n"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        [path, int(size)]
        for path, size in (line.rsplit(" ", 1) for line in found.stdout.splitlines())
    ]


def fork(body: Callable[[], Any]) -> tuple[int, int]:
    """Start a process that runs ``body``; give what this returns to ``join``."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # this process may have threads; the child execs nothing
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(150)
        try:
            said = {"returned": body()}
        except BaseException:
            said = {"raised": traceback.format_exc()}
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    return pid, read


def join(started: tuple[int, int]) -> Any:
    """What the process returned."""
    pid, read = started
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    said = json.loads(text) if text else {"raised": f"ended with status {status}"}
    assert "raised" not in said, said["raised"]
    return said["returned"]

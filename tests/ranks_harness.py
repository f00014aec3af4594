"""Real ranks for tests: forked from a warm server, with torchrun's environment.

``run_ranks(function, world)`` does what the agent and the rank's entry do around a cell, and no
more. The functions live at the top level of the test modules, and return something picklable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from taas.agent import forkserver
from taas.agent.torchrun import RunStore
from taas.protocol.framing import LOOPBACK, StoreAddress

DEADLINE = 150.0
"""Seconds for all ranks; below the suite's own limit for a test."""
GRACE = 3.0
"""Seconds after the first failure, until the others are ended, as the agent would."""
PRELOAD = [*forkserver.PRELOAD, "pytest", "ranks_harness", forkserver.LAST]
"""As an agent's: what a rank finds imported, and registered with torch, decides how it behaves."""


_main_lock = threading.Lock()


@dataclass
class Outcome:
    """How one rank ended.

    ``error`` names the exception's class, or is ``"killed"`` if it was ended with the others.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""
    notices: list[str] = field(default_factory=list)
    exit_code: int | None = None


@contextlib.contextmanager
def warm_server() -> Iterator[None]:
    """A forkserver with torch loaded: the fixture ``warm``."""
    server = multiprocessing.forkserver._forkserver
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with _without_main():
        multiprocessing.forkserver.ensure_running()
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):  # its socket went with the last test's folder
            server._stop()
        multiprocessing.forkserver.set_forkserver_preload([])


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, fails: bool = False, **how: Any
) -> list[Any]:
    """Run ``function(*args)`` in ``world`` ranks, as :func:`launch` does.

    Returns what each returned.

    With ``fails=True`` the outcomes are returned instead, and failures are expected.
    """
    outcomes = launch(function, world, *args, **how)
    if fails:
        return outcomes
    broken = [
        f"rank {r}: {o.error} {o.trace}" for r, o in enumerate(outcomes) if o.error or o.exit_code
    ]
    assert not broken, "\n".join(broken)
    return [outcome.value for outcome in outcomes]


def launch(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    vms: int = 1,
    rehearsed: bool = True,
    grace: float = GRACE,
    host: str = LOOPBACK,
    environ: Mapping[str, str] | None = None,
    devices: int | None = None,
) -> list[Outcome]:
    """Run ranks on ``vms`` pretended VMs.

    Returns how each ended. With another ``host`` they meet through a TCPStore.

    Where every rank fails by itself, ``grace=DEADLINE`` waits for them all, however late one
    begins. ``environ`` are variables beside torchrun's; a rank sees a rehearsed device for each
    rank of its VM, or so many ``devices``.
    """
    scratch = tempfile.mkdtemp(prefix="ranks-")
    store = RunStore(StoreAddress(host, secrets.token_bytes(32)), world, Path(scratch))
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for rank in range(world):
        mine, its = context.Pipe(duplex=False)
        environment = {**_torchrun(rank, world, world // vms, store.address), **(environ or {})}
        told = (
            its,
            environment,
            store.address,
            (devices or world // vms) if rehearsed else 0,
            str(Path.cwd()),
            function,
            args,
        )
        process = context.Process(target=_rank, args=told)
        with _without_main():
            process.start()
        its.close()
        pipes.append(mine)
        processes.append(process)
    outcomes = _collect(pipes, grace)
    for process, outcome, pipe in zip(processes, outcomes, pipes, strict=True):
        if outcome.error == "killed":
            process.kill()
        process.join(GRACE if outcome.error else DEADLINE)
        if process.exitcode is None:
            process.kill()
            process.join()
            outcome.error = outcome.error or "did not exit"
        outcome.exit_code = process.exitcode
        pipe.close()
        process.close()
    store.close()
    shutil.rmtree(scratch)
    return outcomes


def _collect(pipes: list[Connection], grace: float) -> list[Outcome]:
    outcomes = [Outcome(error="killed") for _ in pipes]
    open_pipes, until = set(pipes), time.monotonic() + DEADLINE
    while open_pipes and time.monotonic() < until:
        for pipe in wait(open_pipes, until - time.monotonic()):
            index = pipes.index(pipe)
            try:
                outcomes[index] = pipe.recv()
            except EOFError:
                outcomes[index] = Outcome(error="died")
            open_pipes.discard(pipe)
            if outcomes[index].error:
                until = min(until, time.monotonic() + grace)
    return outcomes


def _torchrun(rank: int, world: int, local: int, store: StoreAddress) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(world // local),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(not store.folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank(
    pipe: Connection,
    environment: dict[str, str],
    store: StoreAddress,
    devices: int,
    cwd: str,
    function: Callable[..., Any],
    args: Any,
) -> None:
    faulthandler.dump_traceback_later(DEADLINE - 5, file=sys.stderr)
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    # as a rank has it, which is forked as these are
    multiprocessing.set_start_method("fork", force=True)
    local = int(environment["LOCAL_WORLD_SIZE"])
    outcome = Outcome()
    if devices:
        from taas import rehearsal

        rehearsal.install(device_count=devices, local_rank=int(environment["LOCAL_RANK"]))
    from taas import adopt
    from taas.rank import children

    membership = adopt.Membership(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_world_size=local,
        address=store,
        rehearsed=devices,
        notice=outcome.notices.append,
        project=Path.cwd(),
    )
    if not devices:  # it has the machine's GPUs, if there are any
        adopt.own_gpu.install()
    adopt.install(membership)
    children.install(membership)
    try:
        outcome.value = function(*args)
    except BaseException as error:
        outcome.error, outcome.text, outcome.trace = (
            type(error).__name__,
            str(error),
            traceback.format_exc(),
        )
    if not outcome.error:
        adopt.finish()
    faulthandler.cancel_dump_traceback_later()
    try:
        pipe.send(outcome)
    except Exception as error:  # a value that doesn't pickle is the test's mistake; say it there
        pipe.send(
            Outcome(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
        )
    pipe.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Start children that don't import pytest's own main module again; one thread at a time."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main

"""Playing a notebook: its kernel, and the ranks that it asks for."""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.forkserver as mp
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vm_harness import DEADLINE, Vm

from oracle.kernel import RUN, be_kernel
from oracle.program import Played, Program
from taas.agent.forkserver import Forkserver
from taas.agent.rank_job import RankJob
from taas.base.places import ProcessMark
from taas.protocol.agents import JobOver, StartJob
from taas.protocol.clients import RunState, Submit
from taas.protocol.framing import LOOPBACK, MessageReader, StoreAddress, pack
from taas.protocol.ranks import RankEnded, RankKept, RankOrder
from taas.protocol.records import Verdict
from taas.supervisor.recorder import Recorder

__all__ = ["forkservers", "play"]

_kernels = mp.ForkServer()
_ranks = Forkserver()
_read_submit = MessageReader(Submit)


@contextmanager
def forkservers() -> Iterator[None]:
    """Run what kernels and ranks are forked from: two processes, as in production."""
    ipykernel = "ipykernel.inprocess.manager ipykernel.inprocess.ipkernel ipykernel.debugger"
    ipython = "IPython.core.magics IPython.core.completerlib IPython.core.completer"
    _kernels.set_forkserver_preload(
        f"torch torch._dynamo numpy.random {ipykernel} {ipython} oracle".split()
    )
    _ranks.fit(RUN, dict(os.environ), rehearsed=None)  # later runs of this name keep it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
        _kernels.ensure_running()
    try:
        yield
    finally:
        for server in (_kernels, mp._forkserver):  # at their own exit, libraries in them complain
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()
        mp.set_forkserver_preload([])


class _Process:
    """A kernel, forked."""

    def __init__(self, program: Program, folder: Path, *, plain: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=be_kernel, args=(theirs, program, str(folder)), kwargs={"plain": plain}
        )
        connect, mp.connect_to_new_process = (
            mp.connect_to_new_process,
            _kernels.connect_to_new_process,
        )
        try:
            self._process.start()
        finally:
            mp.connect_to_new_process = connect
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        if not self.pipe.poll(DEADLINE):
            raise TimeoutError("a kernel of the test does not answer")
        kind, what = self.pipe.recv()
        if kind == "failed":
            raise RuntimeError(what)
        return kind, what

    def close(self) -> None:
        self.pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def play(program: Program, folder: Path, *, plain: bool) -> Played:
    """Play a notebook in a folder's project, with its headers or with comments in their place."""
    project = _new_project(program, folder)
    kernel = _Process(program, project, plain=plain)
    try:
        found: Played = kernel.receive()[1] if plain else _serve(kernel, folder)
    finally:
        kernel.close()
    found.files = _files_of(project)
    return found


def _new_project(program: Program, folder: Path) -> Path:
    project = folder / "project"
    project.mkdir(parents=True)
    for name, text in program.files:
        (project / name).write_text(text)
    return project


def _files_of(project: Path) -> dict[str, str]:
    """Hash the project's files."""
    return {
        str(path.relative_to(project)): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in sorted(project.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _serve(kernel: _Process, folder: Path) -> Played:
    """Run what a kernel submits, until it has played its notebook."""
    job: RankJob | None = None
    scratch = Path(tempfile.mkdtemp(prefix="oracle-"))  # paths of sockets are short
    vm = Vm(scratch, _ranks)
    sizes: list[int] = []
    last: Recorder | None = None
    try:
        while True:
            kind, what = kernel.receive()
            if kind == "played":
                return replace(what, sizes=sizes)
            if kind == "submit":
                submit = _read_submit(what)
                sizes.append(submit.payload.nbytes)
                recorder = Recorder(submit, ProcessMark.of(os.getpid()))
                recorder.begin(())
                kernel.pipe.send_bytes(pack(RunState(record=recorder.record)))
                job = RankJob(
                    _order(recorder, folder, continues=vm.services.kept.there), vm.services
                )
                if last is not None:
                    last.note(kept_ranks=None)  # this run has them
                last = recorder
                ended = _run(vm, job, recorder)
                kernel.pipe.send_bytes(pack(ended))
            if job is not None and (kind == "taken" or ended.answer is None):
                job.close()
                recorder.close()
                job = None
    finally:
        if job is not None:
            job.fail("the test is over")
            for _ in vm.run(job):
                pass
            job.close()
        vm.services.kept.end()
        if last is not None:
            last.note(kept_ranks=None)  # else later tests see them in the table of runs
        shutil.rmtree(scratch)


def _order(recorder: Recorder, folder: Path, *, continues: bool) -> StartJob:
    submit, spec = recorder.submit, recorder.submit.cell.spec
    run = Path(tempfile.mkdtemp(dir=folder, prefix="run"))
    return StartJob(
        run=RUN,
        job=0,
        name="VM vm0",
        payload=submit.payload,
        workspace=submit.workspace,
        output=str(recorder.record.folder),
        scratch=str(run / "scratch"),
        work=RankOrder(
            run=RUN,
            vm="vm0",
            cell=submit.cell,
            group_rank=0,
            store=StoreAddress(LOOPBACK, os.urandom(32)),
            gpus=submit.gpus[: spec.world_size * spec.gpus_per_rank],
            continues=continues,
        ),
    )


def _run(vm: Vm, job: RankJob, recorder: Recorder) -> RunState:
    """Run a job to its end; returns what the supervisor would tell of it."""
    ends: dict[int, RankEnded] = {}
    kept: tuple[RankKept, ...] = ()
    job.begin()
    for message in vm.run(job):
        if isinstance(message.said, JobOver):
            kept = message.said.kept
        if isinstance(message.said, RankEnded):
            ends[message.said.rank] = message.said
    failed = [ended for ended in ends.values() if ended.outcome != "done"]
    outcome, first = ("failed", failed[0]) if failed else ("done", None)
    verdict = Verdict(outcome=outcome, first=first, vm="vm0", others=max(0, len(failed) - 1))
    recorder.end(verdict, (), kept_ranks=kept or None)
    return RunState(record=recorder.record, answer=ends[0].answer)

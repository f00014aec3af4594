"""``python -m taas.engines.slurm_driver SETTINGS PATIENCE``: the supervisor's Slurm driver.

The driver submits jobs, and follows them in the queue. Agents on the nodes (slurm_vm) communicate
with the supervisor, and end when the supervisor requests it or is gone; a job ends with its last
agent. The driver ends when its standard input is closed, and cancels jobs that do not end by
themselves.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import wait

import msgspec

from taas.base.wording import counted
from taas.engines.driven import Acquire, Asks, ClusterReport, Reporter, States, VmReport
from taas.engines.slurm import (
    GONE,
    WAITS,
    JobAgents,
    Settings,
    Standing,
    elapsed,
    look,
    own_address,
    script,
    seconds_of,
    settings_of,
    slurm,
)
from taas.errors import EngineError
from taas.versions import versions

_SBATCH = (
    "sbatch --parsable --no-kill --no-requeue --job-name=taas --output=/dev/null --chdir=/"
    " --ntasks-per-node=1"
)
_LOOK_SECONDS, _QUIET_SECONDS = 2.0, 30.0
"""Seconds between two checks of the queue: while a change is expected, and otherwise."""
_BEGIN_SECONDS = 60.0
"""Time after the start of a job during which news of its agents is expected, in seconds."""
_PARTING_SECONDS = 9.0
_NOTICE_SECONDS = 60.0
"""A cell is interrupted this many seconds before the time limit, or half the limit before it if
that is shorter.
"""


class _Job:
    """A Slurm job; ``left`` are the numbers of its VMs that are still wanted."""

    def __init__(self, number: str, ask: Acquire) -> None:
        self.id, self.left, self.demand = number, set(ask.machines), ask.demand
        self.nodes, self.asked, self.said = len(ask.machines), time.monotonic(), ""
        self.begun = self.notice_at = self.end_by = float("inf")
        self.noticed = False


class SlurmDriver:
    """Serves one supervisor."""

    def __init__(self, report: Reporter, settings: Settings) -> None:
        self._report, self._settings = report, settings
        self._jobs: list[_Job] = []
        self._ask = msgspec.json.Decoder(Asks)
        self._unread = b""
        self._over_by = self._next_look = float("inf")

    def serve(self) -> None:
        """Carry out the requests on standard input until its end; then release all jobs."""
        while time.monotonic() < self._over_by and (self._jobs or self._over_by == float("inf")):
            until = self._next_look if self._jobs else float("inf")
            sources = [sys.stdin.fileno()] if self._over_by == float("inf") else []
            if wait(sources, None if until == float("inf") else max(0.0, until - time.monotonic())):
                self._hear_supervisor()
            if self._jobs and time.monotonic() >= self._next_look:
                self._look()
        self._cancel(self._jobs)

    # ---------------------------------------------------------- requests of the supervisor

    def _hear_supervisor(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            ask = self._ask.decode(line)
            if isinstance(ask, Acquire):
                self._acquire(ask)
            else:
                self._release({ask.machine})
        if not data:
            self._over_by = time.monotonic() + _PARTING_SECONDS
            self._release({number for job in self._jobs for number in job.left})

    def _acquire(self, ask: Acquire) -> None:
        asked = (f"--nodes={len(ask.machines)}", *self._settings.asked_for(ask.demand))
        text = script(self._settings.python, JobAgents(versions(), ask.configs))
        try:
            said = slurm(*_SBATCH.split(), *asked, given=text)
        except EngineError as error:
            why = f"Slurm refuses the job: {error}. It was asked for {shlex.join(asked)}."
            self._say(ask.machines, "gone", why, "EngineError")
            return
        self._jobs.append(_Job(said.strip().partition(";")[0], ask))
        self._next_look = 0.0

    def _release(self, numbers: set[int]) -> None:
        """Release VMs, and cancel a job if none of its VMs is wanted any more.

        If the job has begun, its agents first get some time to end.
        """
        for job in self._jobs:
            if job.left & numbers:
                job.left -= numbers
                if not job.left:
                    begun = job.begun < float("inf")
                    job.end_by = time.monotonic() + (_PARTING_SECONDS - 1) * begun
                    self._next_look = 0.0

    def _cancel(self, jobs: Iterable[_Job]) -> None:
        if ids := [job.id for job in jobs]:
            # the jobs are over; or Slurm is down, and the nodes end by themselves
            with contextlib.suppress(EngineError):
                slurm("scancel", *ids)

    # ------------------------------------------------------------ the queue

    def _look(self) -> None:
        found = look(job.id for job in self._jobs)
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if found is None:  # Slurm does not reply: the jobs may be unchanged
            return
        for job in [*self._jobs]:
            now = found.get(job.id, GONE)
            if now.state not in WAITS:
                job.begun = min(job.begun, time.monotonic())
            if now.over:
                self._jobs.remove(job)
                self._say(job.left, "gone", f"lost: {now.why_over(job.id)}", now.error)
            elif job.left:
                self._give_notice(job, now)
                self._tell_waiting(job, now)
            elif time.monotonic() > job.end_by:
                job.end_by = time.monotonic() + _LOOK_SECONDS
                self._cancel([job])
        self._next_look = time.monotonic() + self._until_next_look()

    def _until_next_look(self) -> float:
        now = time.monotonic()
        if any(not job.left or now < job.begun + _BEGIN_SECONDS for job in self._jobs):
            return _LOOK_SECONDS
        notice = min((job.notice_at for job in self._jobs), default=float("inf")) - now
        return max(_LOOK_SECONDS, min(_QUIET_SECONDS, notice))

    def _tell_waiting(self, job: _Job, now: Standing) -> None:
        """Report what nodes wait for, or that they have waited for too long."""
        waits = time.monotonic() - job.asked
        said = f"Slurm job {job.id}: {now.state}" + (
            f" ({now.reason})" if now.state in WAITS else ""
        )
        if now.state in WAITS and waits > job.demand.wait:
            nodes, waited = counted(job.nodes, "node"), elapsed(job.demand.wait)
            text = (
                f"Slurm did not give {nodes} within {waited} ([engine] wait in taas.toml). {said}. "
                "`squeue --start` tells when it may."
            )
            self._say(job.left, "gone", text, "EngineError")
            self._release(job.left)
        elif f"{said}, {elapsed(waits)}" != job.said:
            job.said = f"{said}, {elapsed(waits)}"
            self._say(job.left, "waiting", job.said)

    def _give_notice(self, job: _Job, now: Standing) -> None:
        """Announce the time limit while a cell still has time to save its work."""
        if now.state != "RUNNING" or job.noticed:
            return
        left, notice = seconds_of(now.left), min(_NOTICE_SECONDS, seconds_of(now.limit) / 2)
        job.noticed = left <= notice
        job.notice_at = float("inf") if job.noticed else time.monotonic() + left - notice
        if job.noticed:
            text = (
                f"Slurm: its job {job.id} reaches the time limit ({now.limit}) in {left:.0f} s;"
                " --time asks for more"
            )
            self._say(job.left, "ending", text)

    def _say(
        self, numbers: Iterable[int], state: States, text: str, error: str = "RunLost"
    ) -> None:
        for number in numbers:
            self._report(VmReport(number, state, text, error))


def main() -> None:
    """Connect to Slurm, and serve."""
    report = Reporter()
    settings, until = settings_of(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    while True:
        try:
            host = own_address(settings)
            break
        except EngineError as error:
            if time.monotonic() > until:
                report(ClusterReport(why_not=str(error)))
                return
            time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
    report(ClusterReport(host))
    SlurmDriver(report, settings).serve()


if __name__ == "__main__":
    main()

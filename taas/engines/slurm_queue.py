"""Slurm's commands, and what the queue says of jobs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from taas.engines.slurm import Settings
from taas.engines.slurm_vm import address_towards
from taas.errors import EngineError
from taas.wording import shown

_COMMAND_SECONDS = 10.0
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_GOES_ON = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
_FORMAT = "%i|%T|%r|%l|%L|%k"


def slurm(*command: str, given: str = "", seconds: float = _COMMAND_SECONDS) -> str:
    """Run one of Slurm's commands; returns what it printed.

    Raises:
        EngineError: it failed, or did not answer; the text is its own.
    """
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(str(error)) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"{command[0]} ended with status {done.returncode}"
        raise EngineError(shown(said, 300))
    return done.stdout


def elapsed(seconds: float) -> str:
    """Return a length of time: ``40 s``, ``4 min``, ``2 h 5 min``."""
    minutes = int(seconds // 60)
    if not minutes:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class Standing(NamedTuple):
    """How a job stands, as ``squeue`` says."""

    state: str
    reason: str
    limit: str
    left: str
    comment: str

    @property
    def over(self) -> bool:
        """Whether none of its nodes is left, or will come."""
        return self.state not in (*WAITS, *_GOES_ON)

    def why_over(self, job: str) -> str:
        """Say why it is over, or why Slurm ends it; empty where that is not known."""
        if self.state == "TIMEOUT" or self.reason == "TimeLimit":
            return f"Slurm ended its job {job} at the time limit ({self.limit}): --time asks for more"
        words = {
            "CANCELLED": "cancelled (scancel)",
            "PREEMPTED": "preempted",
            "NODE_FAIL": "ended: a node failed",
        }
        if self.state in words:
            return f"its Slurm job {job} was {words[self.state]}"
        said = f"; its nodes said: {self.comment}" if self.comment else ""
        return f"its Slurm job {job} is over ({self.state}){said}" if self.over else ""


GONE = Standing("not in the queue any more", "", "", "", "")


def seconds_of(text: str) -> float:
    """Return a length of time as Slurm writes it (``1-02:03:04``, ``0:58``); infinite where it is none."""
    days, _, clock = text.rpartition("-")
    parts = [*(days or "0").split(), *clock.split(":")]
    if not all(part.isdecimal() for part in parts):
        return float("inf")
    total = 0
    for part in parts[1:]:
        total = 60 * total + int(part)
    return float(total + 86400 * int(parts[0]))


def look(jobs: Iterable[str]) -> dict[str, Standing] | None:
    """Return how jobs stand, by their numbers; those that Slurm has forgotten are not there. None: it does not answer."""
    try:
        said = slurm(
            "squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--format={_FORMAT}"
        )
    except EngineError as error:
        return {} if "Invalid job id" in str(error) else None
    rows = [line.replace("(null)", "").split("|", 5) for line in said.splitlines()]
    return {job: Standing._make(standing) for job, *standing in rows}


def own_address(settings: Settings) -> str:
    """Return the address under which nodes reach this machine.

    Raises:
        EngineError: Slurm does not answer, or no node's address is known here.
    """
    if host := settings.get("host"):
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            raise EngineError(f"--host {shown(host)}: {error}") from None
    for node in dict.fromkeys(slurm("sinfo", "--noheader", "--Node", "--format=%o").split()):
        with contextlib.suppress(OSError):
            return address_towards(node)
    raise EngineError(
        "sinfo shows no node whose address this machine knows; set host in [engine.slurm] of taas.toml"
    )

"""The engine whose VMs are nodes of Slurm jobs; its driver (slurm_driver) communicates with Slurm.

The VMs of a run are one job, and each data VM is a separate job. ``sbatch --no-kill`` submits a
job, in which ``srun --no-kill`` starts one task on each node (slurm_vm); without ``--no-kill`` the
death of one node would end the job. All this uses only Slurm's commands and a job script: no part
of Slurm is imported or configured.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from taas.base.wording import shown
from taas.engines.driven import DrivenEngine
from taas.errors import EngineError, HeaderError
from taas.header.arguments import read_line
from taas.header.catalog import BUILT_IN_TYPES, SLURM_OPTIONS, Catalog
from taas.protocol.engines import AgentConfig, Demand

COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol")
_TABLE = {option.name: option for option in SLURM_OPTIONS}
_COMMAND_SECONDS = 10.0
WAITS = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_GOES_ON = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
_FORMAT = "%i|%T|%r|%l|%L|%k"


class SlurmEngine(DrivenEngine):
    """The VMs that are nodes of Slurm jobs."""

    driver, kind, cluster = "taas.engines.slurm_driver", "Slurm", "Slurm"
    advice = "`scontrol ping` and `taas engine slurm --check` say more."

    @staticmethod
    def read_address(words: list[str], where: str, configured: Catalog) -> str:
        """Parse the options of the request to Slurm, as typed or from ``taas.toml``.

        Return a line for :func:`settings_of`.
        """
        try:
            line = read_line(words, _TABLE)
        except HeaderError as error:
            raise HeaderError(f"{where} slurm {error}") from None
        said = {
            name: line.options.get(name, configured[option.setting])
            for name, option in _TABLE.items()
        }
        types = [
            f"--{kind.name}={kind.slurm}" for kind in configured.instances.values() if kind.slurm
        ]
        return shlex.join([*(f"--{name}={value}" for name, value in said.items() if value), *types])

    @staticmethod
    def check_installed() -> None:
        """Raise an EngineError if Slurm's commands are missing."""
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise EngineError(
                f"the Slurm engine needs {', '.join(missing)}, which cannot be found in PATH. Start"
                " Jupyter on a login node of the cluster (perhaps after `module load slurm`), or"
                " type %taas engine local."
            )


# --------------------------------------------------------------------- requests


class Settings(NamedTuple):
    """The options of the request to Slurm: by option, and by instance type."""

    said: Mapping[str, str]
    types: Mapping[str, list[str]]

    def get(self, name: str) -> str:
        """Return the value of an option; empty if there is none."""
        return self.said.get(name, "")

    @property
    def python(self) -> str:
        """Return the interpreter on the nodes; by default the path of this one."""
        return self.get("python") or sys.executable

    def asked_for(self, demand: Demand) -> list[str]:
        """Return the options of ``sbatch`` for nodes that have what a run needs.

        A VM with GPUs is a whole node, unless its type specifies otherwise. A VM without GPUs, or
        of a rehearsed run, is in the partition of CPU nodes, if there is one, with the processors
        of its type.
        """
        said = {name: self.get(name) for name in ("partition", "account", "time")}
        of_type = self.types.get(demand.instance or "", [])
        kind = BUILT_IN_TYPES.get(demand.instance or "")
        if demand.gpus and not demand.rehearse:
            asked = of_type or ["--exclusive", "--mem=0", f"--gres=gpu:{demand.gpus}"]
        else:
            said["partition"] = self.get("cpu-partition") or said["partition"]
            cores = [f"--cpus-per-task={kind.vcpus}"] if kind and not kind.gpus else ["--exclusive"]
            asked = cores if demand.gpus else of_type or cores
        options = [f"--{name}={value}" for name, value in said.items() if value]
        return [*options, *asked, *shlex.split(self.get("sbatch"))]


def settings_of(address: str) -> Settings:
    """Parse the line that ``SlurmEngine.read_address`` has written."""
    pairs = [word[2:].partition("=")[::2] for word in shlex.split(address)]
    types = {name: shlex.split(value) for name, value in pairs if name not in _TABLE}
    return Settings({name: value for name, value in pairs if name in _TABLE}, types)


class JobAgents(msgspec.Struct):
    """The data for the nodes of a job: the notebook's versions, and each agent's configuration."""

    versions: dict[str, str]
    agents: tuple[AgentConfig, ...]


_OUR_COMMENT = "taas: "
"""Prefix of a comment that a job's nodes wrote; sites and users may comment on jobs themselves."""
_BUT_ENDS = "grep -Eiv 'task.*: (exited|terminated|killed)|cancelled at|step aborted'"
"""Removes srun's lines about tasks that end because another one has ended."""
_LAST_LINES = "tail -n 3 | tr '\\n' ' '"


def script(python: str, job: JobAgents) -> str:
    """Return a job's script, from which ``slurm_vm`` reads the job's agents.

    The script contains keys. Its owner and Slurm's administrators can read it. The error of a node
    without an agent is stored in the job's comment, so that no shared disk is needed.
    """
    return f"""#!/bin/sh
said=$(srun --no-kill --kill-on-bad-exit=1 --wait=0 --mpi=none --cpu-bind=none --input=all \\
  {shlex.quote(python)} -P -m taas.engines.slurm_vm 2>&1 <<'END' | {_BUT_ENDS} | {_LAST_LINES}
{msgspec.json.encode(job).decode()}
END
)
[ -z "$said" ] || scontrol update jobid="$SLURM_JOB_ID" comment="{_OUR_COMMENT}$said"
"""


# ---------------------------------------------------------------- Slurm's commands


def slurm(*command: str, given: str = "", seconds: float = _COMMAND_SECONDS) -> str:
    """Run one of Slurm's commands; return its output.

    Raises:
        EngineError: the command failed; the message contains its output.
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
    """Return a duration in words: ``40 s``, ``4 min``, ``2 h 5 min``."""
    minutes = int(seconds // 60)
    if not minutes:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class Standing(NamedTuple):
    """The state of a job, as ``squeue`` shows it."""

    state: str
    reason: str
    limit: str
    left: str
    comment: str

    @property
    def nodes_said(self) -> str:
        """Return what its nodes wrote before it ended; empty if the comment is not theirs."""
        return (
            self.comment.removeprefix(_OUR_COMMENT) if self.comment.startswith(_OUR_COMMENT) else ""
        )

    @property
    def error(self) -> str:
        """Return the name of the class in :mod:`taas.errors` for its end.

        EngineError: another start would end in the same way. RunLost: another start may succeed.
        """
        return "EngineError" if self.nodes_said or self.state == "FAILED" else "RunLost"

    @property
    def over(self) -> bool:
        """Return whether it has no nodes any more, and will get none."""
        return self.state not in (*WAITS, *_GOES_ON)

    def why_over(self, job: str) -> str:
        """Return why it is over, or why Slurm ends it; empty if that is not known."""
        if self.state == "TIMEOUT" or self.reason == "TimeLimit":
            return (
                f"Slurm ended its job {job} at the time limit ({self.limit}): --time asks for more"
            )
        words = {
            "CANCELLED": "cancelled (scancel)",
            "PREEMPTED": "preempted",
            "NODE_FAIL": "ended: a node failed",
        }
        if self.state in words:
            return f"its Slurm job {job} was {words[self.state]}"
        said = f"; its nodes said: {self.nodes_said}" if self.nodes_said else ""
        return f"its Slurm job {job} is over ({self.state}){said}" if self.over else ""


GONE = Standing("not in the queue any more", "", "", "", "")


def seconds_of(text: str) -> float:
    """Return the seconds of a time in Slurm's format, such as ``1-02:03:04`` or ``0:58``.

    Any other text is infinite.
    """
    days, _, clock = text.rpartition("-")
    parts = [*(days or "0").split(), *clock.split(":")]
    if not all(part.isdecimal() for part in parts):
        return float("inf")
    total = 0
    for part in parts[1:]:
        total = 60 * total + int(part)
    return float(total + 86400 * int(parts[0]))


def look(jobs: Iterable[str]) -> dict[str, Standing] | None:
    """Return the state of jobs, by number; None if Slurm does not reply.

    Jobs that Slurm has forgotten are missing.
    """
    try:
        said = slurm(
            "squeue",
            "--noheader",
            "--states=all",
            f"--jobs={','.join(jobs)}",
            f"--format={_FORMAT}",
        )
    except EngineError as error:
        return {} if "Invalid job id" in str(error) else None
    return read_queue(said)


def read_queue(said: str) -> dict[str, Standing]:
    """Parse the output of ``squeue``: the state of jobs, by number."""
    bars = _FORMAT.count("|")
    rows = [line.replace("(null)", "").split("|", bars) for line in said.splitlines()]
    # a shorter row is a further line of a job's comment
    whole = [row for row in rows if len(row) == bars + 1]
    return {job: Standing._make(standing) for job, *standing in whole}


def address_towards(host: str) -> str:
    """Return this machine's address on the route to another one; raise OSError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # nothing is sent
        return str(way.getsockname()[0])


def own_address(settings: Settings) -> str:
    """Return the address at which nodes reach this machine.

    Raises:
        EngineError: Slurm does not reply, or this machine cannot resolve any node.
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
        "sinfo shows no node whose address this machine knows; set host in [engine.slurm] of"
        " taas.toml"
    )

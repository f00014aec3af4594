"""The engine whose VMs are nodes of Slurm jobs, as kernel and supervisor have it; its driver asks Slurm (slurm_driver).

The VMs of a run are one job, each data VM is one of its own. ``sbatch --no-kill``, and in it ``srun --no-kill`` one task a
node (slurm_vm), for else the death of one node would end the job. Both ends are commands and the text of a job: nothing of
Slurm is imported, and nothing of it is configured.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from taas.config import BUILT_IN_TYPES, SLURM_OPTIONS, Catalog
from taas.engines import Demand
from taas.engines.driven import DrivenEngine
from taas.errors import EngineError
from taas.header.arguments import read_line
from taas.wording import shown

COMMANDS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol")
_TABLE = {option.name: option for option in SLURM_OPTIONS}
_OF_JOB = ("partition", "account", "time")


def read_address(words: list[str], where: str, configured: Catalog) -> str:
    """Read what is asked of Slurm: as it was typed, else as ``taas.toml`` says; a line for :func:`settings_of`.

    Raises:
        HeaderError: there is no such option.
    """
    known = ", ".join(f"--{name}" for name in _TABLE)
    line = read_line(
        words, _TABLE, lambda word: f"{where} slurm {shown(word)}: it has {known}; type one of them"
    )
    said = {name: line.options.get(name, configured[option.setting]) for name, option in _TABLE.items()}
    types = [f"--{kind.name}={kind.slurm}" for kind in configured.instances.values() if kind.slurm]
    return shlex.join([*(f"--{name}={value}" for name, value in said.items() if value), *types])


class Settings(NamedTuple):
    """What is asked of Slurm: by options of :data:`taas.config.SLURM_OPTIONS`, and by instance type."""

    said: Mapping[str, str]
    types: Mapping[str, list[str]]

    def get(self, name: str) -> str:
        """Return what was said for an option; empty where nothing was."""
        return self.said.get(name, "")

    @property
    def python(self) -> str:
        """The interpreter on the nodes: this one's path, where nothing was said."""
        return self.get("python") or sys.executable

    def asked_for(self, demand: Demand) -> list[str]:
        """Return the options of ``sbatch`` for nodes that have what a run needs.

        A VM with GPUs is a whole node, unless its type says otherwise. Without GPUs, or rehearsed, it comes from the
        partition of CPU nodes, where there is one, with the processors of its type.
        """
        said = {name: self.get(name) for name in _OF_JOB}
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
    """Read what :func:`read_address` wrote."""
    pairs = [word[2:].partition("=")[::2] for word in shlex.split(address)]
    types = {name: shlex.split(value) for name, value in pairs if name not in _TABLE}
    return Settings({name: value for name, value in pairs if name in _TABLE}, types)


def script(python: str, words: Mapping[str, str]) -> str:
    """Return a job's script.

    What a node says that has no agent to speak for it becomes the job's comment: no disk need be shared for that.

    Args:
        python: the interpreter on the nodes.
        words: what ``slurm_vm`` reads, keys among it: they reach the nodes as a job's script does, which its owner and
            Slurm's administrators can read.
    """
    return f"""#!/bin/sh
said=$(srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --cpu-bind=none --input=all \\
  {shlex.quote(python)} -P -m taas.engines.slurm_vm 2>&1 <<'END' | tail -n 3 | tr '\\n' ' '
{json.dumps(words)}
END
)
[ -z "$said" ] || scontrol update jobid="$SLURM_JOB_ID" comment="$said"
"""


def check_installed() -> None:
    """Refuse this engine where Slurm's commands are missing.

    Raises:
        EngineError: with what to do.
    """
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        raise EngineError(
            f"the Slurm engine needs {', '.join(missing)}, which cannot be found in PATH. Start Jupyter on a login node of "
            "the cluster (perhaps after `module load slurm`), or type %taas engine local."
        )


class SlurmEngine(DrivenEngine):
    """VMs that are nodes of Slurm jobs."""

    driver, kind, cluster = "taas.engines.slurm_driver", "Slurm", "Slurm"
    advice = "`scontrol ping` and `taas engine slurm --check` say more."

    def __init__(self, address: str, listen: Callable[[str], str], scratch: Path) -> None:
        super().__init__(address, listen, scratch)

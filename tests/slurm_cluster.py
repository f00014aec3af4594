"""A real Slurm on one machine: nodes with host names, addresses and process ids of their own.

slurmctld runs on ``login``, where the notebook is, slurmd on ``node1`` and so on; munge for all of
them. A node is a network, UTS, process and mount namespace, with a ``/dev/shm`` of its own; files
are shared, as on a cluster's disk. Nothing of it has a name on this machine: namespaces, bridge and
interfaces go with the processes that hold them, and these end with this one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil
from notebook_harness import Notebook
from privileges import no_network
from ray_cluster import KernelThere, Switch, end, hold

_SUBNET = "10.84.19"
_ROOT = Path(__file__).resolve().parent.parent
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
DEBIAN = "slurmctld slurmd slurm-client munge iproute2"
# Process 1 of a node reaps what is orphaned; it ends, and with it all others, at the end of its
# standard input.
_INIT = """exec 3<&0
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs none /dev/shm
echo up
cat <&3 >/dev/null &
wait"""
_CONF = """
ClusterName=tests
SlurmctldHost=login(10.84.19.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
Epilog={folder}/epilog
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
KillWait=5
ReturnToService=2
PropagateResourceLimits=NONE
"""
# proctrack/linuxproc follows parents, and loses daemons, which a cluster's cgroups would end
_EPILOG = """#!/bin/sh
for e in /proc/[0-9]*/environ; do
  p=${e#/proc/} p=${p%/*}
  [ "$p" = $$ ] && continue
  grep -qz "^SLURM_JOB_ID=$SLURM_JOB_ID$" "$e" 2>/dev/null || continue
  kill -9 "$p" 2>/dev/null
done
exit 0
"""


def why_not() -> str:
    """Why such a cluster cannot be had here; empty where it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return (
        f"{', '.join(missing)} cannot be found: apt-get install {DEBIAN}"
        if missing
        else no_network()
    )


class Machine:
    """A login node, which has the process ids of this machine, or another one, which has its own.

    Attributes:
        name: ``login``, or ``node1`` and so on.
    """

    def __init__(self, cluster: SlurmCluster, number: int) -> None:
        self.name = f"node{number}" if number else "login"
        self._cluster, self._number = cluster, number
        self._holder: subprocess.Popen[str] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Give it power: namespaces, a cable, Slurm's daemon."""
        own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if self._number else []
        self._holder = hold(
            ["unshare", "--net", "--uts", "--mount", "--propagation", "private", *own],
            [self.name, str(self._cluster.folder)],
            self._cluster.environ,
            _INIT,
        )
        [first] = psutil.Process(self._holder.pid).children() if own else [self._holder]
        self.pid: int = first.pid
        self._cluster.switch.plug(self.pid, f"{_SUBNET}.{self._number + 1}", self._number)
        with (self._cluster.folder / f"{self.name}.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                self.command("slurmd" if self._number else "slurmctld", "-D"),
                stdout=log,
                stderr=log,
                env=self._cluster.environ,
                start_new_session=True,
            )

    def command(self, *arguments: str, folder: str = "/") -> list[str]:
        """A command line that runs another one there, in a folder.

        On the login node the process keeps its id.
        """
        spaces = ["--net", "--uts", "--mount", *(["--pid"] if self._number else [])]
        return ["nsenter", f"--target={self.pid}", *spaces, "--", "env", "-C", folder, *arguments]

    def kill(self) -> None:
        """Take its power away: all its processes are gone at once."""
        if self._holder is None:
            return
        assert self._daemon is not None
        if self._number:
            os.kill(self.pid, signal.SIGKILL)
        else:
            self._daemon.terminate()
        self._daemon.wait(30)
        end(self._holder)
        self._holder = None


class SlurmCluster:
    """A login node and nodes of 8 CPUs, which are up inside a ``with``.

    Attributes:
        folder: of this machine; its path is short, and all see it.
        environ: variables of a process that is to find Slurm.
        nodes: ``login`` first.

    Args:
        gpus: the GPUs that each node claims; those without any are in the partition ``cpu``, the
            others in ``gpu``. Jobs of the partition ``urgent`` take nodes from others.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = gpus
        self._notebooks = 0

    def __enter__(self) -> SlurmCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="sc-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.environ = {
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "HOME": str(self.folder),
            "PYTHONPATH": str(_ROOT),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            self._configure()
            self._stack.callback(_finish, self._munge())
            self.switch = self._stack.enter_context(Switch())
            self.nodes = [Machine(self, number) for number in range(1 + len(self._gpus))]
            for node in self.nodes:
                self._stack.callback(node.kill)
                node.boot()
            self.wait_until_idle()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _configure(self) -> None:
        lines, hosts = (
            [_CONF.format(folder=self.folder)],
            [f"127.0.0.1 localhost\n{_SUBNET}.1 login"],
        )
        for number, gpus in enumerate(self._gpus, 1):
            gres = f" Gres=gpu:a100:{gpus}" if gpus else ""
            lines.append(
                f"NodeName=node{number} NodeAddr={_SUBNET}.{number + 1} CPUs=8"
                f" RealMemory=4000{gres}"
            )
            hosts.append(f"{_SUBNET}.{number + 1} node{number}")
        for name, wanted in (("gpu", True), ("cpu", False)):
            nodes = [
                f"node{number}" for number, gpus in enumerate(self._gpus, 1) if bool(gpus) == wanted
            ]
            default = "YES" if wanted else "NO"
            lines.append(f"PartitionName={name} Nodes={','.join(nodes)} Default={default} State=UP")
        lines.append("PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP")
        self.write("slurm.conf", "\n".join(lines) + "\n")
        self.write("hosts", "\n".join(hosts) + "\n")
        self.write("epilog", _EPILOG).chmod(0o755)
        for folder in (
            "dev",
            "state",
            *(f"spool-node{number}" for number in range(1, 1 + len(self._gpus))),
        ):
            (self.folder / folder).mkdir()
        # without files slurmd reports no GPU; any will do, since none is opened
        claims = []
        for number, gpus in enumerate(self._gpus, 1):
            for gpu in range(gpus):
                self.write(f"dev/gpu{gpu}", "")
            if gpus:
                claims.append(
                    f"NodeName=node{number} Name=gpu Type=a100"
                    f" File={self.folder}/dev/gpu[0-{gpus - 1}]"
                )
        self.write("gres.conf", "\n".join(claims) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file that all see."""
        path = self.folder / name
        path.write_text(text)
        return path

    def _munge(self) -> subprocess.Popen[bytes]:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in files.items()]
        return subprocess.Popen(
            ["munged", "--foreground", "--force", f"--key-file={key}", *options],
            env=self.environ,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    # ------------------------------------------------------------ what people type

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command on the login node; returns what it printed."""
        done = subprocess.run(
            self.nodes[0].command(*command),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def jobs(self) -> list[str]:
        """The jobs of the queue: ``ID STATE NODES``."""
        return self.run("squeue", "--noheader", "--format=%i %T %N").splitlines()

    def wait_until_idle(self, seconds: float = 90) -> None:
        """Wait until no job is in the queue, and all nodes are there."""
        deadline = time.monotonic() + seconds
        while True:
            idle = self.run(
                "sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False
            )
            if len({*idle.split()}) == len(self._gpus) and not self.jobs():
                return
            assert time.monotonic() < deadline, (
                self.run("sinfo"),
                self.run("squeue"),
                self._logs(),
            )
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")
        )

    def of_taas(self) -> list[str]:
        """What taas runs on the nodes other than the login node."""
        found = []
        for node in self.nodes[1:]:
            for process in psutil.Process(node.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = " ".join(process.cmdline())
                    if "taas" in words or "multiprocessing.forkserver" in words:
                        found.append(f"{node.name}: {words}")
        return found

    def notebook(self, folder: Path, environ: Mapping[str, str] = MappingProxyType({})) -> Notebook:
        """Start a kernel on the login node; the caller closes it."""
        self._notebooks += 1
        manager = KernelThere(
            kernel_name="python3", transport="ipc", ip=str(self.folder / f"k{self._notebooks}")
        )
        manager.there, manager.project = self.nodes[0], folder
        return Notebook(
            folder, manager, {"SLURM_CONF": self.environ["SLURM_CONF"], "PATH": _PATH, **environ}
        )


def _finish(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)

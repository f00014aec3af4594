"""The local engine: every VM is an agent on this machine; and which GPUs this machine has.

They are found without CUDA: asking CUDA would cost a context, or poison a fork.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from taas.engines import AgentConfig, Demand, Machine
from taas.errors import EngineError, NotEnoughDevices
from taas.header.options import RunSpec
from taas.wire.framing import LOOPBACK
from taas.wire.poll_loop import Child, as_found
from taas.wording import counted

_END_SECONDS = 5.0
_LINE_BYTES = 4096
_RANK_BYTES = 25_000_000
"""A rank's own memory once it has joined a group; measured with 32 of them."""


class LocalMachine:
    """An agent of this machine, held by its standard input: it ends when that is closed."""

    waiting = ending = ""
    error = "RunLost"

    def __init__(self, config: AgentConfig) -> None:
        scratch = Path(config.scratch)
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = os.open(scratch / "agent.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with as_found():
            self._agent = Child(
                ["-P", "-m", "taas.agent"],
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, "TMPDIR": config.scratch},
                start_new_session=True,
            )
        self.pid = self._agent.process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._end_by = float("inf")
        self._agent.send(config)

    @property
    def ended(self) -> bool:
        """Whether it was given back."""
        return self._pidfd < 0

    def fileno(self) -> int:
        """Return the agent's pidfd."""
        return self._pidfd

    def want(self) -> None:
        """It was started at once."""

    def how_it_ended(self) -> str:
        """Return the signal or the status the agent ended with, and the error that it wrote last."""
        code = self._agent.process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        size = os.fstat(self._log).st_size
        end = os.pread(self._log, _LINE_BYTES, max(0, size - _LINE_BYTES)).decode(errors="replace")
        error = end.rstrip().rpartition("\n")[2] if code else ""
        return f"ended with status {code}" + (f" ({error})" if error else "")

    def end(self) -> None:
        """Close the agent's standard input; its time runs from now on."""
        self._end_by = min(self._end_by, time.monotonic() + _END_SECONDS)
        self._agent.hang_up()

    def reap(self) -> None:
        """Wait for the agent that is to end; kill it when it does not. Twice is harmless."""
        if self._pidfd < 0:
            return
        if not wait([self._pidfd], max(0.0, self._end_by - time.monotonic())):
            self._agent.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is in a system call that does not end
            self._agent.process.wait(_END_SECONDS)
        os.close(self._pidfd)
        os.close(self._log)
        self._pidfd = -1


class LocalEngine:
    """Agents on this machine."""

    remote = False
    here = LOOPBACK

    def __init__(self) -> None:
        self._machines: list[LocalMachine] = []

    def start(
        self, demand: Demand, configs: Sequence[AgentConfig], lost: Sequence[Machine] = ()
    ) -> Sequence[LocalMachine]:
        """Start agents."""
        started = [LocalMachine(config) for config in configs]
        self._machines += started
        return started

    def fileno(self) -> int:
        """Return -1: what becomes of the agents is told by their pidfds."""
        return -1

    def step(self) -> None:
        """Do nothing."""

    def pids(self) -> list[int]:
        """Return the agents' process ids."""
        return [machine.pid for machine in self._machines if not machine.ended]

    def close(self) -> None:
        """End all agents."""
        for machine in self._machines:
            machine.end()  # all at once, then wait for each
        for machine in self._machines:
            machine.reap()
        self._machines.clear()


# ---------------------------------------------------------------- which GPUs this machine has

_NVIDIA = (
    "run `nvidia-smi`: it makes the device files (/dev/nvidia0) where the driver is loaded, and says what is "
    "wrong where it is not; in a container, start that with --gpus all"
)
_AMD = "use a machine with NVIDIA GPUs: taas takes no others"
_WSL = "use a Linux that boots by itself: WSL2 has no device file for each GPU, and taas counts those"
_FILES = (("dev/dxg", _WSL), ("dev/nvidia*", _NVIDIA), ("dev/kfd", _AMD))
_DISPLAY = "0x03"  # how the class of a PCI device that draws or computes begins
_VENDORS = {
    "0x10de": ("an NVIDIA GPU on the PCI bus", _NVIDIA),
    "0x1002": ("an AMD GPU on the PCI bus", _AMD),
}


def present_gpus() -> int:
    """Count this machine's NVIDIA GPUs: the driver makes a device file for each."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def visible_gpus() -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs as CUDA_VISIBLE_DEVICES names them.

    ``CUDA_VISIBLE_DEVICES``, where it is set, chooses among those that are present
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars). An entry that is no GPU ends its list.
    """
    present = present_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return tuple(str(number) for number in range(present))
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        known = entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < present)
        if not known or entry in visible:
            break
        visible.append(entry)
    return tuple(visible)


def check_devices(spec: RunSpec, present: int) -> None:
    """Refuse, by NotEnoughDevices, a run that needs more GPUs than there are; none at all means a rehearsal."""
    needed = spec.vms * spec.gpus_per_vm
    if present and needed > present and not spec.rehearse:
        raise NotEnoughDevices(
            f"{needed} GPUs asked for, and this machine has {present}. Ask for {present} or fewer (--gpus auto), "
            "rehearse on CPU ranks (--rehearse), or take an engine with more machines (%taas engine ray ADDRESS)."
        )


def check_memory(ranks: int) -> None:
    """Refuse, by an EngineError, more ranks than this machine has memory for before they hold anything."""
    needed, free = ranks * _RANK_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise EngineError(
            f"{ranks:,} ranks on this machine need {needed / 1e9:.0f} GB of memory before they hold anything, and "
            f"{free / 1e9:.0f} GB are free: nothing was started. Ask for fewer (--gpus)."
        )


def device_in_words(spec: RunSpec, present: int) -> str:
    """Say what the ranks of a run work on."""
    if not spec.gpus_per_rank:
        return "CPU"
    if present and not spec.rehearse:
        return counted(spec.vms * spec.gpus_per_vm, "GPU")
    why = "as --rehearse asks" if present else "no GPU here"
    # those that are present are hidden, as the user asked
    if not present_gpus() and (unseen := unseen_gpu()):
        why = f"{unseen[0]} is here, but no GPU to use: see %taas doctor"
    return f"rehearsed on CPU ({why})"


def unseen_gpu(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return a sign of a GPU that no run can use, on a machine without /dev/nvidia0, and what helps; None where there is none."""
    for pattern, advice in _FILES:
        if found := sorted(root.glob(pattern)):
            return f"/{found[0].relative_to(root)}", advice
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        known = _VENDORS.get(vendor.read_text().strip())
        if known is not None and vendor.with_name("class").read_text().startswith(_DISPLAY):
            return known
    return ("nvidia-smi", _NVIDIA) if shutil.which("nvidia-smi") else None

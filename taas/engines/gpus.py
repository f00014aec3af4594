"""Find this machine's GPUs, and check whether a run can have the GPUs that it requests.

This does not use CUDA, which would cost a context, or break CUDA in forked processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taas.base.wording import counted
from taas.errors import NotEnoughDevices
from taas.header.options import RunSpec
from taas.protocol.clients import Gpu

_NVIDIA = (
    "run `nvidia-smi`: it makes the device files (/dev/nvidia0) where the driver is loaded, and"
    " says what is wrong where it is not; in a container, start that with --gpus all"
)
_AMD = "use a machine with NVIDIA GPUs: taas takes no others"
_WSL = (
    "use a Linux that boots by itself: WSL2 has no device file for each GPU, and taas counts those"
)
_FILES = (("dev/dxg", _WSL), ("dev/nvidia*", _NVIDIA), ("dev/kfd", _AMD))
_SMI_SECONDS = 20.0
_DISPLAY = "0x03"  # prefix of the PCI class of display and compute devices
_VENDORS = {
    "0x10de": ("an NVIDIA GPU on the PCI bus", _NVIDIA),
    "0x1002": ("an AMD GPU on the PCI bus", _AMD),
}


@dataclass(frozen=True)
class _Found:
    """A GPU as the driver shows it in /proc; ``node`` is the number of its device file."""

    bus: str
    node: int
    uuid: str
    model: str


def _nodes(root: Path) -> list[int]:
    """Return the numbers of the device files that this process may use.

    A control group may allow only some of them.
    """
    found = []
    for path in (root / "dev").glob("nvidia*"):
        number = path.name.removeprefix("nvidia")
        if number.isdigit() and os.access(path, os.R_OK | os.W_OK):
            found.append(int(number))
    return sorted(found)


def _shown_by_driver(root: Path) -> list[_Found]:
    """Return the GPUs that this process may use, in the order of their PCI addresses."""
    usable, found = _nodes(root), []
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        with contextlib.suppress(OSError):  # a container may show names and nothing else
            fields = dict(re.findall(r"^(.+?):\s+(.+?)\s*$", path.read_text(), re.MULTILINE))
            node = int(fields.get("Device Minor", "-1"))
            if node in usable:
                model = fields.get("Model", "")
                found.append(
                    _Found(path.parent.name.lower(), node, fields.get("GPU UUID", ""), model)
                )
    return sorted(found, key=lambda gpu: gpu.bus)


def present_gpus(root: Path = Path("/")) -> int:
    """Count the NVIDIA GPUs that this process may use; each has a device file."""
    return len(_nodes(root))


def visible_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs, as named in CUDA_VISIBLE_DEVICES.

    ``CUDA_VISIBLE_DEVICES``, if set, selects some of the present GPUs
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars). An entry that does not denote
    a GPU ends the list.
    """
    present = present_gpus(root)
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


def physical(
    names: Sequence[str], environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists in an environment.

    CUDA numbers the GPUs that a process may use: by their PCI addresses if ``CUDA_DEVICE_ORDER``
    requests this, or if all are of one model. Otherwise the fastest GPU comes first, and only CUDA
    knows which one that is; then the number itself is used as the device.
    """
    shown = _shown_by_driver(root)
    models = {gpu.model for gpu in shown}
    by_address = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) == 1
    all_are_shown = len(shown) == present_gpus(root)
    by_number: list[str] = []
    if by_address and all_are_shown:
        by_number = [gpu.bus for gpu in shown]
    by_uuid: dict[str, str] = {}
    if any(name.startswith("GPU-") for name in names):
        by_uuid = _addresses_by_uuid(shown)
    return tuple(Gpu(name, _address_of(name, by_number, by_uuid)) for name in names)


def _address_of(name: str, by_number: Sequence[str], by_uuid: Mapping[str, str]) -> str:
    """Return the PCI address of an entry of CUDA_VISIBLE_DEVICES; the entry itself if unknown.

    CUDA also accepts the beginning of a UUID, if it is unique.
    """
    if name.isdigit() and int(name) < len(by_number):
        return by_number[int(name)]
    if name.startswith("GPU-"):
        beginning_so = [bus for uuid, bus in by_uuid.items() if uuid.startswith(name)]
        if len(beginning_so) == 1:
            return beginning_so[0]
    return name


def _addresses_by_uuid(shown: Sequence[_Found]) -> dict[str, str]:
    """Return the PCI addresses of GPUs by their UUIDs."""
    known = {gpu.uuid: gpu.bus for gpu in shown}
    if any("?" in uuid for uuid in known):
        # such a GPU was not used since the machine was booted, and until it is used, the driver
        # does not show its UUID
        return _asked_for_uuids() or known
    return known


def _asked_for_uuids() -> dict[str, str]:
    """Query ``nvidia-smi`` for the UUID and PCI address of each GPU, which also wakes them up.

    Return an empty dictionary if it fails or does not reply.
    """
    command = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in done.stdout.splitlines():
        uuid, _, bus = line.partition(", ")
        # other lines are warnings, for example that a GPU's infoROM is corrupted
        if uuid.startswith("GPU-"):
            found[uuid] = bus.strip().lower()[-len("0000:00:00.0") :]
    return found


def refused_as_mig(names: Sequence[str], needed: int, root: Path = Path("/")) -> str:
    """Return why several ranks cannot have parts of GPUs (MIG instances); empty if they can."""
    nodes = {gpu.bus: gpu.node for gpu in _shown_by_driver(root)}
    parts = []
    for gpu in physical(names, root=root):
        divided = root / f"proc/driver/nvidia/capabilities/gpu{nodes.get(gpu.device)}/mig"
        if gpu.name.startswith("MIG-") or any(divided.glob("gi*")):
            parts.append(gpu.name)
    if needed < 2 or not parts:
        return ""
    return (
        f"{needed} GPUs asked for, and {', '.join(parts[:4])}{' …' if len(parts) > 4 else ''} are"
        " parts of GPUs (MIG): CUDA shows a process one such part, so all ranks would have the"
        " same one. Ask for one (--gpus 1), hide them by CUDA_VISIBLE_DEVICES before Jupyter is"
        " started, have MIG turned off (nvidia-smi -mig 0), or rehearse on CPU ranks (--rehearse)."
    )


def check_devices(spec: RunSpec, visible: Sequence[str]) -> None:
    """Raise NotEnoughDevices for a run that needs more GPUs than there are.

    Without any GPU a run is rehearsed: it uses a simulated GPU environment on the CPU.
    """
    needed, present = spec.vms * spec.gpus_per_vm, len(visible)
    if not present or spec.rehearse:
        return
    if needed > present:
        raise NotEnoughDevices(
            f"{needed} GPUs asked for, and this machine has {present}. Ask for {present} or fewer"
            " (--gpus auto), rehearse on CPU ranks (--rehearse), or take an engine with more"
            " machines (%taas engine ray ADDRESS)."
        )
    if refused := refused_as_mig(visible, needed):
        raise NotEnoughDevices(refused)


def lacks_uvm(root: Path = Path("/")) -> bool:
    """Return whether CUDA's own device file is missing, although those of GPUs exist.

    This is the case on a machine that has just been booted.
    """
    return bool(present_gpus(root)) and not (root / "dev/nvidia-uvm").exists()


def device_in_words(spec: RunSpec, present: int) -> str:
    """Return the devices on which the ranks of a run compute, in words."""
    if not spec.gpus_per_rank:
        return "CPU"
    if present and not spec.rehearse:
        return counted(spec.vms * spec.gpus_per_vm, "GPU")
    why = "as --rehearse asks" if present else "no GPU here"
    # if GPUs are present, the user has hidden them
    if not present_gpus() and (unseen := unseen_gpu()):
        why = f"{unseen[0]} is here, but no GPU to use: see %taas doctor"
    return f"rehearsed on CPU ({why})"


def unseen_gpu(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return a sign of a GPU that no run can use, with advice; None if there is none.

    Call it only on machines without /dev/nvidia0.
    """
    for pattern, advice in _FILES:
        if found := sorted(root.glob(pattern)):
            return f"/{found[0].relative_to(root)}", advice
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        known = _VENDORS.get(vendor.read_text().strip())
        if known is not None and vendor.with_name("class").read_text().startswith(_DISPLAY):
            return known
    return ("nvidia-smi", _NVIDIA) if shutil.which("nvidia-smi") else None

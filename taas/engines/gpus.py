"""Which GPUs this machine has, and whether a run can have what it asks for.

They are found without CUDA: asking CUDA would cost a context, or poison a fork.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from taas.errors import NotEnoughDevices
from taas.header.options import RunSpec
from taas.wording import counted

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

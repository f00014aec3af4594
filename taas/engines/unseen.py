"""Signs of a GPU on a machine where none can be used: a rehearsal there is not what its user expects."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def unseen_gpu(root: Path = Path("/")) -> tuple[str, str] | None:
    """Look for a GPU that no run can use, on a machine without /dev/nvidia0.

    Args:
        root: where ``dev`` and ``sys`` are.

    Returns:
        The sign that was found first, and what helps; None where there is none.
    """
    for pattern, advice in _FILES:
        if found := sorted(root.glob(pattern)):
            return f"/{found[0].relative_to(root)}", advice
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        known = _VENDORS.get(vendor.read_text().strip())
        if known is not None and vendor.with_name("class").read_text().startswith(_DISPLAY):
            return known
    return ("nvidia-smi", _NVIDIA) if shutil.which("nvidia-smi") else None

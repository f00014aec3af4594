"""A machine that has a GPU which no run can use is told so, where a cell is rehearsed and in ``taas doctor``."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas.engines.local import device_in_words, present_gpus, unseen_gpu
from taas.header.options import RunSpec
from taas.notebook import doctor

PCI = "sys/bus/pci/devices/0000:01:00.0"
NVIDIA, AMD, VIRTUAL = "0x10de", "0x1002", "0x1234"
VGA, COMPUTE, SOUND = "0x030000", "0x030200", "0x040300"

needs_no_gpu = pytest.mark.skipif(present_gpus() > 0, reason="this machine has GPUs that can be used")


@pytest.fixture
def no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH without ``nvidia-smi``."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH with an ``nvidia-smi``, as a container has that was started without its GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


@pytest.mark.usefixtures("no_nvidia_smi")
@pytest.mark.parametrize(
    ("files", "sign", "advice"),
    [
        ({}, None, None),
        ({"dev/nvidiactl": ""}, "/dev/nvidiactl", "nvidia-smi"),
        ({"dev/kfd": ""}, "/dev/kfd", "NVIDIA GPUs"),
        ({"dev/dxg": "", "dev/kfd": ""}, "/dev/dxg", "WSL2"),
        ({f"{PCI}/vendor": NVIDIA, f"{PCI}/class": COMPUTE}, "an NVIDIA GPU on the PCI bus", "nvidia-smi"),
        ({f"{PCI}/vendor": AMD, f"{PCI}/class": VGA}, "an AMD GPU on the PCI bus", "NVIDIA GPUs"),
        ({f"{PCI}/vendor": NVIDIA, f"{PCI}/class": SOUND}, None, None),
        ({f"{PCI}/vendor": VIRTUAL, f"{PCI}/class": VGA}, None, None),
    ],
)
def test_signs_of_a_gpu(tmp_path: Path, files: dict[str, str], sign: str | None, advice: str | None) -> None:
    """Device files of drivers, and display devices of the two vendors, are found; what helps is said."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = unseen_gpu(tmp_path)
    if sign is None or advice is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == sign
        assert advice in found[1]


@needs_no_gpu
@pytest.mark.usefixtures("nvidia_smi")
def test_a_rehearsal_says_that_a_gpu_was_not_seen() -> None:
    """The cell's line names the sign, and where to look; the same machine's doctor says what helps."""
    assert "is here, but no GPU to use: see %taas doctor)" in device_in_words(RunSpec(ranks_per_vm=2), 0)
    [finding] = [finding for finding in doctor._torch() if finding.what == "GPUs"]
    assert "is here, but no GPU to use" in finding.fact
    assert "nvidia-smi" in finding.advice

"""``taas doctor``: what this machine has, with a verdict for each, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas.engines.local import unseen_gpu
from taas.notebook import doctor
from taas.notebook.doctor import Finding


@pytest.mark.slow
def test_this_machine_is_examined() -> None:
    """Everything that a run needs is looked at by trying; whoever runs this suite has a machine that works."""
    findings = {finding.what: finding for finding in doctor.examine()}
    looked_at = {"Python", "packages", "torch", "GPUs", "machine", "shared memory", "write rule", "host name"}
    assert looked_at <= set(findings)
    assert not [finding for finding in findings.values() if finding.verdict == "bad"]
    assert all(finding.advice for finding in findings.values() if finding.verdict == "note")


def test_a_torch_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of what Python says is the fact."""
    monkeypatch.setattr(
        doctor, "_TORCH", "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    [finding] = doctor._torch()
    assert finding.verdict == "bad"
    assert "libcudart.so.13" in finding.fact
    assert "pip install" in finding.advice


def test_the_report_has_a_verdict_and_advice() -> None:
    """Text and HTML have the same lines; what has to be done is counted."""
    shown = doctor.report([Finding("ok", "torch", "2.9"), Finding("bad", "ports", "<none>", "open them")])
    assert shown.text.splitlines() == [
        "   looked at  found",
        "✓  torch      2.9",
        "✗  ports      <none>",
        "    -> open them",
        "1 thing to do before runs work",
    ]
    assert "&lt;none&gt;" in shown.html


PCI = "sys/bus/pci/devices/0000:01:00.0"


@pytest.mark.parametrize(
    ("files", "sign", "advice"),
    [
        ({}, None, ""),
        ({"dev/nvidiactl": ""}, "/dev/nvidiactl", "nvidia-smi"),
        ({"dev/dxg": "", "dev/kfd": ""}, "/dev/dxg", "WSL2"),
        (
            {f"{PCI}/vendor": "0x10de", f"{PCI}/class": "0x030200"},
            "an NVIDIA GPU on the PCI bus",
            "nvidia-smi",
        ),
        ({f"{PCI}/vendor": "0x1002", f"{PCI}/class": "0x030000"}, "an AMD GPU on the PCI bus", "NVIDIA GPUs"),
        ({f"{PCI}/vendor": "0x10de", f"{PCI}/class": "0x040300"}, None, ""),  # its sound
    ],
)
def test_signs_of_a_gpu_that_no_run_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], sign: str | None, advice: str
) -> None:
    """Device files of drivers, and display devices of the two vendors, are found; what helps is said."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = unseen_gpu(tmp_path)
    assert (found and found[0]) == sign
    assert found is None or advice in found[1]

"""``taas doctor``: what this machine has, with a verdict for each, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from taas.notebook import doctor
from taas.notebook.doctor import Finding


@pytest.mark.slow
def test_this_machine_is_examined() -> None:
    """Everything that a run needs is looked at by trying.

    Whoever runs this suite has a machine that works.
    """
    findings = {finding.what: finding for finding in doctor.examine()}
    looked_at = {"packages", "torch", "GPUs", "machine", "shared memory", "write rule"}
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


def test_what_is_found_is_printed_before_the_next_look() -> None:
    """A look may take a minute, and whoever waits sees what there is."""
    looked = list[str]()

    def look() -> Iterator[Finding]:
        for what in ("first", "second"):
            looked.append(what)
            yield Finding("note", what, "found", "do it")

    lines = doctor.as_text(look())
    assert next(lines) == "!  first          found"
    assert next(lines) == "    -> do it"
    assert looked == ["first"]
    assert [*lines] == ["!  second         found", "    -> do it", "runs work here"]


@pytest.mark.parametrize("there", [True, False])
def test_what_gpus_do_needs_nvidia_ml_py(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are GPUs and no NVML, it says what is not shown, and what to install.

    Without GPUs nothing is missing.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [*doctor._monitoring(tmp_path)] == []
    card = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text(
        "Model: \t\t NVIDIA A100\n"
        "GPU UUID: \t GPU-1\n"
        "Device Minor: \t 0\n"
        "Bus Location: 0000:01:00.0\n"
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(doctor, "_version", lambda name: "13.5" if there else "")
    [finding] = doctor._monitoring(tmp_path)
    assert finding.what == "nvidia-ml-py"
    assert finding.verdict == ("ok" if there else "note")
    assert finding.advice == ("" if there else "pip install nvidia-ml-py")


def test_the_report_has_a_verdict_and_advice() -> None:
    """Text and HTML have the same lines; what has to be done is counted."""
    shown = doctor.report(
        [Finding("ok", "torch", "2.9"), Finding("bad", "ports", "<none>", "open them")]
    )
    assert shown.text.splitlines() == [
        "   looked at  found",
        "✓  torch      2.9",
        "✗  ports      <none>",
        "    -> open them",
        "1 thing to do before runs work",
    ]
    assert "&lt;none&gt;" in shown.html

"""``taas doctor``: what this machine has, with a verdict for each, and what to do."""

from __future__ import annotations

import pytest

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

"""Whoever writes the record of a run, and holds its payload."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taas.header.options import RunSpec
from taas.runs.places import ProcessMark, runtime_folder
from taas.supervisor.recorder import Recorder
from taas.wire.clients import DeliveryOrder, Submit
from taas.wire.framing import Memory
from taas.wire.ranks import Cell, Workspace


def _submit(payload: Memory, loaders: Memory) -> Submit:
    return Submit(
        cell=Cell("", 1, RunSpec(), "nocolor"),
        workspace=Workspace("/", {}),
        payload=payload,
        gpus=(),
        device="",
        delivery=DeliveryOrder(loaders, processes=1, encrypt=False),
    )


@pytest.mark.parametrize("lacks", ["payload", "folder"])
def test_a_run_that_cannot_be_recorded_holds_nothing(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel closed its payload, or there is no room for its folder: cell after cell may be refused so."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    fd = os.memfd_create("names")
    try:
        there = Memory(os.getpid(), fd, 0)
        payload = Memory(os.getpid(), fd, 1) if lacks == "payload" else there
        if lacks == "folder":
            runtime_folder("runs").rmdir()
            (tmp_path / "taas" / "runs").touch()
        before = len([*Path("/proc/self/fd").iterdir()])
        with pytest.raises(OSError, match=r"is not the memory|exists|Not a directory"):
            Recorder(_submit(payload, there), ProcessMark.of(os.getpid()))
        assert len([*Path("/proc/self/fd").iterdir()]) == before
    finally:
        os.close(fd)

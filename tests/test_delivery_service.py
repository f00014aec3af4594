"""The supervisor's end of a delivery: what the coordinator says reaches it, whenever it comes to read it."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import pytest

from taas.delivery.config import DeliveryConfig, Place, new_keys
from taas.delivery.reports import Note, Places, Prebuffered, Report, Serving
from taas.delivery.service import ChildProcess, Service

SPEAKER = """
import os, sys

os.write(1, {first!r})
sys.stdin.readline()
os.write(1, {second!r})
if sys.stdin.read() == "":
    os.write(1, {last!r})
"""
"""Writes as the coordinator does: something at once, more when it is asked, the last at its stdin's end."""


def speaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **said: bytes) -> Service:
    (tmp_path / "speaker.py").write_text(SPEAKER.format(**said))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Service(DeliveryConfig(new_keys(), 1, 1 << 20), ChildProcess("speaker", reports=True), "", "")


def readable(service: Service) -> list[Any]:
    return select.select([service.coordinator.process.stdout], [], [], 0)[0]


def test_what_was_said_at_once_is_heard_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays behind where no descriptor tells of it; half a line waits for its other half."""
    service = speaker(
        tmp_path,
        monkeypatch,
        first=b'{"type":"Serving","endpoint":"tcp://here","slabs":"","pid":7}\n{"type":"Prebuffered"}\n{"type":"No',
        second=b'te","text":"whole"}\n',
        last=b'{"type":"Places","places":{"d":{"iteration":1,"step":2,"taken":6}}}\n{"type":"Pla',
    )
    said: list[Report] | None = service.read()
    assert said == [Serving("tcp://here", "", 7), Prebuffered()]
    assert not readable(service)
    service.coordinator.send(b"go on")
    assert service.read() == [Note("whole")]
    assert service.close() == [Places({"d": Place(1, 2, 6)})]


def test_a_coordinator_killed_in_the_middle_of_a_word_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not say to the end is not taken for a report."""
    service = speaker(tmp_path, monkeypatch, first=b'{"type":"Prebuffered"}\n{"ty', second=b"", last=b"")
    assert service.read() == [Prebuffered()]
    service.coordinator.process.kill()
    assert service.read() is None
    assert service.close() == []

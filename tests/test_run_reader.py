"""A run is its folder: its record and what its ranks wrote are read there, by whoever wants to see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from taas.notebook.cell_output import Screen, follow
from taas.runs.events import EVENTS, RECORD, Output
from taas.runs.reader import RunReader
from taas.runs.records import RunRecord, output_folder, write_record


class Shown(Screen):
    """A screen that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Output] = []

    def show(self, items: Iterable[Output]) -> None:
        self.items += items

    @property
    def text(self) -> str:
        return "".join(f"<{item.text}>" if item.kind == "note" else item.text for item in self.items)


def change(record: RunRecord, **changes: Any) -> None:
    """Write another record, as the supervisor does."""
    for name, value in changes.items():
        setattr(record, name, value)
    write_record(record)


def prints(record: RunRecord, text: str, rank: int = 0) -> None:
    """Let a rank of the run's newest start print something."""
    folder = output_folder(record.folder, record.restarts) / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    body = text.encode()
    with (folder / EVENTS).open("ab") as file:
        file.write(RECORD.pack(0, len(body), 0, 0) + body)


def test_who_looks_finds_output_and_the_record(record: RunRecord) -> None:
    """Also the first output of a rank that was not there before, and a new start's."""
    reader = RunReader(record)

    def news() -> str:
        found = []
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            reader.wait(30)
            reader.look()
            found = reader.read()
        return "".join(item.text for item in found)

    prints(record, "first\n")
    assert news() == "first\n"
    prints(record, "second\n")
    assert news() == "second\n"
    change(record, state="running")
    assert reader.look(at_once=True).state == "running"
    change(record, restarts=1, losses=("rank 1 died; started again",))
    assert news() == "rank 1 died; started again"
    prints(record, "third\n")
    assert news() == "third\n"


def test_what_was_written_before_a_run_was_over_is_shown(record: RunRecord) -> None:
    """Whoever follows it, from its beginning or later, has shown all of it when it says that the run is over."""
    shown = Shown()
    lines = [f"{number}\n" for number in range(2000)]

    def write() -> None:
        for line in lines:
            prints(record, line)
        change(record, state="over", outcome="done")

    writer = threading.Thread(target=write)
    reader = RunReader(record)
    writer.start()
    assert follow(reader, shown).outcome == "done"
    writer.join()
    later = Shown()
    reader = RunReader(record)
    follow(reader, later)
    assert shown.text == later.text == "".join(lines)


def test_a_run_that_is_removed_is_over(record: RunRecord) -> None:
    """Nobody waits for ever for a folder that is gone."""
    reader = RunReader(record)
    (record.folder / "record.json").unlink()
    assert follow(reader, Shown()).live
    assert reader.removed and reader.over

"""A rank's files are read in one order, also while they grow, and from their ends."""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.runs.events import (
    EVENTS,
    KINDS,
    STDERR,
    STDOUT,
    Output,
    RankEvents,
    last_written,
    pack_record,
)

DISPLAY = KINDS.index("display")
# a text that is itself the bytes of records, which a search for their beginnings would take for
# some
RECORDS = pack_record(0, b"inner", 0, 0) * 3
texts = st.one_of(st.text(max_size=200).map(str.encode), st.just(RECORDS), st.just(b"x" * 3000))


def write(folder: Path, records: list[bytes], torn: int = 0) -> None:
    """Write an event file; of the last record ``torn`` bytes are missing."""
    whole = b"".join(records)
    (folder / EVENTS).write_bytes(whole[: len(whole) - torn])


@given(st.lists(texts, max_size=12))
def test_a_reader_that_skips_begins_at_a_record(bodies: list[bytes]) -> None:
    """What is read then is the end of all records, and at least their last 8 KB, or all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [pack_record(0, body, 0, 0) for body in bodies])
        events = RankEvents(folder)
        assert events.skip()
        read = "".join(output.text for output in events.read())
    said = b"".join(bodies).decode(errors="replace")
    assert said.endswith(read)
    # a record's header and length count, and the first of the last 8 KB may be cut off
    assert len(read) >= min(len(said), 1000)


@given(st.lists(texts, min_size=1, max_size=4), st.integers(min_value=1, max_value=24))
def test_a_torn_end_is_told_apart(bodies: list[bytes], torn: int) -> None:
    """While a part of a record is being sent, the last lines cannot be told.

    Nothing else is taken for them.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [pack_record(0, body, 0, 0) for body in bodies], torn=torn)
        last = last_written(folder, 3)
    # only a text that ends in the bytes of a record, cut off just there, passes for one
    assert last is None or (bodies[-1] == RECORDS and torn == 4)


def test_the_last_lines_before_a_large_display() -> None:
    """A figure of 200 KB is found with the lines around it.

    Before one of 2 MB nothing is looked for.
    """
    for nbytes, found in ((200_000, True), (2_000_000, False)):
        figure = msgspec.msgpack.encode(
            {"data": {"image/png": "A" * nbytes, "text/plain": "<Figure>"}}
        )
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            records = [pack_record(0, b"before\n", 0, 0), pack_record(DISPLAY, figure, 0, 0)]
            write(folder, records)
            last = last_written(folder, 3)
        assert (last is not None) is found
        if last is not None:
            assert last[0] == ["before", "<Figure>"]


class Writer:
    """Writes a rank's three files, and notes in which order they are to be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._c_sizes = [0, 0]
        self._c_texts = ["", ""]  # since the last record, or the last time all was read
        self.expected: list[tuple[str, Any]] = []
        for name in (EVENTS, STDOUT, STDERR):
            (folder / name).touch()

    def append(self, name: str, data: bytes) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(data)

    def c_text(self, stream: int, text: str) -> None:
        """C code writes to its stdout (0) or stderr (1)."""
        self.append((STDOUT, STDERR)[stream], text.encode())
        self._c_sizes[stream] += len(text.encode())
        self._c_texts[stream] += text

    def c_texts_come(self) -> None:
        """What C code has written comes now: first its stdout, then its stderr."""
        self.expected += zip(("stdout", "stderr"), self._c_texts, strict=True)
        self._c_texts = ["", ""]

    def record(self, kind: int, value: str) -> bytes:
        """Return the next record, which still has to be written."""
        self.c_texts_come()
        if kind < 2:
            self.expected.append((KINDS[kind], value))
            body = value.encode()
        else:
            body = msgspec.msgpack.encode({"data": {"text/plain": value}})
            self.expected.append((KINDS[kind], body))
        return pack_record(kind, body, *self._c_sizes)


def joined(found: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Join neighbouring texts of one kind, however often somebody read meanwhile."""
    result: list[tuple[str, Any]] = []
    written = [(kind, value) for kind, value in found if value]
    for kind, group in itertools.groupby(written, key=lambda one: one[0]):
        values = [value for _, value in group]
        if kind in ("stdout", "stderr"):
            result.append((kind, "".join(values)))
        else:
            result += [(kind, value) for value in values]
    return result


def read_all(events: RankEvents) -> list[Output]:
    found = []
    while some := events.read():
        found += some
    return found


words = st.one_of(st.text(max_size=20), st.just("é" * 200_000))  # of this a block has a part
steps = st.one_of(
    st.tuples(st.just("C"), st.integers(0, 1), words),
    st.tuples(st.just("record"), st.sampled_from([0, 1, DISPLAY]), words),
    st.tuples(st.just("torn"), st.sampled_from([0, 1, DISPLAY]), words),
    st.tuples(st.just("read"), st.none(), st.none()),
)


@given(st.lists(steps, max_size=20))
def test_three_files_are_one_sequence(what: list[tuple[str, Any, Any]]) -> None:
    """What a rank and its C code write is read once, in order, whenever somebody reads.

    So it is also when a record is there in part: its beginning is not taken for the whole.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer, events = Writer(folder), RankEvents(folder)
        found: list[Output] = []
        for step, which, text in what:
            if step == "C":
                writer.c_text(which, text)
            elif step == "record":
                writer.append(EVENTS, writer.record(which, text))
            elif step == "torn":
                record = writer.record(which, text)
                writer.append(EVENTS, record[: len(record) // 2])
                found += read_all(events)
                writer.append(EVENTS, record[len(record) // 2 :])
            else:
                found += read_all(events)
                writer.c_texts_come()
        found += read_all(events)
        writer.c_texts_come()
    read = [(output.kind, output.body or output.text) for output in found]
    assert joined(read) == joined(writer.expected)


GOOD = pack_record(0, b"before\n", 0, 0)
DAMAGED = {
    "torn, and others behind it": pack_record(0, b"x" * 100, 0, 0)[:60] + GOOD * 20,
    "a large one torn, and others behind it": pack_record(0, b"x" * 900_000, 0, 0)[:-9] + GOOD,
    "of a version whose records had no length": struct.pack("<BIQQ", 0, 3, 0, 0)
    + b"old"
    + struct.pack("<BIQQ", 0, 3, 0, 0)
    + b"old",
    "of a kind of another version": pack_record(200, b"new", 0, 0) + GOOD,
    "a block that a disk has lost": bytes(4096),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_no_record_is_said_once(tmp_path: Path, what: str) -> None:
    """What comes before it is read, and what C code wrote; one line names the file."""
    (tmp_path / EVENTS).write_bytes(GOOD + DAMAGED[what])
    (tmp_path / STDOUT).write_bytes(b"from C\n")
    events = RankEvents(tmp_path)
    first, said, c_text = read_all(events)
    assert (first.kind, first.text) == ("stdout", "before\n")
    assert said.kind == "stderr"
    assert f"{tmp_path / EVENTS} has no record at byte {len(GOOD)}." in said.text
    assert (c_text.kind, c_text.text) == ("stdout", "from C\n")
    assert events.read() == []
    last_written(tmp_path, 3)  # may find nothing, and raises nothing

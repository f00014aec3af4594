"""The last lines of a rank are found from the end of its event file, whatever its records hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from taas.runs.events import EVENTS, KINDS, RankEvents, last_written, pack_record

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

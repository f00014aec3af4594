"""What ranks write and say has no limit; it is read in parts, and the messages that carry what they say have one."""

from __future__ import annotations

from pathlib import Path

from taas.rank.outlet import pack_display
from taas.runs.events import (
    EVENTS,
    KINDS,
    LARGEST_DISPLAY,
    LARGEST_TEXT,
    RECORD,
    STDERR,
    STDOUT,
    Output,
    RankEvents,
    last_written,
)


class Written:
    """The files of a rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw = 0
        for name in (EVENTS, STDOUT, STDERR):
            (folder / name).touch()

    def record(self, kind: str, body: bytes) -> None:
        size = LARGEST_TEXT if kind in ("stdout", "stderr") else len(body)
        with (self.folder / EVENTS).open("ab") as file:
            for at in range(0, len(body), size):
                part = body[at : at + size]
                file.write(RECORD.pack(KINDS.index(kind), len(part), self.raw, 0) + part)

    def raw_stdout(self, body: bytes) -> None:
        with (self.folder / STDOUT).open("ab") as file:
            self.raw += file.write(body)

    def messages(self) -> list[list[Output]]:
        """What is read, part by part."""
        tail = RankEvents(self.folder)
        found = []
        while items := tail.read():
            found.append(items)
        return found


def text(messages: list[list[Output]]) -> str:
    return "".join(item.text for items in messages for item in items)


def test_a_display_larger_than_a_message_is_said_and_left_out(tmp_path: Path) -> None:
    """What comes after it is shown."""
    written = Written(tmp_path)
    written.record("display", b"x" * (LARGEST_DISPLAY + 1))
    written.record("stdout", b"after\n")
    said = text(written.messages())
    assert said.startswith("taas: a display of 50 MB is left out")
    assert said.endswith("after\n")


def test_pieces_of_one_stream_are_one(tmp_path: Path) -> None:
    """Neighbouring texts become one output, whoever wrote them; another stream or a display stands between two."""
    written = Written(tmp_path)
    for number in range(1000):
        written.record("stdout", f"{number}\n".encode())
    written.raw_stdout(b"C\n")
    written.record("stdout", "é".encode()[:1])
    written.record("stdout", "é".encode()[1:])
    written.record("stderr", b"err\n")
    written.record("display", b"shown")
    written.record("stdout", b"last\n")
    [found] = written.messages()
    lines = "".join(f"{number}\n" for number in range(1000))
    assert found == [
        Output(0, "stdout", lines + "C\né"),
        Output(0, "stderr", "err\n"),
        Output(0, "display", body=b"shown"),
        Output(0, "stdout", "last\n"),
    ]


def test_a_record_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """Nothing that stands behind it comes before it."""
    written = Written(tmp_path)
    written.record("stdout", b"whole\n")
    events = RankEvents(tmp_path)
    assert events.read() == [Output(0, "stdout", "whole\n")]
    record = RECORD.pack(0, 5, 0, 0) + b"half\n"
    for part in (record[:7], record[7:-2]):
        with (tmp_path / EVENTS).open("ab") as file:
            file.write(part)
        assert events.read() == []
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(record[-2:])
    assert events.read() == [Output(0, "stdout", "half\n")]


def _last(folder: Path, count: int) -> list[str]:
    found = last_written(folder, count)
    assert found is not None
    return found[0]


def test_the_last_lines_of_much(tmp_path: Path) -> None:
    """Found from the end of the files, in their order, also behind a large display; of a bar what a terminal shows."""
    written = Written(tmp_path)
    assert _last(tmp_path, 3) == []
    for number in range(2000):
        written.record("stdout", f"line {number}\n".encode())
    assert _last(tmp_path, 2) == ["line 1998", "line 1999"]
    written.raw_stdout(b"".join(b"C %d\n" % number for number in range(10_000)))
    assert _last(tmp_path, 2) == ["C 9998", "C 9999"]
    written.record("display", pack_display({"data": {"text/plain": "<Figure>", "image/png": "x" * 100_000}}))
    assert _last(tmp_path, 2) == ["C 9999", "<Figure>"]
    written.record("stderr", b"".join(b"\r%3d%%|" % percent for percent in range(50)))
    assert _last(tmp_path, 2) == [" 49%|"]
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(RECORD.pack(0, 5, 0, 0) + b"ha")  # it is being written
    assert last_written(tmp_path, 2) is None

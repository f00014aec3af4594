"""The supervisor's end of a project's travel: what VMs without the notebook's disk bring, and what the cell says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from taas.messages.hosts import FileChange, FileChangeTaken, ProjectPacked, WantProject
from taas.messages.wire import Message
from taas.supervisor.homecoming import Homecoming
from taas.travel import parcel
from taas.travel.changes import PIECE, Change, DirectoryMade, FilePiece, Removed, encode


class Home:
    """A project and a run of two VMs with two ranks each."""

    def __init__(self, folder: Path) -> None:
        self.project, self.scratch = folder / "project", folder / "scratch"
        self.project.mkdir()
        self.sent: list[tuple[int, Message]] = []
        self.homecoming = Homecoming(
            "golden-fox", str(self.project), self.scratch, 2, lambda vm, said: self.sent.append((vm, said))
        )

    def arrive(self, vm: int, rank: int, change: Change) -> int:
        """Let a VM bring a change; returns its size."""
        data = encode(change)
        self.homecoming.hear(FileChange(run="golden-fox", vm=vm, rank=rank, change=data))
        return len(data)

    def files(self) -> dict[str, bytes]:
        """The project's files."""
        return {path.name: path.read_bytes() for path in self.project.rglob("*") if path.is_file()}


def whole(path: str, data: bytes) -> FilePiece:
    """A small file."""
    return FilePiece(path=path.encode(), mode=0o644, size=len(data), offset=0, data=data)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.homecoming.close()


def test_a_large_file_that_the_cell_adds_to_is_kept_and_both_are_named(home: Home) -> None:
    """The VM had nothing of it. What did not travel is said, though the run succeeded."""
    large = bytes(parcel.LARGE + 1)
    (home.project / "history.csv").write_bytes(large)
    home.homecoming.hear(WantProject(run="golden-fox", vm=0))
    assert isinstance(home.sent[0][1], ProjectPacked)
    assert home.homecoming.notices(well=True) == []
    home.arrive(0, 0, whole("history.csv", b"a line\n"))
    assert home.files() == {"history.csv": b"a line\n", "history.before-golden-fox.csv": large}
    said = home.homecoming.notices(well=True)
    assert "history.csv (8.4 MB) had not travelled" in said[0]
    assert "yours is history.before-golden-fox.csv" in said[0]
    assert "not on the VMs, which do not see this disk: history.csv (8.4 MB)" in said[1]


def test_what_several_vms_write_into_a_shared_directory_is_no_conflict(home: Home) -> None:
    """The last one to write a file wins, as on one machine; what the user changes is the user's against them all."""
    for vm, text in ((1, b"one"), (0, b"zero"), (1, b"one again")):
        home.arrive(vm, 0, DirectoryMade(path=b"ckpt", mode=0o755))
        home.arrive(vm, 0, whole("ckpt/latest.txt", text))
        assert home.files() == {"latest.txt": text}
    home.arrive(0, 0, whole("ckpt/0.txt", b""))
    home.arrive(1, 0, Removed(path=b"ckpt"))
    assert home.homecoming.written == {b"ckpt/latest.txt", b"ckpt/0.txt"}
    (home.project / "ckpt/latest.txt").write_text("user's")
    for vm in range(2):
        home.arrive(vm, 0, whole("ckpt/latest.txt", b"later, %d" % vm))
    assert home.files() == {"latest.txt": b"user's", "latest.golden-fox.txt": b"later, 1", "0.txt": b""}
    (home.project / "ckpt/latest.txt").unlink()
    for name in (b"ckpt/latest.txt", b"ckpt/0.txt", b"ckpt"):
        home.arrive(0, 0, Removed(path=name))
    assert list(home.project.iterdir()) == []
    [said] = home.homecoming.notices(well=True)
    assert "the run's is ckpt/latest.golden-fox.txt" in said


def test_the_same_file_may_come_from_two_vms_at_once(home: Home) -> None:
    """Each version is whole, and what a lost VM was sending does not count."""
    texts = [b"0" * (PIECE + 1), b"1" * (PIECE + 1)]
    for offset in (0, PIECE):
        for vm, text in enumerate(texts):
            home.arrive(
                vm,
                0,
                FilePiece(path=b"x", mode=0o644, size=len(text), offset=offset, data=text[offset:][:PIECE]),
            )
            if vm == 1 and offset == 0:
                home.homecoming.lose(1)
    assert home.files() == {"x": texts[0]}


def test_what_cannot_be_written_is_acknowledged_all_the_same(home: Home, tmp_path: Path) -> None:
    """An agent waits for that, and the run's end for the agent. It is the first file: the project was just renamed."""
    home.project.rename(tmp_path / "renamed")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            home.arrive(0, 0, whole("model.pt", b"new"))
    size = len(encode(whole("model.pt", b"new")))
    assert home.sent == [(0, FileChangeTaken(run="golden-fox", vm=0, size=size))] * 2

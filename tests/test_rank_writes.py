"""The scratch folder of a run: one for each start, sorted at its end whatever the ranks left in it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from storage_ranks import fork, join

from taas import _linux
from taas.rank_storage import scratch_of
from taas.supervisor.rank_writes import kept_root, make_scratch, settle_leftovers, settle_scratch

HOUR = 3600 * 10**9


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project; taas' own folders are the test's."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def test_a_run_begins_again_whatever_is_left_of_its_last_start(project: Path) -> None:
    """What could not be moved stays where it is; a later start, or run, of the same name has a folder of its own."""
    first, _ = make_scratch("fox", str(project))
    second, _ = make_scratch("fox", str(project))
    assert first != second
    assert settle_scratch(first) == settle_scratch(second) == []
    assert list(first.parent.iterdir()) == []


def test_what_lies_in_directories_that_nobody_may_write_is_kept(project: Path) -> None:
    """As a copy of a read-only directory has it. An ordinary user is asked for permission, root is not."""

    def as_an_ordinary_user() -> object:
        _linux.drop_capabilities(None)
        folder, _ = make_scratch("fox", str(project))
        tree = scratch_of(folder, 1) / "tree"
        for name, mode in (("read-only", 0o500), ("closed", 0)):
            (tree / name / "deep").mkdir(parents=True)
            (tree / name / "deep" / "file").write_text(name)
            (tree / name / "deep").chmod(mode)
            (tree / name).chmod(mode)
        (tree / "link").symlink_to("read-only")
        said = settle_scratch(folder)
        return [said, folder.exists()]

    [said], left = join(fork(as_an_ordinary_user))
    assert said.startswith("kept: closed/deep/file, link, read-only/deep/file (3 files")
    assert not left
    assert (kept_root() / "fox/rank1/closed/deep/file").read_text() == "closed"


def test_what_cannot_be_sorted_is_named(project: Path) -> None:
    """The run ends all the same, and so does the next supervisor's look at what is left."""
    folder, _ = make_scratch("fox", str(project))
    (scratch_of(folder, 1) / "tree").mkdir(parents=True)
    (scratch_of(folder, 1) / "tree" / "file").write_text("only rank 1's")
    shutil.rmtree(kept_root())
    (folder.parents[1] / "kept").write_text("in the way")
    [said] = settle_scratch(folder)
    assert "could not be sorted" in said
    assert str(folder) in said
    settle_leftovers()
    assert (scratch_of(folder, 1) / "tree" / "file").read_text() == "only rank 1's"
    shutil.rmtree(folder)
    [said] = settle_scratch(folder)
    assert "could not be sorted" in said


@pytest.mark.parametrize("ahead", [-HOUR, 0, HOUR])
def test_a_file_system_with_another_clock_loses_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The project may be on another machine: what was changed since the run began is told by its clock alone."""
    before, during = project / "before", project / "during"
    before.write_text("as it was")
    here = time.time_ns
    monkeypatch.setattr(
        time, "time_ns", lambda: here() - ahead
    )  # this machine's clock, the other one's being right
    folder, since = make_scratch("fox", str(project))
    tree = scratch_of(folder, 1) / "tree"
    tree.mkdir(parents=True)
    for name in ("before", "during"):
        (tree / name).write_text("rank 1's")
    while (
        during.lstat().st_ctime_ns <= since if during.exists() else True
    ):  # it ticks some hundred times a second
        during.write_text("rank 0's")
    [said] = settle_scratch(folder)
    assert said.startswith("kept: before (1 file")
    assert (kept_root() / "fox/rank1/before").read_text() == "rank 1's"


def test_where_nobody_can_have_written_all_is_kept(project: Path) -> None:
    """A project in which nothing can be made has no clock to ask: in doubt, a write is kept."""
    (project / "file").write_text("as it was")
    away = project.rename(project.parent / "away")
    folder, _ = make_scratch("fox", str(project))
    away.rename(project)
    (project / "file").write_text("changed")
    tree = scratch_of(folder, 1) / "tree"
    tree.mkdir(parents=True)
    (tree / "file").write_text("rank 1's")
    [said] = settle_scratch(folder)
    assert said.startswith("kept: file (1 file")

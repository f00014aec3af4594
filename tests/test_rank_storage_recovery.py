"""The end of a run: replicas go, what only other ranks wrote is kept, told, recovered, and retired with notice."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from storage_ranks import Run, fork, join
from torch.distributed.checkpoint.api import CheckpointException

from taas import cli, rank_storage
from taas.errors import HeaderError
from taas.rank_storage import Settlement, recover, retention, settle

DAY = 24 * 3600 * 10**9


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def settled(run: Run, since_ns: int, name: str = "run-1") -> Settlement:
    return settle(run.scratch, run.project, run=name, since_ns=since_ns, kept_root=run.kept)


def write(path: str, text: str):
    def body(guard):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    return body


def test_every_rank_saves_the_model(run: Run):
    """torch.save in eight ranks: one file, rank 0's, and not a word about it."""
    since = run.now()
    for rank in range(8):
        run.rank(lambda guard, rank=rank: torch.save({"rank": rank}, "mnist_cnn.pt"), rank=rank)
    told = settled(run, since)
    assert torch.load(run.project / "mnist_cnn.pt") == {"rank": 0}
    assert [path.name for path in run.project.iterdir()] == ["mnist_cnn.pt"]
    assert told.lines() == []
    assert not run.kept.exists()
    assert not run.scratch.exists()


def test_a_file_from_before_the_run_is_not_rank_0s(run: Run):
    """A path that rank 0 left as it was is kept: only a write of this run makes the others replicas."""
    (run.project / "results.csv").write_text("last week's")
    past = time.time_ns() - DAY
    os.utime(run.project / "results.csv", ns=(past, past))
    since = (run.project / "results.csv").stat().st_ctime_ns + 1
    run.rank(write("results.csv", "rank 1's"))
    told = settled(run, since)
    assert [file.path for file in told.kept] == ["results.csv"]
    assert (run.kept / "run-1" / "rank1" / "results.csv").read_text() == "rank 1's"


def test_what_only_others_wrote_is_kept_and_recovered(run: Run):
    """The cell says what was kept and from whom; recovering brings it to its place and clears the kept folder."""
    since = run.now()
    for rank in (1, 2, 3):
        run.rank(write(f"ckpt/shard{rank}", "x" * 1500), rank=rank)
    told = settled(run, since)
    assert told.lines() == [
        "kept: ckpt/shard1, ckpt/shard2, ckpt/shard3 (3 files, 4.5 kB) from ranks 1–3, which rank 0 did not write: "
        "%taas recover run-1 brings them into the project, and with --shared ckpt every rank writes there itself"
    ]
    written = recover("run-1", run.kept, run.project)
    assert written == [run.project / "ckpt" / f"shard{rank}" for rank in (1, 2, 3)]
    assert all(path.read_text() == "x" * 1500 for path in written)
    assert list(run.kept.iterdir()) == []


def test_equal_versions_are_kept_once_and_others_apart(run: Run):
    """Where several ranks wrote a path, equal versions are one file; different ones all reach the project."""
    since = run.now()
    for rank, text in ((1, "same"), (2, "same"), (3, "other")):
        run.rank(write("log", text), rank=rank)
    (file,) = settled(run, since).kept
    assert (file.path, file.ranks, file.size) == ("log", (1, 3), 9)
    recover("run-1", run.kept, run.project)
    found = {path.name: path.read_text() for path in run.project.iterdir()}
    assert found == {"log": "same", "log.rank3": "other"}


def test_recovering_overwrites_only_when_told(run: Run):
    """A path that exists stops the recovery before anything is written."""
    since = run.now()
    run.rank(write("a", "rank 1's"))
    run.rank(write("b", "rank 1's"))
    settled(run, since)
    (run.project / "b").write_text("mine")
    with pytest.raises(HeaderError, match=r"b exists in the project; nothing was written\..*--overwrite"):
        recover("run-1", run.kept, run.project)
    assert not (run.project / "a").exists()
    recover("run-1", run.kept, run.project, overwrite=True)
    assert (run.project / "b").read_text() == "rank 1's"


def test_a_runs_own_project_gets_what_it_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from a terminal that stands elsewhere; where the project is gone, nothing is moved."""
    run.rank(write("a", "rank 1's"))
    settled(run, time.time_ns())
    monkeypatch.setattr("taas.supervisor.rank_writes.kept_root", lambda: run.kept)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    away = run.project.rename(tmp_path / "away")
    assert cli.main(["recover", "run-1"]) != 0
    assert "is not there any more; what was kept lies in" in capsys.readouterr().err
    away.rename(run.project)
    assert cli.main(["recover", "run-1"]) == 0
    assert (run.project / "a").read_text() == "rank 1's"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_and_folders_in_each_others_way_stop_a_recovery(run: Run, overwrite: bool) -> None:
    """Before anything is written, with a line that says what is where."""
    run.rank(write("a", "rank 1's"))
    run.rank(write("deep/er/b", "rank 1's"))
    run.rank(write("c", "rank 1's"))
    settled(run, time.time_ns())
    (run.project / "deep").write_text("a file")
    with pytest.raises(
        HeaderError, match=r"deep/er/b has no place .* deep is a file there; nothing was written"
    ):
        recover("run-1", run.kept, run.project, overwrite)
    (run.project / "deep").unlink()
    (run.project / "c").mkdir()
    with pytest.raises(HeaderError, match=r"c has no place .* c is a folder there; nothing was written"):
        recover("run-1", run.kept, run.project, overwrite)
    assert not (run.project / "a").exists()
    (run.project / "c").rmdir()
    assert len(recover("run-1", run.kept, run.project, overwrite)) == 3


def test_recovering_an_unknown_run_names_those_there_are(run: Run):
    """A wrong name is answered with the right ones."""
    with pytest.raises(HeaderError, match="No run has kept writes"):
        recover("run-7", run.kept, run.project)
    run.rank(write("a", "x"))
    settled(run, time.time_ns())
    with pytest.raises(HeaderError, match="Runs that kept writes: run-1"):
        recover("run-7", run.kept, run.project)


def test_a_second_run_of_the_same_name_keeps_both(run: Run):
    """Kept writes of an earlier run are never overwritten."""
    for text in ("first", "second"):
        run.rank(write("a", text))
        told = settled(run, time.time_ns())
    assert told.run == "run-1-2"
    assert "%taas recover run-1-2" in told.lines()[0]
    assert (run.kept / "run-1" / "rank1" / "a").read_text() == "first"
    assert (run.kept / "run-1-2" / "rank1" / "a").read_text() == "second"


def test_removals_by_others_are_said(run: Run):
    """What another rank removed and rank 0 did not is still there, and the cell says so."""
    (run.project / "old.pt").touch()
    since = run.now()
    run.rank(lambda guard: Path("old.pt").unlink())
    assert settled(run, since).lines() == [
        "rank writes: old.pt removed by rank 1 but not by rank 0: still there"
    ]
    assert (run.project / "old.pt").exists()


def test_nothing_written_says_nothing(run: Run):
    """A run whose other ranks wrote nothing has no line."""
    run.rank(lambda guard: None)
    assert settled(run, time.time_ns()).lines() == []


def test_links_are_kept_as_links(run: Run):
    """A link that only another rank made comes back as a link."""
    since = run.now()

    def body(guard):
        Path("ckpt1").write_text("x")
        Path("latest").symlink_to("ckpt1")

    run.rank(body)
    settled(run, since)
    recover("run-1", run.kept, run.project)
    assert (run.project / "latest").readlink() == Path("ckpt1")
    assert (run.project / "latest").read_text() == "x"


def test_retention_tells_before_it_removes(run: Run):
    """Above the limit the oldest run is announced, removed a day later, and the newest never."""
    for number in (1, 2, 3):
        run.rank(write("a", "x" * 1000))
        settled(run, time.time_ns(), f"run-{number}")
    now = time.time_ns()
    assert retention(run.kept, 3000, now) == []
    (line,) = retention(run.kept, 2000, now)
    assert "run run-1" in line and "%taas recover run-1" in line and "removed after a day" in line
    assert retention(run.kept, 2000, now + DAY // 2) == []
    assert (run.kept / "run-1").exists()
    (line,) = retention(run.kept, 2000, now + DAY)
    assert line.startswith("kept writes removed, as announced: 1.0 kB of run run-1")
    assert sorted(path.name for path in run.kept.iterdir()) == ["run-2", "run-3"]
    retention(run.kept, 0, now + DAY)
    retention(run.kept, 0, now + 2 * DAY)
    assert [path.name for path in run.kept.iterdir()] == ["run-3"]


WORLD = 3


def save_sharded(run: Run, store: Path, scratches: dict[int, str] | None = None, **options) -> None:
    """Every rank saves its part of one checkpoint, as FSDP programs do; ``scratches``: of ranks on other VMs."""

    def rank_process(rank):
        policy = run.policy(rank, **options)
        policy = dataclasses.replace(policy, scratch=(scratches or {}).get(rank, policy.scratch))

        def body():
            rank_storage.guard(policy)
            os.chdir(policy.project)
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
            dcp.save({f"part{rank}": torch.full((4,), float(rank)), "step": 7}, checkpoint_id="ckpt")
            dist.destroy_process_group()

        return fork(body)

    for started in [rank_process(rank) for rank in range(WORLD)]:
        join(started)


def load_sharded(folder: Path) -> dict[str, torch.Tensor]:
    state = {f"part{rank}": torch.zeros(4) for rank in range(WORLD)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_a_sharded_checkpoint_is_made_whole_by_rank_0(run: Run, tmp_path: Path):
    """Without --shared, too, it loads as soon as it is complete, and so does the next one in its place."""
    since = run.now()
    for number in range(2):
        save_sharded(run, tmp_path / f"store{number}")
        loaded = load_sharded(run.project / "ckpt")
        assert [float(loaded[f"part{rank}"].sum()) for rank in range(WORLD)] == [0.0, 4.0, 8.0]
        for shard in (run.project / "ckpt").glob("*.distcp"):
            shard.write_text("an older checkpoint's")
    assert settled(run, since).lines() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_of_several_vms_is_kept_and_recovered(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """What ranks of other VMs wrote rank 0 does not reach: the cell says what to type, and nothing of it is lost."""
    since = run.now()
    elsewhere = tmp_path / "elsewhere" / "rank2"
    elsewhere.mkdir(parents=True)
    save_sharded(run, tmp_path / "store", scratches={2: str(elsewhere)})
    assert "the checkpoint ckpt lacks __2_0.distcp: only rank 0 writes the project" in capfd.readouterr().out
    shutil.rmtree(run.scratch / "rank2")
    elsewhere.rename(run.scratch / "rank2")  # as it comes home
    told = settled(run, since)
    assert [file.path for file in told.kept] == ["ckpt/__2_0.distcp"]
    [line] = told.lines()
    assert line.endswith(
        "%taas recover run-1 brings them into the project, and with --shared ckpt every rank writes there itself"
    )
    with pytest.raises(CheckpointException, match=r"__2_0"):
        load_sharded(run.project / "ckpt")
    recover("run-1", run.kept, run.project)
    loaded = load_sharded(run.project / "ckpt")
    assert [float(loaded[f"part{rank}"].sum()) for rank in range(WORLD)] == [0.0, 4.0, 8.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_in_a_shared_directory_loads(run: Run, tmp_path: Path):
    """With --shared every rank writes the project there, and nothing is left to say."""
    since = run.now()
    save_sharded(run, tmp_path / "store", shared=("ckpt",))
    assert settled(run, since).lines() == []
    loaded = load_sharded(run.project / "ckpt")
    assert [float(loaded[f"part{rank}"].sum()) for rank in range(WORLD)] == [0.0, 4.0, 8.0]

"""The end of a run: replicas go; other ranks' files are kept, told, and can be recovered."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blocks import block
from notebook_harness import Notebook, until
from privileges import needs_mounts, small_disk
from storage_ranks import Run, fork, join
from torch.distributed.checkpoint.api import CheckpointException

from taas import rank_storage
from taas.errors import HeaderError
from taas.project.wall.rescued import make_writes, recover, rescued_versions, sort_writes
from taas.protocol.records import runs_root
from taas.runs.records import read_records


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has begun."""
    run = Run(tmp_path)
    make_writes(run.scratch, str(run.project))
    run.now()
    return run


def settled(run: Run) -> list[str]:
    return sort_writes([run.scratch], str(run.project), "fox")


def recovered(run: Run, *, overwrite: bool = False) -> list[str]:
    """Paths in the project that ``%taas recover`` wrote."""
    kept = rescued_versions([run.scratch], str(run.project))
    written = recover("fox", kept, str(run.project), overwrite=overwrite)
    return [str(path.relative_to(run.project)) for path in written]


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(path: str, text: str) -> Callable[[Any], None]:
    def body(_: object) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    return body


def test_a_file_from_before_the_run_is_not_rank_0s(tmp_path: Path):
    """A path that rank 0 left as it was is kept.

    Only a write of this run makes the others replicas.
    """
    run = Run(tmp_path)
    (run.project / "results.csv").write_text("last week's")
    run.now()
    make_writes(run.scratch, str(run.project))
    run.rank(write("results.csv", "rank 1's"))
    [said] = settled(run)
    assert said.startswith("kept: results.csv (1 file")
    (run.project / "results.csv").write_text("edited after the run")
    with pytest.raises(
        HeaderError, match=r"results.csv exists in the project; nothing was written\..*--overwrite"
    ):
        recovered(run)
    assert recovered(run, overwrite=True) == ["results.csv"]
    assert contents(run.project) == {"results.csv": "rank 1's"}


@pytest.mark.parametrize("ahead", [-3600 * 10**9, 0, 3600 * 10**9])
def test_a_file_system_with_another_clock_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
):
    """The project may be on another machine.

    What was changed since the run began is told by its clock alone.
    """
    project, writes = tmp_path / "project", tmp_path / "writes"
    project.mkdir()
    before, during = project / "before", project / "during"
    before.write_text("as it was")
    here = time.time_ns
    # this machine's clock is wrong; the other one's is right
    monkeypatch.setattr(time, "time_ns", lambda: here() - ahead)
    since = make_writes(writes, str(project))
    tree = rank_storage.scratch_of(writes, 1) / "tree"
    tree.mkdir(parents=True)
    for name in ("before", "during"):
        (tree / name).write_text("rank 1's")
    # the file system's clock ticks some hundred times a second
    while not during.exists() or during.lstat().st_ctime_ns <= since:
        during.write_text("rank 0's")
    [said] = sort_writes([writes], str(project), "fox")
    assert said.startswith("kept: before (1 file")
    assert rescued_versions([writes], str(project)) == {"before": {1: tree / "before"}}


def test_different_versions_all_reach_the_project(run: Run):
    """Where several ranks wrote a path, equal versions become one file, others stand beside it."""
    for rank, text in ((1, "same"), (2, "same"), (3, "other")):
        run.rank(write("log", text), rank=rank)
    settled(run)
    recovered(run)
    assert contents(run.project) == {"log": "same", "log.rank3": "other"}


@pytest.mark.slow
def test_recover_is_typed_after_a_run(notebook: Notebook) -> None:
    """The newest run that has something to recover, or the named one, from wherever it is typed.

    Others have nothing.

    One that was killed is sorted first: what its user does to the project after that is the user's.
    """
    for record in read_records():
        shutil.rmtree(record.folder)  # of other tests
    ran = notebook.run("%taas recover")
    assert "no run has writes of ranks other than 0" in ran.stderr
    for name in ("fox", "owl"):
        ran = notebook.good(
            block(f"""
                #pragma taas --gpus 2 --name {name}
                import os
                from pathlib import Path
                if os.environ['RANK'] == '1': Path('{name}-1').write_text('mine')
                found = Path('{name}-1').exists()
            """)
        )
        assert f"%taas recover {name} brings them into the project" in ran.stdout
        assert notebook.value("found") == "False"
    notebook.good("#pragma taas --gpus 2 --name cat\nimport os")
    assert "cat has no writes" in notebook.run("%taas recover cat").stderr
    assert "no run is called" in notebook.run("%taas recover dog").stderr
    assert "1 file of owl recovered" in notebook.good("%taas recover").stdout
    notebook.good("import os; os.mkdir('sub'); os.chdir('sub')")
    assert "1 file of fox recovered" in notebook.good("%taas recover fox").stdout
    assert {path.name for path in notebook.folder.iterdir()} >= {"fox-1", "owl-1"}
    (notebook.folder / "fox-1").unlink()
    assert "1 file of fox recovered" in notebook.good("%taas recover").stdout  # owl's is there
    assert "that its project lacks" in notebook.run("%taas recover").stderr
    notebook.good("os.chdir('..')")
    notebook.start(
        block("""
            #pragma taas --gpus 2 --name elk
            import os, signal
            from pathlib import Path
            rank = os.environ['RANK']
            for name in ('both', f'elk-{rank}'): Path(name).write_text(rank)
            signal.pause()
        """)
    )
    until((notebook.folder / "elk-0").exists)
    until(lambda: [*runs_root().glob("elk-*/writes/rank1/tree/elk-1")])
    [supervisor] = notebook.processes().supervisor
    supervisor.kill()
    assert notebook.end().ename == "RunLost"
    assert "1 file of elk recovered" in notebook.good("%taas recover").stdout
    (notebook.folder / "elk-1").write_text("edited")
    assert "elk-1 exists in the project" in notebook.run("%taas recover elk").stderr
    # the new supervisor removes what the old one left
    notebook.good("#pragma taas --gpus 1\nimport os")


WORLD = 3


def save_sharded(
    run: Run, store: Path, scratches: dict[int, Path] | None = None, **options
) -> None:
    """Every rank saves its part of one checkpoint, as FSDP programs do.

    ``scratches``: of ranks on other VMs.
    """

    def rank_process(rank):
        if scratches and rank in scratches:
            options["scratch"] = scratches[rank]
        policy = run.policy(rank, **options)

        def body():
            rank_storage.guard(**policy)
            os.chdir(run.project)
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
            )
            dcp.save(
                {f"part{rank}": torch.full((4,), float(rank)), "step": 7}, checkpoint_id="ckpt"
            )
            dist.destroy_process_group()

        return fork(body)

    for started in [rank_process(rank) for rank in range(WORLD)]:
        join(started)


def load_sharded(folder: Path) -> dict[str, torch.Tensor]:
    state = {f"part{rank}": torch.zeros(4) for rank in range(WORLD)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@needs_mounts
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)
def test_a_sharded_checkpoint_is_made_whole_by_rank_0(run: Run, tmp_path: Path):
    """It loads as soon as it is complete, also without --shared, from another disk, and again."""
    for number in range(2):
        with small_disk(run.scratch, "size=1m") if number else contextlib.nullcontext():
            save_sharded(run, tmp_path / f"store{number}")
            assert [*run.scratch.rglob("*.distcp")] == [], "nothing is there twice"
        loaded = load_sharded(run.project / "ckpt")
        assert [float(loaded[f"part{rank}"].sum()) for rank in range(WORLD)] == [0.0, 4.0, 8.0]
        for shard in (run.project / "ckpt").glob("*.distcp"):
            shard.write_text("an older checkpoint's")
    assert settled(run) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_of_several_vms_is_whole_at_the_end(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """What ranks of other VMs wrote rank 0 does not reach.

    The cell says so, and it gets there when the run is over.
    """
    elsewhere = tmp_path / "elsewhere" / "rank2"
    elsewhere.mkdir(parents=True)
    save_sharded(run, tmp_path / "store", scratches={2: elsewhere})
    assert (
        "the checkpoint ckpt lacks __2_0.distcp until the end of the run" in capfd.readouterr().out
    )
    with pytest.raises(CheckpointException, match=r"__2_0"):
        load_sharded(run.project / "ckpt")
    shutil.rmtree(run.scratch / "rank2")
    elsewhere.rename(run.scratch / "rank2")  # as it comes home
    [line] = settled(run)
    assert line.startswith("put into the project: ckpt/__2_0.distcp (1 file")
    loaded = load_sharded(run.project / "ckpt")
    assert [float(loaded[f"part{rank}"].sum()) for rank in range(WORLD)] == [0.0, 4.0, 8.0]

"""What another rank wrote into a directory of rank 0's save belongs to that save."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from notebook_harness import Notebook
from storage_ranks import Run, Turns, join

from taas.project.wall.rescued import make_writes, rescued_versions, sort_writes

Body = Callable[[Any], None]


def writes(**texts: str) -> Body:
    """A rank that writes files: by their paths, ``__`` for a slash and ``_dot_`` for a dot."""

    def body(_: Any) -> None:
        for path, text in texts.items():
            file = Path(path.replace("__", "/"))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return body


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


OWN = {"ck__model": "0"}
ROWS: dict[
    str, tuple[dict[str, str], dict[str, str], dict[int, dict[str, str]], dict[str, str]]
] = {
    # what was there before, what rank 0 writes, what others write, and what the project lacks of
    # theirs afterwards
    "beside a model, as transformers' and accelerate's": (
        {},
        OWN,
        {1: {"ck__rng_1": "1"}, 2: {"ck__rng_2": "2"}},
        {},
    ),
    "in a folder of its own there, as DeepSpeed's": (
        {},
        OWN,
        {1: {"ck__global_step1__zero_1": "1"}},
        {},
    ),
    "saved again over an older one": (
        {"ck__model": "old", "ck__rng_1": "old"},
        OWN,
        {1: {"ck__rng_1": "1"}},
        {},
    ),
    "deep below the project": (
        {},
        {"runs__a__ck__model": "0"},
        {1: {"runs__a__ck__rng_1": "1"}},
        {},
    ),
    "the same from two ranks": ({}, OWN, {1: {"ck__config": "c"}, 2: {"ck__config": "c"}}, {}),
    "different from two ranks": (
        {},
        OWN,
        {1: {"ck__log": "1"}, 2: {"ck__log": "2"}},
        {"ck/log": "rank 0 did not write"},
    ),
    "where rank 0 wrote nothing": (
        {},
        OWN,
        {1: {"mine__log": "1"}},
        {"mine/log": "--shared mine "},
    ),
    "where nobody wrote before rank 0": (
        {"mine__a": "old"},
        OWN,
        {1: {"mine__log": "1"}},
        {"mine/log": "--shared mine "},
    ),
    "in the project's own folder": (
        {},
        {"model": "0"},
        {1: {"log": "1"}},
        {"log": "%taas recover fox"},
    ),
    "below what no rank 0 made": (
        {},
        OWN,
        {1: {"tests__tmp12__part": "1"}},
        {"tests/tmp12/part": "--shared tests every"},
    ),
}


@pytest.mark.parametrize(("before", "own", "others", "kept"), ROWS.values(), ids=ROWS)
def test_what_belongs_to_a_save_is_there_at_the_end(
    tmp_path: Path,
    before: dict[str, str],
    own: dict[str, str],
    others: dict[int, dict[str, str]],
    kept: dict[str, str],
) -> None:
    """It stands beside what rank 0 saved, and a line says so.

    All else is kept, with the topmost directory to share.
    """
    run = Run(tmp_path)
    for path, text in before.items():
        file = run.project / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    run.now()
    make_writes(run.scratch, str(run.project))
    run.now()
    run.rank(writes(**own), rank=0)
    for rank, texts in others.items():
        run.rank(writes(**texts), rank=rank)
    said = sort_writes([run.scratch], str(run.project), "fox")
    assert sort_writes([run.scratch], str(run.project), "fox") == [
        line for line in said if line.startswith("kept")
    ]
    wanted = {
        path.replace("__", "/"): text
        for texts in (before, own, *others.values())
        for path, text in texts.items()
    }
    assert contents(run.project) == {
        path: text for path, text in wanted.items() if path not in kept
    }
    assert rescued_versions([run.scratch], str(run.project)).keys() == kept.keys()
    for words in kept.values():
        assert words in said[-1]
    put = sorted(wanted.keys() - kept.keys() - {path.replace("__", "/") for path in own | before})
    assert not put or said[0].startswith(f"put into the project: {', '.join(put)} (")


def test_rank_0_finds_them_meanwhile(tmp_path: Path) -> None:
    """It opens, loads, moves and removes another rank's file that the project lacks.

    Files that belong to no save of rank 0 it does not see.
    """
    run, turns = Run(tmp_path), Turns()
    (run.project / "old").mkdir()
    run.now()
    since = make_writes(run.scratch, str(run.project))
    run.now()

    def rank_0(_: Any) -> None:
        os.makedirs("out/tmp")  # noqa: PTH103 what libraries call
        assert not os.path.exists("out/tmp/part_1.pt")  # noqa: PTH110
        turns.give()  # rank 1 writes
        part = Path("out/tmp/part_1.pt")
        assert part.exists()
        assert part.stat().st_size > 0
        assert os.access(part, os.R_OK)
        assert torch.load(part)["rank"] == 1
        with open("out/tmp/../tmp/name.txt") as file:  # noqa: PTH123
            assert (file.read(), file.name) == ("one", "out/tmp/../tmp/name.txt")
        with pytest.raises(FileNotFoundError):
            open("out/tmp/part_2.pt")  # noqa: PTH123, SIM115
        assert not Path("old/log").exists(), "rank 0 wrote nothing there"
        assert not Path("log").exists(), "nor is the project a save"
        assert not Path("out/new").exists(), "a directory that it lacks it has to make"
        os.makedirs("out/new/deep")  # noqa: PTH103
        assert Path("out/new/file").read_text() == "new"
        with open("out/tmp/name.txt", opener=None) as file:  # noqa: PTH123
            assert file.read() == "one"
        Path("out/tmp/name.txt").unlink()
        assert not Path("out/tmp/name.txt").exists()
        for call, name in (
            (os.rename, "one.txt"),
            (os.replace, "two.txt"),
            (shutil.move, "three.txt"),
        ):
            call(f"out/tmp/{name}", f"out/moved-{name}")
            assert Path(f"out/moved-{name}").read_text() == name
            assert not Path(f"out/tmp/{name}").exists()
        with pytest.raises(FileNotFoundError):
            Path("out/tmp/four.txt").rename("out/four.txt")
        with pytest.raises(FileNotFoundError):
            Path("out/tmp/part_1.pt").rename("out/lacking/part_1.pt")
        os.makedirs("aside/out")  # noqa: PTH103
        here = os.open("aside", os.O_RDONLY)
        shutil.rmtree("out", dir_fd=here)  # another directory of that name
        os.close(here)
        assert Path("out/tmp/part_1.pt").exists()
        Path("out/tmp").rename("out/final")
        assert torch.load("out/final/part_1.pt")["rank"] == 1
        shutil.rmtree("out/new")

    def rank_1(_: Any) -> None:
        for name, text in (
            ("out/tmp/name.txt", "one"),
            ("old/log", "1"),
            ("log", "1"),
            ("out/new/file", "new"),
            ("out/tmp/one.txt", "one.txt"),
            ("out/tmp/two.txt", "two.txt"),
            ("out/tmp/three.txt", "three.txt"),
        ):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        torch.save({"rank": 1}, "out/tmp/part_1.pt")

    started = run.start(rank_0, rank=0, since_ns=since)
    turns.take()
    run.rank(rank_1, since_ns=since)
    turns.give_back()
    join(started)
    turns.close()
    said = sort_writes([run.scratch], str(run.project), "fox")
    assert said[0].startswith("put into the project: out/final/part_1.pt (1 file")
    files = {
        str(path.relative_to(run.project)) for path in run.project.rglob("*") if path.is_file()
    }
    moved = {f"out/moved-{name}.txt" for name in ("one", "two", "three")}
    assert files == {"out/final/part_1.pt", *moved}
    assert rescued_versions([run.scratch], str(run.project)).keys() == {"old/log", "log"}


MISSING = ["data/missing", "data/deep/missing", "new/missing", "missing"]


@pytest.mark.parametrize("path", MISSING)
def test_rank_0_looks_at_no_entries_for_a_file_that_no_rank_has(tmp_path: Path, path: str) -> None:
    """A program may ask for thousands of files that are not there, in a directory of thousands."""
    run = Run(tmp_path)
    (run.project / "data").mkdir()
    since = make_writes(run.scratch, str(run.project))
    run.rank(writes(other="1"), since_ns=since)

    def rank_0(_: Any) -> list[str]:
        listed: list[str] = []
        sys.addaudithook(
            lambda event, args: listed.append(str(args[0])) if event == "os.listdir" else None
        )
        assert not Path(path).exists()
        return [folder for folder in listed if folder.startswith(str(run.project))]

    assert run.rank(rank_0, rank=0, since_ns=since) == []


@pytest.mark.slow
def test_a_checkpoint_with_states_of_all_ranks_resumes_as_torchruns(notebook: Notebook) -> None:
    """Each rank saves its random state beside rank 0's model.

    The next cell finds them all, and each rank its own.
    """
    notebook.good("%load_ext taas")
    save = """#pragma taas --gpus 2
import os, torch
rank = os.environ["RANK"]
torch.manual_seed(int(rank) + 10)
os.makedirs("out/checkpoint-1", exist_ok=True)
if rank == "0": torch.save({"step": 1}, "out/checkpoint-1/model.pt")
torch.save(torch.get_rng_state(), f"out/checkpoint-1/rng_state_{rank}.pth")"""
    ran = notebook.good(save)
    assert "put into the project: out/checkpoint-1/rng_state_1.pth (1 file" in ran.stdout
    assert "%taas recover" not in ran.stdout
    resumed = notebook.good("""#pragma taas --gpus 2 --collect drawn
import os, torch
torch.set_rng_state(torch.load(f"out/checkpoint-1/rng_state_{os.environ['RANK']}.pth"))
drawn = torch.rand(1).item()""")
    assert resumed.status == "ok"
    expected = (
        "[torch.rand(1, generator=torch.Generator().manual_seed(n)).item() for n in (10, 11)]"
    )
    assert notebook.value(f"__import__('taas').collected['drawn'] == {expected}") == "True"

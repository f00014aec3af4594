"""The disk of the run folders is full: the run goes on, and the loss of output is said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import block
from fault_table import CELLS, Stage
from notebook_harness import Notebook
from privileges import needs_mounts, small_disk

from taas.runs.records import read_records

pytestmark = needs_mounts
FLOOD = block("""
    #pragma taas --gpus 2 --name flood{options}
    import os, torch.distributed as dist
    dist.init_process_group('gloo')
    if os.environ['RANK'] == '0': print(f'{{0:6}}', 'x' * 90)
    dist.barrier()  # before rank 1 fills the disk alone
    for i in range(1, 30_000): print(f'{{i:6}}', 'x' * 90)
    answer = 42
""")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder of what is started now, which has one megabyte."""
    small = tmp_path / "small"
    small.mkdir()
    with small_disk(small, "size=1m"):
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(small))
        yield small


@pytest.fixture
def book(small: Path, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook on that disk."""
    notebook = Notebook(tmp_path)
    try:
        notebook.good("%load_ext taas")
        yield notebook
    finally:
        notebook.close()


@pytest.fixture
def stage(small: Path, tmp_path: Path) -> Iterator[Stage]:
    """A notebook on that disk, in which faults are tried."""
    (tmp_path / "project").mkdir()
    stage = Stage(tmp_path / "project")
    yield stage
    stage.notebook.close()


def test_a_foreground_run_goes_on(book: Notebook) -> None:
    """What fitted is shown, what was lost is counted, and the names are there."""
    ran = book.good(FLOOD.format(options=""))
    assert ran.own.startswith("     0 xxx")
    assert "bytes of the output of rank 0 were lost, because the disk" in ran.stdout
    assert book.value("answer") == "42"


def test_a_background_run_ends_and_says_what_was_lost(book: Notebook) -> None:
    """There is room for its record's last version; names that could not be kept are not faked."""
    book.good(FLOOD.format(options=" --background"))
    ran = book.good("%taas attach flood")
    assert "were lost, because the disk" in ran.stdout
    [record] = read_records()
    assert (record.state, record.outcome) == ("over", "done")


def _fill(small: Path) -> Path:
    """Leave no byte on the disk; returns the file that takes it."""
    filler = small / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "then"),
    [
        ("starting", "goes on"),
        ("training", "interrupt"),
        ("delivering", "goes on"),
        ("ending", "goes on"),
    ],
)
def test_it_fills_up_while_a_cell(stage: Stage, small: Path, state: str, then: str) -> None:
    """The cell ends as it would, with its names.

    Nothing of the run is left, and with room the next one runs.
    """
    stage.reach(state)
    filler = _fill(small)
    ran = stage.follow(then)
    assert ran.ename == ("KeyboardInterrupt" if then == "interrupt" else ""), ran
    if not ran.ename:
        assert stage.notebook.value("got in (place, held)") == "True"
    filler.unlink()
    stage.check()
    stage.check_next()


@pytest.mark.slow
def test_it_is_full_before_a_cell(stage: Stage, small: Path) -> None:
    """Nothing begins, and ranks that wait go on waiting."""
    stage.reach("kept")
    filler = _fill(small)
    ran = stage.notebook.run(CELLS["kept"])
    assert ran.ename == "EngineError"
    assert "is full (0 bytes left): nothing was started" in ran.evalue
    filler.unlink()
    assert stage.follow("goes on").status == "ok"
    stage.check()

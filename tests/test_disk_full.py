"""The disk of the run folders is full: the run goes on, and the loss of output is said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_table import CELLS, Stage
from notebook_harness import Notebook, Ran, gone, until
from privileges import needs_mounts, small_disk

from taas.runs.records import read_records

pytestmark = needs_mounts
FLOOD = (
    "#pragma taas --gpus 2 --name flood{options}\n"
    "import os, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "if os.environ['RANK'] == '0': print(f'{{0:6}}', 'x' * 90)\n"
    "dist.barrier()  # before rank 1 fills the disk alone\n"
    "for i in range(1, 30_000): print(f'{{i:6}}', 'x' * 90)\n"
    "answer = 42"
)


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


def _told(ran: Ran) -> list[str]:
    return [line for line in ran.stdout.splitlines() if line.startswith("taas: ")]


def test_a_background_run_whose_names_do_not_fit(book: Notebook) -> None:
    """Why there are none is said, and nothing else."""
    book.good("import os")
    book.good("#pragma taas --gpus 1 --background --name fox\nmade = os.urandom(3_000_000)")
    for _ in range(2):
        [told] = _told(book.good("%taas attach fox"))
        assert told.startswith("taas: the names that the run made could not be kept: No space left on device")
    assert book.value("'made' in globals()") == "False"


def test_a_background_run_whose_payload_does_not_fit(book: Notebook, tmp_path: Path) -> None:
    """Its own kernel takes the names, for it has what they refer to; another one is told why it cannot."""
    book.good("import os\ngiven = os.urandom(3_000_000)")
    book.good("#pragma taas --gpus 1 --background --name fox\nmade = len(given)")
    why = "taas: only the kernel that started the run can take its names, as what it gave could not be kept: No sp"
    until(lambda: not read_records()[0].live)
    other = Notebook(tmp_path)
    try:
        other.good("%load_ext taas")
        [told] = _told(other.good("%taas attach fox"))
        assert told.startswith(why)
    finally:
        other.close()
    first, second = _told(book.good("%taas attach fox"))
    assert first.startswith(why) and second == "taas: names here now: made"
    assert book.value("made") == "3000000"


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
    [("starting", "goes on"), ("training", "interrupt"), ("delivering", "goes on"), ("ending", "goes on")],
)
def test_it_fills_up_while_a_cell(stage: Stage, small: Path, state: str, then: str) -> None:
    """The cell ends as it would, with its names; nothing of the run is left, and with room the next one runs."""
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


@pytest.mark.slow
def test_the_kernel_dies_while_it_is_full(stage: Stage, small: Path) -> None:
    """No process outlives it."""
    stage.reach("training")
    _fill(small)
    everybody = stage.everybody()
    stage.notebook.kill()
    assert gone(everybody)

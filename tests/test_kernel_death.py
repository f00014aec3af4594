"""What is left when the kernel dies: nothing of a foreground run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, gone

from taas.runs.records import read_records

pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook of this test alone, which kills its kernel."""
    book = Notebook(tmp_path)
    try:
        book.good("import taas")
        yield book
    finally:
        book.close()


def test_sigkill_of_the_kernel(book: Notebook) -> None:
    """Nothing of a foreground run outlives its kernel, DataLoader workers and sessions of their own included."""
    book.start(
        "#pragma taas --gpus 2\n"
        "import subprocess, time, torch, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "batches = iter(DataLoader(torch.arange(1000), num_workers=2, persistent_workers=True))\n"
        "next(batches)\n"
        "dist.init_process_group('gloo'); dist.barrier()  # in both ranks\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    book.wait_for("ready")
    found = book.processes()
    assert len(found.ranks) == 2
    book.kill()
    everything = found.supervisor + found.agents + found.forkservers + found.ranks + found.others
    assert len(found.others) >= 6, "a child and two workers of each rank"
    assert gone(everything, 5)


STUCK = """
import signal, sys, time
if "taas.supervisor" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
"""


def test_a_supervisor_that_is_stuck_when_its_kernel_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices nothing: the system kills it, and all below it."""
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    book = Notebook(tmp_path)
    try:
        book.good("import taas")
        book.start("#pragma taas --gpus 2\nimport time\nprint('ready', flush=True)\ntime.sleep(600)")
        book.wait_for("ready")
        found = book.processes()
        found.supervisor[0].send_signal(signal.SIGUSR1)
        book.kill()
        assert gone(found.supervisor + found.agents + found.forkservers + found.ranks)
    finally:
        book.close()


def test_a_kernel_that_dies_with_a_runs_names_in_its_hands(book: Notebook, tmp_path: Path) -> None:
    """The run was over, its names are lost with the kernel; a background run of the same kernel goes on to its end."""
    book.good("import os\nkernel = os.getpid()")
    book.good(
        "#pragma taas --gpus 1 --background --name outlives\n"
        "import time\nfrom pathlib import Path\n"
        "Path('there').touch()\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
    )
    while not tmp_path.joinpath("there").exists():
        time.sleep(0.05)
    book.start(
        "#pragma taas --gpus 2\n"
        "class Last:\n"
        "    def __reduce__(self): return os.kill, (kernel, 9)  # when the kernel unpacks it\n"
        "last = Last()"
    )
    [supervisor] = book.processes().supervisor
    os.waitpid(book.pid, 0)
    tmp_path.joinpath("go").touch()
    assert gone([supervisor])
    [outlives] = [record for record in read_records() if record.name == "outlives"]
    assert (outlives.outcome, outlives.message) == ("done", "")


def test_a_kernel_that_dies_while_output_waits_for_it(book: Notebook, tmp_path: Path) -> None:
    """Nobody acknowledges the rest: it stays in its files, and the run ends as any other."""
    book.start(
        "#pragma taas --gpus 1\n"
        "import time\nfrom pathlib import Path\n"
        "print('ready', flush=True)\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
        "for _ in range(32): print('x' * (1 << 20))\n"
        "Path('printed').touch()\n"
        "time.sleep(600)"
    )
    book.wait_for("ready")
    found = book.processes()
    os.kill(book.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    while not (tmp_path / "printed").exists():
        time.sleep(0.02)
    book.kill()
    assert gone(found.supervisor + found.agents + found.forkservers + found.ranks)

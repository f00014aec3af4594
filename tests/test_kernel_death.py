"""What is left when the kernel dies: nothing of a foreground run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from notebook_harness import Notebook, gone, until

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
    """Nothing of a foreground run outlives its kernel, DataLoader workers and sessions of their own included.

    A child that C code has forked in the kernel lives on, with all that the kernel had open.
    """
    book.good("#pragma taas --gpus 1\npass")
    book.good("import ctypes\nlibc = ctypes.PyDLL(None)\nchild = libc.fork()\nwhile not child: libc.pause()")
    child = psutil.Process(int(book.value("child")))
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
    found.others.remove(child)
    everything = found.supervisor + found.agents + found.forkservers + found.ranks + found.others
    assert len(found.others) >= 6, "a child and two workers of each rank"
    try:
        assert gone(everything, 5)
    finally:
        child.kill()


KILLERS = {
    "with a run's names in its hands": "class Last:\n"
    "    def __reduce__(self): return os.kill, (kernel, 9)  # when the kernel unpacks it\n"
    "last = Last()",
    "while a cell is deaf to interrupts": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "if os.environ['RANK'] == '0': os.kill(kernel, 9)\ntime.sleep(600)",
}


@pytest.mark.parametrize("when", KILLERS)
def test_a_kernel_that_dies_beside_a_background_run(book: Notebook, tmp_path: Path, when: str) -> None:
    """A foreground run is over, whatever it is at; its background run goes on to its end."""
    book.good("import os\nkernel = os.getpid()")
    book.good(
        "#pragma taas --gpus 1 --background --name outlives\n"
        "import time\nfrom pathlib import Path\n"
        "Path('there').touch()\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
    )
    until(tmp_path.joinpath("there").exists)
    book.start(f"#pragma taas --gpus 2\nimport os\n{KILLERS[when]}")
    [supervisor] = book.processes().supervisor
    os.waitpid(book.pid, 0)
    until(lambda: len(book.processes().ranks) == 1)
    tmp_path.joinpath("go").touch()
    assert gone([supervisor])
    outlives = [record for record in read_records() if record.name == "outlives"][-1]
    assert (outlives.outcome, outlives.message) == ("done", "")

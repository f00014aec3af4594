"""What is left when the kernel dies: nothing of a foreground run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from notebook_harness import Notebook, gone

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
    book.good(
        "import ctypes\nlibc = ctypes.PyDLL(None)\nchild = libc.fork()\nwhile not child:"
        " libc.pause()"
    )
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

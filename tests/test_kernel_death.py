"""What is left when the kernel dies: nothing of a foreground run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from blocks import block
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
    """Nothing of a foreground run outlives its kernel, no DataLoader worker and no session.

    A child that C code has forked in the kernel lives on, with all that the kernel had open.
    """
    book.good("#pragma taas --gpus 1\npass")
    book.good(
        block("""
            import ctypes
            libc = ctypes.PyDLL(None)
            child = libc.fork()
            while not child: libc.pause()
        """)
    )
    child = psutil.Process(int(book.value("child")))
    book.start(
        block("""
            #pragma taas --gpus 2
            import subprocess, time, torch, torch.distributed as dist
            from torch.utils.data import DataLoader
            subprocess.Popen(['sleep', '600'], start_new_session=True)
            batches = iter(DataLoader(torch.arange(1000), num_workers=2, persistent_workers=True))
            next(batches)
            dist.init_process_group('gloo'); dist.barrier()  # in both ranks
            print('ready', flush=True)
            time.sleep(600)
        """)
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

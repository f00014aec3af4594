"""The disk of the run folders is full: the run goes on, and the loss of output is said."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook

from taas.records import read_records

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only"),
]
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
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """A notebook whose runtime folder has one megabyte."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(small)], check=True)
    try:
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(small))
        notebook = Notebook(tmp_path)
        try:
            notebook.good("%load_ext taas")
            yield notebook
        finally:
            notebook.close()
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


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

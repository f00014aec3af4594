"""Folders with long names, as Slurm and pytest make them.

A socket's path has 107 bytes, and runs do not care.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook, gone

TRAIN = """#pragma taas --gpus 2 --cpus 1
import torch.distributed as dist, torch.multiprocessing as mp
dist.init_process_group("gloo")
seen = [None, None]
dist.all_gather_object(seen, sum(batch.sum().item() for batch in loader))
# tensors come by sockets of multiprocessing's
workers = list(DataLoader(torch.arange(4.0), num_workers=2, batch_size=2))
with mp.Manager() as manager:
    shared = manager.list([len(workers)])[0]
print(sum(seen), torch.cat(workers).tolist(), shared)
del workers
"""


@pytest.fixture
def long_named(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook whose folders for temporary files and for runs have names of 150 characters."""
    environ = {}
    for name in ("TMPDIR", "JUPYTER_RUNTIME_DIR"):
        folder = tmp_path / name.lower().ljust(150, "x")
        folder.mkdir(mode=0o700)
        environ[name] = str(folder)
    (tmp_path / "project").mkdir()
    book = Notebook(tmp_path / "project", environ=environ)
    yield book
    everything = book.processes()
    book.close()
    assert gone([*everything.supervisor, *everything.agents])


@pytest.mark.slow
def test_runs_where_folders_have_long_names(long_named: Notebook) -> None:
    """Ranks, data workers, the cell's own workers and managers.

    All that talks over sockets does.
    """
    long_named.good(
        block("""
            %load_ext taas
            import taas, torch
            from torch.utils.data import DataLoader
            loader = DataLoader(torch.arange(12.0), batch_size=2)
            taas.register(loader)
        """)
    )
    assert long_named.good(TRAIN).own == "66.0 [0.0, 1.0, 2.0, 3.0] 2\n"

"""What is left when the kernel dies: nothing of a foreground run."""

from __future__ import annotations

from pathlib import Path

import pytest
from notebook_harness import Notebook, gone

pytestmark = pytest.mark.slow


def test_sigkill_of_the_kernel(tmp_path: Path) -> None:
    """Nothing of a foreground run outlives its kernel, DataLoader workers and sessions of their own included."""
    book = Notebook(tmp_path)
    try:
        book.good("import taas")
        book.start(
            "#pragma taas --gpus 2\n"
            "import subprocess, time, torch\n"
            "from torch.utils.data import DataLoader\n"
            "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
            "batches = iter(DataLoader(torch.arange(1000), num_workers=2, persistent_workers=True))\n"
            "next(batches)\n"
            "print('ready', flush=True)\n"
            "time.sleep(600)"
        )
        book.wait_for("ready")
        found = book.processes()
        assert len(found.ranks) == 2
        book.kill()
        everything = found.supervisor + found.agents + found.forkservers + found.ranks + found.others
        assert len(found.others) >= 4
        assert gone(everything)
    finally:
        book.close()

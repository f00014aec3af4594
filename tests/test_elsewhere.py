"""VMs elsewhere, without a cluster: what they bring is written down beside the supervisor's loop, and all of it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from elsewhere import install
from notebook_harness import Notebook, until

pytestmark = pytest.mark.slow
CELL = """
import os, torch
torch.save(weights, "net.pt")
made = weights * 2
print("rank", os.environ["RANK"])
"""


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook whose cells run there."""
    (tmp_path / "project").mkdir()
    notebook = Notebook(tmp_path / "project", environ=install(tmp_path / "site"))
    try:
        notebook.good("%load_ext taas\nimport torch\nweights = torch.ones(40 << 18)")
        yield notebook
    finally:
        notebook.close()


def test_names_files_and_a_loss(book: Notebook) -> None:
    """Names of several windows' size arrive whole, and rank 0's files; a rank that is killed is started again.

    %taas release ends the agents.
    """
    ran = book.good(f"#pragma taas --gpus 2 --output all{CELL}")
    assert sorted(ran.own.splitlines()) == ["[rank 1] rank 1", "rank 0"]
    assert book.value("made.sum().item() == 2 * (40 << 18)") == "True"
    assert (book.folder / "net.pt").stat().st_size > 40 << 20
    book.good(f"#pragma taas --gpus 1 --background --name fox{CELL}made += 1")
    book.good("%taas attach fox")
    assert book.value("made.sum().item() == 3 * (40 << 18)") == "True"
    ran = book.good(
        "#pragma taas --gpus 2 --max-restarts 1\n"
        "import os\n"
        "made = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if made == '0' and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
    )
    assert "started again (1 of 1 restarts used)" in ran.stdout
    assert book.value("made") == "1"
    book.good("%taas release")
    until(lambda: not book.processes().agents)

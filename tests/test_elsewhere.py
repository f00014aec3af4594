"""VMs elsewhere, without a cluster.

What they bring is written down beside the supervisor's loop, and all of it counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import block
from elsewhere import install
from notebook_harness import Notebook, until
from privileges import needs_mounts

pytestmark = pytest.mark.slow
CELL = """
import os, torch
torch.save(weights, "net.pt")
made = weights * 2
os.write(1, b"first\\n")
print("rank", os.environ["RANK"])
"""


UNSEEN = """#!g2.1
#pragma taas --gpus 2 --shared shards --name fox
import os, time, torch, torch.distributed as dist, model
dist.init_process_group("nccl")
rank = dist.get_rank()
found = os.getcwd() == project, model.VALUE, sorted({*os.listdir()} - {"__pycache__"})
os.makedirs("shards", exist_ok=True)
for name in (f"shards/{rank}.pt", "both.txt", f"only-{rank}.txt"):
    open(name, "w").write(f"of rank {rank}")
if rank == 0:
    torch.save(weights, "net.pt")
    open("model.py", "w").write("VALUE = 'run'")
print("written", flush=True)
while not os.path.exists(gate):
    time.sleep(0.05)
"""


@pytest.fixture
def book(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """A notebook whose cells run there; the project is ``hidden``, or seen."""
    project = tmp_path / "project"
    project.mkdir()
    hidden = str(project) if hasattr(request, "param") else ""
    notebook = Notebook(project, environ=install(tmp_path / "site", hidden))
    try:
        notebook.good("%load_ext taas\nimport taas, torch\nweights = torch.ones(40 << 18)")
        yield notebook
    finally:
        notebook.close()


def test_setup_cells_go_with_the_names(book: Notebook) -> None:
    """VMs of a cluster run them, too; a run that is started again runs them again."""
    book.good(
        block("""
            #pragma taas --setup
            import codecs
            codecs.register_error('far', lambda error: ('?', error.end))
        """)
    )
    book.good(
        block("""
            #!g2.1
            #pragma taas --gpus 2 --max-restarts 1
            import os
            far = 'ä'.encode('ascii', 'far'), os.environ['TORCHELASTIC_RESTART_COUNT']
            if far[1] == '0' and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)
        """)
    )
    assert book.value("far") == "(b'?', '1')"


def test_names_files_and_a_loss(book: Notebook) -> None:
    """Names of several windows' size arrive whole, and rank 0's files.

    A rank that is killed is started again.

    %taas release ends the agents.
    """
    ran = book.good(
        f"#pragma taas --gpus 2 --output all --collect rank{CELL}rank = os.environ['RANK'] * 2"
    )
    assert [line for line in ran.own.splitlines() if "[" not in line] == []
    assert sorted(line for line in ran.own.splitlines() if "[" in line) == [
        *("[rank 0] first", "[rank 0] rank 0", "[rank 1] first", "[rank 1] rank 1")
    ]
    rows = re.findall(r"<tr.*?</tr>", ran.updates[-1]["data"]["text/html"])[1:]
    assert [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows] == [
        ["0", "done", "rank 0"], ["1", "done", "rank 1"]
    ]  # fmt: skip
    assert book.value("taas.collected['rank']") == "['00', '11']"
    assert book.value("made.sum().item() == 2 * (40 << 18)") == "True"
    assert (book.folder / "net.pt").stat().st_size > 40 << 20
    book.good(f"#pragma taas --gpus 1 --background --name fox --collect made{CELL}made += 1")
    book.good("%taas attach fox")
    assert book.value("torch.equal(taas.collected['made'][0], made)") == "True"
    assert book.value("made.sum().item() == 3 * (40 << 18)") == "True"
    ran = book.good(
        block("""
            #pragma taas --gpus 2 --max-restarts 1
            import os
            made = os.environ['TORCHELASTIC_RESTART_COUNT']
            if made == '0' and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)
        """)
    )
    assert "started again (1 of 1 restarts used)" in ran.stdout
    assert book.value("made") == "1"
    book.good("%taas release")
    until(lambda: not book.processes().agents)


@needs_mounts
@pytest.mark.parametrize("book", ["hidden"], indirect=True)
def test_a_project_that_is_not_seen_there(book: Notebook, tmp_path: Path) -> None:
    """It travels; what rank 0 wrote is back while the cell runs.

    What changed at both ends is kept in both versions.
    """
    gate = tmp_path / "gate"
    for name, text in (("model.py", "VALUE = 'notebook'"), ("large.bin", "0" * (9 << 20))):
        (book.folder / name).write_text(text)
    book.good(f"import os\nproject, gate = os.getcwd(), {str(gate)!r}")
    book.start(UNSEEN)
    book.wait_for("written")
    (book.folder / "model.py").write_text("VALUE = 'user'")
    until(lambda: (book.folder / "net.pt").exists())
    assert (book.folder / "net.pt").stat().st_size > 40 << 20
    assert (book.folder / "model.py").read_text() == "VALUE = 'user'"
    gate.touch()
    ran = book.end()
    assert ran.status == "ok", ran
    assert book.value("found") == "(True, 'notebook', ['model.py', 'shards'])"
    texts = {
        name: (book.folder / name).read_text()
        for name in ("shards/0.pt", "shards/1.pt", "both.txt")
    }
    assert texts == {
        "shards/0.pt": "of rank 0",
        "shards/1.pt": "of rank 1",
        "both.txt": "of rank 0",
    }
    assert "kept: model.py (1 file, 13 bytes) as the run wrote it" in ran.stdout
    assert "kept: only-1.txt (1 file, 9 bytes) from rank 1" in ran.stdout
    book.good("%taas recover fox --overwrite")
    assert (book.folder / "model.py").read_text() == "VALUE = 'run'"
    names = {"model.py", "large.bin", "net.pt", "shards", "both.txt", "only-0.txt", "only-1.txt"}
    assert {path.name for path in book.folder.iterdir()} == names
    book.good("#pragma taas --gpus 1 --keep\nimport os, model\nopen('made.txt', 'w').write('run')")
    (book.folder / "model.py").write_text("VALUE = 'edited'")
    (book.folder / "both.txt").unlink()
    book.good(
        block("""
            #pragma taas --gpus 1 --keep
            import importlib
            importlib.reload(model)
            found = model.VALUE, sorted({*os.listdir()} - {'__pycache__'})
        """)
    )
    there = sorted(names - {"large.bin", "net.pt", "both.txt"} | {"made.txt"})
    assert book.value("found") == str(("edited", there)), "kept ranks have the project as it is now"


LATE = """#!g2.1
#pragma taas --gpus 2
import os, numpy as np, torch.distributed as dist
dist.init_process_group("nccl")
size = os.path.getsize("data/large.npy")
mine = np.load("data/large.npy", mmap_mode="r").sum().item(), os.stat("data/large.npy").st_ino, size
found = [None, None]
dist.all_gather_object(found, mine)
missing = [os.path.exists(name) for name in ("data/none.npy", "unread.bin")]
"""
LATE_DATA = """
import os, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return int(np.load("data/large.npy", mmap_mode="r")[row])
loader = DataLoader(Rows(), batch_size=4)
taas.register(loader)
"""


@needs_mounts
@pytest.mark.parametrize("book", ["hidden"], indirect=True)
def test_a_large_file_comes_when_it_is_opened(book: Notebook) -> None:
    """Once to each VM; the next cell has it from there, another version comes anew.

    So do files that datasets read.

    What rank 0 changes in it comes back as any other file.
    """
    book.good(
        "import os, numpy as np\nos.mkdir('data')\nnp.save('data/large.npy', np.arange(2_000_000))"
    )
    (book.folder / "unread.bin").write_bytes(bytes(9 << 20))
    book.good(LATE)
    assert (
        book.value("[one[0] for one in found], missing")
        == "[1999999000000, 1999999000000] [False, True]"
    )
    before = book.value("[one[1:] for one in found]")
    book.good(LATE)
    assert book.value("[one[1:] for one in found]") == before, "it was there"
    book.good("np.save('data/large.npy', np.arange(2_000_000) * 2)")
    book.good(LATE)
    assert book.value("[one[0] for one in found]") == "[3999998000000, 3999998000000]"
    book.good(LATE_DATA)
    book.good("#!g2.1\n#pragma taas --gpus 2 --cpus 2\ngot = [rows.tolist() for rows in loader]")
    assert book.value("got") == "[[0, 2, 4, 6]]"
    ran = book.good(
        "#!g2.1\n#pragma taas --gpus 2\nnp.load('data/large.npy', mmap_mode='r+')[0] = 7"
    )
    assert "before" not in ran.stdout
    assert book.value("np.load('data/large.npy')[:2].tolist()") == "[7, 2]"
    assert [path.name for path in (book.folder / "data").iterdir()] == ["large.npy"]

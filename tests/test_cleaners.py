"""What a cleaner of temporary files removes while a kernel waits for its next cell."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, gone, until

from taas.runs.records import read_records
from taas.supervisor.connections import all_connections

pytestmark = pytest.mark.slow
CELL = "#pragma taas --gpus 2\nimport os\nx += 1\nprint('world', os.environ['WORLD_SIZE'])"


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """A notebook that has run a cell, with a runtime folder of its own."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "project").mkdir()
    notebook = Notebook(tmp_path / "project")
    try:
        notebook.good("%load_ext taas\nx = 0")
        notebook.good(CELL)
        yield notebook
    finally:
        notebook.close()


def _folder() -> Path:
    """The supervisor's."""
    [connection] = all_connections()
    return Path(connection.endpoint.removeprefix("ipc://")).parent


def test_the_supervisors_folder(book: Notebook) -> None:
    """The next cell starts a new supervisor; a background run of the old one ends as it would, and then that is gone."""
    book.good(
        "#pragma taas --gpus 1 --background --name owl\n"
        "import time\nfrom pathlib import Path\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
        "saved = 42"
    )
    until(lambda: any(record.name == "owl" and record.state == "running" for record in read_records()))
    before = book.processes()
    shutil.rmtree(_folder())
    for _ in range(2):
        assert book.good(CELL).own == "world 2\n"
    assert book.value("x") == "3"
    (book.folder / "go").touch()
    book.good("%taas attach owl")
    assert book.value("saved") == "42"
    assert gone(before.supervisor + before.agents)


@pytest.mark.parametrize("what", ["runtime", "agent"])
def test_part_of_it(book: Notebook, what: str, tmp_path: Path) -> None:
    """The runs' folders, with the file by which a terminal finds the supervisor, or an agent's folder."""
    book.good("%taas release" if what == "runtime" else "pass")
    removed = tmp_path / "runtime" / "taas" if what == "runtime" else next(_folder().glob("agent-*"))
    shutil.rmtree(removed)
    if what == "agent":  # this one finds out
        assert book.run(CELL).ename in ("", "RunLost")
    assert book.good(CELL).own == "world 2\n"
    book.good("#pragma taas --gpus 1 --background --name owl\nimport time\ntime.sleep(600)")
    book.good("%taas stop owl --now")

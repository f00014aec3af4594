"""What a cleaner of temporary files removes while a kernel waits for its next cell, and what killed supervisors leave."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from notebook_harness import Notebook, gone, until

from taas.runs.records import read_records
from taas.supervisor.connections import all_connections, remove_folders_left
from taas.wire.clients import SupervisorConfig

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


def test_a_folder_of_sockets_goes_when_nobody_holds_it(tmp_path: Path) -> None:
    """That of a supervisor that lives stays, and what is no supervisor's, also where somebody's link leads to it."""
    for name in ("taas-mine", "taas-lives", "taas-left", "taas-of-a-node", "other"):
        (tmp_path / name).mkdir()
    for name in ("taas-mine", "taas-lives", "taas-left", "other"):
        (tmp_path / name / "supervisor").touch()
    (tmp_path / "taas-theirs").symlink_to(tmp_path / "other")
    held = [os.open(tmp_path / name, os.O_RDONLY) for name in ("taas-mine", "taas-lives")]
    try:
        for fd in held:
            fcntl.flock(fd, fcntl.LOCK_SH)
        remove_folders_left(tmp_path / "taas-mine")
    finally:
        for fd in held:
            os.close(fd)
    assert not (tmp_path / "taas-left").exists()
    for name in ("taas-mine", "taas-lives", "taas-of-a-node", "other", "other/supervisor"):
        assert (tmp_path / name).exists()


def test_one_that_cannot_begin_leaves_none() -> None:
    """There is no place for its connection file, say."""
    life, kernel = os.pipe()
    with tempfile.TemporaryDirectory(dir="/tmp") as beside:
        ended = subprocess.run(  # it has forked: what it says ends with it
            [sys.executable, "-P", "-m", "taas.supervisor"],
            input=msgspec.json.encode(SupervisorConfig(os.getpid(), life, zmq.curve_keypair()[0].decode())),
            env={**os.environ, "JUPYTER_RUNTIME_DIR": os.devnull, "TMPDIR": beside},
            pass_fds=(life,),
            capture_output=True,
            check=True,
            timeout=60,
        )
        os.close(life)
        os.close(kernel)
        assert b"FileExistsError" in ended.stderr
        assert not list(Path(beside).iterdir())

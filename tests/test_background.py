"""Background runs: the prompt is back at once, the run outlives its kernel, and one comes back to it."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from notebook_harness import Notebook, gone

from taas.messages.wire import pack
from taas.records import find_run, read_record, read_records, runs_root

pytestmark = pytest.mark.slow

GATED = """
import os, time
from pathlib import Path
print("ready", flush=True)
while not Path("{gate}").exists():
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a runtime folder of its own, so that the newest run is the test's."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def book(project: Path) -> Iterator[Notebook]:
    notebook = open_notebook(project)
    yield notebook
    notebook.close()


def open_notebook(project: Path) -> Notebook:
    notebook = Notebook(project)
    notebook.good("%load_ext taas")
    return notebook


def terminal(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``taas`` in a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "taas.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_cell_returns_a_handle_and_attach_changes_objects_in_place(book: Notebook, project: Path) -> None:
    """The cell is over while the ranks go on; attach shows the output from the beginning and brings the names."""
    book.good(
        "history = ['before']\nalias = history\nimport torch\nweights = torch.zeros(3)\nview = weights[:1]"
    )
    ran = book.good(
        "#pragma taas --gpus 2 --background --name train"
        + GATED.format(gate="go")
        + "history.append('run')\nweights += 1\nanswer = 42\nprint('last words')"
    )
    assert ran.result is not None
    assert "%taas attach train" in ran.result["text/plain"]
    assert "train" in ran.result["text/html"]
    assert book.value("history") == "['before']"  # nothing is applied while the user works
    (project / "go").touch()
    ran = book.good("%taas attach train")
    assert ran.own == "ready\nlast words\n"
    assert "✓ train done" in ran.updates[-1]["data"]["text/plain"]
    assert (
        book.value("alias, weights.tolist(), view.tolist(), answer")
        == "['before', 'run'] [1.0, 1.0, 1.0] [1.0] 42"
    )
    assert "since it was attached before" in book.good("%taas attach train").stdout


def test_sigkill_of_the_kernel_leaves_the_run_and_another_kernel_takes_its_names(project: Path) -> None:
    """The run goes on without its kernel, ends, and its supervisor ends with it; a new kernel has its names."""
    first = open_notebook(project)
    second = None
    try:
        first.good(
            "import torch\n"
            "class Net(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.layer = torch.nn.Linear(2, 1, bias=False)\n"
            "model = Net()\nlosses = []\nlr = 0.5"
        )
        first.good(
            "#pragma taas --gpus 2 --background --name night"
            + GATED.format(gate="go")
            + "losses.append(lr)\nmodel.layer.weight.data.fill_(7.0)\nbest = model\nprint('trained')"
        )
        first.start("%taas attach night")
        first.wait_for("ready")
        everything = first.processes()
        first.kill()
        os.waitpid(first.pid, 0)
        assert all(process.is_running() for process in everything.supervisor)
        status = terminal("status")
        assert "night" in status.stdout
        assert "running" in status.stdout
        (project / "go").touch()
        assert gone(everything.supervisor + everything.agents + everything.ranks)
        second = open_notebook(project)
        second.good("lr = 'mine'")
        ran = second.good("%taas attach")
        assert ran.own == "ready\ntrained\n"
        assert second.value("losses, type(best).__name__, best is model") == "[0.5] Net True"
        assert (
            second.value("model.layer.weight.tolist(), model.layer(torch.ones(2)).item()")
            == "[[7.0, 7.0]] 14.0"
        )
        assert second.value("lr") == "mine"  # the cell could not have changed it
    finally:
        first.close()
        if second is not None:
            second.close()


def test_an_interrupt_while_attached_detaches(book: Notebook, project: Path) -> None:
    """Ctrl-C gives the prompt back and leaves the run alone; stop ends it."""
    book.good("#pragma taas --gpus 2 --background --name long" + GATED.format(gate="never"))
    book.start("%taas attach long")
    book.wait_for("ready")
    book.interrupt()
    ran = book.end()
    assert ran.status == "ok"
    assert "detached; long goes on" in ran.stdout
    ranks = book.processes().ranks
    assert ranks
    assert "long stopped after" in book.good("%taas stop long").stdout
    assert gone(ranks)
    assert "long was stopped" in book.good("%taas attach long").stdout


def test_attach_raises_what_the_run_raised(book: Notebook) -> None:
    """A failed background run fails the cell that attaches to it, with the rank's own traceback."""
    book.good("#pragma taas --gpus 2 --background\nraise ValueError('too steep')")
    ran = book.run("%taas attach")
    assert ran.ename == "CellFailed"
    assert "ValueError: too steep" in ran.evalue
    assert "Cell In[2], line 2" in ran.traceback
    assert "raise ValueError('too steep')" in ran.traceback
    assert "too steep" in book.good("%taas history").displays[0]["data"]["text/plain"]


def test_two_background_runs_never_mix(book: Notebook, project: Path) -> None:
    """Runs at the same time keep their own output and names, and a foreground cell runs beside them."""
    for name in ("left", "right"):
        book.good(
            f"#pragma taas --gpus 1 --background --name {name}"
            + GATED.format(gate=name)
            + f"for i in range(200): print('{name}', i)\n{name}_done = 200"
        )
    assert book.good("#pragma taas --gpus 1\nprint('between')").own == "between\n"
    for name in ("right", "left"):
        (project / name).touch()
        ran = book.good(f"%taas attach {name}")
        assert ran.own == "ready\n" + "".join(f"{name} {i}\n" for i in range(200))
        assert book.value(f"{name}_done") == "200"


def test_stop_from_a_terminal_beside_a_busy_kernel(book: Notebook) -> None:
    """A foreground run ends by ``taas stop`` as by the interrupt button."""
    book.start("#pragma taas --gpus 2 --name busy" + GATED.format(gate="never"))
    book.wait_for("ready")
    done = terminal("stop", "busy")
    assert done.returncode == 0, done.stderr
    assert "busy stopped after" in done.stdout
    assert book.end().ename == "KeyboardInterrupt"


def test_history_says_that_the_supervisor_was_killed(book: Notebook) -> None:
    """SIGKILL of the supervisor ends everything cleanly; the history says why."""
    book.good("#pragma taas --gpus 2 --background --name doomed" + GATED.format(gate="never"))
    book.start("%taas attach doomed")
    book.wait_for("ready")
    book.interrupt()
    book.end()
    record = find_run("doomed", read_records(), live=True, kernel=0)
    found = book.processes()
    psutil.Process(record.supervisor.pid).kill()
    assert gone(found.ranks + found.agents + found.forkservers)
    ended = read_record(record.folder)
    assert ended is not None
    assert (ended.outcome, ended.live) == ("lost", False)
    assert "the supervisor was killed" in terminal("history").stdout
    assert book.run("%taas attach doomed").ename == "RunLost"
    assert book.good("#pragma taas --gpus 1\nprint('next')").own == "next\n"


def test_run_folders_and_connection_files_are_private(book: Notebook, tmp_path: Path) -> None:
    """Nobody else reads what a run printed, its names, or the keys of its supervisor."""
    book.good("#pragma taas --gpus 2 --background --name secret\npassword = 'x'\nprint(password)")
    book.good("%taas attach secret")
    [record] = read_records()
    modes = {}
    for path in (tmp_path / "runtime" / "taas").rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the supervisor may be replacing one
            modes[path] = stat.S_IMODE(path.stat().st_mode)
    assert stat.S_IMODE(runs_root().stat().st_mode) == 0o700
    assert stat.S_IMODE(record.folder.stat().st_mode) == 0o700
    for name in ("record.json", "answer", "payload", "0/events"):
        assert modes[record.folder / name] == 0o600, name
    [connection] = (tmp_path / "runtime" / "taas" / "supervisors").iterdir()
    assert modes[connection] == 0o600


def test_a_stray_client_gets_nothing(book: Notebook) -> None:
    """Without the key of the connection file a client is not heard; with a wrong one neither."""
    import zmq

    from taas.connections import all_connections
    from taas.messages.clients import Release

    book.good("#pragma taas --gpus 1\npass")
    [connection] = all_connections()
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    for curve in (True, False):
        socket = context.socket(zmq.DEALER)
        if curve:
            socket.curve_serverkey = connection.server_key.encode()
            socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.connect(connection.endpoint)
        socket.send(pack(Release()))
        assert not socket.poll(500)
        socket.close(linger=0)
    context.term()
    assert book.good("#pragma taas --gpus 1\nprint('unharmed')").own == "unharmed\n"

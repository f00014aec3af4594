"""Nobody who does not hold a key reaches a run, and what holds keys is private."""

from __future__ import annotations

import os
import pickle
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from notebook_harness import Notebook

from taas.header import RunSpec
from taas.messages.clients import Interrupt, Submit
from taas.messages.wire import Memory, pack

pytestmark = pytest.mark.slow

WAITING = (
    "#pragma taas --gpus 2\nimport time, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    "print('ready', flush=True)\nwhile not stop.exists(): time.sleep(0.01)\nprint('through')"
)


@pytest.fixture
def running(notebook: Notebook) -> Iterator[psutil.Process]:
    """A run that goes on during the test, and has to end well after it; gives its supervisor."""
    notebook.good("from pathlib import Path\nstop = Path('stop')\nstop.unlink(missing_ok=True)")
    notebook.start(WAITING)
    notebook.wait_for("ready")
    [supervisor] = notebook.processes().supervisor
    yield supervisor
    (notebook.folder / "stop").touch()
    ran = notebook.end()
    assert ran.status == "ok", ran
    assert ran.own == "ready\nthrough\n"


def tcp_ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses on which a process listens."""
    return [tuple(c.laddr) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_supervisor_and_agents_listen_on_loopback_only(running: psutil.Process, notebook: Notebook) -> None:
    """Nothing of a local run can be reached from another machine."""
    found = notebook.processes()
    addresses = [a for p in [running, *found.agents, *found.ranks] for a, _ in tcp_ports(p)]
    assert addresses
    assert {address.removeprefix("::ffff:") for address in addresses} <= {"127.0.0.1", "::1"}


def test_a_port_scan_harms_nothing(running: psutil.Process) -> None:
    """Rubbish on the port is ignored."""
    for address, port in tcp_ports(running):
        for rubbish in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\xff" + b"\0" * 8 + b"\x01\x7f"):
            with socket.create_connection((address, port), timeout=5) as stranger:
                stranger.sendall(rubbish)


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def stranger(kind: str, server_key: bytes, endpoint: str, context: zmq.Context) -> zmq.Socket:
    """A client without the key."""
    client = context.socket(zmq.DEALER)
    client.linger = 0
    if kind == "another key":
        client.curve_serverkey = server_key
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.connect(endpoint)
    return client


@pytest.mark.parametrize("kind", ["no key", "another key"])
def test_a_stray_client_gets_nothing(running: psutil.Process, tmp_path: Path, kind: str) -> None:
    """Neither commands nor pickles of a client without the key are read, and nothing is answered."""
    [(address, port)] = tcp_ports(running)
    trace = tmp_path / "trace"
    payload = pickle.dumps(Bomb(trace))
    fd = os.memfd_create("bomb")
    os.write(fd, payload)
    submit = Submit(
        cell="open('/dev/null')", execution_count=1, project=str(tmp_path), environ={},
        payload=Memory(os.getpid(), fd, len(payload)), spec=RunSpec(), gpus=(), colors="nocolor", device="cpu", waiting=False,
    )  # fmt: skip
    context = zmq.Context()
    try:
        client = stranger(kind, zmq.curve_keypair()[0], f"tcp://{address}:{port}", context)
        for message in (pack(submit), pack(Interrupt(run="r1")), payload):
            client.send(message)
        assert client.poll(1500) == 0
        client.close()
    finally:
        context.term()
        os.close(fd)
    assert not trace.exists()


def test_memory_of_another_size_or_owner_is_refused(tmp_path: Path) -> None:
    """What is announced and what is found must agree."""
    fd = os.memfd_create("short")
    with pytest.raises(OSError, match="not the memory that was announced"):
        Memory(os.getpid(), fd, 10).open()
    os.close(fd)


def test_files_with_keys_are_private(running: psutil.Process) -> None:
    """Of the folders that a run uses, none can be entered by another user, and no connection file read."""
    folders = list(Path(os.environ["TMPDIR"]).glob("taas-*"))
    assert folders
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    for path in [*folders, *runtime.glob("taas*")]:
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path

"""Nobody else reaches a run: not another user of the machine, and not who does not hold a key."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import zmq
from blocks import block
from delivery_run import DeliveryRun
from notebook_harness import Notebook, Processes, gone
from other_user import (
    TRAPS,
    Bomb,
    as_other_user,
    become_other_user,
    doors,
    only_as_root,
    private,
    swap,
    try_all,
)
from storage_ranks import fork, join
from torch.utils.data import DataLoader
from zmq.utils.monitor import recv_monitor_message

from taas.delivery import loader as rank_side
from taas.delivery.registered import Registration, apply_final
from taas.delivery.transport import SlabServer, connect_data, map_slabs, new_context
from taas.header.options import RunSpec
from taas.protocol.clients import RunRequest, Submit
from taas.protocol.curve import make_dealer
from taas.protocol.delivery_messages import (
    PLANNER,
    Failed,
    Final,
    Hello,
    HostLost,
    Peer,
    Result,
    WorkerLost,
    new_identity,
)
from taas.protocol.framing import Memory, Message, Unreadable, pack
from taas.protocol.ranks import Cell, Workspace
from taas.supervisor.connections import remove_folders_left

pytestmark = pytest.mark.slow

WAITING = block("""
    #pragma taas --gpus 2
    import time, torch.distributed as dist
    dist.init_process_group('gloo')
    dist.barrier()
    print('ready', flush=True)
    while not stop.exists(): time.sleep(0.01)
    print('through')
""")
DELIVERED = """#pragma taas --gpus 2 --cpus 1
steps = iter(loader)
total = next(steps).sum()
print("ready", flush=True)
while not stop.exists(): time.sleep(0.01)
print((total + sum(batch.sum() for batch in steps)).item())
del steps, total
"""
BACKGROUND = """#pragma taas --gpus 2 --background --name night
import torch.distributed as dist
print("ready", flush=True)
while not stop.exists(): time.sleep(0.01)
dist.init_process_group("gloo")
seen = [None, None]
dist.all_gather_object(seen, dist.get_rank())
print(seen)
"""
POOL = Peer("pool", 0)
LIMIT = 64 << 20
"""Bytes by which a stranger may make the processes of a run grow."""


def everybody(found: Processes) -> list[psutil.Process]:
    """All processes of taas for a notebook."""
    return [process for kind in found.__dataclass_fields__ for process in getattr(found, kind)]


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """A TMPDIR as /tmp is, which everybody can enter; pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="public-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    left = list(folder.glob("taas-*"))
    shutil.rmtree(folder)
    assert not left, "the notebook left a folder"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, public: Path) -> Iterator[Notebook]:
    """A notebook whose sockets would be open to others, but for taas."""
    book = Notebook(tmp_path_factory.mktemp("project"), environ={"TMPDIR": str(public)})
    try:
        book.good("%load_ext taas")
        yield book
        everything = everybody(book.processes())
    finally:
        book.close()
    assert gone(everything), "the notebook left processes"


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


def test_a_run_on_one_machine_opens_no_port(
    running: psutil.Process, notebook: Notebook, public: Path
) -> None:
    """All of taas' sockets lie in folders that nobody else can enter.

    The ports are gloo's, on loopback.
    """
    found = notebook.processes()
    ranks = doors(found.ranks)
    assert not doors(p for p in everybody(found) if p not in found.ranks).tcp
    assert {address for address, _ in ranks.tcp} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    paths = doors(everybody(found)).unix
    assert len(paths) >= 2  # the supervisor and the forkserver listen
    assert all(path.startswith("/") and private(path, public) for path in paths), paths


@only_as_root
@pytest.mark.parametrize(("cell", "printed"), [(DELIVERED, "1500.0"), (BACKGROUND, "[0, 1]")])
def test_another_user_comes_in_nowhere(
    notebook: Notebook, public: Path, tmp_path: Path, cell: str, printed: str
) -> None:
    """He tries each socket 1,500 times, plants pickles, lists folders.

    No door opens, and the run is what it is.
    """
    notebook.good(
        "from pathlib import Path\nimport time\nstop = Path('stop')\nstop.unlink(missing_ok=True)"
    )
    if cell is DELIVERED:
        notebook.good(
            block("""
                import taas, torch
                from torch.utils.data import DataLoader
                loader = DataLoader(torch.arange(80.0), batch_size=4)
                taas.register(loader)
            """)
        )
    notebook.start(cell)
    if cell is BACKGROUND:
        notebook.end()
        notebook.start("%taas attach night")
    notebook.wait_for("ready")
    processes, trace = everybody(notebook.processes()), tmp_path / "trace"
    before = {process: process.memory_info().rss for process in processes}
    open_to_all = doors(processes)
    assert len(open_to_all.unix) >= 2
    assert as_other_user(lambda: [path.name for path in public.iterdir()])  # so far he comes
    entered = as_other_user(lambda: try_all(open_to_all, trace))
    assert entered == {"unix": [], "tcp": [], "stores": [], "files": []}
    grown = {process: process.memory_info().rss - before[process] for process in processes}
    (notebook.folder / "stop").touch()
    ran = notebook.end()
    assert ran.status == "ok", ran
    assert printed in ran.own
    assert not trace.exists()
    assert max(grown.values()) < LIMIT, grown
    if cell is DELIVERED:
        notebook.good("taas.unregister(loader)")


@pytest.mark.parametrize("kind", ["no key", "another key"])
def test_a_stray_client_gets_nothing(running: psutil.Process, tmp_path: Path, kind: str) -> None:
    """Commands and pickles of a client without the key are not read, and not answered."""
    [path] = doors([running]).unix
    trace = tmp_path / "trace"
    payload = pickle.dumps(Bomb(trace))
    fd = os.memfd_create("bomb")
    os.write(fd, payload)
    submit = Submit(
        cell=Cell("open('/dev/null')", 1, RunSpec(), "nocolor"),
        workspace=Workspace(str(tmp_path), {}),
        payload=Memory(os.getpid(), fd, len(payload)),
        gpus=(),
        device="cpu",
    )
    context = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.linger = 0
        if kind == "another key":
            client.curve_serverkey = zmq.curve_keypair()[0]
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.connect(f"ipc://{path}")
        for message in (pack(submit), pack(RunRequest(run="r1", what="interrupt")), payload):
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


def test_cleaners_leave_the_folder_of_sockets_alone(running: psutil.Process, public: Path) -> None:
    """systemd-tmpfiles removes what is old in /tmp, except locked folders (tmpfiles.d(5))."""
    [folder] = public.glob("taas-*")
    fd = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_folder_of_sockets_goes_when_nobody_holds_it(tmp_path: Path) -> None:
    """A living supervisor's folder stays, and what is no supervisor's, also behind a link."""
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


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder as /tmp is, in which another user sets traps."""
    folder = Path(tempfile.mkdtemp(prefix="traps-", dir="/tmp"))
    folder.chmod(0o1777)
    (folder / "of-the-user").mkdir()
    (folder / "of-the-user" / "supervisor").touch()
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)  # rmtree may not go so deep


@only_as_root
@pytest.mark.parametrize("trap", TRAPS)
def test_who_tidies_up_falls_into_no_trap(open_to_all: Path, trap: str) -> None:
    """What another user puts there is neither opened nor waited for, and stays."""
    set_one = TRAPS[trap]
    as_other_user(lambda: set_one(open_to_all / "taas-trap"))
    (open_to_all / "taas-left").mkdir()
    (open_to_all / "taas-left" / "supervisor").touch()
    remove_folders_left(open_to_all / "taas-mine")
    assert sorted(path.name for path in open_to_all.iterdir()) == ["of-the-user", "taas-trap"]
    assert (open_to_all / "of-the-user" / "supervisor").exists()


@only_as_root
def test_no_trap_ends_or_stops_a_supervisor(open_to_all: Path, tmp_path: Path) -> None:
    """All of them at once, and a FIFO that is swapped for a folder all the time.

    The first cell runs, in one supervisor.
    """
    for number, set_one in enumerate(TRAPS.values()):
        as_other_user(
            lambda number=number, set_one=set_one: set_one(open_to_all / f"taas-{number}")
        )
    read, write = os.pipe()

    def swapping() -> None:
        os.close(write)
        become_other_user()
        swap(open_to_all / "taas-swapped", read)

    stranger = fork(swapping)
    os.close(read)
    book = Notebook(tmp_path, environ={"TMPDIR": str(open_to_all)})
    try:
        book.good("%load_ext taas")
        pids = set()
        for _ in range(2):
            assert book.good("#pragma taas --gpus 2\nprint('through')").own == "through\n"
            pids.add(book.processes().supervisor[0].pid)
        everything = everybody(book.processes())
    finally:
        book.close()
        os.close(write)
    join(stranger)
    assert len(pids) == 1
    assert gone(everything)


def test_files_with_keys_are_private(running: psutil.Process, public: Path) -> None:
    """No other user can enter a folder of a run, or read a connection file."""
    folders = list(public.glob("taas-*"))
    assert folders
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    for path in [*folders, *runtime.glob("taas*")]:
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


def test_silent_clients_hold_nobody_up(tmp_path: Path) -> None:
    """A client of the slabs' socket that says nothing is dropped before the next is served."""
    with (tmp_path / "slab").open("w+b") as slab:
        slab.truncate(4096)
        server = SlabServer(str(tmp_path), slab.fileno())
        silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for client in silent:
            client.connect(str(tmp_path / "slabs"))
            server.answer()
        server.answer()  # nobody is there
        for client in silent:
            client.close()
        with ThreadPoolExecutor(1) as pool:
            wanted = pool.submit(map_slabs, str(tmp_path))
            while not wanted.done():
                if select.select([server], [], [], 0.1)[0]:
                    server.answer()
        server._listener.close()
        slabs = wanted.result()
        assert slabs is not None
        slabs.map[:1] = b"!"
        assert (tmp_path / "slab").read_bytes()[:1] == b"!"


def _flooded(rank: int, loaders: dict[str, DataLoader]) -> tuple[int, bool, float]:
    """Be sent rubbish by a stranger, and by a peer.

    Returns how the stranger fared, what is left, and the sum.
    """
    connection = rank_side._connection
    assert connection is not None
    context, receiver = zmq.Context(), connection._receiver
    stranger = context.socket(zmq.PUSH)
    events = stranger.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    stranger.connect(receiver.address)
    fared = recv_monitor_message(events)["event"]
    peer = connect_data(context, receiver.address, b"", connection.config.keys)
    for _ in range(5000):
        peer.send_multipart([b"x" * 20, b"y"])
    while not receiver.socket.poll(100):
        connection._drain()  # which lets in who is at the gate
    connection._drain()
    left = bool(receiver.socket.poll(1000))
    total = sum(batch.sum().item() for batch in loaders["d"])
    for one in (peer, stranger, events):
        one.close(0)
    context.term()
    return int(fared), left, total


def test_where_the_user_chose_no_encryption_strangers_stay_out_and_floods_come_by_parts() -> None:
    """Between hosts: without the run's password there is no connection.

    What peers send costs a step a bounded part.
    """
    with DeliveryRun(
        {"d": DataLoader(torch.arange(40.0), batch_size=4)}, shared=False, encrypt=False
    ) as run:
        [(fared, left, total)] = run.ranks(_flooded)
    assert fared != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert (left, total) == (True, 780.0)


LIES: dict[str, tuple[Peer, Peer, Message | list[Result]]] = {
    "a data VM as the planner": (POOL, PLANNER, Final(b"", {"d": "a lie"})),
    "a data VM says what the planner says": (POOL, POOL, Final(b"", {"d": "a lie"})),
    "a rank as the planner": (Peer("rank", 1), PLANNER, Final(b"", {"d": "a lie"})),
    "a rank as another rank": (Peer("rank", 1), Peer("rank", 0), Hello(address="ipc:///nowhere")),
    "a rank says what a data VM says": (
        Peer("rank", 1),
        Peer("rank", 1),
        WorkerLost(0, -1, "a lie"),
    ),
    "a data VM as another one": (POOL, Peer("pool", 1), Hello("a lie")),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_key_is_good_for_its_own_words_only(lie: str) -> None:
    """A node of a run has the keys of what runs there.

    What it says as another one, or of another's affairs, is not heard.
    """
    holder, claimed, message = LIES[lie]
    loader = DataLoader(torch.arange(40), batch_size=2, shuffle=True, generator=torch.Generator())
    with DeliveryRun({"d": loader}, ranks=2) as run:
        told, context = run.told(holder), new_context()
        liar = make_dealer(context, told.keys.server_public, *told.keys.clients[holder.holder])
        liar.identity = new_identity(claimed)
        events = liar.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        liar.connect(told.endpoint)
        recv_monitor_message(events)
        liar.send(pack(message))
        assert run.ranks(lambda r, loaders: len(list(loaders["d"]))) == [10, 10]
        final = run.finish()
        heard = liar.poll(0) if claimed != holder else 0
        liar.disable_monitor()
        for one in (events, liar):
            one.close(0)
        context.term()
    assert final.states
    assert not final.unknown
    assert not heard
    assert not [report for report in run.reports if isinstance(report, Failed | HostLost)]


def test_where_generators_stand_is_plain_data(tmp_path: Path) -> None:
    """The notebook unpickles rank 0's answer and nothing else, not even its planner's words."""
    trace = tmp_path / "trace"
    loader = DataLoader(torch.arange(4), generator=torch.Generator())
    with pytest.raises(Unreadable):
        apply_final(pickle.dumps({"d": Bomb(trace)}), [Registration("d", loader)])
    assert not trace.exists()

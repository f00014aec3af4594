"""Messages that nobody can read, whatever is wrong with them.

Who hears one goes on, at each of the four places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from blocks import block
from delivery_run import DeliveryRun
from notebook_harness import Notebook, until
from torch.utils.data import DataLoader
from zmq.utils.monitor import recv_monitor_message

from taas.delivery.transport import new_context
from taas.protocol.clients import ClientSays, RunRequest
from taas.protocol.curve import make_dealer
from taas.protocol.delivery_messages import Peer, new_identity
from taas.protocol.framing import MessageReader, Unreadable, pack
from taas.runs.records import read_record
from taas.supervisor.connections import Visit, all_connections

_DEPTH = 100_000
KINDS = (
    "invalid UTF-8",
    "nested too deeply",
    "cut off",
    "of an unknown kind",
    "of another type",
    "no MessagePack",
)


def unreadable(kind: str, tag: str) -> bytes:
    """Return a message that cannot be read, which begins like one that can: with this tag."""
    begin = b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode(tag)
    begin += msgspec.msgpack.encode("unknown")
    return {
        "invalid UTF-8": begin.replace(b"unknown", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9") + b"\x01",
        "nested too deeply": begin + b"\x91" * _DEPTH + b"\x01",
        "cut off": begin,
        "of an unknown kind": pack({"type": "Nobody"}),
        "of another type": pack({"type": tag, "run": [1.5], "stage": 2, "rank": "x", "loader": 1}),
        "no MessagePack": b"\xc1",
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_being_unreadable_is_one_error(kind: str) -> None:
    """The reader raises nothing else."""
    with pytest.raises(Unreadable):
        MessageReader(ClientSays)(unreadable(kind, "RunRequest"))


def test_a_damaged_record_is_no_run(tmp_path: Path) -> None:
    """Nor do views of runs break on a file that a disk has damaged."""
    for number, text in enumerate((b'{"name": "\xff"}', b'{"x":' + b"[" * _DEPTH, b"{")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "record.json").write_bytes(text)
        assert read_record(folder) is None


@pytest.mark.slow
def test_a_client_says_it(notebook: Notebook) -> None:
    """The supervisor, and the run that goes on, are what they were."""
    notebook.start(
        block("""
            #pragma taas --gpus 2 --name goes
            import time
            print('ready', flush=True)
            time.sleep(600)
        """)
    )
    notebook.wait_for("ready")
    pid = notebook.processes().supervisor[0].pid
    [connection] = [one for one in all_connections() if one.kernel.pid == notebook.pid]
    with Visit(connection) as visit:
        for kind in KINDS:
            visit._socket.send(unreadable(kind, "RunRequest"))
        visit.say(RunRequest(run="goes", what="interrupt", place="a test"))
    assert notebook.end().ename == "KeyboardInterrupt"
    assert [process.pid for process in notebook.processes().supervisor] == [pid]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_rank_says_it(notebook: Notebook, kind: str) -> None:
    """It is cut off and its run ends; the agent runs the next cell."""
    notebook.good(f"message = {unreadable(kind, 'RankStage')!r}")
    notebook.good("#pragma taas --gpus 2\npass")
    agents = notebook.processes().agents
    ran = notebook.run(
        block("""
            #pragma taas --gpus 2
            import gc, os, taas.protocol.ranks
            [link] = [one for one in gc.get_objects() if type(one).__name__ == 'AgentLink']
            if os.environ['RANK'] == '1': taas.protocol.ranks.send(link._agent, message)
        """)
    )
    assert ran.ename == "CellFailed"
    assert "rank 1" in ran.evalue
    assert notebook.good("#pragma taas --gpus 2\nprint('next')").own == "next\n"
    assert notebook.processes().agents == agents


_TALKS_RUBBISH = """
import os, sys
if "taas.agent" in sys.orig_argv:
    from taas.agent import loop
    pack = loop.pack
    def pack_rubbish(said):
        if os.path.exists("{folder}/says"):
            return open("{folder}/says", "rb").read()
        return pack(said)
    loop.pack = pack_rubbish
"""


@pytest.mark.slow
def test_an_agent_says_it(tmp_path: Path) -> None:
    """Its run is lost, with the reason, and it is replaced; the supervisor goes on."""
    folder, project = tmp_path / "site", tmp_path / "project"
    folder.mkdir()
    project.mkdir()
    (folder / "sitecustomize.py").write_text(_TALKS_RUBBISH.format(folder=folder))
    notebook = Notebook(project, environ={"PYTHONPATH": str(folder)})
    try:
        notebook.good("%load_ext taas")
        notebook.good("#pragma taas --gpus 2\npass")
        pid = notebook.processes().supervisor[0].pid
        for kind in KINDS[:3]:
            notebook.start(
                "#pragma taas --gpus 2 --name goes\n"
                "import time\n"
                "print('ready', flush=True)\n"
                "time.sleep(600)"
            )
            notebook.wait_for("ready")
            (folder / "new").write_bytes(unreadable(kind, "OfJob"))
            (folder / "new").rename(folder / "says")
            [connection] = [one for one in all_connections() if one.kernel.pid == notebook.pid]
            with Visit(connection) as visit:  # the agent says it in its answer
                visit.say(RunRequest(run="goes", what="stacks"))
            ran = notebook.end()
            (folder / "says").unlink()
            assert ran.ename == "RunLost"
            assert "said what nobody understands" in ran.evalue
            assert notebook.good("#pragma taas --gpus 2\nprint('next')").own == "next\n"
        until(lambda: [process.pid for process in notebook.processes().supervisor] == [pid])
    finally:
        notebook.close()


def _length(rank: int, loaders: dict[str, Any]) -> int:
    return len(list(loaders["d"]))


@pytest.mark.slow
def test_a_peer_of_the_delivery_says_it() -> None:
    """The coordinator goes on, and all is delivered."""
    loader = DataLoader(torch.arange(40), batch_size=2)
    with DeliveryRun({"d": loader}, ranks=2) as run:
        told, context = run.told(Peer("rank", 1)), new_context()
        peer = make_dealer(
            context, told.keys.server_public, *told.keys.clients[Peer("rank", 1).holder]
        )
        peer.identity = new_identity(Peer("rank", 1))
        events = peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        peer.connect(told.endpoint)
        recv_monitor_message(events)
        for kind in KINDS:
            peer.send(unreadable(kind, "Hello"))
        assert run.ranks(_length) == [10, 10]
        run.finish()
        peer.disable_monitor()
        for one in (events, peer):
            one.close(0)
        context.term()

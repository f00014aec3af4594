"""Real Ray nodes on one machine, each with an address and files of its own.

They are what VMs are to a cluster.

A node is a network namespace with one interface (a veth pair into a bridge), a mount namespace with
a ``/tmp`` and a ``/dev/shm`` of its own, and a process namespace in which Ray runs. The head alone
keeps this machine's ``/tmp``: the notebook's kernel runs beside it, and its project, which tests
put there, is what no other node sees. Python and taas are read from the machine's disk, as if they
were installed on every node.

Nothing has a name on the machine itself: bridge and interfaces live in namespaces that are held by
processes, and go with them. These processes read a pipe of this one, and end with it however it
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
from jupyter_client.manager import KernelManager
from notebook_harness import Notebook
from privileges import no_network

_SUBNET = "10.83.17"
_PORT = 6379
_OBJECT_STORE = 100 << 20
_START_SECONDS, _TRIES = 150.0, 3
_ROOT = Path(__file__).resolve().parent.parent
# Ray runs under this process 1, which reaps what is orphaned, says when Ray is up, and ends at
# end-of-file.
_INIT = 'exec 3<&0; "$@" </dev/null >&2 && echo up || echo failed; cat <&3 & wait'
_HOLD = (
    'set -e; for place in "$@"; do mount -t tmpfs none "$place"; done; mkdir -p "$HOME"; echo up;'
    " exec cat"
)


def why_not() -> str:
    """Why such a cluster cannot be had here; empty where it can."""
    if find_spec("ray") is None:
        return "Ray is not installed: pip install 'jupyter-taas[ray]'"
    return no_network()


class Node:
    """One node of a cluster: a place where Ray runs, or does not.

    Attributes:
        number: 0 is the head.
        address: its IP address.
        resources: what it offers to Ray.
    """

    def __init__(self, cluster: RayCluster, number: int, resources: Mapping[str, float]) -> None:
        self.number, self.resources = number, dict(resources)
        self.address = f"{_SUBNET}.{number + 1}"
        self._cluster = cluster
        self._ray: subprocess.Popen[str] | None = None
        self.log = cluster.folder / f"node{number}.log"
        home = cluster.folder / "home" if number == 0 else Path("/tmp/home")
        self.environ = {**cluster.environ, "HOME": str(home)}
        private = ["/dev/shm"] if number == 0 else ["/dev/shm", "/tmp", *cluster.hidden]
        self._holder = hold(
            ["unshare", "--net", "--mount", "--propagation", "private"], private, self.environ
        )
        cluster.switch.plug(self._holder.pid, self.address, number)

    # ------------------------------------------------------------ running something there

    def command(self, *arguments: str, folder: str = "/tmp") -> list[str]:
        """A command line that runs another one in this node, in a folder of it.

        The process keeps its id.
        """
        spaces = [
            f"--{kind}=/proc/{self._holder.pid}/ns/{name}"
            for kind, name in (("net", "net"), ("mount", "mnt"))
        ]
        return ["nsenter", *spaces, "--", "env", "-C", folder, *arguments]

    def python(self, code: str, *arguments: str, seconds: float = 60) -> str:
        """Run a program on this node, in its ``/tmp``; returns what it printed."""
        done = subprocess.run(
            self.command(sys.executable, "-c", code, *arguments),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # ------------------------------------------------------------ Ray there

    def restart(self) -> None:
        """Start Ray, anew where it was running."""
        for _ in range(_TRIES):
            self.kill()
            self._ray = self._start_ray()
            # the 30 s that Ray gives itself are too short on a loaded machine
            prefer(self._ray.pid, -15)
            up = _line(self._ray, _START_SECONDS) == "up"
            prefer(self._ray.pid, 0)
            if up:
                return
        raise AssertionError(f"Ray does not start on node {self.number}: {self.log.read_text()}")

    def _start_ray(self) -> subprocess.Popen[str]:
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        place = head if self.number == 0 else [f"--address={self._cluster.address}"]
        own = {name: count for name, count in self.resources.items() if name not in ("CPU", "GPU")}
        arguments = [
            *(str(Path(sys.executable).with_name("ray")), "start", *place),
            *("--disable-usage-stats", "--include-log-monitor=false"),
            *(f"--node-ip-address={self.address}", f"--object-store-memory={_OBJECT_STORE}"),
            *(
                f"--num-cpus={self.resources.get('CPU', 1):g}",
                f"--num-gpus={self.resources.get('GPU', 0):g}",
            ),
            f"--resources={json.dumps(own)}",
            f"--temp-dir={self._cluster.folder / 'ray' if self.number == 0 else '/tmp/ray'}",
        ]
        inner = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            _INIT,
            "init",
        ]
        with self.log.open("w") as log:
            return subprocess.Popen(
                self.command(*inner, *arguments),
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End all processes that Ray started here, at once, as if the VM had lost its power."""
        if self._ray is None:
            return
        for init in psutil.Process(self._ray.pid).children():
            init.kill()  # process 1 of its namespace: the kernel ends all the others with it
        end(self._ray)
        self._ray = None

    def of_taas(self, *, actors: bool = True) -> list[psutil.Process]:
        """What taas runs here; with ``actors``, Ray's workers that serve it count, too."""
        found = []
        for process in psutil.Process(self._ray.pid).children(recursive=True) if self._ray else []:
            try:
                name, words = process.name(), process.cmdline()
            except psutil.NoSuchProcess:
                continue
            mine = name.startswith("taas-") or any(word.startswith("taas.") for word in words)
            forked = any("multiprocessing.forkserver" in word for word in words)
            if mine or forked or (actors and any("VmActor" in word for word in words)):
                found.append(process)
        return found

    # ------------------------------------------------------------ its cable

    def cut_off(self) -> None:
        """Pull the cable: nothing gets through, in neither direction, and nobody is told."""
        self._cluster.switch.cable(self.number, "down")

    def reconnect(self) -> None:
        """Plug the cable in again."""
        self._cluster.switch.cable(self.number, "up")

    def close(self) -> None:
        """End all that is here, and the namespaces."""
        self.kill()
        end(self._holder)


class Switch:
    """A bridge in a network namespace of its own, and what is plugged into it."""

    def __enter__(self) -> Switch:
        self._holder = hold(["unshare", "--net"], [], {"PATH": os.environ["PATH"]})
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")
        return self

    def __exit__(self, *_: object) -> None:
        end(self._holder)

    def plug(self, pid: int, address: str, number: int) -> None:
        """Give the namespace of a process an interface in this network."""
        ip("link", "add", f"port{number}", "netns", str(self._holder.pid), "type", "veth",
            "peer", "name", "eth0", "netns", str(pid))  # fmt: skip
        self._ip("link", "set", f"port{number}", "master", "bridge", "up")
        for device, extra in (
            ("lo", []),
            ("eth0", ["address", "add", f"{address}/24", "dev", "eth0"]),
        ):
            if extra:
                ip(*extra, namespace=pid)
            ip("link", "set", device, "up", namespace=pid)

    def cable(self, number: int, state: str) -> None:
        """Set a port ``up`` or ``down``."""
        self._ip("link", "set", f"port{number}", state)

    def _ip(self, *arguments: str) -> None:
        ip(*arguments, namespace=self._holder.pid)


class RayCluster:
    """Nodes that are up inside a ``with``.

    Attributes:
        nodes: all of them; the first is the head.
        address: Ray's address.
        environ: variables that a driver needs, such as the cluster's token.
        folder: a folder of this machine that the head sees, too; its path is short.
        hidden: directories of this machine that only the head sees, besides ``/tmp``.

    Args:
        nodes: what each node offers: ``{"GPU": 2, "g2.2": 1}``; one ``CPU`` where it is not said.
        hidden: as above.
    """

    def __init__(self, nodes: Sequence[Mapping[str, float]], hidden: Sequence[Path] = ()) -> None:
        self._offers, self.hidden = (
            nodes,
            [str(path) for path in hidden if not path.is_relative_to("/tmp")],
        )
        self.nodes: list[Node] = []
        self.address = f"{_SUBNET}.1:{_PORT}"
        self.environ = _clean_environment()
        self._notebooks = 0

    @property
    def head(self) -> Node:
        """The node where Ray's head and the notebook are."""
        return self.nodes[0]

    def __enter__(self) -> RayCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            self.switch = self._stack.enter_context(Switch())
            for number, offer in enumerate(self._offers):
                self.nodes.append(Node(self, number, offer))
                self._stack.callback(self.nodes[-1].close)
            for node in self.nodes:
                # one after the other: Ray gives each 30 s, and together they take longer
                node.restart()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rid_of_taas(self, seconds: float, *, actors: bool = True) -> bool:
        """Wait until taas has no process on the nodes other than the head."""
        deadline = time.monotonic() + seconds
        while any(node.of_taas(actors=actors) for node in self.nodes[1:]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    # ------------------------------------------------------------ a notebook beside the head

    def notebook(self, folder: Path, environ: Mapping[str, str] | None = None) -> Notebook:
        """Start a kernel on the head's node; the caller closes it.

        Without an ``environ`` of its own it has the cluster's token.
        """
        self._notebooks += 1
        manager = KernelThere(
            kernel_name="python3", transport="ipc", ip=str(self.folder / f"k{self._notebooks}")
        )
        manager.there, manager.project = self.head, folder
        with_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.environ["RAY_AUTH_TOKEN"]}
        return Notebook(folder, manager, environ or with_token)


class KernelThere(KernelManager):
    """Start its kernel on a node, and speak with it over sockets in the file system.

    Those reach across networks.
    """

    there: Node
    project: Path

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """The kernel's command line, run on the node."""
        return self.there.command(
            *super().format_kernel_cmd(extra_arguments), folder=str(self.project)
        )


def _clean_environment() -> dict[str, str]:
    """Return what a node's processes get: a token of the cluster's, and no folder of ours."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def hold(
    unshare: list[str], words: list[str], environ: Mapping[str, str], script: str = _HOLD
) -> subprocess.Popen[str]:
    """A process that keeps namespaces alive, after a script or with some empty directories."""
    holder = subprocess.Popen(
        [*unshare, "sh", "-c", script, "hold", *words],
        env={"HOME": "/", **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert _line(holder, 20) == "up", "the namespaces cannot be made"
    return holder


def _line(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line a process prints; empty when it ends or says nothing for so long."""
    assert process.stdout is not None
    return (
        process.stdout.readline().strip()
        if select.select([process.stdout], [], [], seconds)[0]
        else ""
    )


def prefer(pid: int, niceness: int) -> None:
    """Set how much of the machine a session gets among the others (sched(7), autogroups)."""
    with contextlib.suppress(OSError):  # a kernel without them, or it has ended
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def ip(*arguments: str, namespace: int | None = None) -> None:
    there = [] if namespace is None else ["nsenter", f"--net=/proc/{namespace}/ns/net", "--"]
    done = subprocess.run([*there, "ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

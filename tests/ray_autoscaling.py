"""Ray's own autoscaler (v2) on this machine.

It has a head, and nodes that come and go, each a real raylet (`FakeMultiNodeProvider`).

`ray.cluster_utils.AutoscalingCluster` cannot be used: it reads an example.yaml that is not in the
wheel, and ends every Ray of the machine at its start and end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from notebook_harness import until
from ray_cluster import prefer

_HEAD = "f" * 51 + "00000"
_HEAD_TYPE = "ray.head.default"  # as the provider calls it
_MEMORY = 80_000_000
_TYPES = {"g2.8": {"CPU": 4, "GPU": 8, "g2.8": 1}, "c1.4": {"CPU": 4, "c1.4": 1}}
_LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class AutoscaledCluster:
    """A head, and at most two nodes of each type, which go after six idle seconds.

    Attributes:
        address: Ray's.
        environ: what Ray's processes, and drivers, have to have.
    """

    def __enter__(self) -> AutoscaledCluster:
        # short: Ray's sockets are below it
        self.folder = Path(tempfile.mkdtemp(prefix="ras", dir="/tmp"))
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        self.environ = {
            **os.environ,
            "RAY_enable_autoscaler_v2": "1",
            "RAY_FAKE_CLUSTER": "1",
            # a head takes the token in this user's home, if there is one, and drivers do not
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }
        (self.folder / "config.json").write_text(json.dumps(self._config()))
        head = {
            "RAY_CLOUD_INSTANCE_ID": _HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
            "RAY_NODE_TYPE_NAME": _HEAD_TYPE,
        }
        self._log = self.folder / "head.log"
        with self._log.open("w") as log:
            start = (
                f"{Path(sys.executable).with_name('ray')} start --head --block --num-cpus=0"
                f" --node-ip-address=127.0.0.1 --port={port} --temp-dir={self.folder}/r"
                f" --autoscaling-config={self.folder}/config.json --object-store-memory={_MEMORY}"
                f" --ray-client-server-port={_free_port()} --include-dashboard=false"
                " --dashboard-agent-listen-port=0"
            )
            self._head = subprocess.Popen(
                start.split(),
                env={**self.environ, **head},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # the 30 s that Ray gives itself are too short on a loaded machine
        prefer(self._head.pid, -15)
        until(
            lambda: "Ray runtime started" in self._log.read_text() or self._head.poll() is not None
        )
        assert self._head.poll() is None, self._log.read_text()
        prefer(self._head.pid, 0)
        self._log_monitors = set(self._find_log_monitors())
        return self

    def _config(self) -> dict[str, object]:
        nodes = {}
        for name, has in _TYPES.items():
            resources = {**has, "object_store_memory": _MEMORY}
            nodes[name] = {
                "resources": resources,
                "node_config": {},
                "min_workers": 0,
                "max_workers": 2,
            }
        switches = (
            "launch_multiple use_node_id_as_ip disable_node_updaters disable_launch_config_check"
        )
        provider = {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": self.address,
            "head_node_id": _HEAD,
            **dict.fromkeys(switches.split(), True),
        }
        return {
            "cluster_name": "here",
            "max_workers": 4,
            "idle_timeout_minutes": 0.1,
            "upscaling_speed": 1.0,
            "provider": provider,
            "head_node_type": _HEAD_TYPE,
            "available_node_types": {
                _HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                **nodes,
            },
            "file_mounts_sync_continuously": False,
            **{name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")},
            **{name: [] for name in _LISTS},
        }

    def nodes(self, kind: str) -> list[psutil.Process]:
        """The raylets of the nodes of a type."""
        found = []
        for process in psutil.Process(self._head.pid).children(recursive=True):
            try:
                if process.name() == "raylet" and any(
                    f"{kind},1" in word for word in process.cmdline()
                ):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_until_none_is_left(self) -> None:
        """Wait until the autoscaler has taken back all nodes; `ray status` says so, too.

        Its provider may leave the log monitor of a node, a process of Ray's own, which is ended.
        """
        until(lambda: not any(self.nodes(kind) for kind in _TYPES))
        until(lambda: not any(f" {kind}" in self.status() for kind in _TYPES))
        left = [one for one in self._find_log_monitors() if one not in self._log_monitors]
        for process in left:
            process.kill()
        psutil.wait_procs(left)

    def _find_log_monitors(self) -> list[psutil.Process]:
        """The processes that read the logs of a node of this cluster; of the head there is one."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                if "ray/_private/log_monitor.py" in words and str(self.folder) in words:
                    found.append(process)
        return found

    def status(self) -> str:
        """What `ray status` prints of nodes that are there, or on their way."""
        ray = str(Path(sys.executable).with_name("ray"))
        said = subprocess.run(
            [ray, "status", "--address", self.address],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        return said.partition("Recent failures")[0]

    def __exit__(self, *_: object) -> None:
        # nodes are in its group; upon SIGTERM it takes more than 20 s
        os.killpg(self._head.pid, signal.SIGKILL)
        self._head.wait(20)
        # the nodes, too, remove what is theirs
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

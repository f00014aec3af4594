"""A VM of a Ray cluster: the actor that holds its resources and runs its agent.

The class is sent to the node by value (``ray_driver`` does that), so that a node without taas can
report this. Apart from Ray, it needs only the standard library and two modules that are sent with
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

from taas.protocol.curve import make_short_folder
from taas.versions import differing_versions, versions

_TAIL_BYTES = 2000
_START = (
    "import os, sys; os.fork() and os._exit(0); os.setsid()\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'taas.agent'])"
)
"""Starts an agent that is not the actor's child, because Ray kills all children of an actor at
once.
"""
_RAYS_OWN = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")


def given_gpus() -> list[str]:
    """Return the GPUs that Ray assigned to this process, as named in CUDA_VISIBLE_DEVICES.

    The variable itself is not reliable: in an actor without GPUs it has the node's value, and Ray
    can be told not to set it (``RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES``).
    """
    import ray

    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return sorted(given, key=lambda gpu: (len(gpu), gpu))


class VmActor:
    """One VM.

    Its agent ends when the actor ends, because the agent's standard input is closed then.
    """

    def __init__(self) -> None:
        self._lifeline = os.pipe()

    def serve(self, line: bytes, here: dict[str, str]) -> tuple[str, str]:
        """Run an agent to its end; return how it ended, and the name of the error class.

        The agent is not run if the versions on the node differ from those in ``here``. Facts about
        the node are added to the agent's configuration.
        """
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        if differing := differing_versions(versions(), here):
            return f"{differing} (node {host})", "VersionMismatch"
        scratch = make_short_folder()
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(_RAYS_OWN)
        }
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(given_gpus())
        there = {"scratch": scratch, "environ": environ, "host": host, "node": host}
        config = {**json.loads(line), **there}
        alive, signs_of_life = os.pipe()
        with tempfile.TemporaryFile() as log:
            starter = subprocess.Popen(
                [sys.executable, "-S", "-c", _START],
                stdin=self._lifeline[0],
                stdout=log,
                stderr=log,
                cwd=scratch,
                env={**environ, "TMPDIR": scratch},
                pass_fds=(signs_of_life,),
                start_new_session=True,
            )
            os.close(signs_of_life)
            with contextlib.suppress(OSError):  # the VM was released meanwhile
                os.write(self._lifeline[1], json.dumps(config).encode() + b"\n")
            starter.wait()
            os.read(alive, 1)
            os.close(alive)
            shutil.rmtree(scratch, ignore_errors=True)
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            said = log.read().decode(errors="replace").strip()
            return f"ended by itself; its log says: {said}" if said else "ended", "RunLost"

    def end(self) -> None:
        """Let the agent end its processes and itself; then ``serve`` returns. Call it only once."""
        os.close(self._lifeline[1])

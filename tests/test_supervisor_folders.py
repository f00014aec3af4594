"""What is left of supervisors that were killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from taas.supervisor.connections import remove_folders_left
from taas.wire.clients import SupervisorConfig


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

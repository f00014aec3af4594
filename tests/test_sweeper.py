"""What is left of supervisors that were lost together with their sweepers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from taas.supervisor.sweeper import remove_folders_left


def test_a_folder_of_sockets_goes_when_nobody_holds_it(tmp_path: Path) -> None:
    """That of a supervisor that lives stays, and what is no supervisor's."""
    for name in ("taas-mine", "taas-lives", "taas-left", "taas-of-a-node", "other"):
        (tmp_path / name).mkdir()
    for name in ("taas-mine", "taas-lives", "taas-left", "other"):
        (tmp_path / name / "supervisor").touch()
    held = [os.open(tmp_path / name, os.O_RDONLY) for name in ("taas-mine", "taas-lives")]
    try:
        for fd in held:
            fcntl.flock(fd, fcntl.LOCK_SH)
        remove_folders_left(tmp_path / "taas-mine")
    finally:
        for fd in held:
            os.close(fd)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "other",
        "taas-lives",
        "taas-mine",
        "taas-of-a-node",
    ]

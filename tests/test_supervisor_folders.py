"""What is left of supervisors that were killed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from taas.supervisor.connections import CONNECTION, remove_folders_left


def test_a_folder_of_sockets_goes_when_nobody_holds_it(tmp_path: Path) -> None:
    """With its connection file; that of a supervisor that lives stays, and what is no supervisor's."""
    for name in ("taas-mine", "taas-lives", "taas-left", "taas-of-a-node", "other"):
        (tmp_path / name).mkdir()
    for name in ("taas-mine", "taas-lives", "taas-left", "other"):
        (tmp_path / name / "supervisor").touch()
        (tmp_path / f"{name}.json").touch()
        (tmp_path / name / CONNECTION).symlink_to(tmp_path / f"{name}.json")
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
        "other.json",
        "taas-lives",
        "taas-lives.json",
        "taas-mine",
        "taas-mine.json",
        "taas-of-a-node",
    ]


def test_another_users_link_removes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where anybody makes folders, one may look like a supervisor's that has ended."""
    (tmp_path / "taas-theirs").mkdir()
    (tmp_path / "taas-theirs" / "supervisor").touch()
    (tmp_path / "mine").touch()
    (tmp_path / "taas-theirs" / CONNECTION).symlink_to(tmp_path / "mine")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_folders_left(tmp_path / "taas-mine")
    assert (tmp_path / "mine").exists()

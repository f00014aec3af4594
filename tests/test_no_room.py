"""A machine without room for what a run needs: the cell says where and what to do, and nothing is started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from notebook_harness import Notebook
from privileges import needs_mounts

pytestmark = [needs_mounts, pytest.mark.slow]


@contextmanager
def small(folder: Path, options: str) -> Iterator[None]:
    """Let a folder be a file system of 64 kB, or of none."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(("options", "lack"), [("size=64k", "is full (66 kB left)"), ("ro", "is read-only")])
@pytest.mark.parametrize("place", ["/dev/shm", "runtime"])
def test_a_folder_without_room(
    place: str, options: str, lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named, with what it lacks; with room in it the same cell runs."""
    runtime = tmp_path / "runtime"
    (runtime / "taas").mkdir(parents=True, mode=0o700)
    folder = Path(place) if place.startswith("/") else runtime / "taas"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
    with small(folder, options):
        book = Notebook(tmp_path)
        try:
            book.good("%load_ext taas")
            ran = book.run("#pragma taas --gpus 2\nprint('the body ran')")
            assert book.processes().ranks == []
        finally:
            book.close()
    assert ran.ename == "EngineError"
    assert ran.evalue.startswith(f"{folder}, where r") and "nothing was started" in ran.evalue
    assert f" {lack}: " in ran.evalue or ("cannot be made: Read-only" in ran.evalue and options == "ro")

"""A machine without room for what a run needs.

The cell says where and what to do, and nothing is started.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebook_harness import Notebook
from privileges import needs_mounts, small_disk

pytestmark = [needs_mounts, pytest.mark.slow]


@pytest.mark.parametrize(
    ("options", "lack"), [("size=64k", r"is full \(\d+ kB left\)"), ("ro", "is read-only")]
)
@pytest.mark.parametrize("place", ["/dev/shm", "runtime"])
def test_a_folder_without_room(
    place: str, options: str, lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named, with what it lacks; with room in it the same cell runs."""
    runtime = tmp_path / "runtime"
    (runtime / "taas").mkdir(parents=True, mode=0o700)
    folder = Path(place) if place.startswith("/") else runtime / "taas"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
    with small_disk(folder, options):
        book = Notebook(tmp_path)
        try:
            book.good("%load_ext taas")
            ran = book.run("#pragma taas --gpus 2\nprint('the body ran')")
            assert book.processes().ranks == []
        finally:
            book.close()
    assert ran.ename == "EngineError"
    assert ran.evalue.startswith(f"{folder}, where r") and "nothing was started" in ran.evalue
    assert re.search(f" {lack}: ", ran.evalue) or (
        "cannot be made: Read-only" in ran.evalue and options == "ro"
    )

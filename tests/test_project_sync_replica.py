"""A copy of the project in the project's place, for the processes of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from privileges import needs_other_users

from taas import project_sync

_ROOT = Path(__file__).resolve().parent.parent
_NOBODY = 65534
_ENTER = """
import json, os, sys
copy, project, user, wall = sys.argv[1:]
from taas import _linux
from pathlib import Path
from taas.rank_storage import guard
from taas.project_sync import entered
if user:  # who may not read where taas is
    os.setgid(int(user)); os.setuid(int(user)); _linux.prctl(4, 1)  # its own /proc again
entered(copy, project, sys.exit)
if wall:
    guard(project=project, rank=1, scratch=Path(wall))
os.chdir(project)
said = {"sees": sorted(os.listdir(project)), "reads": open(f"{project}/model.py").read()}
try:
    open(f"{project}/saved", "w").write("by the rank")
    said["wrote"] = os.path.exists(f"{project}/saved")
except OSError as error:
    said["wrote"] = str(error)
said["cache"] = os.path.exists(f"{project}/.cache/kept")
print(json.dumps(said))
"""


def _in_replica(copy: Path, project: Path, user: str = "", wall: str = "") -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _ENTER, str(copy), str(project), user, wall],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 and not done.stderr.startswith("Traceback"):
        pytest.skip(f"no mount namespaces on this machine: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """A copy of the project, and the path of the project, where the VM has files of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # any user may look there
        Path(folder).chmod(0o755)
        yield _fill(Path(folder))


def _fill(place: Path) -> tuple[Path, Path]:
    copy, project = place / "vm" / "copy", place / "home"
    for folder, text in ((copy, "today's"), (project, "the VM's")):
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(text)
    (project / ".cache").mkdir()
    (project / ".cache" / "kept").write_text("a model, downloaded before")
    return copy, project


def test_the_copy_stands_at_the_projects_path_and_only_there(places: tuple[Path, Path]) -> None:
    """Absolute paths hold; the VM's own caches are still seen; the VM's files are as they were."""
    copy, project = places
    said = _in_replica(copy, project)
    assert said == {"sees": [".cache", "model.py"], "reads": "today's", "wrote": True, "cache": True}
    assert (copy / "saved").read_text() == "by the rank"
    assert sorted(path.name for path in project.iterdir()) == [".cache", "model.py"]
    assert (project / "model.py").read_text() == "the VM's"


@needs_other_users
def test_an_ordinary_user_can_do_so_too(places: tuple[Path, Path]) -> None:
    copy, project = places
    for folder in (copy, *copy.rglob("*")):
        os.chown(folder, _NOBODY, _NOBODY)
    said = _in_replica(copy, project, user=str(_NOBODY))
    assert (said["reads"], said["wrote"]) == ("today's", True)


def test_the_wall_of_other_ranks_stands_around_the_copy(places: tuple[Path, Path], tmp_path: Path) -> None:
    """By the project's path the write goes to scratch; the copy itself is read-only to that rank."""
    copy, project = places
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    said = _in_replica(copy, project, wall=str(scratch))
    assert said["reads"] == "today's"
    assert said["wrote"] is True
    assert not (copy / "saved").exists()
    assert (scratch / "tree" / "saved").read_text() == "by the rank"


def test_pythons_own_installation_is_never_hidden() -> None:
    """A project that is a home directory, or the root, may have Python in it."""
    inside = project_sync.kept_places("/")
    assert any(sys.prefix.startswith(place) for place in map(os.path.realpath, inside))
    assert project_sync.kept_places("/nowhere") == []

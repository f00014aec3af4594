"""``taas install``: a header works in a notebook that forgot ``%load_ext taas``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, terminal

pytestmark = pytest.mark.slow

RANKS = "#pragma taas --gpus 2\nimport os\nprint(os.environ.get('WORLD_SIZE'))"


@pytest.fixture
def ipython_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "project").mkdir()
    yield tmp_path / "ipython"


def ran_in(project: Path, *cells: str, environ: dict[str, str] | None = None) -> list[str]:
    """What cells print in a kernel of their own."""
    book = Notebook(project, environ=environ)
    try:
        return [book.good(cell).own for cell in cells]
    finally:
        book.close()


def test_every_notebook_loads_taas_until_it_is_undone(ipython_dir: Path, tmp_path: Path) -> None:
    """One file, written once, named; no name comes into the notebook; ``--undo`` leaves the folder as it was."""
    project = tmp_path / "project"
    file = ipython_dir / "profile_default" / "startup" / "50-taas.py"
    assert ran_in(project, RANKS) == ["None\n"]
    first, again = terminal("install"), terminal("install")
    assert (first.returncode, again.returncode) == (0, 0)
    assert f"{file} is written" in first.stdout
    assert f"{file} is written" in again.stdout
    assert list(file.parent.glob("*.py")) == [file]
    assert ran_in(project, "print('taas' in globals(), 'error' in globals())", RANKS) == [
        "False False\n",
        "2\n",
    ]
    assert f"{file} is removed" in terminal("install", "--undo").stdout
    assert f"{file} is removed" in terminal("install", "--undo").stdout
    assert ran_in(project, RANKS) == ["None\n"]


def ipython(project: Path, code: str, blocked: str) -> str:
    """What IPython prints where a module cannot be imported, with its startup files."""
    hide = f"import sys; sys.modules[{blocked!r}] = None; from IPython import start_ipython; "
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}start_ipython(['-c', {code!r}])"],
        capture_output=True, text=True, timeout=120, check=True, cwd=project,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_ipython_goes_on_where_taas_is_not(ipython_dir: Path, tmp_path: Path) -> None:
    """In an environment without taas not a word; where taas is broken one line, and later startup files run."""
    assert terminal("install").returncode == 0
    startup = ipython_dir / "profile_default" / "startup"
    (startup / "60-mine.py").write_text("mine = 41")
    assert ipython(tmp_path / "project", "print(mine + 1)", blocked="taas") == "42\n"
    broken = ipython(tmp_path / "project", "print(mine + 1)", blocked="taas.magics").splitlines()
    assert broken[0].startswith("taas was not loaded, so that #pragma taas is a comment here: ")
    assert broken[1:] == ["42"]


@pytest.mark.parametrize("load", ["%load_ext taas", "import taas"])
def test_a_cell_that_loads_taas_itself_is_told(tmp_path: Path, load: str) -> None:
    """Its header is a comment the first time, and it is told so; then it runs."""
    book = Notebook(tmp_path)
    try:
        ran = book.run(f"#pragma taas --gpus 2\n{load}\nimport os\nprint(os.environ.get('WORLD_SIZE'))")
        [said] = [line for line in ran.stderr.splitlines() if "too late" in line]
        assert f"{load} came too late for the header of its own cell" in said
        assert said.endswith("so run this cell again")
        assert (ran.status, ran.own) == ("ok", "None\n")
        assert (
            book.good(f"#pragma taas --gpus 2\n{load}\nimport os\nprint(os.environ.get('WORLD_SIZE'))").own
            == "2\n"
        )
        assert book.good("%reload_ext taas").stderr == ""
    finally:
        book.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(ipython_dir: Path) -> None:
    """No file in a temporary folder that nobody reads."""
    ipython_dir.mkdir(mode=0o500)
    refused = terminal("install")
    assert refused.returncode == 1
    assert str(ipython_dir) in refused.stderr
    assert "IPYTHONDIR" in refused.stderr

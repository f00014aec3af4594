"""``taas install``: a header works in a notebook that forgot ``%load_ext taas``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import block
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
    """One file, written once, named; no name comes into the notebook.

    ``--undo`` leaves the folder as it was.
    """
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
    """In an environment without taas not a word.

    Where taas is broken one line, and later startup files run.
    """
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
        ran = book.run(
            f"#pragma taas --gpus 2\n{load}\nimport os\nprint(os.environ.get('WORLD_SIZE'))"
        )
        [said] = [line for line in ran.stderr.splitlines() if "too late" in line]
        assert f"{load} came too late for the header of its own cell" in said
        assert "so run this cell again" in said
        assert (ran.status, ran.own) == ("ok", "None\n")
        assert (
            book.good(
                f"#pragma taas --gpus 2\n{load}\nimport os\nprint(os.environ.get('WORLD_SIZE'))"
            ).own
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


SIGNALS = {
    "SIGCHLD blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
    "all blocked": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGINT})"
    ),
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "SIGTERM, SIGQUIT and SIGALRM ignored": (
        "for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM): "
        "signal.signal(number, signal.SIG_IGN)"
    ),
}
"""What whoever started the kernel may have done to its signals."""


@pytest.mark.parametrize("what", SIGNALS)
def test_processes_begin_with_clean_signals(tmp_path: Path, what: str) -> None:
    """Runs begin and end, also where another one follows, and data workers are there.

    Ranks have the mask of a script.
    """
    again = block("""
        #pragma taas --gpus 2 --cpus 1
        import os, signal
        total = sum(len(batch) for batch in loader)
        ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
        usual = sorted(ignored) == [signal.SIGPIPE, signal.SIGXFSZ]
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), usual)
    """)
    loader = block("""
        from torch.utils.data import DataLoader
        import taas
        loader = DataLoader(range(8), batch_size=2)
        taas.register(loader)
    """)
    first, *_, last = ran_in(
        tmp_path, f"import signal\n{SIGNALS[what]}", "%load_ext taas", loader, RANKS, again, again
    )
    assert first == ""
    assert last == "set() True\n"


GONE = {
    "removed": "shutil.rmtree(folder)",
    "made anew": "shutil.rmtree(folder); os.mkdir(folder)",
    "made anew, and filled": "shutil.rmtree(folder); os.mkdir(folder); os.mkdir(folder + '/in')",
    "moved": "os.rename(folder, folder + '-2'); folder += '-2'",
}
"""What may become of the folder in which taas was first used."""


@pytest.mark.parametrize("what", GONE)
def test_the_folder_in_which_taas_was_started_goes(tmp_path: Path, what: str) -> None:
    """The notebook goes on from any folder that is there.

    Without one, the cell says what to type.
    """
    first = tmp_path / "first"
    first.mkdir()
    book = Notebook(first)
    try:
        book.good("%load_ext taas\nimport os, shutil\nfolder = os.getcwd()")
        assert book.good(RANKS).own == "2\n"
        book.good(GONE[what])
        if what != "moved":
            ran = book.run(RANKS)
            assert "working directory was removed" in ran.evalue + ran.stderr + ran.stdout
        book.good(f"os.chdir({str(tmp_path)!r})\n%taas release")
        assert book.good(RANKS).own == "2\n"
        assert book.good(RANKS).own == "2\n"
    finally:
        book.close()


def test_relative_folders_in_variables_mean_what_they_meant(tmp_path: Path) -> None:
    """PYTHONPATH and Jupyter's folders may depend on the folder in which the kernel was started."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "found_by_path.py").write_text("value = 7")
    environ = {"PYTHONPATH": f"lib{os.pathsep}", "JUPYTER_RUNTIME_DIR": "runtime"}
    cell = "#pragma taas --gpus 2\nimport found_by_path, os\nprint(found_by_path.value)"
    assert ran_in(tmp_path, "%load_ext taas", cell, cell, environ=environ)[1:] == ["7\n", "7\n"]
    assert list((tmp_path / "runtime" / "taas" / "runs").iterdir())

"""What is said where something is odd.

The fact, the cause and the next step, never a bare error of Python's.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from notebook_harness import Notebook, terminal, until
from privileges import needs_mounts, small_disk

from taas.base.process_log import BROKE_DOWN, how_it_broke, log_file
from taas.config import load_catalog
from taas.errors import ConfigError, HeaderError
from taas.project.wall.boundary import make_shared
from taas.runs.records import read_records

SHARED = {
    "too long": ("a" * 300, "type --shared checkpoints"),
    "a loop of links": ("loop/x", "type --shared checkpoints"),
    "below a file": ("file/x", "cannot be made (Not a directory): type --shared checkpoints"),
    "a link that leads nowhere": (
        "dangling",
        "type --shared checkpoints; allowed is a directory inside",
    ),
    "a home directory": ("~/ckpt", "type --shared /somebody/ckpt"),
    "all of the project": (".", "neither the project nor what holds it"),
}


@pytest.mark.parametrize("what", SHARED)
def test_an_odd_shared_directory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system says of a path is one line with what to type."""
    path, said = SHARED[what]
    monkeypatch.setenv("HOME", "/somebody")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(HeaderError, match=re.escape(said)) as caught:
        make_shared(tmp_path, (path,))
    assert "\n" not in str(caught.value)


TOML = {
    "nested too deeply": ("a = " + "[" * 3000 + "]" * 3000, "recursion"),
    "a key nested too deeply": ("x" + ".x" * 3000 + " = 1", "; correct the file or remove it"),
    "a number for a list of folders": ("[storage]\nshared = 5", 'write ["checkpoints"]'),
    "a list in a list": ("[storage]\nshared = [[1]]", 'write ["checkpoints"]'),
    "a date": ("[run]\nmax_restarts = 1979-05-27", "a date has no meaning here"),
    "a value for a section": ("run = 5", "run is no key: write one of run.max_restarts"),
    "a misspelt key": ("[run]\nhang_timout = 5", "did you mean run.hang_timeout?"),
    "a misspelt value": ("[engine]\ndefault = 'slrum'", "did you mean slurm?"),
    "not UTF-8": (b"\xff\xfe", "correct the file or remove it"),
}


@pytest.mark.parametrize("what", TOML)
def test_an_odd_taas_toml(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named, and what to write."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    content, said = TOML[what]
    (tmp_path / "taas.toml").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load_catalog(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/taas.toml: ")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a link to itself"])
def test_no_file_in_the_place_of_taas_toml(kind: str, tmp_path: Path) -> None:
    """It is neither waited for nor passed over in silence."""
    path = tmp_path / "taas.toml"
    {"a folder": path.mkdir, "a FIFO": lambda: os.mkfifo(path)}.get(
        kind, lambda: path.symlink_to(path)
    )()
    with pytest.raises(ConfigError, match="it is no file, nor a link to one; replace it"):
        load_catalog(tmp_path)


@pytest.mark.parametrize("home", ["~nosuchuser/x", "/dev/null", "x" * 5000])
def test_an_odd_folder_of_settings(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no settings there, or the path is named."""
    monkeypatch.setenv("XDG_CONFIG_HOME", home)
    # from Python 3.14 on, a path that is too long is one that does not exist
    if len(home) < 100 or sys.version_info >= (3, 14):
        assert load_catalog(tmp_path).settings == {}
    else:
        with pytest.raises(ConfigError, match="File name too long; correct the path"):
            load_catalog(tmp_path)


# ---------------------------------------------------------------- %taas stop, and handles


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has no runs yet."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    project = tmp_path / "project"
    project.mkdir()
    return project


WAITS = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.02)"


@pytest.mark.slow
def test_stop_says_what_goes_on(alone: Path) -> None:
    """Nothing; another notebook's run; several: each with what to type."""
    assert (
        terminal("stop").stderr
        == "taas: taas stop: no run goes on; taas history says how the last ones ended\n"
    )
    book = Notebook(alone)
    try:
        book.good("%load_ext taas")
        book.good(f"#pragma taas --gpus 1 --background --name small\n{WAITS}")
        other = Notebook(alone)
        try:
            other.good("%load_ext taas")
            said = other.run("%taas stop").stderr
            assert "no run of this notebook goes on, but others do; type %taas stop small" in said
        finally:
            other.close()
        book.good(f"#pragma taas --gpus 1 --background --name large\n{WAITS}")
        said = book.run("%taas stop").stderr
        assert "2 runs go on here; type one of %taas stop small (" in said
        assert "%taas stop large (" in said
        (alone / "go").touch()
        until(lambda: not any(record.live for record in read_records()))
        shown = book.good("%taas top small").displays[-1]["data"]["text/plain"]
        assert "ends it" not in shown
        assert shown.endswith("%taas attach small brings its output and its names")
        book.good("%taas attach small")
        shown = book.good("%taas top small").displays[-1]["data"]["text/plain"]
        assert shown.endswith("%taas logs small shows its output")
        assert "no run goes on; %taas history" in book.run("%taas stop").stderr
    finally:
        book.close()


# ---------------------------------------------------------------- folders whose names are not UTF-8

NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.mark.slow
def test_a_project_whose_name_is_not_utf8(alone: Path) -> None:
    """It is named, and nothing is started; in another folder the same kernel runs cells."""
    project = alone / NOT_UTF8
    project.mkdir()
    book = Notebook(project)
    try:
        ran = book.run("%load_ext taas")
        assert ran.status == "ok", ran
        for cell in ("#pragma taas --gpus 1\npass", "%taas config"):
            said = book.run(cell)
            assert "has a name that is not UTF-8" in said.stderr + said.evalue, said
            assert "rename it, or type %cd and another folder" in said.stderr + said.evalue
        book.good(f"%cd {alone}")
        assert book.good("#pragma taas --gpus 1\nprint('ran')").own == "ran\n"
    finally:
        book.close()


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["TMPDIR", "JUPYTER_RUNTIME_DIR"])
def test_a_folder_of_ours_whose_name_is_not_utf8(alone: Path, variable: str) -> None:
    """Another one is taken where there is a choice, else it is named."""
    folder = alone.parent / NOT_UTF8
    folder.mkdir(mode=0o700)
    book = Notebook(alone, environ={variable: str(folder)})
    try:
        book.good("%load_ext taas")
        ran = book.run("#pragma taas --gpus 1\nprint('ran')")
        if variable == "TMPDIR":
            assert ran.own == "ran\n", ran
        else:
            assert "has a name that is not UTF-8: nothing was started" in ran.evalue
    finally:
        book.close()


# ---------------------------------------------------------------- a disk without inodes


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("left", [4, 6, 8, 12, 0])
def test_a_disk_without_inodes(alone: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run it is said, and nothing starts.

    Where others take them meanwhile, supervisor, agent or rank say it.

    Packing a name takes all inodes but a few, after it was looked whether there are enough.
    """
    runtime = alone.parent / "small"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(runtime))
    with small_disk(runtime, "size=8m,nr_inodes=300"):
        book = Notebook(alone)
        try:
            book.good("%load_ext taas")
            book.good(FILLS.format(folder=str(runtime), left=left))
            if left:
                ran = book.run("#pragma taas --gpus 2\nfills\nprint('the body ran')")
            else:
                book.good("fill()")
                ran = book.run("#pragma taas --gpus 2\nprint('the body ran')")
        finally:
            book.close()
    if left:
        assert "No space left on device" in ran.evalue, ran
        assert "no inode (df -i)" in ran.evalue
        assert "left with status" not in ran.evalue
    else:
        assert ran.ename == "EngineError", ran
        assert "nothing was started. Make room there" in ran.evalue


FILLS = """
import os
def fill():
    number = 0
    while os.statvfs({folder!r}).f_ffree > {left}:
        open(f"{folder}/filler-{{number}}", "w").close()
        number += 1
class Fills:
    def __reduce__(self):
        fill()
        return int, ()
fills = Fills()
"""


# ---------------------------------------------------------------- a supervisor that breaks down

_BREAKS = """
import os, sys
if "taas.supervisor" in sys.orig_argv:
    from taas.supervisor import fleet
    step = fleet.Fleet.step
    def breaking(self):
        if os.path.exists("{folder}/breaks"):
            raise KeyError("a fault of taas")
        step(self)
    fleet.Fleet.step = breaking
"""


@pytest.mark.slow
def test_a_supervisor_that_breaks_down_is_not_said_to_be_killed(
    alone: Path, tmp_path: Path
) -> None:
    """The cell and the history name its error and its log.

    The out-of-memory killer is not suspected.
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_BREAKS.format(folder=site))
    book = Notebook(alone, environ={"PYTHONPATH": str(site)})
    try:
        book.good("%load_ext taas")
        book.start(
            "#pragma taas --gpus 2\nimport time\nprint('ready', flush=True)\ntime.sleep(600)"
        )
        book.wait_for("ready")
        (site / "breaks").touch()
        ran = book.end()
        (site / "breaks").unlink()
        assert ran.ename == "RunLost"
        assert "broke down of an error of its own (KeyError: 'a fault of taas'; " in ran.evalue
        assert "dmesg" not in ran.evalue
        [record] = read_records()
        assert "the supervisor broke down (KeyError: 'a fault of taas')" in record.message
        assert book.good("#pragma taas --gpus 2\nprint('next')").own == "next\n"
    finally:
        book.close()


def test_the_error_of_a_supervisor_is_its_own(alone: Path) -> None:
    """Not that of an earlier process with the same id, nor what is logged after it."""
    log = log_file(7)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S,000")
    broke = (
        f"{stamp} ERROR taas: {BROKE_DOWN}\n"
        "Traceback (most recent call last):\n"
        "  File x\n"
        "KeyError: 'x'\n"
    )
    begin = f"{stamp} INFO taas: process 7 on here\n"
    assert how_it_broke(7) == ""
    log.write_text(begin + broke)
    assert how_it_broke(7) == "KeyError: 'x'"
    log.write_text(begin + broke + f"{stamp} INFO taas: agent-0 ended\n")
    assert how_it_broke(7) == "KeyError: 'x'"
    log.write_text(begin + broke + begin)
    assert how_it_broke(7) == ""

"""The verbs of %taas and of taas: taught, completed, and forgiving of near misses."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook, gone, terminal

from taas.errors import HeaderError
from taas.notebook.steering import do
from taas.notebook.verbs import VERBS, help_text
from taas.runs.curves import read_curves
from taas.runs.records import read_records

pytestmark = pytest.mark.slow


def completions(notebook: Notebook, text: str) -> list[str]:
    """Ask the kernel as a front end does when Tab is pressed.

    Returns the last line as each choice makes it.
    """
    reply = notebook._client.complete(text, reply=True, timeout=60)["content"]
    shown = reply["metadata"]["_jupyter_types_experimental"]
    assert [one["text"] for one in shown] == reply["matches"]
    assert all(len(one["type"]) > 4 for one in shown), "JupyterLab shows what each of them means"
    kept = text[: reply["cursor_start"]] + "{}" + text[reply["cursor_end"] :]
    return [kept.format(match).splitlines()[-1] for match in reply["matches"]]


def test_the_status_table_is_live(notebook: Notebook) -> None:
    """``%taas`` alone follows the run in the cell that asked, after that cell has ended."""
    notebook.good(
        block("""
            #pragma taas --gpus 1 --background --name watched
            import time
            from pathlib import Path
            while not Path('go').exists(): time.sleep(0.05)
        """)
    )
    [shown] = notebook.good("%taas").displays
    assert "<table>" in shown["data"]["text/html"]
    assert "watched" in shown["data"]["text/plain"]
    assert "watched" in terminal().stdout
    notebook.folder.joinpath("go").touch()
    while True:
        message = notebook._client.get_iopub_msg(timeout=120)
        if (
            message["msg_type"] == "update_display_data"
            and "done" in message["content"]["data"]["text/plain"]
        ):
            break
    notebook.good("%taas attach watched")


def test_the_verbs_are_these() -> None:
    """The contract's list."""
    names = (
        "status logs stop stacks attach top history recover export engine config setup types run"
        " install release doctor"
    )
    assert list(VERBS) == names.split()
    assert all(verb in help_text() for verb in VERBS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stauts", "did you mean %taas status?"),
        ("frobnicate", "allowed is status, logs"),
        ("logs --rnk 3", "no option --rnk: did you mean --rank?"),
        ("logs --rank", "--rank has no value"),
        (
            "status now",
            "now is no option: leave it out, or put a value in quotes; allowed is --json",
        ),
        ("release -9", "no option -9: leave it out; allowed is none"),
        ("engine nebula", "type local; allowed is local, ray and its address, or slurm"),
        ("engine slrum", "type slurm; allowed is local"),
        ("logs 'a", "a quote is opened and not closed"),
    ],
)
def test_a_wrong_line_says_what_to_type(line: str, said: str) -> None:
    """One line: what is wrong, what is allowed."""

    class Nobody:
        kernel = 0

    with pytest.raises(HeaderError, match=re.escape(said)) as caught:
        do(line, Nobody())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("#!g2", ["#!g2.1", "#!g2.2", "#!g2.4", "#!g2.8"]),
        ("#pragma taas --ou", ["#pragma taas --output"]),
        (
            "# pragma taas --gpus 2 --uneven=",
            [f"# pragma taas --gpus 2 --uneven={v}" for v in ("drop", "pad", "raise")],
        ),
        (
            "#pragma taas --rank-writes d",
            ["#pragma taas --rank-writes discard", "#pragma taas --rank-writes deny"],
        ),
        ("%%taas --ou", ["%%taas --output"]),
        ("%%taas --on g1", ["%%taas --on g1.1", "%%taas --on g1.2", "%%taas --on g1.4"]),
        ("x = 1\n%taas sta", ["%taas status", "%taas stacks"]),
        ("%taas ", [f"%taas {verb}" for verb in VERBS]),
        ("%taas logs --f", ["%taas logs --follow"]),
        ("%taas engine ", ["%taas engine local", "%taas engine ray", "%taas engine slurm"]),
        ("%taas engine s", ["%taas engine slurm"]),
        ("%taas engine slurm --pa", ["%taas engine slurm --partition"]),
    ],
)
def test_the_kernels_reply_completes(notebook: Notebook, typed: str, offered: list[str]) -> None:
    """What may stand there and nothing else, as JupyterLab, Notebook and VS Code ask for it."""
    assert completions(notebook, typed) == offered


def test_the_notebook_teaches(notebook: Notebook) -> None:
    """``%taas?`` shows the table, ``%%taas?`` the options."""
    reply = notebook._client.inspect("%taas", reply=True, timeout=30)
    assert "stacks [RUN]" in reply["content"]["data"]["text/plain"]
    assert (
        "--hang-timeout S"
        in notebook.good("print(get_ipython().object_inspect_text('%%taas'))").stdout
    )
    assert (
        "did you mean %taas status?" in notebook.run("%taas stauts").stderr + notebook._ran.evalue
    )


def test_logs_have_all_ranks_complete_and_in_order(notebook: Notebook) -> None:
    """What the cell did not show is kept, tagged with its rank."""
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2 --name kept
            import os
            for i in range(5000): print(os.environ['RANK'], i)
            status = os.system('echo from a shell')
        """)
    )
    expected = "".join(f"0 {i}\n" for i in range(5000)) + "from a shell\n"
    assert ran.own == expected
    assert notebook.good("%taas logs kept --rank 1").own == expected.replace("0 ", "1 ", 1).replace(
        "\n0 ", "\n1 "
    )
    both = terminal("logs", "kept").stdout.splitlines()
    assert [line for line in both if line.startswith("[rank 1] ")][-1] == "[rank 1] from a shell"
    assert len(both) == 10002
    assert terminal("logs", "kept", "--rank", "7").returncode == 2


def test_top_is_drawn_anew(notebook: Notebook) -> None:
    """In a terminal until the run is over, in a notebook as a display.

    It has a row for each rank, with its last line.
    """
    notebook.good(
        block("""
            #pragma taas --gpus 2 --background --name drawn
            import os, time
            from pathlib import Path
            print('here is', os.environ['RANK'])
            while not Path('end').exists(): time.sleep(0.05)
        """)
    )
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "taas.cli", "top", "drawn"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its) as drawing:
        os.close(its)
        drawn = b""
        while not re.search(rb"1 +running +\d+ % .* here is 1\s.*\x1b\[H\x1b\[J", drawn, re.DOTALL):
            drawn += os.read(ours, 4096)
        [shown] = notebook.good("%taas top drawn").displays
        assert "here is 1" in shown["data"]["text/html"]
        notebook.folder.joinpath("end").touch()
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes there any more
            while True:
                drawn += os.read(ours, 4096)
        assert drawing.wait(60) == 0
    os.close(ours)
    assert "drawn done" in drawn.rpartition(b"\x1b[J")[2].decode()
    notebook.good("%taas attach drawn")
    drawn_run = next(run for run in read_records() if run.name == "drawn")
    assert read_curves(drawn_run.folder).busy, "what %taas history draws was not kept"


def test_release_gives_warm_machines_back(notebook: Notebook) -> None:
    """The next run starts new ones. Kept ranks go, too, and what cells have started below them."""
    notebook.good(
        block("""
            #!g1.1
            #pragma taas --gpus 2 --keep
            import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)
        """)
    )
    found = notebook.processes()
    assert (len(found.agents), len(found.others)) == (2, 2)
    assert "2 kept ranks ended" in notebook.good("%taas release").stdout
    assert gone(found.agents + found.others)
    assert notebook.good("#pragma taas --gpus 1\nprint('again')").own == "again\n"


def test_types_are_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``types`` names each instance type with its GPUs, those of ``taas.toml``, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taas.toml").write_text(
        '[instances."x1.2"]\nvcpus = 16\ngpus = 2\ngpu_model = "L40S"\n'
    )
    rows = [line.split() for line in terminal("types").stdout.splitlines()]
    assert ["#!g2.8", "8", "A100", "224", "8,", "16,", "32"] in rows
    assert ["#!g1.1", "1", "V100", "8", "1,", "2,", "4"] in rows
    assert ["#!c1.4", "4"] in rows
    assert rows[-1] == ["#!x1.2", "2", "L40S", "16", "2,", "4,", "8"]


def test_the_settings_say_where_they_were_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, by the user's file or by the project's, which wins.

    A header sets them for one cell.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for folder, said in (
        ("config/taas", "hang_timeout = 60\nmax_restarts = 1"),
        (".", 'hang_timeout = "5min"'),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "taas.toml").write_text(f"[run]\n{said}\n")
    rows = [re.split("  +", line) for line in terminal("config").stdout.splitlines()]
    assert ["run.hang_timeout = 300.0", str(tmp_path / "taas.toml"), "--hang-timeout"] in rows
    assert [
        "run.max_restarts = 1",
        str(tmp_path / "config/taas/taas.toml"),
        "--max-restarts",
    ] in rows
    assert ['storage.rank_writes = "discard"', "default", "--rank-writes"] in rows
    assert ["keep.idle = 1800.0", "default"] in rows


def test_the_terminal_teaches_and_fails_with_a_status(tmp_path: Path) -> None:
    """``taas --help`` is the same table; a wrong verb is status 2."""
    assert "stacks [RUN]" in terminal("--help").stdout
    wrong = terminal("stauts")
    assert wrong.returncode == 2
    assert wrong.stderr == "taas: taas stauts: there is no such verb; did you mean taas status?\n"
    assert "type %taas engine in a notebook" in terminal("engine", "local").stderr

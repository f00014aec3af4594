"""Runs without progress: the cell says which rank is the odd one, and goes on until told to end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from blocks import block
from notebook_harness import Notebook, Ran, terminal

from taas.notebook.view import tables
from taas.runs.records import read_records

pytestmark = pytest.mark.slow

HEADER = "#pragma taas --gpus 3 --hang-timeout 2\n"
GROUP = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group('gloo')
rank = dist.get_rank()
print('ready', flush=True)
"""


def wait_for_trouble(notebook: Notebook, seconds: float = 150) -> dict[str, str]:
    """Wait until the running cell's live view says that something is wrong; returns the view."""
    deadline = time.monotonic() + seconds
    while True:
        for update in reversed(notebook._ran.updates):
            if "The run goes on" in update["data"]["text/plain"]:
                data: dict[str, str] = update["data"]
                return data
        assert not notebook._next(deadline), f"the cell ended: {notebook._ran}"


def interrupt(notebook: Notebook) -> Ran:
    """End the hanging run."""
    notebook.interrupt()
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    return ran


def stays(notebook: Notebook, said: str) -> None:
    """The report is in the cell, in the record and in the history after the run was ended."""
    ran = interrupt(notebook)
    last = ran.updates[-1]["data"]
    assert "interrupted" in last["text/plain"].splitlines()[0]
    assert "! before it ended: " in last["text/plain"]
    assert said in last["text/plain"]
    assert "<details " in last["text/html"]
    record = max(read_records(), key=lambda record: record.submitted)
    assert record.trouble is not None
    assert said in "\n".join(map(str, (record.trouble.headline, *record.trouble.places)))
    assert record.trouble.headline in tables.history([record]).text


def test_a_rank_that_skips_a_collective_is_named(notebook: Notebook) -> None:
    """Ranks that wait in a collective are folded.

    The one that has gone on to sleep is the odd one.
    """
    notebook.start(
        HEADER
        + GROUP
        + "if rank == 1:\n    time.sleep(600)\nelse:\n    dist.all_reduce(torch.ones(1))\n"
    )
    view = wait_for_trouble(notebook)
    text = view["text/plain"]
    assert "no rank has made progress for 2 s" in text
    assert "ranks 0, 2: all_reduce, cell line 9" in text
    assert "rank 1: cell line 7: time.sleep(600)   <- differs" in text
    assert "<details " in view["text/html"]
    stays(notebook, "rank 1: cell line 7: time.sleep(600)   <- differs")


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason="this torch keeps no record of gloo",
)
def test_a_collective_that_differs_is_named(notebook: Notebook) -> None:
    """Where ranks wait in different ones, each is named.

    Operation, types and shapes, and which of its group's it is.
    """
    notebook.start(
        HEADER + GROUP + "dist.all_reduce(torch.ones(2))\n"
        "if rank == 1: dist.broadcast(torch.ones(6, 2), 0)\nelse: dist.all_reduce(torch.ones(4))\n"
    )
    text = wait_for_trouble(notebook)["text/plain"]
    assert "ranks 0, 2: all_reduce of Float[4], number 2, cell line 8" in text
    assert "rank 1: broadcast of Float[6, 2], number 2, cell line 7   <- differs" in text
    stays(notebook, "rank 1: broadcast of Float[6, 2], number 2, cell line 7   <- differs")


def test_a_rank_that_never_comes_is_named(notebook: Notebook) -> None:
    """A rank has ended the cell, and the others wait for it to make the group: that cannot end."""
    notebook.start(
        HEADER
        + "import os, torch.distributed as dist\n"
        + "if os.environ['RANK'] != '2':\n    dist.init_process_group('gloo')\n"
    )
    text = wait_for_trouble(notebook)["text/plain"]
    assert "rank 2 ended the cell, and ranks 0–1 wait in a collective that cannot end" in text
    assert "ranks 0–1: init_process_group, cell line 4" in text
    stays(notebook, "rank 2 ended the cell, and ranks 0–1 wait in a collective that cannot end")


def test_a_rank_that_swallowed_its_error_and_left_is_named(notebook: Notebook) -> None:
    """With gloo the others' collective fails when a rank leaves: the error says who had left."""
    ran = notebook.run(
        HEADER
        + GROUP
        + "try:\n"
        + "    if rank == 2: raise ValueError('swallowed')\n"
        + "    dist.all_reduce(torch.ones(1))\n"
        + "except ValueError:\n    pass\n"
    )
    assert ran.ename == "CellFailed"
    assert ran.evalue.startswith("rank 2 had ended the cell before rank ")
    said = ran.traceback[ran.traceback.index("RuntimeError: ") :].splitlines()
    assert said[-1].startswith("CellFailed: rank 2 had ended the cell before rank ")
    assert "raised the RuntimeError above." in said[-1]
    assert ran.traceback.count(said[0].removeprefix("RuntimeError: ")) == 1


def test_a_stopped_rank_is_named(notebook: Notebook) -> None:
    """SIGSTOP is seen from outside, and how to go on is said; after SIGCONT the run ends well."""
    notebook.start(
        HEADER
        + GROUP
        + block("""
            dist.barrier()
            print('together')
            while not os.path.exists('go'):  # that is progress
                print('waits', flush=True)
                time.sleep(0.1)
            for _ in range(3): dist.all_reduce(torch.ones(1))
        """)
    )
    notebook.wait_for("together")
    ranks = sorted(notebook.processes().ranks, key=lambda process: process.pid)
    os.kill(ranks[-1].pid, signal.SIGSTOP)
    (notebook.folder / "go").touch()
    text = wait_for_trouble(notebook)["text/plain"]
    assert "stopped: somebody sent SIGSTOP" in text
    assert f"kill -CONT {ranks[-1].pid}" in text
    os.kill(ranks[-1].pid, signal.SIGCONT)
    ran = notebook.end()
    assert ran.status == "ok", ran
    assert max(read_records(), key=lambda record: record.submitted).trouble is None
    assert "SIGSTOP" not in ran.updates[-1]["data"]["text/plain"]


def test_a_rank_that_computes_or_prints_is_not_hung(notebook: Notebook) -> None:
    """Processor time or output is progress, however long the collective takes that waits for it."""
    ran = notebook.good(
        "#pragma taas --gpus 2 --hang-timeout 2\n" + GROUP + "if rank == 0:\n"
        "    end = time.monotonic() + 3\n"
        "    while time.monotonic() < end: sum(range(1000))\n"
        "dist.barrier()\n"
        "if rank == 1:\n"
        "    for i in range(15):\n"
        "        print(i, flush=True); time.sleep(0.2)\n"
        "dist.barrier()\n"
    )
    assert not any("The run goes on" in update["data"]["text/plain"] for update in ran.updates)


def test_stacks_are_shown_also_while_c_code_holds_the_gil(
    notebook: Notebook, tmp_path: Path
) -> None:
    """``taas stacks`` from a terminal shows the lines of the cell."""

    notebook.good(f"came = {str(tmp_path)!r} + '/'")
    line = "open(came + rank, 'w').close(); sum(range(10**13))"
    notebook.start(
        "#pragma taas --gpus 2 --name deep\n"
        "import os\n"
        "rank = os.environ['RANK']\n"
        "def f():\n"
        f"    {line}\n"
        "f()"
    )
    while len(list(tmp_path.iterdir())) < 2:  # where it is seen, the rank is in that line
        time.sleep(0.05)
    done = terminal("stacks", "deep")
    assert done.returncode == 0, done.stderr
    assert f"ranks 0–1: cell line 5: {line}" in done.stdout
    assert "cell line 6: f()" in done.stdout
    notebook.interrupt()
    notebook.wait_for_line("press again to end it")
    interrupt(notebook)


@pytest.mark.parametrize(
    "waits",
    ["dist.all_reduce(torch.ones(1))", "dist.barrier()", "dist.broadcast(torch.ones(1), 1)"],
)
def test_who_waited_for_the_failed_rank_has_not_failed(notebook: Notebook, waits: str) -> None:
    """The others' collectives break off with it, or never end.

    The error says that they waited, and the line names the error.
    """
    ran = notebook.run(
        f"#pragma taas --gpus 3\n{GROUP}dist.barrier()\n"
        f"if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('boom')\n{waits}"
    )
    assert ran.ename == "CellFailed"
    assert re.search(
        r"The other 2 were waiting for it\.|1 other was waiting for it\.", ran.evalue
    ), ran.evalue
    assert "failed after it" not in ran.evalue
    line = ran.updates[-1]["data"]["text/plain"]
    assert re.search(r"failed: rank 1: cell line \d+: ValueError: boom · 3 ranks", line), line


def test_an_error_alone_blames_nobody_else(notebook: Notebook) -> None:
    """One rank, or all of them without waiting for each other."""
    ran = notebook.run("#pragma taas --gpus 1\nraise ValueError('boom')")
    assert "waiting" not in ran.evalue and "after it" not in ran.evalue
    ran = notebook.run("#pragma taas --gpus 2\nraise ValueError('boom')")
    assert "waiting" not in ran.evalue

"""Whatever breaks in a run: the cell says what, nothing is left of it, and the next cell runs."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_left(notebook: Notebook) -> Iterator[None]:
    """After each fault no rank is left.

    That a run in the same notebook succeeds shows the next test.
    """
    yield
    found = notebook.processes()
    assert not found.ranks
    assert gone(found.others)  # a resource tracker may be at its last work


@pytest.fixture(autouse=True, scope="module")
def next_cell_runs(notebook: Notebook) -> Iterator[None]:
    """So does one after them all."""
    yield
    ran = notebook.good(
        "#pragma taas --gpus 2\nimport os\nprint('world', os.environ['WORLD_SIZE'])"
    )
    assert ran.own == "world 2\n"


GROUP = """\
import os, signal, torch, torch.distributed as dist
dist.init_process_group('gloo'); rank = dist.get_rank()
"""
FAILS = {
    "an exception in one rank, while others wait": (
        f"{GROUP}if rank == 1:\n    raise ValueError('bad batch')\ndist.all_reduce(torch.ones(1))",
        "rank 1 raised ValueError: bad batch",
        ("line 5", "raise ValueError('bad batch')"),
    ),
    "one in all ranks": ("raise KeyError('all')", "raised KeyError: 'all'", ()),
    "a group of them": (
        "raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])",
        "",
        ("raise ExceptionGroup('both', ", "ValueError: a", "TypeError: b", "line 2"),
    ),
    "a status": ("import sys\nsys.exit(3)", "called sys.exit(3)", ()),
    "a rank that leaves without a word": (
        f"{GROUP}if rank == 1: os._exit(0)",
        "rank 1 left with status 0 before the cell ended",
        (),
    ),
    "a rank that is killed, and not those whose collective broke": (
        GROUP
        + block("""
            dist.barrier()
            if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
        """),
        "rank 2 was killed by SIGKILL: out of memory?",
        (),
    ),
}


@pytest.mark.parametrize("what", FAILS)
def test_what_failed_is_shown_on_the_cells_lines(notebook: Notebook, what: str) -> None:
    """The first failing rank's traceback is the cell's, once.

    Ranks that hang in a collective are ended.
    """
    body, said, parts = FAILS[what]
    ran = notebook.run(f"#pragma taas --gpus 3\n{body}")
    assert ran.ename == "CellFailed"
    assert said in ran.evalue
    for part in parts:
        assert part in ran.traceback
    assert "interactiveshell.py" not in ran.traceback
    assert ran.stderr == ""
    assert ran.traceback.count("KeyError                  ") == ("KeyError" in said)


BROKEN = "x = 1\ndef f(:\n"
OWN_CODE = {
    "a module that does not compile": (BROKEN, "import {module}", "def f(:"),
    "one whose body raises": ("x = 1\n1 / 0\n", "import {module}", "1 / 0"),
    "one that imports another which is broken": (
        "import importlib\nimportlib.import_module('broken_inside')\n",
        "import {module}",
        "def f(:",
    ),
    "one in which a function lives": (BROKEN, "function()", "def f(:"),
    "a class that cannot be made again": (
        "x = 1\n",
        "made.x",
        "raise ValueError('not in a rank')",
    ),
    "a function that a launcher calls": (
        "x = 1\n",
        (
            "def fails(rank):\n    raise ValueError('mine')\n"
            "import torch.multiprocessing as mp\nmp.spawn(fails, nprocs=2)"
        ),
        "raise ValueError('mine')",
    ),
}


@pytest.mark.parametrize("what", OWN_CODE)
def test_frames_of_taas_do_not_stand_above_the_users(notebook: Notebook, what: str) -> None:
    """The traceback leads from the cell, or from the import, to the user's line."""
    text, cell, shown = OWN_CODE[what]
    module = f"own_code_{[*OWN_CODE].index(what)}"
    file = notebook.folder / f"{module}.py"
    file.write_text("def function(): pass\n")
    (notebook.folder / "broken_inside.py").write_text(BROKEN)
    notebook.good(
        "class Odd:\n"
        "    def __getstate__(self): return {'x': 1}\n"
        "    def __setstate__(self, state):\n"
        "        import os\n"
        "        if 'RANK' in os.environ: raise ValueError('not in a rank')\n"
        f"made = Odd()\nfrom {module} import function"
    )
    file.write_text(text)
    ran = notebook.run(f"#pragma taas --gpus 2\n{cell.format(module=module)}")
    assert ran.ename == "CellFailed"
    assert shown in ran.traceback, ran.traceback
    assert "/taas/" not in ran.traceback
    assert "<frozen importlib" not in ran.traceback


def test_an_exception_of_an_earlier_cells_function_shows_its_lines(notebook: Notebook) -> None:
    """A traceback through a function of an earlier cell names that cell and its line."""
    notebook.good("def divide(a, b):\n    return a / b")
    ran = notebook.run("#pragma taas --gpus 2\ndivide(1, 0)")
    assert ran.ename == "CellFailed"
    assert "ZeroDivisionError" in ran.traceback
    assert "return a / b" in ran.traceback


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "exit()", "import sys; sys.exit()"])
def test_leaving_without_a_status_succeeds(notebook: Notebook, leave: str) -> None:
    """``sys.exit(0)`` and ``exit()`` are success."""
    ran = notebook.good(f"#pragma taas --gpus 2\nleft_at = 7\n{leave}")
    assert ran.stderr == ""
    assert notebook.value("left_at") == "7"


BUSY = {
    "python loop": "print('ready', flush=True)\nwhile True: pass",
    "C loop": "print('ready', flush=True)\nsum(range(10**13))",
    "C code that holds the GIL": (
        "import ctypes\nprint('ready', flush=True)\nctypes.PyDLL(None).sleep(600)"
    ),
    "deaf to SIGTERM": block("""
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print('ready', flush=True)
        while True: time.sleep(1)
    """),
    "await": "import asyncio\nprint('ready', flush=True)\nawait asyncio.sleep(600)",
}


@pytest.mark.parametrize("what", BUSY)
def test_interrupt(notebook: Notebook, what: str) -> None:
    """The interrupt button ends the ranks, whatever they are in, and raises KeyboardInterrupt.

    A save in one call of C is not cut at the first press, and a cell may ignore one.
    """
    notebook.start(f"#pragma taas --gpus 2\nimport time\n{BUSY[what]}")
    notebook.wait_for("ready")
    ranks = notebook.processes().ranks
    notebook.interrupt()
    if what not in ("python loop", "await"):
        notebook.wait_for_line("press again to end it")
        notebook.interrupt()
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    assert ran.traceback == f"KeyboardInterrupt: {ran.evalue}"
    assert gone(ranks, 0)


def test_a_forgotten_process_group_is_closed(notebook: Notebook) -> None:
    """A cell need not destroy its process group; nothing is printed about it."""
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2
            import torch.distributed as dist
            dist.init_process_group('gloo')
            dist.barrier()
        """)
    )
    assert ran.stderr == ""


def test_children_of_a_cell_end_with_it(notebook: Notebook) -> None:
    """A child with a session of its own, whose parent has gone, does not outlive the run."""
    notebook.good(
        block("""
            #pragma taas --gpus 1
            import subprocess
            child = subprocess.Popen(['sleep', '600'], start_new_session=True).pid
        """)
    )
    assert not psutil.pid_exists(int(notebook.value("child")))

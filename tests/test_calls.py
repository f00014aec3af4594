"""`taas.run` and `taas.submit`: a function of the notebook, or of a script, in ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook

pytestmark = pytest.mark.slow

SETUP = """
import json, os, taas, torch, time
from pathlib import Path
class Result:
    def __init__(self, rank, lr): self.rank, self.lr = rank, lr
def rank(): return int(os.environ["RANK"])
def train(net, lr=0.5):
    net.weight.data.fill_(lr)
    seen.append(lr)
    return Result(rank(), lr)
def wait_for(gate, value):
    while not Path(gate).exists():
        time.sleep(0.02)
    return value
net, seen = torch.nn.Linear(1, 1), []
"""


@pytest.fixture(scope="module", autouse=True)
def defined(notebook: Notebook) -> None:
    """The notebook has functions and classes, which all tests call."""
    notebook.good(SETUP)


def test_a_call_returns_rank_0s_value_and_changes_the_notebooks_objects(notebook: Notebook) -> None:
    """The value is of the notebook's class, aliases hold, and no name of ours is left."""
    notebook.good("w = net.weight\nr = taas.run(train, net, lr=2.0, gpus=2)")
    assert (
        notebook.value("type(r) is Result, r.rank, w.item(), w is net.weight, seen")
        == "True 0 2.0 True [2.0]"
    )
    assert notebook.value("[name for name in globals() if 'train' in name]") == "['train']"


def test_every_ranks_value(notebook: Notebook) -> None:
    """With collect they come as a list, in the order of ranks."""
    assert (
        notebook.value("[r.rank for r in taas.run(train, net, gpus=2, collect=True)]") == "[0, 1]"
    )


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            "taas.run(train, net, gpu=2)",
            "TypeError: train(net, lr=0.5): got an unexpected keyword argument",
        ),
        ("taas.run(train, net, gpu=2)", "did you mean the option gpus?"),
        (
            "taas.run(train, gpus=2)",
            "TypeError: train(net, lr=0.5): missing a required argument: 'net'",
        ),
        ("taas.run(train, net, gpus=12, on='g2.8')", "--gpus 12"),
        (
            "taas.run(train, net, gpus=2, background=True)",
            "taas.submit is what runs in the background",
        ),
        (
            "taas.run(train, net, gpus=2, setup=True)",
            "head a cell of its own with #pragma taas --setup",
        ),
        ("taas.submit(train, net, gpus=2, keep=True)", "leave it out"),
        ("taas.run(lambda name: 1, name='a')", "a parameter of <lambda> as well"),
        ("taas.run(lambda collect=0: 1, collect=True)", "a parameter of <lambda> as well"),
        ("taas.submit(lambda collect=0: 1, collect=True)", "a parameter of <lambda> as well"),
        ("taas.run(3, gpus=2)", "TypeError: taas.run takes a function, and a int is none"),
        ("taas.submit(rank, gpus=2, units=5)", "no DataLoader is registered"),
    ],
)
def test_a_wrong_call_starts_nothing(notebook: Notebook, call: str, error: str) -> None:
    """It says what to write instead."""
    ran = notebook.run(call)
    assert error in f"{ran.ename}: {ran.evalue}"
    assert "acquiring" not in ran.stdout


def test_options_that_say_nothing_new_change_nothing(notebook: Notebook) -> None:
    """An option may be False, and a path an object."""
    call = "taas.run(rank, gpus=2, shared=Path('mine'), rehearse=False, name=None)"
    assert notebook.value(call) == "0"
    assert notebook.value("taas.run(rank, gpus=2, shared=['mine', Path('yours')])") == "0"
    assert notebook.value("taas.submit(rank, gpus=2, keep=False).result(120)") == "0"


THREADS = """
from concurrent.futures import ThreadPoolExecutor
def twice(n): return 2 * n
pool = ThreadPoolExecutor(3)
"""


def test_threads_take_turns(notebook: Notebook) -> None:
    """Each call has its own arguments and its own value, be it run, submitted, or waited for."""
    notebook.good(THREADS)
    ran = notebook.good("list(pool.map(lambda n: taas.run(twice, n, gpus=1), range(3)))")
    assert ran.result is not None
    assert ran.result["text/plain"] == "[0, 2, 4]"
    assert "another thread of this notebook runs something in ranks" in ran.stdout
    notebook.good("runs = list(pool.map(lambda n: taas.submit(twice, n, gpus=1), range(3)))")
    assert notebook.value("list(pool.map(lambda run: run.result(120), runs))") == "[0, 2, 4]"
    assert notebook.value("[name for name in globals() if 'twice' in name]") == "['twice']"


def test_a_run_that_was_removed_is_no_run_to_wait_for(notebook: Notebook) -> None:
    """Whether the handle has seen its end or not: it is done, and says what became of it."""
    notebook.good(
        "import shutil\n"
        "def record(run): return json.loads((run.folder / 'record.json').read_text())\n"
        "seen_end, unseen = [taas.submit(rank, gpus=1) for _ in range(2)]\n"
        "seen_end.result(120)\n"
        "while record(unseen)['state'] != 'over': time.sleep(0.02)\n"
        "for run in (seen_end, unseen): shutil.rmtree(run.folder)"
    )
    assert notebook.value("seen_end.done(), unseen.done()") == "True True"
    for run in ("seen_end", "unseen"):
        assert notebook.value(f"{run}.exception(5).run == {run}.name") == "True"
        ran = notebook.run(f"{run}.result(5)")
        assert ran.ename == "RunLost"
        assert "is not there any more" in ran.evalue


def test_logs_of_a_rank_that_there_is_not(notebook: Notebook) -> None:
    """They are refused, not another rank's."""
    notebook.good("run = taas.submit(rank, gpus=2); run.result(120);")
    for number in (-1, 2):
        ran = notebook.run(f"run.logs({number})")
        assert f"has no rank {number}: its 2 ranks are numbered from 0" in ran.evalue


def test_an_error_is_the_ranks_own(notebook: Notebook) -> None:
    """It is raised with the lines of the notebook's function; its arguments are changed here."""
    ran = notebook.run(
        "def bad(l):\n    l.append(1)\n    return 1 / 0\nl = []\ntaas.run(bad, l, gpus=2)"
    )
    assert ran.ename == "CellFailed"
    assert "return 1 / 0" in ran.traceback
    assert notebook.value("l") == "[1]"


def test_a_value_that_cannot_come_back_is_named(notebook: Notebook) -> None:
    """The run has ended well; what it returned is refused by name."""
    ran = notebook.run("def opened(): return open('/dev/null')\ntaas.run(opened, gpus=2)")
    assert ran.ename == "CaptureError"
    assert "what opened() returned in rank 0 cannot come back" in ran.evalue
    ran = notebook.run("h = taas.submit(opened, gpus=2)\nh.result()")
    assert ran.ename == "CaptureError"
    assert "Return what pickle can carry" in ran.evalue


def test_a_submitted_run_is_a_future(notebook: Notebook) -> None:
    """Result, exception, done, logs, by rank; nothing of the notebook changes."""
    notebook.good(
        block("""
            seen.clear(); net.weight.data.fill_(7.0)
            def talk(x): print('I am', rank()); return train(net, x)
            h = taas.submit(talk, 3.0, gpus=2, name='talk')
            r = h.result(120)
        """)
    )
    assert (
        notebook.value("type(r) is Result, r.lr, seen, net.weight.item(), h.done(), h.exception()")
        == "True 3.0 [] 7.0 True None"
    )
    assert notebook.value("repr(h.logs()), repr(h.logs(rank=1))") == r"'I am 0\n' 'I am 1\n'"
    assert ".result() of this handle is what it returned" in notebook.good("print(h)").stdout


def test_runs_wait_for_processors_in_their_order(notebook: Notebook, tmp_path: Path) -> None:
    """Without GPUs a processor counts as one: runs of all of them follow each other.

    One that waits can be stopped.
    """
    ranks = len(os.sched_getaffinity(0))
    notebook.good(
        block(f"""
            gate = {str(tmp_path / "gate")!r}
            runs = [taas.submit(wait_for, gate, n, gpus={ranks}, name=f'q{{n}}') for n in range(4)]
        """)
    )
    first_runs = "import time\nwhile 'running' not in repr(runs[0]): time.sleep(0.02)\n"
    shown = notebook.good(f"{first_runs}print(runs[1]); print(runs[3]); runs[2].stop()")
    assert f"waiting for {ranks} processors, which other runs have." in shown.stdout
    assert "which other runs have and behind 2 runs" in shown.stdout
    assert "%taas stop q1 gives up." in shown.stdout
    stopped = notebook.run("runs[2].result(60)")
    assert stopped.ename == "RunStopped"
    assert "q2 was stopped from its handle while it waited for devices" in stopped.evalue
    late = notebook.run("runs[3].result(0.1)")
    assert late.ename == "TimeoutError"
    assert notebook.value("runs[1].done()") == "False"
    (tmp_path / "gate").touch()
    assert notebook.value("[runs[n].result(120) for n in (0, 1, 3)]") == "[0, 1, 3]"
    ends = (
        "[json.loads((r.folder / 'record.json').read_text())['ended'] for r in (runs[0], runs[1],"
        " runs[3])]"
    )
    assert notebook.value(f"(ends := {ends}.copy()) == sorted(ends)") == "True"


def test_a_run_that_goes_on_is_stopped(notebook: Notebook, tmp_path: Path) -> None:
    """Its function is interrupted, as the cell of a run."""
    never = tmp_path / "never"
    ran = notebook.run(
        block(f"""
            h = taas.submit(wait_for, {str(never)!r}, 1, gpus=2)
            import time
            while 'running' not in repr(h): time.sleep(0.02)
            h.stop(); h.result(60)
        """)
    )
    assert ran.ename == "RunStopped"
    assert "stopped from its handle" in ran.evalue


SCRIPT = """
import os
import taas

class Point:
    def __init__(self, x): self.x = x

def square(point):
    point.x **= 2
    return [int(os.environ["RANK"]), point.x]

if __name__ == "__main__":
    point = Point(3)
    print(taas.run(square, point, gpus=2), point.x)
    print([run.result() for run in [taas.submit(square, Point(n), gpus=2) for n in (4, 5)]])
"""


def test_in_a_script(tmp_path: Path) -> None:
    """`python train.py` runs its own functions in ranks, and ends with nothing left."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    own = [line for line in done.stdout.splitlines() if not line.startswith("taas: ")]
    assert own == ["[0, 9] 9", "[[0, 16], [0, 25]]"]

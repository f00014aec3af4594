"""Processes forked ahead: the next run uses them, as fresh ones, and leaves none."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone, there

from taas.rank import lifeline

pytestmark = pytest.mark.slow

STATE = """
import json, os, random, signal, sys, threading, tempfile
import numpy, torch
state = {
    "environ": {k: v for k, v in os.environ.items() if k not in
                ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "EXTRA")},
    "cwd": os.getcwd(), "path": sys.path, "argv": sys.argv, "umask": os.umask(0o22),
    "random": random.random(), "numpy": numpy.random.rand(), "torch": torch.rand(1).item(),
    "sigint": str(signal.getsignal(signal.SIGINT)), "threads": threading.active_count(),
    "name": __name__, "temporary": tempfile.gettempdir(), "leads": os.getsid(0) == os.getpid(),
    "comm": open("/proc/self/comm").read(), "stdin": sys.stdin.read(),
    "count": get_ipython().execution_count > 0,
    "names": sorted(k for k in globals() if k != "state" and not k.strip("_i").isdigit()),
    "modules": "settings" in sys.modules,
    "open": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in (0, 1, 2)),
}
state["umask"] = [state["umask"], os.umask(state["umask"])][0]
open(f"{folder}/{os.environ['RANK']}", "w").write(json.dumps([os.getpid(), state]))
"""


@pytest.fixture
def folder(notebook: Notebook, tmp_path: Path) -> Path:
    """A folder outside the project, which the notebook and its ranks know as ``folder``."""
    notebook.good(f"folder = {str(tmp_path)!r}")
    return tmp_path


def run_and_wait(notebook: Notebook, body: str = "pass", ranks: int = 2) -> set[int]:
    """Run a cell, and wait until as many spares are ready; returns their process ids."""
    notebook.good(f"#pragma taas --gpus {ranks} --return none\n{body}")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        spares = [spare for spare in notebook.processes().spares if _waits(spare)]
        if len(spares) >= ranks:
            return {spare.pid for spare in spares}
        time.sleep(0.05)
    raise AssertionError(f"no spares: {notebook.processes()}")


def _waits(spare: psutil.Process) -> bool:
    """Whether it is one, and waits for its order.

    Some of an earlier test may be ended at this moment.
    """
    try:
        return spare.name() == lifeline.SPARE_NAME and spare.status() == psutil.STATUS_SLEEPING
    except psutil.NoSuchProcess:
        return False


def states(folder: Path) -> tuple[set[int], list[object]]:
    """What ranks 0 and 1 wrote: their process ids and what they found."""
    import json

    both = [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]
    return {pid for pid, _ in both}, [state for _, state in both]


def test_the_next_run_uses_them_and_finds_what_fresh_ranks_find(
    notebook: Notebook, folder: Path
) -> None:
    """Environment, signals, names, random numbers, descriptors are as in a fresh rank."""
    seeds = (
        "import random, numpy, torch\nrandom.seed(3); numpy.random.seed(4); torch.manual_seed(5);"
    )
    spares = run_and_wait(notebook)
    notebook.good(seeds)
    notebook.good("#pragma taas --gpus 2 --return none\n" + STATE)
    pids, of_spares = states(folder)
    assert pids == spares
    unfit = run_and_wait(notebook)
    # another environment: none of these fits
    notebook.good(seeds + "\nimport os; os.environ['EXTRA'] = '1'")
    notebook.good("#pragma taas --gpus 2 --return none\n" + STATE)
    fresh, of_fresh = states(folder)
    assert not fresh & (spares | unfit)
    assert gone(there(unfit))
    assert of_spares == of_fresh
    notebook.good("del os.environ['EXTRA']")


LEFT = """
import os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/tmp/torchinductor_somebody"
os.environ["TRITON_CACHE_DIR"] = "/tmp/torchinductor_somebody/triton/0"
os.environ["CUDA_MODULE_LOADING"] = "LAZY"
os.environ["WANDB_SERVICE"] = f"3-{os.getpid()}-unix-/tmp/wandb"
"""


def test_a_compiler_in_a_rank_throws_no_spares_away(notebook: Notebook) -> None:
    """What libraries leave in the environment of ranks makes the next cell no cold one."""
    run_and_wait(notebook)
    notebook.good(f"#pragma taas --gpus 2\n{LEFT}")
    spares = run_and_wait(notebook)
    assert int(notebook.good("#pragma taas --gpus 2\nprint(os.getpid())").own) in spares


READ_AT_IMPORT = {
    "TORCHINDUCTOR_MAX_AUTOTUNE": "torch._inductor.config.max_autotune",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "torch._inductor.config.coordinate_descent_tuning",
    "TORCHDYNAMO_VERBOSE": "torch._dynamo.config.verbose",
    "TORCHDYNAMO_PREPARE_FREEZING": "torch._dynamo.config.prepare_freezing",
}


def test_settings_of_compilers_hold_in_ranks(notebook: Notebook) -> None:
    """Variables that torch's compiler reads at import work in ranks, until they are unset."""
    sets = "\n".join(f"os.environ[{name!r}] = '1'" for name in READ_AT_IMPORT)
    seen = block(f"""
        #pragma taas --gpus 2
        import torch._inductor.config
        print(({", ".join(READ_AT_IMPORT.values())}))
    """)
    notebook.good(f"import os\n{sets}")
    assert notebook.good(seen).own == "(True, True, True, True)\n"
    notebook.good(f"for name in {[*READ_AT_IMPORT]}: del os.environ[name]")
    assert notebook.good(seen).own == "(False, False, False, False)\n"

"""Whoever of taas is killed, stopped or starved, whatever it is at.

The cell ends, nothing is left, the next one runs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_table import CELLS, DATA_HELPERS, HELPERS, STEPPING, Fault, Stage, kernel_deaths, table
from notebook_harness import gone

pytestmark = pytest.mark.slow
MORE = os.environ.get("TAAS_FAULTS")
COUNT = int(MORE or ("3" if "TAAS_FEW" in os.environ else "10"))
SEED = int(os.environ.get("TAAS_FAULTS_SEED", "1" if MORE is None else "0"))
"""Read before conftest.py takes what is the user's own out of the environment."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A notebook for all rows that it survives."""
    stage = Stage(tmp_path_factory.mktemp("project"))
    yield stage
    stage.check_next()
    stage.close()


@pytest.fixture
def own_stage(tmp_path: Path) -> Iterator[Stage]:
    """A notebook of this test alone, which kills its kernel."""
    stage = Stage(tmp_path)
    yield stage
    stage.notebook.close()


@pytest.mark.slow(rows=2)
@pytest.mark.parametrize("fault", kernel_deaths(), ids=str)
def test_a_kernel_that_dies_after_a_fault(own_stage: Stage, fault: Fault) -> None:
    """Nothing of taas outlives the kernel, and of what the cell started, be it stopped or not.

    These rows come first: while there is another notebook, its processes are found, too.
    """
    own_stage.reach(fault.state)
    everybody = own_stage.everybody()
    own_stage.strike(fault)
    own_stage.notebook.kill()
    assert gone(everybody)


@pytest.mark.parametrize("fault", table(), ids=str)
def test_a_fault(stage: Stage, fault: Fault) -> None:
    """The cell ends as the table says, and so it says; no process of the run is left.

    The next cell runs.
    """
    stage.reach(fault.state)
    found = stage.notebook.processes()
    stage.strike(fault)
    if fault.how == "SIGKILL" and fault.who in ("supervisor", "agent", "forkserver"):
        assert gone(found.spares + (found.ranks if fault.state == "kept" else [])), (
            "they die with whom they belong to"
        )
    ran = stage.follow(fault.then)
    assert ran.ename in fault.ends, ran
    assert fault.says in ran.evalue + ran.stdout
    if fault.then == "goes on" and not ran.ename and fault.state != "idle":
        assert stage.notebook.value("got in (place, held)") == "True"
    stage.check()


@pytest.mark.timeout(7200)  # a hundred of them take a while
def test_random_faults(stage: Stage) -> None:
    """Two of them at once, the same in every run.

    ``TAAS_FAULTS=100`` for others and more, ``TAAS_FAULTS_SEED`` for those again.
    """
    seed = SEED or random.randrange(1, 1 << 32)
    print(f"TAAS_FAULTS_SEED={seed}")
    dice = random.Random(seed)
    for _ in range(COUNT):
        state = dice.choice(list(CELLS))
        stage.reach(state)
        whom = [*HELPERS, *(DATA_HELPERS if state == "delivering" else ())]
        faults = [
            Fault(state, who, dice.choice(("SIGKILL", "SIGSTOP")), "")
            for who in dice.sample(whom, dice.randint(1, 2))
        ]
        for fault in faults:
            print(fault, flush=True)
            stage.strike_if_there(fault)
        ends = "release" if state in ("idle", "kept") else "interrupt"
        stopped = any(fault.how == "SIGSTOP" for fault in faults)
        ran = stage.follow(ends if stopped else dice.choice((ends, "goes on")))
        assert ran.ename in ("", "KeyboardInterrupt", "RunLost", "CellFailed"), ran
        stage.check()


@pytest.mark.timeout(7200)
def test_random_interrupts(stage: Stage) -> None:
    """One or two presses, at any moment from the capture of the cell to after its end.

    What the notebook has then is one state of rank 0, or what it had before.
    """
    seed = SEED or random.randrange(1, 1 << 32)
    print(f"TAAS_FAULTS_SEED={seed}")
    dice = random.Random(seed)
    for _ in range(COUNT):
        state, moment = dice.choice(list(STEPPING)), dice.uniform(0, 3)
        again = dice.choice((None, None, dice.uniform(0, 1)))
        print(f"{state} after {moment:.2f} s", "" if again is None else f"and {again:.2f} s")
        ran = stage.interrupt_at(state, moment, again)
        assert ran.ename in ("", "KeyboardInterrupt"), ran.traceback
        stage.check()

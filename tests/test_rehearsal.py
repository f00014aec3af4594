"""What programs written for GPUs do in rehearsed ranks.

* Programs of one rank stand in ``rehearsal_programs.py``, of two ranks in
  ``rehearsal_programs_ranks.py``.
* Every line of the table in docs/rehearsal.md is executed.
* That frameworks train shows the gallery (``test_gallery.py``).
"""

from __future__ import annotations

import ast
import importlib
import os
import traceback
from pathlib import Path

import pytest
import rehearsal_table
from ranks_harness import run_ranks

from taas.engines.gpus import visible_gpus

pytestmark = pytest.mark.usefixtures("warm")
ONE, TWO = "rehearsal_programs", "rehearsal_programs_ranks"
AS_ON_GPUS = ("what_goes_to_the_gpu_is_a_copy", "forked_children_have_no_cuda")
LINES = rehearsal_table.lines()
OK = "ok"


def programs(module: str) -> list[str]:
    """The names of the programs of a file, in order, without importing it."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if not name.startswith("_")]


def _verdicts(module: str, names: list[str]) -> dict[str, str]:
    """Run a file's programs in this rank, one after another.

    Returns ``"ok"`` of each, or its traceback.
    """
    loaded, found = importlib.import_module(module), {}
    for name in names:
        try:
            getattr(loaded, name)()
            found[name] = OK
        except BaseException as error:
            if int(os.environ["WORLD_SIZE"]) > 1:  # the others may wait for this rank now
                raise RuntimeError(f"program {name}") from error
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def alone(warm: None) -> dict[str, str]:
    """The verdicts of all programs for one rank."""
    return run_ranks(_verdicts, 1, ONE, programs(ONE))[0]


@pytest.fixture(scope="module")
def together(warm: None) -> dict[str, str]:
    """The verdicts of all programs for two ranks."""
    return run_ranks(_verdicts, 2, TWO, programs(TWO))[0]


@pytest.mark.parametrize("program", programs(ONE))
def test_one_rank(program: str, alone: dict[str, str]) -> None:
    """A program of one GPU finds what it relies on."""
    assert alone[program] == OK, alone[program]


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("program", AS_ON_GPUS)
def test_a_gpu_gives_the_same_answer(program: str) -> None:
    """What the rehearsal says of copies and of forks is what CUDA does."""
    [verdicts] = run_ranks(_verdicts, 1, ONE, [program], rehearsed=False)
    assert verdicts == {program: OK}


@pytest.mark.parametrize("program", programs(TWO))
def test_two_ranks(program: str, together: dict[str, str]) -> None:
    """A program of several GPUs finds what it relies on."""
    assert together[program] == OK, together[program]


# ---------------------------------------------------------------- the table of docs/rehearsal.md


@pytest.fixture(scope="module")
def of_the_table(warm: None) -> dict[str, str]:
    """The verdicts of all lines, executed in order in one rank with two devices."""
    names = [f"line_{number}" for number in range(len(LINES))]
    return run_ranks(_verdicts, 1, "rehearsal_table", names, devices=2)[0]


@pytest.mark.parametrize("number", range(len(LINES)), ids=[line.code for line in LINES])
def test_line_of_the_table(number: int, of_the_table: dict[str, str]) -> None:
    """The call does what the table says."""
    assert of_the_table[f"line_{number}"] == OK, of_the_table[f"line_{number}"]


def test_table_is_read_whole() -> None:
    """Every line of the table is understood; at least twenty calls are from tutorials."""
    text = rehearsal_table.DOCUMENT.read_text().split("## Calls")[1].split("\n## ")[0]
    assert len(LINES) == sum(line.startswith("| `") for line in text.splitlines())
    assert sum("torch.cuda" in line.code and bool(line.seen_in) for line in LINES) >= 20

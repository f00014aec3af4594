"""Random notebooks, with and without headers on random cells.

``TAAS_NOTEBOOKS=2000 pytest tests/test_random_notebooks.py --hypothesis-seed=7`` plays more of
them, or again. Without the variable they are the same in every run. Some cells raise, and later
ones miss what those did not get to.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from oracle import Program, compare
from oracle.grammar import notebooks

pytestmark = [pytest.mark.usefixtures("oracle"), pytest.mark.slow]
COUNT = int(os.environ.get("TAAS_NOTEBOOKS", "8" if "TAAS_FEW" in os.environ else "100"))


_SETTINGS = settings(
    max_examples=COUNT,
    phases=[Phase.generate],  # a notebook is small as it is
    database=None,
    derandomize="TAAS_NOTEBOOKS" not in os.environ,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def _compare(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        different = compare(program, Path(folder))
    for number, cell in enumerate(program.cells):
        note(f"# ---- cell {number}{', headed' * (number in program.headed)}\n{cell}")
    assert not different, "\n".join(different)


@pytest.mark.timeout(120 + 10 * COUNT)
@_SETTINGS
@given(program=notebooks())
def test_random_cells_in_ranks_leave_what_they_leave_in_the_notebook(program: Program) -> None:
    """Whatever ordinary code the cells are made of."""
    _compare(program)


@pytest.mark.timeout(120 + 10 * COUNT)
@settings(_SETTINGS, max_examples=COUNT // 2)
@given(program=notebooks(kept=True))
def test_random_cells_in_ranks_that_stay(program: Program) -> None:
    """Whatever the cells between have changed of what the ranks hold."""
    _compare(program)

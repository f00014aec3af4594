"""What programs written for GPUs do in rehearsed ranks.

* Programs of one rank stand in ``rehearsal_programs.py``, of two ranks in ``rehearsal_programs_ranks.py``.
* Every line of the table in docs/rehearsal.md is executed.
* That frameworks train shows the gallery (``test_gallery.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import rehearsal_ranks
import rehearsal_table

from taas.engines.local import visible_gpus

ONE, TWO = "rehearsal_programs", "rehearsal_programs_ranks"
AS_ON_GPUS = ("what_goes_to_the_gpu_is_a_copy", "forked_children_have_no_cuda")
LINES = rehearsal_table.lines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all programs for one rank."""
    return rehearsal_ranks.run(ONE, tmp_path_factory.mktemp("rehearsal"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all programs for two ranks."""
    return rehearsal_ranks.run(TWO, tmp_path_factory.mktemp("rehearsal"), ranks=2)


@pytest.mark.parametrize("program", rehearsal_ranks.programs(ONE))
def test_one_rank(program: str, alone: dict[str, str]) -> None:
    """A program of one GPU finds what it relies on."""
    assert alone[program] == rehearsal_ranks.OK, alone[program]


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("program", AS_ON_GPUS)
def test_a_gpu_gives_the_same_answer(program: str, tmp_path: Path) -> None:
    """What the rehearsal says of copies and of forks is what CUDA does."""
    verdict = rehearsal_ranks.run(ONE, tmp_path, devices=0, names=[program])[program]
    assert verdict == rehearsal_ranks.OK, verdict


@pytest.mark.parametrize("program", rehearsal_ranks.programs(TWO))
def test_two_ranks(program: str, together: dict[str, str]) -> None:
    """A program of several GPUs finds what it relies on."""
    assert together[program] == rehearsal_ranks.OK, together[program]


# ---------------------------------------------------------------- the table of docs/rehearsal.md


@pytest.fixture(scope="module")
def of_the_table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all lines, executed in order in one rank with two devices."""
    names = [f"line_{number}" for number in range(len(LINES))]
    return rehearsal_ranks.run(
        "rehearsal_table", tmp_path_factory.mktemp("rehearsal"), devices=2, names=names
    )


@pytest.mark.parametrize("number", range(len(LINES)), ids=[line.code for line in LINES])
def test_line_of_the_table(number: int, of_the_table: dict[str, str]) -> None:
    """The call does what the table says."""
    assert of_the_table[f"line_{number}"] == rehearsal_ranks.OK, of_the_table[f"line_{number}"]


def test_table_is_read_whole() -> None:
    """Every line of the table was understood, and at least twenty of its calls are from tutorials."""
    text = rehearsal_table.DOCUMENT.read_text().split("## Calls")[1].split("\n## ")[0]
    assert len(LINES) == sum(line.startswith("| `") for line in text.splitlines())
    assert sum("torch.cuda" in line.code and bool(line.seen_in) for line in LINES) >= 20

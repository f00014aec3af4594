"""What programs written for GPUs do in rehearsed ranks.

The programs stand in ``rehearsal_programs.py`` (one rank) and ``rehearsal_programs_ranks.py`` (two ranks).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import rehearsal_ranks
import torch

from taas.engines.local import visible_gpus

ONE, TWO = "rehearsal_programs", "rehearsal_programs_ranks"
AS_ON_GPUS = ("what_goes_to_the_gpu_is_a_copy", "what_is_on_the_gpu_stays", "forked_children_have_no_cuda")
NOT_BEFORE = {"attention_over_shards": "2.7", "fsdp2_shards_and_saves": "2.7"}
"""Programs that need a newer torch than the oldest that is supported: its DTensors gather the heads, its FSDP2 wants CUDA."""


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
    if torch.__version__ < NOT_BEFORE.get(program, "2"):
        pytest.skip(f"torch {torch.__version__} cannot do this on the CPU, newer ones can")
    assert together[program] == rehearsal_ranks.OK, together[program]

"""Frameworks train in two rehearsed ranks with nothing but what their own documentation says.

The programs stand in ``rehearsal_programs_<framework>.py``; each framework has interpreters of its own and makes
the process group itself.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import pytest
import rehearsal_ranks

FRAMEWORKS = ("lightning", "accelerate", "fastai", "torchvision")
PROGRAMS = [
    (framework, program)
    for framework in FRAMEWORKS
    for program in rehearsal_ranks.programs(f"rehearsal_programs_{framework}")
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Runs all programs of a framework at the first request for one of them."""

    @functools.cache
    def of(framework: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(framework)
        return rehearsal_ranks.run(f"rehearsal_programs_{framework}", folder, ranks=2, timeout=180)

    return of


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("framework", "program"), PROGRAMS)
def test_framework_trains(framework: str, program: str, verdicts: Callable[[str], dict[str, str]]) -> None:
    """The framework sees two GPUs and two ranks, and the loss falls."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed (pip install jupyter-taas[gallery])")
    verdict = verdicts(framework)[program]
    assert verdict == rehearsal_ranks.OK, verdict

"""docs/rehearsal.md says what happens: every line of its table is executed in a rehearsed rank."""

from __future__ import annotations

import pytest
import rehearsal_ranks
import rehearsal_table

LINES = rehearsal_table.lines()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of all lines, executed in order in one rank with two devices."""
    names = [f"line_{number}" for number in range(len(LINES))]
    return rehearsal_ranks.run(
        "rehearsal_table", tmp_path_factory.mktemp("rehearsal"), devices=2, names=names
    )


@pytest.mark.parametrize("number", range(len(LINES)), ids=[line.code for line in LINES])
def test_line_of_the_table(number: int, verdicts: dict[str, str]) -> None:
    """The call does what the table says."""
    assert verdicts[f"line_{number}"] == rehearsal_ranks.OK, verdicts[f"line_{number}"]


def test_table_is_read_whole() -> None:
    """Every line of the table was understood, and at least twenty of its calls are from tutorials."""
    text = rehearsal_table.DOCUMENT.read_text().split("## Calls")[1].split("\n## ")[0]
    assert len(LINES) == sum(line.startswith("| `") for line in text.splitlines())
    assert sum("torch.cuda" in line.code and bool(line.seen_in) for line in LINES) >= 20

"""Bars and tables that a library draws live in a rank: as in a notebook, and no more of them than an eye can see."""

from __future__ import annotations

from typing import Any

import pytest
from notebook_harness import Notebook

from taas.rank.outlet import Updates

BAR = """#pragma taas --gpus 2
import sys
from rich.progress import Progress
with Progress(auto_refresh=False) as progress:
    task = progress.add_task("steps", total=3000)
    for step in range(3000):
        progress.update(task, advance=1, refresh=True)
print("done")
"""


def test_updates_are_bounded_and_the_last_one_is_sent() -> None:
    """The first goes at once; of the others of a moment only the latest; each display has its own."""
    sent: list[Any] = []
    updates = Updates(lambda **arguments: sent.append(arguments))
    for number in range(1000):
        updates.update("a", {"number": number})
    updates.update("b", {"number": -1})
    updates.flush()
    assert sent[0] == {"number": 0}
    assert {"number": -1} in sent
    assert {"number": 999} in sent
    assert [one["number"] for one in sent if one["number"] >= 0] == sorted(
        one["number"] for one in sent if one["number"] >= 0
    )
    assert len(sent) < 100


@pytest.mark.slow
def test_a_rich_bar_is_one_display(notebook: Notebook) -> None:
    """No cursor movements in the text; the bar is HTML, changes in place, and ends where the loop ended."""
    ran = notebook.good(BAR)
    assert ran.own == "done\n"
    assert "\x1b" not in ran.stdout
    bars = [update for update in ran.updates if "steps" in update["data"]["text/plain"]]
    assert len({update["transient"]["display_id"] for update in bars}) == 1
    assert "100%" in bars[-1]["data"]["text/plain"]
    assert "<pre" in bars[-1]["data"]["text/html"]
    assert len(bars) < 1500


@pytest.mark.slow
def test_a_bar_that_is_to_vanish_does(notebook: Notebook) -> None:
    """A transient bar is empty at its end."""
    ran = notebook.good(BAR.replace("auto_refresh=False", "auto_refresh=False, transient=True"))
    bars = [update for update in ran.updates if not update["transient"]["display_id"].startswith("taas-")]
    assert bars[-1]["data"]["text/plain"] == ""


@pytest.mark.slow
def test_libraries_find_the_notebook_they_are_shown_in(notebook: Notebook) -> None:
    """What libraries ask for gives the same in the kernel and in a rank; Lightning's own question does not."""
    asked = """
import sys
from rich.console import Console
from fastprogress.core import IN_NOTEBOOK
from transformers.utils.import_utils import is_in_notebook
found = Console().is_jupyter, IN_NOTEBOOK, is_in_notebook(), type(get_ipython()).__name__
print(*found, hasattr(sys, "ps1"))
"""
    here = notebook.good(asked).own.split()
    assert here[:4] == ["True", "True", "True", "ZMQInteractiveShell"]
    assert notebook.good("#pragma taas --gpus 1" + asked).own.split() == [*here[:4], "False"]

"""`%load_ext taas` starts what the first cell will need, at a low priority; what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, Processes, gone, until

pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook that has not loaded taas."""
    book = Notebook(tmp_path)
    try:
        yield book
    finally:
        book.close()


def _warm(book: Notebook) -> Processes:
    """Wait until there is a forkserver."""
    until(lambda: book.processes().forkservers)
    return book.processes()


def test_the_first_cell_finds_what_load_ext_started(book: Notebook) -> None:
    """Its ranks are forked from that forkserver; the machine has one agent."""
    book.good("%load_ext taas")
    before = _warm(book)
    assert book.good("#pragma taas --gpus 2\nprint('there')").own == "there\n"
    after = book.processes()
    assert (after.supervisor, after.agents) == (before.supervisor, before.agents)
    assert len(after.forkservers) == 1


def test_unload_ext_ends_it(book: Notebook) -> None:
    """Agent and forkserver go."""
    book.good("%load_ext taas")
    found = _warm(book)
    book.good("%unload_ext taas")
    assert gone(found.agents + found.forkservers)


def test_nothing_is_started_for_another_engine(book: Notebook) -> None:
    """The VMs of a cluster are asked for by a run; a plain import starts nothing either."""
    book.good("import os; os.environ['TAAS_ENGINE'] = 'ray 10.0.0.1:6379'\n%load_ext taas")
    book.good("import taas\nfrom taas.notebook import supervisor_client")
    assert book.value("supervisor_client._ahead, supervisor_client._current") == "None None"

"""What of a notebook's names stays in ranks that stay: what travels, what is deleted, and what is let go."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle.kept import Group

from taas.capture.memory import MemoryTable


class Notebook:
    """Names, and two ranks that stay."""

    def __init__(self, folder: Path) -> None:
        self.main = sys.modules["__main__"] = types.ModuleType("__main__")
        self.group = Group(2, folder)
        self.sizes = self.group.sizes

    def here(self, code: str) -> None:
        """Run a cell in the notebook."""
        exec(compile(code, "<cell>", "exec"), self.main.__dict__)

    def there(self, cell: str) -> Any:
        """Run a cell in the ranks."""
        return self.group.run(cell, None)

    def __getitem__(self, name: str) -> Any:
        return self.main.__dict__[name]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    main = sys.modules["__main__"]
    found = Notebook(tmp_path)
    yield found
    found.group.close()
    sys.modules["__main__"] = main


def test_a_large_model_that_nobody_changed_does_not_travel_again(book: Notebook) -> None:
    """200 MB of parameters: the next payload has less than 1 MB, also where they were trained."""
    book.here("import torch\nnet = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(50)])")
    book.there("n = len(net)")
    book.there("net[0].weight.data.add_(1)")
    book.there("total = net[0].weight.sum().item() + n")
    assert book.sizes[0] > 200e6
    assert max(book.sizes[1:]) < 1_000_000
    assert book["total"] == pytest.approx(book["net"][0].weight.sum().item() + 50, rel=1e-4)


def test_a_name_that_only_ranks_have_is_found_there(book: Notebook) -> None:
    """A generator cannot come back; the next cell goes on with it, and the notebook's own of that name travels."""
    book.there("import threading\nit = (n for n in range(9)); first = next(it)")
    assert "it" not in book.main.__dict__
    book.there("second = next(it)")
    assert (book["first"], book["second"]) == (0, 1)
    book.here("it = [7]")
    book.there("third = it[0]")
    assert book["third"] == 7


def test_other_ranks_keep_their_own_values(book: Notebook, tmp_path: Path) -> None:
    """What each rank has made under a name, it uses in the next cell, also where it is in something that travels."""
    book.there("import os\nown = [int(os.environ['RANK'])]")
    book.here("pair = [own, 1]")
    book.there(f"open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr((own, pair, pair[0] is own)))")
    assert (tmp_path / "0").read_text() == "([0], [[0], 1], True)"
    assert (tmp_path / "1").read_text() == "([1], [[1], 1], True)"


def test_what_the_notebook_let_go_is_not_kept_alive(book: Notebook) -> None:
    """After the next cell neither the notebook nor rank 0 has what no name holds any more."""
    book.here("import torch, weakref\nx = torch.ones(1000); k = 1")
    book.there("import weakref\ny = x * 2; gone = weakref.ref(y); was = weakref.ref(x); z = y.sum()")
    here = weakref.ref(book["x"]), weakref.ref(book["y"])
    book.here("del x, y, gone, was\nx = 1")
    book.there("import gc; gc.collect(); left = 'y' in globals(), k")
    gc.collect()
    assert [ref() for ref in here] == [None, None]
    assert book["left"] == (False, 1)


def test_where_there_was_no_answer_all_names_travel_again(book: Notebook) -> None:
    """Nobody is sure what the ranks hold then."""
    book.here("a = [1]; b = [2]")
    book.there("a.append(b)")
    captured = book.group.capture("a, b", None)
    captured.close()
    book.group.kept = captured.kept()
    book.there("c = [a, b, a[1] is b]")
    assert book["c"] == [[1, [2]], [2], True]
    assert book.sizes[-1] > book.sizes[-2]


def test_a_write_into_large_memory_is_seen_on_both_sides(book: Notebook) -> None:
    """In the middle of it and at its ends, cell after cell; then nothing travels again."""
    book.here("import numpy as np\na = np.zeros(1_000_000)")
    for n in range(1, 4):
        book.here(f"a[0] = a[500_000] = a[-1] = {n}")
        book.there("total = a[0] + a[500_000] + a[-1]; a[250_000] += 1")
        assert (book["total"], book["a"][250_000], book["a"].sum()) == (3 * n, n, 4 * n)
        assert book.sizes[-1] > 8e6
    book.there("total = a.sum()")
    assert (book["total"], book.sizes[-1] < 1_000_000) == (12, True)


def test_a_row_that_holds_an_object_is_seen_to_change(book: Notebook) -> None:
    """A row of a large list of plain dicts is given a set by the ranks, then another number by the notebook."""
    book.here("rows = [{'i': n} for n in range(2000)]")
    book.there("rows[5]['kept'] = {1j}; rows[9]['kept'] = range(3)")
    book.here("rows[5]['i'] = 'here'")
    book.there("seen = rows[5]['i'], rows[6]['i']; rows[7]['i'] = rows[5]['kept']")
    assert book["seen"] == ("here", 6)
    assert book["rows"][7]["i"] is book["rows"][5]["kept"]


def test_where_held_memory_lies_is_found_once(book: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each object: for a thousand tensors that took seconds before every cell."""
    book.here("import torch\nts = [torch.ones(1) for _ in range(50)]")
    book.there("n = len(ts)")
    asked, places = [], MemoryTable.places
    monkeypatch.setattr(MemoryTable, "places", lambda table: asked.append(table) or places(table))
    book.there("n = ts[0].item()")
    assert len(asked) < 25


def test_what_a_protocol_makes_afresh_is_no_change(book: Notebook) -> None:
    """However many cells look at it: a generator's device is another object each time."""
    book.here("import torch\ng = torch.Generator().manual_seed(5)\nheld = [g]")
    for cell in ("n = g.initial_seed()", "x = 1", "y = g"):
        book.there(cell)
        assert book["held"][0] is book["g"]

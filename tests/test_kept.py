"""What ranks that stay hold of a notebook, what travels again, and what is each rank's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from oracle import Played, in_ranks, kept, play

pytestmark = pytest.mark.usefixtures("oracle")


def played(folder: Path, *cells: str) -> Played:
    """Play a notebook whose ranks stay, in which no cell may fail."""
    found = play(kept("", *cells), folder, plain=False)
    assert not any(ran.ename for ran in found.cells), [ran.traceback for ran in found.cells]
    return found


def written(folder: Path, value: str) -> str:
    """Return a line by which each rank writes the repr of a value into a file named after it."""
    return f"open(r'{folder}/' + os.environ['RANK'], 'w').write(repr({value}))"


def read(folder: Path) -> list[str]:
    """Return what the two ranks have written."""
    return [(folder / rank).read_text() for rank in "01"]


def test_a_large_model_that_nobody_changed_does_not_travel_again(tmp_path: Path) -> None:
    """200 MB of parameters: the next payload has less than 1 MB, also where they were trained."""
    found = played(
        tmp_path,
        """
        import torch
        net = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(50)])
        """,
        in_ranks("n = len(net)"),
        in_ranks("net[0].weight.data.add_(1)"),
        in_ranks("total = net[0].weight.sum().item() + n"),
        "abs(total - net[0].weight.sum().item() - 50) < 100  # of a million",
    )
    assert found.sizes[0] > 200e6
    assert max(found.sizes[1:]) < 1_000_000
    assert found.value == "True"


def test_other_ranks_keep_their_own_values(tmp_path: Path) -> None:
    """A rank uses what it has made under a name in the next cell, also inside what travels."""
    played(
        tmp_path,
        in_ranks("""
            import os
            own = [int(os.environ["RANK"])]
        """),
        "pair = [own, 1]",
        in_ranks(written(tmp_path, "(own, pair, pair[0] is own)")),
    )
    assert read(tmp_path) == ["([0], [[0], 1], True)", "([1], [[1], 1], True)"]


def test_a_name_that_only_ranks_have_is_theirs_until_the_notebook_has_its_own(
    tmp_path: Path,
) -> None:
    """A generator cannot come back.

    The ranks go on with theirs, and then with the notebook's list.
    """
    found = played(
        tmp_path,
        in_ranks("""
            import threading
            it = (n for n in range(9))
            first = next(it)
        """),
        "here = 'it' in globals()",
        in_ranks("second = next(it)"),
        "it = [7]",
        in_ranks("third = it[0]"),
        "here, first, second, third",
    )
    assert found.value == "(False, 0, 1, 7)"


def test_what_the_notebook_let_go_is_kept_alive_on_neither_side(tmp_path: Path) -> None:
    """Weak references to it are dead in the notebook, and the name is gone in the ranks."""
    found = played(
        tmp_path,
        """
        import torch, weakref
        x = torch.ones(1000)
        k = 1
        """,
        in_ranks("""
            import weakref
            y = x * 2
            gone = weakref.ref(y)
            was = weakref.ref(x)
            z = y.sum()
        """),
        """
        import sys
        sys.refs = [weakref.ref(x), weakref.ref(y)]
        del x, y, gone, was
        x = 1
        """,
        in_ranks("""
            import gc
            gc.collect()
            left = "y" in globals(), k
        """),
        """
        import gc
        gc.collect()
        [ref() for ref in sys.refs], left
        """,
    )
    assert found.value == "([None, None], (False, 1))"


def test_a_row_of_plain_dicts_is_given_a_set_by_ranks_and_a_text_by_the_notebook(
    tmp_path: Path,
) -> None:
    """Each side sees what the other one has put there."""
    found = played(
        tmp_path,
        "rows = [{'i': n} for n in range(2000)]",
        in_ranks("""
            rows[5]["kept"] = {1j}
            rows[9]["kept"] = range(3)
        """),
        "rows[5]['i'] = 'here'",
        in_ranks("""
            seen = rows[5]["i"], rows[6]["i"]
            rows[7]["i"] = rows[5]["kept"]
        """),
        "seen, rows[7]['i'] is rows[5]['kept']",
    )
    assert found.value == "(('here', 6), True)"


@pytest.mark.parametrize(
    "between",
    [
        "net.eval()",
        "%timeit -n1 -r1 net.eval()",
        "!true",
        "exec('x = 1')",
        "vars(net)",
        "from math import *",
    ],
)
def test_a_cell_whose_code_does_not_say_what_it_binds_leaves_each_rank_its_own(
    tmp_path: Path, between: str
) -> None:
    """A number or a text of a rank stays that rank's: nothing of it was bound in the notebook."""
    played(
        tmp_path,
        in_ranks("""
            import os, torch
            rank = int(os.environ["RANK"])
            name = f"r{rank}"
            net = torch.nn.Linear(1, 1)
        """),
        between,
        in_ranks(written(tmp_path, "(rank, name)")),
    )
    assert read(tmp_path) == ["(0, 'r0')", "(1, 'r1')"]


@pytest.mark.parametrize(
    ("rebinds", "expected"),
    [
        ("rank = 0", "0"),
        ("rank = 7", "7"),
        ("for rank in range(1): pass", "0"),
        ("exec('rank = 7')", "7"),
    ],
)
def test_a_number_that_the_notebook_binds_is_every_ranks(
    tmp_path: Path, rebinds: str, expected: str
) -> None:
    """Also where it has the value that it had: rank 0's."""
    played(
        tmp_path,
        in_ranks("""
            import os
            rank = int(os.environ["RANK"])
        """),
        rebinds,
        in_ranks(written(tmp_path, "rank")),
    )
    assert read(tmp_path) == [expected, expected]


@pytest.mark.parametrize(
    ("own", "new", "kind"),
    [
        ("torch.full((3,), r)", "x = torch.ones(4)", "Tensor"),
        ("np.full(3, r)", "x = np.zeros(4)", "ndarray"),
        ("[torch.device('cpu'), r]", "x = [torch.ones(1), torch.device('cpu')]", "list"),
        ("[datetime.timedelta(r), DAY]", "x = [DAY]", "list"),
        ("[re.compile(f'{int(r)}'), WORD]", "x = {WORD: 1}", "dict"),
        ("torch.full((3,), r)", "a.mul_(2)", "NoneType"),
    ],
)
def test_what_shares_a_constant_with_something_new_stays_each_ranks(
    tmp_path: Path, own: str, new: str, kind: str
) -> None:
    """All tensors have ``torch.float32`` in common, and nothing can change in it."""
    found = played(
        tmp_path,
        """
        import datetime, os, re, numpy as np, torch
        DAY, WORD = datetime.timedelta(1), re.compile("w+")
        a = torch.ones(2)
        x = None
        """,
        in_ranks(f"""
            r = float(os.environ["RANK"])
            own = {own}
            before = repr(own)
            kept = [a]
        """),
        new,
        in_ranks(
            written(tmp_path, "(repr(own) == before, type(x).__name__)"), "count = a.sum().item()"
        ),
        "count == a.sum().item()",
    )
    assert read(tmp_path) == [repr((True, kind))] * 2
    assert found.value == "True"


def test_what_shares_something_that_can_change_travels_with_it(tmp_path: Path) -> None:
    """Python's arrays and iterators have no state in their pickles, and change all the same."""
    found = played(
        tmp_path,
        """
        import array
        numbers, steps = array.array("i", [1]), enumerate("ab", 5)
        """,
        in_ranks("one = [numbers, steps]"),
        "two = [numbers, steps]",
        in_ranks("same = one[0] is two[0], one[1] is two[1]"),
        "same",
    )
    assert found.value == "(True, True)"


LARGE = """
    import hashlib, os
    import numpy as np, torch
    def bits(x):
        x = getattr(x, "weight", x)
        x = x.detach().numpy() if isinstance(x, torch.Tensor) else x
        return hashlib.sha1(x.tobytes()).hexdigest()
    def elsewhere(write):
        if (pid := os.fork()) == 0:
            write()
            os._exit(0)
        os.waitpid(pid, 0)
"""
CHANGED_IN_PLACE = {
    "an array": ("x = np.zeros(500_000)", "x[7] = 5"),
    "past torch's counter of changes": ("x = torch.zeros(500_000)", "x.data[7] = 5"),
    "a view with steps, through the whole": (
        """
        whole = torch.zeros(3000, 400)
        x = whole.t()[::2]
        """,
        "whole[8, 2] = 5",
    ),
    "what is read-only, through its base": (
        """
        base = np.zeros(500_000)
        x = base[:]
        x.flags.writeable = False
        """,
        "base[7] = 5",
    ),
    "another NaN": ("x = np.full(500_000, np.nan)", "x.view(np.uint64)[7] += 1"),
    "minus zero": ("x = torch.zeros(500_000)", "x[7] = -0.0"),
    "a parameter": (
        "x = torch.nn.Linear(1000, 500)",
        """
        with torch.no_grad():
            x.weight[7, 8] = 5
        """,
    ),
    "shared memory, by another process": (
        "x = torch.zeros(500_000).share_memory_()",
        "elsewhere(lambda: x.fill_(5))",
    ),
}
NOT_CHANGED = {
    "read": "float(x.sum())",
    "the same bytes": "x.mul_(1)",
    "a child that writes": "elsewhere(lambda: x.fill_(5))",
    "its memory seen by another name": "y = x.numpy(); z = x[5:]",
}


@pytest.mark.parametrize("name", CHANGED_IN_PLACE)
def test_what_changed_in_place_between_two_cells_travels_anew(name: str, tmp_path: Path) -> None:
    """The ranks have the notebook's bytes then; before it, nothing travels, whatever is read."""
    setup, change = CHANGED_IN_PLACE[name]
    found = played(
        tmp_path,
        LARGE,
        setup,
        in_ranks("first = bits(x)"),
        in_ranks("again = bits(x)"),
        change,
        in_ranks("anew = bits(x)"),
        "first == again, again != anew, anew == bits(x)",
    )
    assert found.value == "(True, True, True)"
    assert [size > 1_000_000 for size in found.sizes] == [True, False, True]


@pytest.mark.parametrize("name", NOT_CHANGED)
def test_what_is_as_it_was_between_two_cells_stays_each_ranks(name: str, tmp_path: Path) -> None:
    """What a rank has written to it is there, also where rank 0 has changed it in every cell."""
    found = played(
        tmp_path,
        LARGE,
        "x = torch.zeros(500_000)",
        in_ranks("x += int(os.environ['RANK'])"),
        NOT_CHANGED[name],
        in_ranks("x += 1"),
        NOT_CHANGED[name],
        in_ranks(written(tmp_path, "float(x[7])")),
        "float(x[7])",
    )
    assert read(tmp_path) == ["1.0", "2.0"]
    assert found.value == "1.0"
    assert [size > 1_000_000 for size in found.sizes] == [True, False, False]


def test_what_a_thread_of_rank_0_writes_between_two_cells_comes_with_the_next(
    tmp_path: Path,
) -> None:
    """The notebook has then what rank 0 has, and nothing of it travels back to the ranks."""
    go, done = tmp_path / "go", tmp_path / "done"
    os.mkfifo(go)
    os.mkfifo(done)
    found = played(
        tmp_path,
        LARGE,
        "x = torch.zeros(500_000)",
        in_ranks(f"""
            import threading
            def write_between_cells():
                open({str(go)!r}).read()
                x[7] = 5
                open({str(done)!r}, "w").close()
            x[8] = 1
            if os.environ["RANK"] == "0":
                threading.Thread(target=write_between_cells, daemon=True).start()
        """),
        f"""
        before = float(x[7])
        open({str(go)!r}, "w").close()
        open({str(done)!r}).read()
        """,
        in_ranks("seen = float(x[8])"),
        "came = float(x[7])",
        in_ranks("seen = float(x[7])"),
        "before, came, seen",
    )
    assert found.value == "(0.0, 5.0, 5.0)"
    assert [size > 1_000_000 for size in found.sizes] == [True, False, False]

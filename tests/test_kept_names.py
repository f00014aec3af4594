"""What of a notebook's names stays in ranks that stay: what travels, what is deleted, and what is let go."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Played, play
from test_kept import kept

pytestmark = pytest.mark.usefixtures("oracle")


def played(folder: Path, *cells: str) -> Played:
    """Play a notebook whose cells that begin with ``#r`` run in ranks that stay."""
    found = play(kept("", *cells), folder, plain=False)
    assert not any(ran.ename for ran in found.cells), [ran.traceback for ran in found.cells]
    return found


def test_a_large_model_that_nobody_changed_does_not_travel_again(tmp_path: Path) -> None:
    """200 MB of parameters: the next payload has less than 1 MB, also where they were trained."""
    found = played(
        tmp_path,
        "import torch\nnet = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(50)])",
        "#r\nn = len(net)",
        "#r\nnet[0].weight.data.add_(1)",
        "#r\ntotal = net[0].weight.sum().item() + n",
        "abs(total - net[0].weight.sum().item() - 50) < 100  # of a million",
    )
    assert found.sizes[0] > 200e6
    assert max(found.sizes[1:]) < 1_000_000
    assert found.value == "True"


def test_a_write_into_large_memory_is_seen_on_both_sides(tmp_path: Path) -> None:
    """In the middle of it and at its ends, cell after cell; then nothing travels again."""
    steps = [
        (
            f"a[0] = a[500_000] = a[-1] = {n}",
            "#r\ntotal = a[0] + a[500_000] + a[-1]; a[250_000] += 1",
            f"seen.append((total, a[250_000], a.sum()) == ({3 * n}, {n}, {4 * n}))",
        )
        for n in range(1, 4)
    ]
    found = played(
        tmp_path,
        "import numpy as np\na = np.zeros(1_000_000); seen = []",
        *(cell for step in steps for cell in step),
        "#r\ntotal = a.sum()",
        "seen, int(total)",
    )
    assert found.value == "([True, True, True], 12)"
    assert min(found.sizes[:-1]) > 8e6
    assert found.sizes[-1] < 1_000_000


def test_other_ranks_keep_their_own_values(tmp_path: Path) -> None:
    """What each rank has made under a name, it uses in the next cell, also where it is in something that travels."""
    played(
        tmp_path,
        "#r\nimport os\nown = [int(os.environ['RANK'])]",
        "pair = [own, 1]",
        f"#r\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr((own, pair, pair[0] is own)))",
    )
    assert (tmp_path / "0").read_text() == "([0], [[0], 1], True)"
    assert (tmp_path / "1").read_text() == "([1], [[1], 1], True)"


@pytest.mark.parametrize(("cells", "value"), [
    pytest.param(
        (
            "#r\nimport threading\nit = (n for n in range(9)); first = next(it)", "here = 'it' in globals()",
            "#r\nsecond = next(it)", "it = [7]", "#r\nthird = it[0]", "here, first, second, third",
        ),
        "(False, 0, 1, 7)", id="a name that only ranks have, until the notebook has its own",
    ),
    pytest.param(
        (
            "import torch, weakref\nx = torch.ones(1000); k = 1",
            "#r\nimport weakref\ny = x * 2; gone = weakref.ref(y); was = weakref.ref(x); z = y.sum()",
            "import sys\nsys.refs = [weakref.ref(x), weakref.ref(y)]\ndel x, y, gone, was\nx = 1",
            "#r\nimport gc; gc.collect(); left = 'y' in globals(), k",
            "import gc; gc.collect()\n[ref() for ref in sys.refs], left",
        ),
        "([None, None], (False, 1))", id="what the notebook let go is kept alive on neither side",
    ),
    pytest.param(
        (
            "rows = [{'i': n} for n in range(2000)]", "#r\nrows[5]['kept'] = {1j}; rows[9]['kept'] = range(3)",
            "rows[5]['i'] = 'here'", "#r\nseen = rows[5]['i'], rows[6]['i']; rows[7]['i'] = rows[5]['kept']",
            "seen, rows[7]['i'] is rows[5]['kept']",
        ),
        "(('here', 6), True)", id="a row of plain dicts is given a set by the ranks, a text by the notebook",
    ),
    pytest.param(
        (
            "import torch\nts = [torch.ones(1) for _ in range(50)]", "#r\nn = len(ts)",
            "from taas.capture.memory import MemoryTable\nasked, places = [], MemoryTable.places\n"
            "MemoryTable.places = lambda table: asked.append(table) or places(table)",
            "#r\nn = ts[0].item()", "0 < len(asked) < 25",
        ),
        "True", id="where held memory lies is found once, not for each of many tensors",
    ),
    pytest.param(
        (
            "import torch\ng = torch.Generator().manual_seed(5); held = [g]; same = []", "#r\nn = g.initial_seed()",
            "same.append(held[0] is g)", "#r\nx = 1", "same.append(held[0] is g)", "#r\ny = g",
            "same.append(held[0] is g)\nsame",
        ),
        "[True, True, True]", id="a generator's device is another object each time: that is no change",
    ),
])  # fmt: skip
def test_names_that_stay(tmp_path: Path, cells: tuple[str, ...], value: str) -> None:
    """The last cell sees what is so in the notebook."""
    assert played(tmp_path, *cells).value == value

"""What README and docs/names.md list as not the same in ranks: each line is so, and is said where it can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, play, row

pytestmark = pytest.mark.usefixtures("oracle")

P = row
KEY = (
    "class Key:\n    def __init__(self, text): self.text = text; self.hash = hash(text)\n    def"
    " __hash__(self): return self.hash\n    def __eq__(self, other): return self.text =="
    " other.text\nmade = {}\n"
)

LIMITS = [
    (P("hash of text", (KEY,), "made[Key('a')] = 1", "[Key('a') in made, len(made)]"), "[False, 1]", ()),
    (
        P("array resized", ("import numpy as np",), "a = np.arange(3)",
          "try: a.resize(8, refcheck=False)\nexcept ValueError as error: why = str(error)\na.size, 'does not own' in why"),
        "(3, True)", (),
    ),
    (P("records of an array of objects", ("import numpy as np\na = np.zeros(3, dtype=[('o', 'O'), ('n', 'i4')]); v = a[1:]",), "a['n'] = 2; seen = v['n'].tolist()", "a['n'].tolist(), seen"), "([2, 2, 2], [0, 0])", ()),
    (P("graph of a loss", ("import torch\nw = torch.ones(2, requires_grad=True)",), "loss = (w * 2).sum()", "loss.item(), loss.requires_grad"), "(4.0, False)", ()),
    (P("cache", ("import functools\ncalls = []\n@functools.lru_cache\ndef f(x): calls.append(x); return x",), "r = f(3)", "f(3), calls"), "(3, [3, 3])", ()),
    (P("order of a set", ("s = {7, 15}",), "there = list(s)", "there, list(s)"), "([7, 15], [15, 7])", ()),
    (P("lock there", ("import threading\nlock = threading.Lock()",), "with lock: n = 1", "'n' in globals()"), "False", ("needs 'lock'", "Nothing was started")),
    (P("generator back", ("def g():\n    yield 1",), "it = g(); n = next(it)", "'it' in globals(), n"), "(False, 1)", ("did not come back: it", "generator")),
    (P("open file back", (), "f = open('x.txt', 'w'); n = f.write('a')", "'f' in globals(), n"), "(False, 1)", ("did not come back: f", "open file")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "value", "said"), LIMITS, ids=[program.name for program, *_ in LIMITS]
)
def test_a_limit_is_as_the_readme_says(
    program: Program, value: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    """Who mends one takes it out of both lists."""
    left = play(program, tmp_path, plain=False)
    assert left.value == value
    told = "\n".join(ran.stdout + ran.evalue for ran in left.cells)
    for words in said:
        assert words in told

"""What README and docs/names.md list as not the same in ranks.

Each line is so, and is said where it can be.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, play, row

pytestmark = pytest.mark.usefixtures("oracle")

KEY = """
class Key:
    def __init__(self, text):
        self.text = text
        self.hash = hash(text)

    def __hash__(self):
        return self.hash

    def __eq__(self, other):
        return self.text == other.text

made = {}
"""

LIMITS = [
    (
        row(
            "hash of text",
            setup=KEY,
            cell='made[Key("a")] = 1',
            check='[Key("a") in made, len(made)]',
        ),
        "[False, 1]",
        (),
    ),
    (
        row(
            "array resized",
            setup="import numpy as np",
            cell="a = np.arange(3)",
            check="""
                try:
                    a.resize(8, refcheck=False)
                except ValueError as error:
                    why = str(error)
                a.size, "does not own" in why
            """,
        ),
        "(3, True)",
        (),
    ),
    (
        row(
            "records of an array of objects",
            setup="""
                import numpy as np
                a = np.zeros(3, dtype=[("o", "O"), ("n", "i4")])
                v = a[1:]
            """,
            cell="""
                a["n"] = 2
                seen = v["n"].tolist()
            """,
            check='a["n"].tolist(), seen',
        ),
        "([2, 2, 2], [0, 0])",
        (),
    ),
    (
        row(
            "graph of a loss",
            setup="""
                import torch
                w = torch.ones(2, requires_grad=True)
            """,
            cell="loss = (w * 2).sum()",
            check="loss.item(), loss.requires_grad",
        ),
        "(4.0, False)",
        (),
    ),
    (
        row(
            "cache",
            setup="""
                import functools
                calls = []

                @functools.lru_cache
                def f(x):
                    calls.append(x)
                    return x
            """,
            cell="r = f(3)",
            check="f(3), calls",
        ),
        "(3, [3, 3])",
        (),
    ),
    (
        row("order of a set", setup="s = {7, 15}", cell="there = list(s)", check="there, list(s)"),
        "([7, 15], [15, 7])",
        (),
    ),
    (
        row(
            "lock there",
            setup="""
                import threading
                lock = threading.Lock()
            """,
            cell="""
                with lock:
                    n = 1
            """,
            check='"n" in globals()',
        ),
        "False",
        ("needs 'lock'", "Nothing was started"),
    ),
    (
        row(
            "generator back",
            setup="""
                def g():
                    yield 1
            """,
            cell="""
                it = g()
                n = next(it)
            """,
            check='"it" in globals(), n',
        ),
        "(False, 1)",
        ("did not come back: it", "generator"),
    ),
    (
        row(
            "open file back",
            cell="""
                f = open("x.txt", "w")
                n = f.write("a")
            """,
            check='"f" in globals(), n',
        ),
        "(False, 1)",
        ("did not come back: f", "open file"),
    ),
]


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

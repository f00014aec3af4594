"""The oracle itself: it sees what is different, and nothing where nothing is."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blocks import block
from oracle import Program, compare, row, together
from oracle.graph import describe, differences
from torch.utils.hooks import RemovableHandle

pytestmark = pytest.mark.usefixtures("oracle")


def _graph(code: str) -> Any:
    namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
    RemovableHandle.next_id = 0
    exec(code, namespace)
    return describe({n: v for n, v in namespace.items() if not n.startswith("__")}, namespace)


CLASS = """
class A:
    def f(self): return 1
a = A()
a.x = [1]
"""


class Pair(NamedTuple):
    """Two programs that leave something else, and how the difference is told."""

    code: str
    other: str
    told: str


PAIRS = [
    Pair(
        code="a = [1]; b = a",
        other="a = [1]; b = [1]",
        told="b: the same object as a expected, another one found",
    ),
    Pair(
        code="a = [1]; b = [1]",
        other="a = [1]; b = a",
        told="b: an object of its own expected, that of a found",
    ),
    Pair(
        code="d = {'k': [1, 2.0]}",
        other="d = {'k': [1, 2]}",
        told="d['k'][1]: 2.0 expected, 2 found",
    ),
    Pair(code="d = {'a': 1, 'b': 2}", other="d = {'b': 2, 'a': 1}", told="d: in the order "),
    Pair(code="x = 1", other="", told="x: missing"),
    Pair(code=CLASS, other=block(CLASS, "a.x.append(2)"), told="a['x'][1]: not expected"),
    Pair(code=CLASS, other=CLASS.replace("return 1", "return 2"), told="A.f (code):"),
    Pair(
        code=block(CLASS, "b = A()"),
        other=block(
            CLASS,
            """
            A0 = A
            class A: pass
            b = A()
            del A0
            """,
        ),
        told="type(a): the same object as A expected",
    ),
    Pair(
        code=block(CLASS, "d = vars(a)"),
        other=block(CLASS, "d = dict(vars(a))"),
        told="a: the same object as d expected, another one found",
    ),
    Pair(
        code="def f(x=[1]): return x",
        other="def f(x=[2]): return x",
        told="f.__defaults__[0][0]: 1 expected, 2 found",
    ),
    Pair(
        code="""
            n = 1
            def f(): return n
        """,
        other="""
            n = 1
            exec("def f(): return n", g := {"__name__": "x"})
            f = g.pop("f")
            del g
        """,
        told="f (globals): the notebook's expected",
    ),
    Pair(
        code="""
            def m(n):
                return lambda: n
            f = m([1])
        """,
        other="""
            def m(n):
                return lambda: n
            f = m([2])
        """,
        told="f closure n[0]: 1 expected, 2 found",
    ),
    Pair(
        code="""
            import numpy as np
            a = np.arange(4.)
            v = a[1:]
        """,
        other="""
            import numpy as np
            a = np.arange(4.)
            v = a[1:].copy()
        """,
        told="(memory): the same object as",
    ),
    Pair(
        code="""
            import numpy as np
            a = np.zeros(2, object)
            a[0] = [1]
        """,
        other="""
            import numpy as np
            a = np.zeros(2, object)
            a[0] = [2]
        """,
        told="a[0][0]: 1 expected, 2 found",
    ),
    Pair(
        code="""
            import torch
            t = torch.zeros(4)
            v = t[1:]
        """,
        other="""
            import torch
            t = torch.zeros(4)
            v = t[:3]
        """,
        told="v (offset): 1 expected, 0 found",
    ),
    Pair(
        code="""
            import torch, numpy as np
            t = torch.zeros(4)
            a = t.numpy()
        """,
        other="""
            import torch, numpy as np
            t = torch.zeros(4)
            a = np.zeros(4, "f4")
        """,
        told="(memory): the same object as",
    ),
    Pair(
        code="""
            import torch
            t = torch.zeros(2)
        """,
        other="""
            import torch
            t = torch.zeros(2).requires_grad_()
        """,
        told="t (requires_grad): False expected, True found",
    ),
    Pair(
        code="""
            import torch
            t = torch.ones(1).requires_grad_()
            h = t.register_hook(print)
        """,
        other="""
            import torch
            t = torch.ones(1).requires_grad_()
            h = t.register_hook(print)
            t._backward_hooks.clear()
        """,
        told="t._backward_hooks[0]: missing",
    ),
    Pair(
        code="""
            import weakref
            class A: pass
            a = A()
            r = weakref.ref(a)
        """,
        other="""
            import weakref
            class A: pass
            a = A()
            b = A()
            r = weakref.ref(b)
            del b
        """,
        told="r (referent):",
    ),
    Pair(
        code="""
            import random
            r = random.Random(1)
        """,
        other="""
            import random
            r = random.Random(2)
        """,
        told="r (state):",
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.told)
def test_a_difference_is_one_line_with_its_path(pair: Pair) -> None:
    """Values, types, aliases, memory, classes, functions, hooks; no line where nothing differs."""
    code, other = block(pair.code), block(pair.other)
    assert differences(_graph(code), _graph(code)) == []
    found = differences(_graph(code), _graph(other))
    assert any(pair.told in line for line in found), found


@pytest.mark.parametrize(
    ("cell", "here_also", "found"),
    [
        (
            "n = 2",
            "import os; os.environ['PROGRAM_Y'] = '1'",
            "os.environ['PROGRAM_Y']: '1' expected, None found",
        ),
        ("n = 2", "import random; random.seed(3)", "random draws"),
        ("print(1)", "print(2)", "cell 1: it shows"),
        ("n = 2", "w = open('x.txt', 'w').write('x')", "files['x.txt']"),
        ("n = 2", "3", "Out[2]: missing"),
    ],
)
def test_what_only_one_of_them_does_is_found(
    cell: str, here_also: str, found: str, tmp_path: Path
) -> None:
    """In the process, the output, the files, and what IPython keeps."""
    different = compare(row("", setup="n = 1", cell=cell, here_also=here_also), tmp_path)
    assert any(found in line for line in different), different


def test_notebooks_are_joined_under_names_of_their_own() -> None:
    """As is what their cells show at their end; a row's files, too."""
    one = row(
        "one",
        setup="""
            import m
            a = m.n
        """,
        cell="""
            def f(a=1):
                return a + m.n
        """,
        check="f(a=a)",
        files={"m.py": "n = 1"},
    )
    two = row("two", setup="a = 1", cell="a += 1", check="a")
    (joint,) = together([two, one])
    assert joint.headed == (1,)
    assert joint.cells[1] == "a_0 += 1\ndef f_1(a_1=1):\n    return a_1 + m_1.n"
    assert joint.cells[2].split() == ["shown_0", "=", "a_0", "shown_1", "=", "f_1(a_1=a_1)"]
    assert joint.files == (("m_1.py", "n = 1\n"),)


TRAINED = Program(
    "trained",
    (
        block("""
            import torch, torch.nn as nn
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            log = []
        """),
        block("""
            for step in range(3):
                opt.zero_grad()
                loss = net(torch.ones(4, 2)).pow(2).mean()
                loss.backward()
                opt.step()
                log.append(loss.item())
                print(step)
            del loss
            len(log)
        """),
        "log.append(torch.rand(1).item())",
        block("""
            import os
            os.environ["PROGRAM_X"] = str(len(log))
            best = min(log)
            display(best)
        """),
    ),
    (1, 3),
)


def test_two_ranks(tmp_path: Path) -> None:
    """Only rank 0's names come back."""
    program = Program(TRAINED.name, TRAINED.cells, TRAINED.headed, "#pragma taas --gpus 2\n")
    assert compare(program, tmp_path) == []

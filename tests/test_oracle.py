"""The oracle itself: it sees what is different, and nothing where nothing is."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from oracle import Program, compare, row, together
from oracle.graph import describe, differences
from torch.utils.hooks import RemovableHandle

pytestmark = pytest.mark.usefixtures("oracle")


def _graph(code: str) -> Any:
    namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
    RemovableHandle.next_id = 0
    exec(code, namespace)
    return describe({n: v for n, v in namespace.items() if not n.startswith("__")}, namespace)


NP = "import numpy as np\n"
TORCH = "import torch, torch.nn as nn\n"
CLASS = "class A:\n    def f(self): return 1\na = A(); a.x = [1]\n"


@pytest.mark.parametrize(
    ("code", "other", "path"),
    [
        ("a = [1]; b = a", "a = [1]; b = [1]", "b: the same object as a expected, another one found"),
        ("a = [1]; b = [1]", "a = [1]; b = a", "b: an object of its own expected, that of a found"),
        ("d = {'k': [1, 2.0]}", "d = {'k': [1, 2]}", "d['k'][1]: 2.0 expected, 2 found"),
        ("d = {'a': 1, 'b': 2}", "d = {'b': 2, 'a': 1}", "d: in the order "),
        ("x = 1", "", "x: missing"),
        (CLASS, CLASS + "a.x.append(2)", "a['x'][1]: not expected"),
        (CLASS, CLASS.replace("return 1", "return 2"), "A.f (code):"),
        (CLASS + "b = A()", CLASS + "A0 = A\nclass A: pass\nb = A(); del A0", "type(a): the same object as A expected"),
        (CLASS + "d = vars(a)", CLASS + "d = dict(vars(a))", "a: the same object as d expected, another one found"),
        ("def f(x=[1]): return x", "def f(x=[2]): return x", "f.__defaults__[0][0]: 1 expected, 2 found"),
        ("n = 1\ndef f(): return n", "n = 1\nexec('def f(): return n', g := {'__name__': 'x'})\nf = g.pop('f'); del g", "f (globals): the notebook's expected"),
        ("def m(n):\n    return lambda: n\nf = m([1])", "def m(n):\n    return lambda: n\nf = m([2])", "f closure n[0]: 1 expected, 2 found"),
        (NP + "a = np.arange(4.); v = a[1:]", NP + "a = np.arange(4.); v = a[1:].copy()", "(memory): the same object as"),
        (NP + "a = np.zeros(2, object); a[0] = [1]", NP + "a = np.zeros(2, object); a[0] = [2]", "a[0][0]: 1 expected, 2 found"),
        (TORCH + "t = torch.zeros(4); v = t[1:]", TORCH + "t = torch.zeros(4); v = t[:3]", "v (offset): 1 expected, 0 found"),
        (TORCH + NP + "t = torch.zeros(4); a = t.numpy()", TORCH + NP + "t = torch.zeros(4); a = np.zeros(4, 'f4')", "(memory): the same object as"),
        (TORCH + "t = torch.zeros(2); t.register_hook if 0 else 0", TORCH + "t = torch.zeros(2).requires_grad_()", "t (requires_grad): False expected, True found"),
        (TORCH + "t = torch.ones(1).requires_grad_(); h = t.register_hook(print)", TORCH + "t = torch.ones(1).requires_grad_(); h = t.register_hook(print); t._backward_hooks.clear()", "t._backward_hooks[0]: missing"),
        ("import weakref\nclass A: pass\na = A(); r = weakref.ref(a)", "import weakref\nclass A: pass\na = A(); b = A(); r = weakref.ref(b); del b", "r (referent):"),
        ("import random\nr = random.Random(1)", "import random\nr = random.Random(2)", "r (state):"),
    ],
)  # fmt: skip
def test_a_difference_is_one_line_with_its_path(code: str, other: str, path: str) -> None:
    """Values, types, aliases, memory, classes, functions, closures, hooks; nothing where the code is the same."""
    assert differences(_graph(code), _graph(code)) == []
    found = differences(_graph(code), _graph(other))
    assert any(path in line for line in found), found


@pytest.mark.parametrize(
    ("cell", "here_also", "found"),
    [
        ("n = 2", "\nimport os; os.environ['PROGRAM_Y'] = '1'", "os.environ['PROGRAM_Y']: '1' expected, None found"),
        ("n = 2", "\nimport random; random.seed(3)", "random draws"),
        ("print(1)", "\nprint(2)", "cell 1: it shows"),
        ("n = 2", "\nw = open('x.txt', 'w').write('x')", "files['x.txt']"),
        ("n = 2", "\n3", "Out[2]: missing"),
    ],
)  # fmt: skip
def test_what_only_one_of_them_does_is_found(
    cell: str, here_also: str, found: str, tmp_path: Path
) -> None:
    """In the process, the output, the files, and what IPython keeps."""
    different = compare(row("", ("n = 1",), cell, here_also=here_also), tmp_path)
    assert any(found in line for line in different), different


def test_notebooks_are_joined_under_names_of_their_own() -> None:
    """As is what their cells show at their end; a row's files, too."""
    one = row(
        "one", ("import m; a = m.n",), "def f(a=1): return a + m.n", "f(a=a)", (("m.py", "n = 1"),)
    )
    (joint,) = together([row("two", ("a = 1",), "a += 1", "a"), one])
    assert joint.headed == (1,)
    assert joint.cells[1] == "a_0 += 1\ndef f_1(a_1=1):\n    return a_1 + m_1.n"
    assert joint.cells[2].split() == ["shown_0", "=", "a_0", "shown_1", "=", "f_1(a_1=a_1)"]
    assert joint.files == (("m_1.py", "n = 1"),)


TRAINED = Program(
    "trained",
    (
        (
            "import torch, torch.nn as nn\nnet = nn.Linear(2, 1); opt ="
            " torch.optim.SGD(net.parameters(), lr=.1); log = []"
        ),
        (
            "for step in range(3):\n    opt.zero_grad(); loss = net(torch.ones(4,"
            " 2)).pow(2).mean(); loss.backward(); opt.step()\n    log.append(loss.item());"
            " print(step)\ndel loss\nlen(log)"
        ),
        "log.append(torch.rand(1).item())",
        "import os\nos.environ['PROGRAM_X'] = str(len(log)); best = min(log); display(best)",
    ),
    (1, 3),
)


def test_two_ranks(tmp_path: Path) -> None:
    """Only rank 0's names come back."""
    program = Program(TRAINED.name, TRAINED.cells, TRAINED.headed, "#pragma taas --gpus 2\n")
    assert compare(program, tmp_path) == []

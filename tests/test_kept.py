"""Ranks that stay hold their names: the notebook is what it would be without them, and only what changed travels again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle import Played, Program, compare, play, together

pytestmark = pytest.mark.usefixtures("oracle")

TORCH = "import torch, torch.nn as nn\n"
NET = TORCH + "net = nn.Linear(2, 2); opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)\n"
HEADER = "#pragma taas --gpus 2 --keep\n"
STEP = "opt.zero_grad(); net(torch.ones(2)).sum().backward(); opt.step(); w = net.weight.detach()"


def kept(name: str, *cells: str, **more: Any) -> Program:
    """A notebook whose cells that begin with ``#r`` run in ranks that stay."""
    headed = tuple(n for n, cell in enumerate(cells) if cell.startswith("#r\n"))
    return Program(
        name, tuple(c.removeprefix("#r\n") for c in cells), headed, header=HEADER, **more
    )


K = kept
ROWS = [
    K("nothing changed", "a = [1]; n = 3", "#r\nb = [a, n]", "#r\nb.append(a); a.append(n)", "#r\nc = b[0] is a, n", "c, b"),
    K("rebound", "a = [1]", "#r\na.append(2); b = a", "a = [5]", "#r\na.append(6); b.append(7)", "a, b, a is b"),
    K("object changed in place", "a = [1]; d = {'a': a}", "#r\na.append(2); b = a", "a.append(3)", "#r\na.append(4); n = len(b), d['a'] is a", "a, b is a, n"),
    K("attribute changed in place", "class A: pass\na = A(); a.n = 1; k = [a]", "#r\na.n += 1", "a.n = 10", "#r\na.n += 1; same = k[0] is a", "a.n, k[0] is a, same"),
    K("array changed in place", "import numpy as np\nx = np.arange(6.); v = x[2:]", "#r\nx += 1", "x[0] = 50; v[1] = 7", "#r\ny = x.copy(); x *= 2; s = np.shares_memory(x, v)", "x.tolist(), v.tolist(), y.tolist(), s"),
    K("memory of a file", "import numpy as np\nx = np.memmap('m.bin', 'i4', 'w+', shape=6); v = x[2:]", "#r\nx += 1; y = np.memmap('m.bin', 'i4', 'r+', 4, 2)", "x[0] = 50; v[1] = 7; y[1] = 8", "#r\nx *= 2; s = v.tolist(), np.shares_memory(x, v); x.flush()", "y[0] += 1", "#r\nt = x.tolist(); u = x.mode", "x.tolist(), v.tolist(), y.tolist(), s, t, u"),
    K("array of a cell changed in place", "import numpy as np", "#r\nx = np.arange(6.); v = x[2:]", "v[1] = 7", "#r\nx *= 2; s = np.shares_memory(x, v)", "#r\nx += 1; y = v + 1", "x.tolist(), v.tolist(), y.tolist(), s"),
    K("tensor changed behind its counter", NET, "#r\n" + STEP, "net.weight.data.add_(1)", "#r\n" + STEP, "w, opt.state"),
    K("training goes on", NET, *["#r\n" + STEP] * 4, "w, opt.state_dict()"),
    K("training of a model that a cell made", "#r\n" + NET + STEP, *["#r\n" + STEP] * 3, "w, net(torch.ones(2))"),
    K("signs of all numbers", "import numpy as np", "#r\nx = np.arange(8, dtype='f8'); y = np.arange(9, dtype='f4')", "np.negative(x, out=x); np.negative(y, out=y)", "#r\nz = x.sum() + y.sum()", "z"),
    *(K(f"new view of a held {what}", f"import torch, numpy as np\nx = {made}", "#r\nl = [x]", f"v = {view}", "#r\nx += 1; s = float(v.sum())", "x, v, l, s") for what, made, view in (("array", "np.arange(6.)", "x[1:]"), ("tensor", "torch.arange(6.)", "x[1:]"), ("tensor, as an array", "torch.arange(6.)", "x.numpy()"), ("array, as a tensor", "np.arange(6.)", "torch.from_numpy(x)"))),
    K("new view of what a cell made", "import numpy as np", "#r\nx = np.arange(6.)", "v = x[1:]", "#r\nx += 1; s = v.sum()", "x, v, s"),
    K("whole of a held part", "import numpy as np, torch\nx = np.arange(6.); v = torch.from_numpy(x[2:4])", "#r\nl = [v]", "x[3] = 9", "#r\nx += 1; s = v.sum().item()", "v += 1", "#r\nt = v.sum().item()", "x, v, s, t"),
    K("a module that no cell uses", "import helper; l = helper.items", "#r\nx = 1", "helper.items.append(x)", "#r\ny = x", "helper.counter, helper.items is l, l", "#r\nhelper.counter += y; del helper.gone", "helper.counter, hasattr(helper, 'gone')", files=(("helper.py", "counter = gone = 0\nitems = []\n"),)),
    K("aliases of held names", "a = [1]; b = {'a': a}; c = [b, a]", "#r\na.append(2)", "d = [a, b]", "#r\nd[0].append(3); e = d[1] is b, d[0] is a, c[0] is b", "a, b, c, d, e, c[1] is d[0]"),
    K("part of a held name", "class A: pass\nh = A(); h.inner = [1]; o = [h.inner]", "#r\nh.inner.append(2)", "p = [h.inner, h]", "#r\np[0].append(3); same = p[0] is h.inner is o[0], p[1] is h", "h.inner, p, same, o[0] is p[0]"),
    K("functions and classes", "n = 1\ndef f(): return n\nclass A:\n    k = 1\n    def m(self): return f() + self.k\na = A()", "#r\nr = f(), a.m()", "n = 5; A.k = 7", "#r\nr2 = f(), a.m(), type(a) is A", "def f(): return n * 2", "#r\nr3 = f(), a.m(); b = A(); b.x = 1", "#r\nb.x += a.m(); same = type(b) is A", "r, r2, r3, b.x, same"),
    K("attributes of a class", "class M:\n    count = 0\n    def __init__(self): M.count += 1\n    def f(self): return 'f'\nm = M()", "#r\nn = M()", "o = M()", "#r\np = M(); M.f = lambda self: M.count", "#r\nr = m.f(); M.f = len; del M.f", "q = M(); M.f = 3", "#r\nt = M.f, M.count", "r, t, M.count, M.f"),
    K("classes of the project's modules", "import helper\nm = helper.M()", "#r\nn = helper.M()", "o = helper.M()", "#r\np = helper.M(); helper.M.f = lambda self: 'g'", "helper.M.count += 10", "#r\nr = helper.M.count, m.f()", "r, helper.M.count, m.f()", files=(("helper.py", "class M:\n    count = 0\n    def __init__(self): M.count += 1\n    def f(self): return 'f'\n"),)),
    K("class of a cell", "#r\nclass B:\n    def __init__(self): self.l = []\nb = B()", "c = B(); c.l.append(b)", "#r\nc.l.append(B()); b.l.append(c); t = type(c) is B", "#r\nb.l[0].l.append(3); u = b.l[0] is c", "t, u, [type(x) is B for x in c.l[:2]], c.l[0] is b"),
    K("large leaves", "rows = [{'n': i} for i in range(2000)]; nums = list(range(5000))", "#r\nrows[3]['n'] = -1; nums[1] = 9", "rows[4]['n'] = -2", "#r\nrows[5]['n'] = -3; nums.append(1); one = rows[7]", "del rows", "one['n'] = 70", "#r\none['m'] = nums[1]", "one, len(nums)"),
    K("rows of a leaf that is gone", "rows = [{'n': i} for i in range(2000)]; one = [rows[7]]", "#r\none[0]['a'] = 1", "rows = None", "#r\none[0]['b'] = rows", "one[0]['c'] = 2", "#r\nsame = dict(one[0])", "one, same"),
    K("what could not be changed in place", "t = (1, [2]); d = {'t': t}", "#r\nd['t'] = (3, t[1]); t = d['t']", "t[1].append(5)", "#r\nt[1].append(6); s = d['t'] is t", "t, d, s"),
    K("data of a module", "import helper", "#r\nhelper.counter += 1; helper.seen.append(1)", "helper.counter += 10", "#r\nhelper.seen.append(helper.counter); c = helper.counter", "#r\nhelper.counter += 1", "helper.counter, helper.seen, c", files=(("helper.py", "counter = 0\nseen = []\n"),)),
    K("inside a module's wrapper", "from helper import counted\n@counted\ndef f(): return 1", "#r\nf()", "f()", "#r\nr = f(); c = f.calls, f.log", "f()", "#r\nd = f(), f.calls", "r, c, d, f(), f.calls, f.log", files=(("helper.py", "def counted(f):\n    n = 0\n    def w():\n        nonlocal n\n        n += 1; w.calls += 1; w.log.append(n)\n        return n\n    w.calls, w.log = 0, []\n    return w\n"),)),
    K("cells in turn with the notebook", NET + "log = []", *["#r\n" + STEP + "\nlog.append(float(w.sum()))", "log.append('here')"] * 4, "log"),
]  # fmt: skip
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""

ALONE = [
    K("deleted in the notebook", "a = [1]; b = 2", "#r\na.append(b); c = a", "del a", "#r\nhere = 'a' in globals(), c", "here, c"),
    K("deleted in a cell", "a = [1]; b = [2]", "#r\na.append(1)", "#r\ndel a\nb.append(3)", "#r\nhere = 'a' in globals()", "here, b"),
    K("error in the middle", "a = [1]; b = []", "#r\na.append(2)", "#r\na.append(3)\nb = [a]\n1 / 0", "#r\na.append(4); n = b[0] is a", "a, b, n", goes_on=True),
    K("values of cells", "#r\n[1, 2]", "_.append(3)", "#r\nv = _", "v"),
    K("names with dots", "globals()['0.w'] = [1]", "#r\nglobals()['0.w'].append(2)", "globals()['0.w'].append(3); globals()['1.w'] = 4", "#r\nglobals()['0.w'].append(globals()['1.w']); globals()['2.w'] = 5", "globals()['0.w'], globals()['2.w']"),
    K("names of texts", "v1 = [1]; v2 = [2]", "#r\nv1.append(0)", "v2.append(5)", "#r\nr = [globals()[f'v{i}'] for i in (1, 2)]", "r, r[0] is v1"),
    K("log in a file", "import logging", "#r\nlog = logging.getLogger('file'); log.propagate = False; log.addHandler(logging.FileHandler('a.log', mode='w')); log.error('one'); del log", "logging.getLogger('file').error('two')", "#r\nlogging.getLogger('file').error('three')", "logging.getLogger('file').error('four')", "#r\nlogging.getLogger('file').error('five')", "log = logging.getLogger('file'); log.handlers[0].close(), log.handlers.clear(), open('a.log').read()"),
]  # fmt: skip


@pytest.mark.parametrize(
    "program", [*together(ROWS), *ALONE], ids=lambda program: program.name[:60]
)
def test_a_notebook_is_what_it_is_without_ranks_that_stay(program: Program, tmp_path: Path) -> None:
    """Each headed cell runs in the processes of the one before; names, aliases and memory are as in a plain notebook."""
    found = compare(program, tmp_path)
    assert not found, "\n".join([program.name, *found])


def played(folder: Path, *cells: str) -> Played:
    """Play a notebook whose cells that begin with ``#r`` run in ranks that stay."""
    found = play(kept("", *cells), folder, plain=False)
    assert not any(ran.ename for ran in found.cells), [ran.traceback for ran in found.cells]
    return found


def test_a_large_model_that_nobody_changed_does_not_travel_again(tmp_path: Path) -> None:
    """200 MB of parameters: the next payload has less than 1 MB, also where they were trained."""
    found = played(
        tmp_path,
        "import torch\nnet = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in"
        " range(50)])",
        "#r\nn = len(net)",
        "#r\nnet[0].weight.data.add_(1)",
        "#r\ntotal = net[0].weight.sum().item() + n",
        "abs(total - net[0].weight.sum().item() - 50) < 100  # of a million",
    )
    assert found.sizes[0] > 200e6
    assert max(found.sizes[1:]) < 1_000_000
    assert found.value == "True"


def test_other_ranks_keep_their_own_values(tmp_path: Path) -> None:
    """What each rank has made under a name, it uses in the next cell, also where it is in something that travels."""
    played(
        tmp_path,
        "#r\nimport os\nown = [int(os.environ['RANK'])]",
        "pair = [own, 1]",
        f"#r\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr((own, pair, pair[0] is"
        " own)))",
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
])  # fmt: skip
def test_names_that_stay(tmp_path: Path, cells: tuple[str, ...], value: str) -> None:
    """The last cell sees what is so in the notebook."""
    assert played(tmp_path, *cells).value == value


@pytest.mark.parametrize("between", [
    "net.eval()", "%timeit -n1 -r1 net.eval()", "!true", "exec('x = 1')", "vars(net)", "from math import *",
])  # fmt: skip
def test_a_cell_whose_code_does_not_say_what_it_binds_leaves_each_rank_its_own(
    tmp_path: Path, between: str
) -> None:
    """A number or a text of a rank stays that rank's: nothing of it was bound in the notebook."""
    played(
        tmp_path,
        "#r\nimport os, torch\nrank = int(os.environ['RANK']); name = f'r{rank}'; net ="
        " torch.nn.Linear(1, 1)",
        between,
        f"#r\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr((rank, name)))",
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["(0, 'r0')", "(1, 'r1')"]


@pytest.mark.parametrize(("rebinds", "expected"), [
    ("rank = 0", "0"), ("rank = 7", "7"), ("for rank in range(1): pass", "0"), ("exec('rank = 7')", "7"),
])  # fmt: skip
def test_a_number_that_the_notebook_binds_is_every_ranks(
    tmp_path: Path, rebinds: str, expected: str
) -> None:
    """Also where it has the value that it had: rank 0's."""
    played(
        tmp_path,
        "#r\nimport os\nrank = int(os.environ['RANK'])",
        rebinds,
        f"#r\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr(rank))",
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == [expected, expected]


@pytest.mark.parametrize(("own", "new"), [
    ("torch.full((3,), r)", "x = torch.ones(4)"),
    ("np.full(3, r)", "x = np.zeros(4)"),
    ("[torch.device('cpu'), r]", "x = [torch.ones(1), torch.device('cpu')]"),
    ("[datetime.timedelta(r), DAY]", "x = [DAY]"),
    ("[re.compile(f'{int(r)}'), WORD]", "x = {WORD: 1}"),
    ("torch.full((3,), r)", "a.mul_(2)"),
])  # fmt: skip
def test_what_shares_a_constant_with_something_new_stays_each_ranks(
    tmp_path: Path, own: str, new: str
) -> None:
    """All tensors have ``torch.float32`` in common, and nothing can change in it."""
    found = played(
        tmp_path,
        "import datetime, os, re, numpy as np, torch\n"
        "DAY, WORD = datetime.timedelta(1), re.compile('w+')\na = torch.ones(2); x = None",
        f"#r\nr = float(os.environ['RANK']); own = {own}; before = repr(own); kept = [a]",
        new,
        f"#r\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').write(repr((repr(own) == before,"
        " type(x).__name__)))\ncount = a.sum().item()",
        "count == a.sum().item()",
    )
    kind = {"x": "Tensor", "a": "NoneType"}[new[0]]
    kind = "ndarray" if "np." in new else "list" if "[" in new else "dict" if "{" in new else kind
    assert [(tmp_path / rank).read_text() for rank in "01"] == [repr((True, kind))] * 2
    assert found.value == "True"


def test_what_shares_something_that_can_change_travels_with_it(tmp_path: Path) -> None:
    """An array of Python's, and an iterator, have no state in their pickles, and change all the same."""
    found = played(
        tmp_path,
        "import array, itertools\nnumbers, steps = array.array('i', [1]), itertools.count(5)",
        "#r\none = [numbers, steps]",
        "two = [numbers, steps]",
        "#r\nsame = one[0] is two[0], one[1] is two[1]",
        "same",
    )
    assert found.value == "(True, True)"

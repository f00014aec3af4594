"""Capture and return: a cell that ran elsewhere leaves the notebook as if it had run here."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, compare, row

pytestmark = pytest.mark.usefixtures("oracle")

P = row
NET = """
import torch, torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.fc = nn.Linear(4, 2); self.steps = 0; self.seen = []
    def forward(self, x): return self.fc(x) * scale
scale = 1.0
"""
TRAIN = """
for i in range(3):
    opt.zero_grad()
    loss = net(torch.ones(2, 4)).sum()
    loss.backward()
    opt.step()
    net.steps += 1; net.seen.append(i)
del loss
"""

PROGRAMS = [
    P("new names", ("x = 1",), "y = x + 1\nz = [y, x]"),
    P("counter", ("n = 0",), "n += 1\nn"),
    P("list in place, alias", ("a = [1]; b = a; c = {'k': a}",), "a.append(2)"),
    P("list rebound", ("a = [1]; b = a",), "a = a + [2]"),
    P("nested containers", ("d = {'x': [1, {2}], 'y': (3, [4])}; inner = d['y'][1]",), "d['x'][1].add(5); d['y'][1].append(6); d['z'] = d"),
    P("dict order", ("d = {'a': 1, 'b': 2}; e = d",), "d['a'] = d.pop('a')"),
    P("set and frozenset", ("s = {1, 2}; f = frozenset([s_ := 3]); t = s",), "s.discard(1); s.add('x'); g = f | {4}"),
    P("deque", ("import collections\nq = collections.deque([1, 2], maxlen=3); r = q",), "q.extend([3, 4]); q.rotate(1)"),
    P("container classes", (
        "from collections import OrderedDict, defaultdict, Counter\n"
        "o = OrderedDict(a=1, b=2); f = defaultdict(list); c = Counter('aab'); keep = [o, f, c]",),
      "o.move_to_end('a'); f['x'].append(1); c.update('bbb')"),
    P("bytearray", ("b = bytearray(b'abc'); k = [b]",), "b += b'def'; b[0] = 0"),
    P("recursive list", ("a = []; a.append(a); d = {}; d['d'] = d; a.append(d)",), "a.append(len(a)); d['a'] = a"),
    P("instance", ("class A: pass\na = A(); a.x = [1]; a.self = a; k = {'a': a}",), "a.x.append(2); a.y = a.x; del a.self"),
    P("slots", ("class S:\n    __slots__ = ('a', 'b', '__weakref__')\ns = S(); s.a = [1]; t = s",), "s.b = s.a; s.a = 2"),
    P("slots and dict", ("class B:\n    __slots__ = ('a',)\nclass C(B): pass\nc = C(); c.a = 1; c.z = 2; k = c",), "c.a += 1; c.new = [c]; del c.z"),
    P("dataclass", ("from dataclasses import dataclass, field\n@dataclass\nclass D:\n    n: int = 0\n    l: list = field(default_factory=list)\nd = D(); e = d",), "d.n += 1; d.l.append(d.n); f = D(5)"),
    P("list subclass", ("class L(list):\n    pass\nl = L([1]); l.note = 'x'; k = l",), "l.append(l.note); l.note = l"),
    P("dict subclass", ("class M(dict):\n    def __missing__(self, key): return key\nm = M(a=1); k = m",), "m['b'] = m['zz']; m.tag = 1"),
    P("enum", ("import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ne = E.A; log = []",), "log.append(E.B); log.append(e is E.A); e = E.B"),
    P("namedtuple", ("from collections import namedtuple\nPt = namedtuple('Pt', 'x y')\np = Pt([1], 2)",), "p.x.append(3); q = Pt(p, p.x)"),
    P("property and classmethod", ("class A:\n    count = 0\n    @property\n    def two(self): return 2\n    @classmethod\n    def make(cls): return cls()\n    @staticmethod\n    def one(): return 1\na = A()",), "b = A.make(); c = [a.two, A.one(), isinstance(b, type(a))]"),
    P("inheritance and super", ("class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return super().f() + 1\nb = B()",), "class C(B):\n    def f(self): return super().f() + 1\nc = C(); r = [c.f(), isinstance(c, A), B().f()]", "c.f(), isinstance(c, A), B.f(c)"),
    P("abstract base class", ("import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\nclass B(A):\n    def f(self): return 1\nb = B()",), "r = [isinstance(b, A), b.f()]"),
    P("metaclass", ("class M(type):\n    def __call__(cls, *a): o = super().__call__(*a); o.made = True; return o\nclass A(metaclass=M): pass\na = A()",), "b = A(); r = b.made"),
    P("function sees rebound global", ("k = 1\ndef f(): return k",), "k = 5\nr = f(), f.__globals__ is globals()", "k, f()"),
    P("global statement", ("n = 0\ndef bump():\n    global n\n    n += 1\n    return n",), "bump(); bump()", "bump(), n"),
    P("new function sees notebook", ("k = 1\ndef f(): return k",), "def g(): return f() + k", "g()"),
    P("later rebinding seen by new function", ("k = 1",), "def g(): return k", "exec('k = 9'), g()"),
    P("mutual recursion", ("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)",), "r = even(10), odd(10)"),
    P("closure", ("def make():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n        return n\n    return inc\nc = make()",), "r = [c(), c()]", "c()"),
    P("closures share a variable", ("def make():\n    n = [0]; m = 0\n    def inc():\n        nonlocal m\n        m += 1; n.append(m)\n    def get(): return m, n\n    return inc, get\ninc, get = make()",), "inc(); inc(); r = get()", "inc(), get()"),
    P("recursive closure", ("def make():\n    def fact(n): return 1 if n < 2 else n * fact(n - 1)\n    return fact\nfact = make()",), "r = fact(5)", "fact(6)"),
    P("function attributes and defaults", ("def f(x, acc=[]):\n    f.calls += 1\n    acc.append(x)\n    return acc\nf.calls = 0",), "f(1); r = f(2)", "f(3), f.calls"),
    P("decorators and partial", ("import functools\ndef twice(g):\n    @functools.wraps(g)\n    def w(*a): return g(g(*a))\n    return w\n@twice\ndef inc(x): return x + k\nk = 2\np = functools.partial(inc, 3)",), "k = 10\nr = inc(1), p()", "inc(1), p()"),
    P("lru_cache", ("import functools\nk = 2\n@functools.lru_cache\ndef f(x): return x * k",), "r = f(3)", "f(4)"),
    P("cached property", ("import functools\nclass A:\n    n = 0\n    @functools.cached_property\n    def p(self): self.n += 1; return [self.n]\na = A(); b = A(); b.p",), "b.p.append(2)\nclass B(A):\n    @functools.cached_property\n    def q(self): return self.p + ['q']\nc = B()", "a.p, b.p, b.n, c.q, c.q is c.q"),
    P("lambda in a list", ("k = 1\nfs = [lambda x: x + k, max]",), "k = 3\nr = [f(2) if f is not max else 0 for f in fs]", "fs[0](1)"),
    P("generator function and async", ("def g(n):\n    for i in range(n): yield i * k\nk = 2\nasync def co(x): return x + k",), "r = list(g(3)), await co(1)"),
    P("bound method", ("class A:\n    def __init__(self): self.n = 0\n    def up(self): self.n += 1\na = A(); up = a.up",), "up(); up()", "a.n, up.__self__ is a"),
    P("class in the cell", ("k = 1\nclass Base:\n    def f(self): return k",), "class New(Base):\n    pass\no = New(); k = 4", "o.f(), isinstance(o, Base)"),
    P("tensor in place", ("import torch\nt = torch.zeros(3); u = t",), "t += 1; t[0] = 5"),
    P("tensor views", ("import torch\nt = torch.arange(6.); v = t[1:4]; w = t.view(2, 3).T; k = [v]",), "v.mul_(10); w[0, 0] = -1; x = t[4:]"),
    P("tensor rebound", ("import torch\nt = torch.zeros(3); u = t",), "t = t + 1"),
    P("tensor dtypes", ("import torch\nts = [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64)]; e = torch.empty(0, 3); s = torch.tensor(3.)",), "for t in ts: t[0] = 0\ns += 1; e2 = e + 1"),
    P("conjugate view", ("import torch\nz = torch.tensor([1 + 2j, 3j]); c = z.conj()",), "z *= 2; r = c.resolve_conj()", "c.tolist()"),
    P("sparse tensor", ("import torch\ns = torch.eye(3).to_sparse()",), "d = s.to_dense() * 2", "s.to_dense().tolist()"),
    P("sparse tensors and torch.load", ("import io, torch, warnings\ns = torch.eye(3).to_sparse()\ndef said():\n    file = io.BytesIO(); torch.save(1, file); file.seek(0)\n    with warnings.catch_warnings(record=True) as seen: torch.load(file)\n    return len(seen)",), "s = s * 2; t = torch.eye(2).to_sparse(); r = said()", "said(), t.to_dense().tolist()"),
    P("grad and requires_grad", ("import torch\nw = torch.ones(2, requires_grad=True); v = torch.ones(2)",), "(w * 3).sum().backward(); v.requires_grad_()", "w.grad.tolist(), v.requires_grad, w.is_leaf"),
    P("tensor attribute", ("import torch\nt = torch.zeros(1); t.tag = [1]",), "t.tag.append(2); t.other = t.tag"),
    P("data replaced", ("import torch\nt = torch.zeros(2); v = t[:1]",), "t.data = torch.ones(3)"),
    P("module to half", (NET + "net = Net(); p = net.fc.weight",), "net.half(); net.eval()", "net.fc.weight is p, p.dtype"),
    P("resized tensor", ("import torch\nt = torch.empty(0); k = [t]",), "t.resize_(4).fill_(1)"),
    P("parameters and optimizer", (NET + "net = Net(); opt = torch.optim.Adam(net.parameters(), lr=.1)",), TRAIN, "opt.param_groups[0]['params'][0] is net.fc.weight"),
    P("scheduler", (NET + "net = Net(); opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9); sched = torch.optim.lr_scheduler.StepLR(opt, 1, .5)",), TRAIN.replace("opt.step()", "opt.step(); sched.step()"), "opt.param_groups[0]['lr'], sched.get_last_lr(), sched.optimizer is opt"),
    P("shared parameters and buffers", (NET + "class Two(Net):\n    def __init__(self):\n        super().__init__(); self.a = nn.Linear(2, 2); self.b = self.a; self.bn = nn.BatchNorm1d(2)\nnet = Two()",), "net.bn(torch.ones(4, 2)); net.a.weight.data.fill_(2); net.extra = nn.Linear(1, 1)", "net.a is net.b, list(net.state_dict())"),
    P("model made in the cell, run twice", (NET, "net = Net(); first = net", "n = 1"), "net = Net(); opt = torch.optim.SGD(net.parameters(), lr=.1)\n" + TRAIN, "isinstance(net, Net), first is net"),
    P("wrapper unwrapped", (NET + "net = Net()",), "net0 = net\nnet = nn.DataParallel(net)\nnet.module.steps = 7", "net is net0", here_also="\nnet = net.module.cpu()"),
    P("new wrapper unwrapped", (NET,), "m = nn.DataParallel(Net())", "type(m) is Net", here_also="\nm = m.module"),
    P("wrapper inside a container", (NET,), "d = {'m': nn.DataParallel(Net())}", "type(d['m']) is Net", here_also="\nd['m'] = d['m'].module"),
    P("distributed wrapper unwrapped", (NET + "net = Net(); opt = torch.optim.Adam(net.parameters())",),
      "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nstore = dist.HashStore()\ndist.init_process_group('gloo', store=store, rank=0, world_size=1)\nnet = DDP(net)\ninner = net.module\n" + TRAIN.replace("net.steps", "inner.steps").replace("net.seen", "inner.seen") + "dist.destroy_process_group()\ndel store\nnet = net.module",
      "net is inner"),
    P("dataset and loader", (NET + "from torch.utils.data import DataLoader, Dataset\nclass D(Dataset):\n    def __init__(self): self.x = torch.arange(8.)\n    def __len__(self): return 8\n    def __getitem__(self, i): return self.x[i]\nloader = DataLoader(D(), batch_size=4, shuffle=True)",), "got = [b.tolist() for b in loader]", "sorted(sum(got, []))"),
    P("arrays and views", ("import numpy as np\na = np.arange(6.); v = a[::2]; b = a.reshape(2, 3).T; rev = a[::-1]",), "v += 10; b[0, 0] = -1; c = a[1:]; n = a.copy()"),
    P("array of objects and records", ("import numpy as np\no = np.array([[1], 'x'], dtype=object); r = np.zeros(2, dtype=[('a', 'i4'), ('b', 'f8')]); k = [o, r]",), "r['a'] = 3; o[0].append(2)"),
    P("array read-only and empty", ("import numpy as np\na = np.ones(3); a.flags.writeable = False; e = np.empty((0, 2)); z = np.array(3.)",), "s = a.sum() + z; z += 1", "a.flags.writeable"),
    P("array and tensor share memory", ("import numpy as np, torch\na = np.zeros(4); t = torch.from_numpy(a); s = torch.zeros(3); b = s.numpy()",), "a[0] = 1; t[1] = 2; b[2] = 3; s[0] = 4", "a.tolist(), t.tolist(), b.tolist(), s.tolist()"),
    P("new view of old memory", ("import numpy as np, torch\na = np.zeros(4); s = torch.zeros(3)",), "n = s.numpy(); t = torch.from_numpy(a[1:]); v = a[2:]; w = s[1:]", "n.fill(5), t.fill_(6), a.tolist(), s.tolist(), v.tolist(), w.tolist()"),
    P("random generators", ("import random, numpy as np, torch\nr = random.Random(3); g = np.random.default_rng(4); s = np.random.RandomState(5); t = torch.Generator().manual_seed(6); k = [r, g, s, t]",), "x = [r.random(), g.random(), s.rand(), torch.rand(1, generator=t).item()]", "[r.random(), g.random(), s.rand(), torch.rand(1, generator=t).item()]"),
    P("global random state", ("import random, numpy as np, torch\nx0 = random.random(), np.random.rand(), torch.rand(1).item()",), "x1 = random.random(), np.random.rand(), torch.rand(1).item()"),
    P("seeded in the cell", ("import random, numpy as np, torch",), "torch.manual_seed(7); random.seed(7); np.random.seed(7)\nx1 = random.random(), np.random.rand(), torch.rand(1).item()"),
    P("default dtype", ("import torch\ntorch.set_default_dtype(torch.float64)",), "x = torch.ones(1) / 3"),
    P("default dtype changed in the cell", ("import torch",), "torch.set_default_dtype(torch.float64)"),
    P("environment", ("import os\nos.environ['PROGRAM_X'] = 'one'",), "x = os.environ['PROGRAM_X']; os.environ['PROGRAM_X'] = 'two'"),
    P("sys.path", ("import sys\nsys.path.append('/program-path/a')",), "x = '/program-path/a' in sys.path; sys.path.append('/program-path/b')"),
    P("deleted name", ("a = [1]; b = a",), "del a"),
    P("only possibly used, unpicklable", ("import threading\nlock = threading.Lock(); n = 1\ndef f():\n    if n > 5: lock.acquire()\n    return n",), "r = f()\nif n > 9: lock.release()"),
    P("unpicklable and not used", ("gen = (i for i in range(3)); x = 1",), "y = x + 1", "next(gen)"),
    P("imported in the cell", (), "import json, os.path as osp\nfrom math import pi\nx = json.dumps([osp.join('a', 'b'), pi])"),
    P("submodule of an imported package", ("import concurrent.futures",), "x = concurrent.futures.Future.__name__"),
    P("project module", ("import model\nnet = model.Thing(3)",), "net.n += 1; other = model.Thing(net.n); r = model.double(2)", "isinstance(other, model.Thing), type(net) is model.Thing", (("model.py", "class Thing:\n    def __init__(self, n): self.n = n\ndef double(x): return 2 * x\n"),)),
    P("data of a project's module", ("import helper\nfrom helper import cfg\nhelper.counter = 41; cfg['lr'] = [1]; keep = helper.things",), "helper.counter += 1; cfg['lr'].append(2); helper.things.append(helper.lr()); helper.new = [helper.things]; del helper.old; r = helper.bump()", "helper.counter, helper.cfg is cfg, cfg, helper.things is keep, keep, helper.new[0] is keep, hasattr(helper, 'old'), helper.bump()", (("helper.py", "import threading\ncounter = 0\nold = 1\ncfg = {}\nthings = []\nlock = threading.Lock()\ndef bump():\n    global counter\n    counter += 1\n    return counter\ndef lr(): return cfg['lr']\n"),)),
    P("data of a module that the cell imports", ("n = 1",), "import helper\nhelper.counter = 5; helper.things.append(n)", "helper.counter, helper.things", (("helper.py", "counter = 0\nthings = []\n"),)),
    P("data of a module that an earlier cell only imported", ("import helper; helper.counter = 5; del helper",), "from helper import counter as r", "r", (("helper.py", "counter = 0\n"),)),
    P("magics", ("n = 3; path = '.'; total = 0\ndef f(x): return x * n",), "%timeit -n 1 -r 1 f(n)\nfiles = !echo {path} $n\nprint(f'{n:{n}}')\n%time y = f(n)\nfiles = list(files)"),
    P("cell magic below the header", ("n = 3\ndef f(x): return x * n",), "%%time\nz = f(n)"),
    P("last expression", ("n = 3",), "[n, n + 1]"),
    P("match, walrus, try, with", ("p = {'k': [1, 2]}; n = 2; import contextlib",), "match p:\n    case {'k': [a, *rest]} if a < n:\n        r = rest\nif (m := n + 1) > 2: q = m\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    err = str(n)\nwith contextlib.suppress(KeyError):\n    n = p['zz']"),
    P("eval and globals", ("a = 1; b = 2; c = 3",), "r = eval('a + 1'), globals()['b']\nexec('c += 1')"),
    P("imported from the future", ("from __future__ import annotations\nn = 1",), "class A:\n    def copy(self, other: Missing) -> A: return n\nr = A().copy(1)", "A.copy.__annotations__, r"),
    P("names in texts of the notebook", ("code = 'r = x + y'; x = 1; y = 2; z = 3\ndef f(): return z",), "exec(code)\nfrom __main__ import z as other\nimport timeit\nt = timeit.timeit('f()', 'from __main__ import f', number=1) > 0", "r, other, t"),
    P("asked by name", ("a = [1]; b = 2; c = 3; d = 4; other = 5",), "if 'a' not in globals(): a = [9]\nr = '%(b)d' % vars(), '{c}'.format(**globals()), 'd' in dir()", "a, r"),
    P("annotations are evaluated", ("from dataclasses import dataclass, fields\nfrom typing import Optional, List\nclass K: pass",), "@dataclass\nclass C:\n    k: Optional[int] = None\n    l: 'List[K]' = None\ndef f(x: K) -> K: return x\nimport typing\nr = fields(C)[0].type, f.__annotations__['x'] is K, typing.get_type_hints(C)['l'].__args__[0] is K\ndel C"),
    P("names called as those of IPython", ("open = 1; display = [2]; exit = 'x'; __version__ = '1'",), "display.append(open); exit += 'y'; __version__ = '2'; quit = exit"),
    P("names made by the cell", ("n0 = 1; n1 = [2]; n2 = 3; lock = __import__('threading').Lock(); del lock",), "r = [globals()[f'n{i}'] for i in range(3)]; r[1].append(4)"),
    P("names made by an earlier function", ("n0 = 1; n1 = [2]\ndef get(i): return globals()[f'n{i}']\ndef ev(text): return eval(text)",), "r = get(0), ev('n' + '1')"),
    P("attributes of __main__", ("import __main__ as m, sys\nn0 = 1; n1 = [2]; k = 'n1'",), "r = getattr(m, 'n' + '0'), getattr(sys.modules['__main__'], k), m.n1"),
    P("a loop over names of the last run", ("a = 1; b = [2]; name = 'a'",), "r = []\nfor name in ('a', 'b'): r.append(eval(name))"),
    P("annotated names", ("x: int = 1",), "y: float = 2.0", "__annotations__"),
    P("star import", (), "from math import *\nr = floor(pi)"),
    P("strings, paths, dates, regex", ("import re, datetime, pathlib, decimal, fractions\nv = [re.compile('a+'), datetime.date(2020, 1, 1), pathlib.Path('x'), decimal.Decimal('1.5'), fractions.Fraction(1, 3), range(3), slice(1, 2), 1j, b'x', None, ...]",), "w = list(v); v.append(v[0].match('aa').group())"),
    P("exception object", ("class MyError(Exception):\n    def __init__(self, a, b): super().__init__(a, b); self.a = a\nerrors = []",), "try:\n    raise MyError(1, [2])\nexcept MyError as e:\n    errors.append(e.args); kind = type(e)", "kind is MyError"),
    P("own pickling protocol", ("class Own:\n    def __init__(self): self.n = [0]; self.lock = __import__('threading').Lock()\n    def __getstate__(self): return {'n': self.n, 'm': getattr(self, 'm', 0)}\n    def __setstate__(self, s): self.__dict__.update(s); self.lock = __import__('threading').Lock()\no = Own(); k = o",), "o.n.append(1); o.m = 5", "o is k, o.m, o.n, o.lock.locked()"),
    P("protocol that only makes anew", ("class Own:\n    def __init__(self, n): self.n = n; self.lock = __import__('threading').Lock()\n    def __reduce__(self): return Own, (self.n,)\no = Own(1); k = [o]",), "o.n = 5", "o.lock.locked(), k[0] is o"),
    P("array of the array module", ("import array\na = array.array('i', [1, 2]); k = {'a': a}",), "a.append(3)", "list(a), list(k['a']), a is k['a']"),
    P("iterator advanced", ("it = iter([1, 2, 3]); k = [it]",), "first = next(it)", "next(it), k[0] is it"),
    P("many small dicts", ("rows = [{'i': i, 's': str(i % 7)} for i in range(300)]; r0 = rows[0]",), "for r in rows[::50]: r['x'] = r['i'] * 2\nrows.append(r0)"),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_cell_in_ranks_leaves_what_it_leaves_in_the_notebook(program: Program, tmp_path: Path) -> None:
    """Names, output, process and files afterwards are those of the same cells without headers."""
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)

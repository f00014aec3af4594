"""Ordinary things that cells do, each with what it is that has to be right, in ranks as in the notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from oracle import Program, compare, play, row, together

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

NOTED = "__annotate__(1)" if sys.version_info >= (3, 14) else "__annotations__"
"""The annotations of names that a cell has bound; from Python 3.14 on a function makes them."""
TORCH = "import torch, torch.nn as nn\n"
CALLED = "seen = []\ndef note(*what): seen.append(len(seen))\n"
HELPER = (
    "import ctypes, logging, threading\nlock = threading.Lock()\nlog ="
    " logging.getLogger(__name__)\nlibc = ctypes.CDLL(None)\ncounter = 1\nout = open('out.txt',"
    " 'w')\nheld = {'lock': lock, 'n': 1}\nclass Bad:\n    lock, n = lock, 1\n    def"
    " __reduce__(self): raise RuntimeError('no')\nbad = Bad()\n"
)

ROWS = [
    P("new names", ("x = 1",), "y = x + 1\nz = [y, x]"),
    P("counter", ("n = 0",), "n += 1\nn"),
    P("list in place, alias", ("a = [1]; b = a; c = {'k': a}",), "a.append(2)"),
    P("item of a large list, list first", ("a = [[i] for i in range(20)]; b = a[3]",), "a[1].append(5); b.append(1)", "a[3], b, a[3] is b"),
    P("item of a large mixed list, list first", ("a = [[i] if i % 2 else i for i in range(20)]; b = {'k': a[3]}",), "a[1].append(5); b['k'].append(1)", "a[3], b, a[3] is b['k']"),
    P("item of a large dict, dict first", ("a = {i: {i: i} for i in range(20)}; b = [a[3]]",), "a[1][5] = 5; b[0]['x'] = 1", "a[3], b, a[3] is b[0]"),
    P("deep in a large list, list first", ("a = [[0, [i]] for i in range(20)]; b = a[3][1]",), "a[1].append(5); b.append(1)", "a[3], b, a[3][1] is b"),
    P("views of a dict", ("d = {'a': [1]}; k, v, i = d.keys(), d.values(), d.items(); box = [k]",), "d['b'] = [2]; r = [*k], [*v], [*i]; e = {1: 1}; m = e.keys(); e[2] = 2", "d.update(c=3); e.update({3: 3})\n[*k], [*v], [*i], box[0] is k, r, [*m]"),
    P("views of an ordered dict", ("from collections import OrderedDict\nd = OrderedDict(a=[1]); k, v, i = d.keys(), d.values(), d.items()",), "d['b'] = 2; d.move_to_end('a'); r = [*k], [*v], [*i]", "d.update(c=3)\n[*k], [*v], [*i], r"),
    P("read-only views of dicts", ("import types, collections\nd = {'a': [1]}; p = types.MappingProxyType(d); box = [p]; q = types.MappingProxyType(collections.ChainMap(d))",), "d['b'] = 2; r = dict(p), dict(q)", "d.update(c=3)\ndict(p), dict(q), box[0] is p, r"),
    P("metadata of a dataclass", ("from dataclasses import dataclass, field, fields\n@dataclass\nclass A:\n    n: int = field(default=1, metadata={'help': 'how many'})\na = A()",), "h = fields(a)[0].metadata['help']; b = A(2)", "h, fields(b)[0].metadata['help'], type(b) is A"),
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
    P("mutual recursion", ("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)",), "r = even(10), odd(10)"),
    P("closure", ("def make():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n        return n\n    return inc\nc = make()",), "r = [c(), c()]", "c()"),
    P("closures share a variable", ("def make():\n    n = [0]; m = 0\n    def inc():\n        nonlocal m\n        m += 1; n.append(m)\n    def get(): return m, n\n    return inc, get\ninc, get = make()",), "inc(); inc(); r = get()", "inc(), get()"),
    P("recursive closure", ("def make():\n    def fact(n): return 1 if n < 2 else n * fact(n - 1)\n    return fact\nfact = make()",), "r = fact(5)", "fact(6)"),
    P("function attributes and defaults", ("def f(x, acc=[]):\n    f.calls += 1\n    acc.append(x)\n    return acc\nf.calls = 0",), "f(1); r = f(2)", "f(3), f.calls"),
    P("decorators and partial", ("import functools\ndef twice(g):\n    @functools.wraps(g)\n    def w(*a): return g(g(*a))\n    return w\n@twice\ndef inc(x): return x + k\nk = 2\np = functools.partial(inc, 3)",), "k = 10\nr = inc(1), p()", "inc(1), p()"),
    P("lru_cache", ("import functools\nk = 2\n@functools.lru_cache\ndef f(x): return x * k",), "r = f(3)", "f(4)"),
    P("cached property", ("import functools\nclass A:\n    n = 0\n    @functools.cached_property\n    def p(self): self.n += 1; return [self.n]\na = A(); b = A(); b.p",), "b.p.append(2)\nclass B(A):\n    @functools.cached_property\n    def q(self): return self.p + ['q']\nc = B()", "a.p, b.p, b.n, c.q, c.q is c.q"),
    P("lambda in a list", ("k = 1\nfs = [lambda x: x + k, max]",), "k = 3\nr = [f(2) if f is not max else 0 for f in fs]", "fs[0](1)"),
    P("bound method", ("class A:\n    def __init__(self): self.n = 0\n    def up(self): self.n += 1\na = A(); up = a.up",), "up(); up()", "a.n, up.__self__ is a"),
    P("class in the cell", ("k = 1\nclass Base:\n    def f(self): return k",), "class New(Base):\n    pass\no = New(); k = 4", "o.f(), isinstance(o, Base)"),
    P("deleted name", ("a = [1]; b = a",), "del a"),
    P("only possibly used, unpicklable", ("import threading\nlock = threading.Lock(); n = 1\ndef f():\n    if n > 5: lock.acquire()\n    return n",), "r = f()\nif n > 9: lock.release()"),
    P("unpicklable and not used", ("gen = (i for i in range(3)); x = 1",), "y = x + 1", "next(gen)"),
    P("imported in the cell", (), "import json, os.path as osp\nfrom math import pi\nx = json.dumps([osp.join('a', 'b'), pi])"),
    P("match, walrus, try, with", ("p = {'k': [1, 2]}; n = 2; import contextlib",), "match p:\n    case {'k': [a, *rest]} if a < n:\n        r = rest\nif (m := n + 1) > 2: q = m\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    err = str(n)\nwith contextlib.suppress(KeyError):\n    n = p['zz']"),
    P("strings, paths, dates, regex", ("import re, datetime, pathlib, decimal, fractions\nv = [re.compile('a+'), datetime.date(2020, 1, 1), pathlib.Path('x'), decimal.Decimal('1.5'), fractions.Fraction(1, 3), range(3), slice(1, 2), 1j, b'x', None, ...]",), "w = list(v); v.append(v[0].match('aa').group())"),
    P("exception object", ("class MyError(Exception):\n    def __init__(self, a, b): super().__init__(a, b); self.a = a\nerrors = []",), "try:\n    raise MyError(1, [2])\nexcept MyError as e:\n    errors.append(e.args); kind = type(e)", "kind is MyError"),
    P("own pickling protocol", ("class Own:\n    def __init__(self): self.n = [0]; self.lock = __import__('threading').Lock()\n    def __getstate__(self): return {'n': self.n, 'm': getattr(self, 'm', 0)}\n    def __setstate__(self, s): self.__dict__.update(s); self.lock = __import__('threading').Lock()\no = Own(); k = o",), "o.n.append(1); o.m = 5", "o is k, o.m, o.n, o.lock.locked()"),
    P("protocol that only makes anew", ("class Own:\n    def __init__(self, n): self.n = n; self.lock = __import__('threading').Lock()\n    def __reduce__(self): return Own, (self.n,)\no = Own(1); k = [o]",), "o.n = 5", "o.lock.locked(), k[0] is o"),
    P("many small dicts", ("rows = [{'i': i, 's': str(i % 7)} for i in range(300)]; r0 = rows[0]",), "for r in rows[::50]: r['x'] = r['i'] * 2\nrows.append(r0)"),
    P("dataclass subclassed", ("from dataclasses import dataclass, field\n@dataclass\nclass A:\n    n: int\n    l: list = field(default_factory=list)",), "@dataclass\nclass B(A):\n    m: int = 2\nb = B(1)", "b, B(3, [4]), A(5)"),
    P("attributes are the object itself", ("class Bunch(dict):\n    def __init__(self, **k):\n        super().__init__(**k); self.__dict__ = self\nb = Bunch(n=1)",), "b.n += 1; b['m'] = 3", "b.m, b['n'], b.__dict__ is b"),
    P("class of an object changed", ("class A: pass\nclass B:\n    def hi(self): return 'hi'\na = A(); a.n = 1; k = [a]",), "a.__class__ = B; a.n = 2", "a.hi(), k[0] is a, type(k[0]) is B"),
    P("registry of a metaclass", ("class Meta(type):\n    classes = {}\n    def __new__(mcs, name, bases, ns):\n        cls = super().__new__(mcs, name, bases, ns); mcs.classes[name] = cls; return cls\nclass A(metaclass=Meta): pass",), "class B(A):\n    k = 1\nn = len(Meta.classes)", "n, sorted(Meta.classes), sorted(k.__name__ for k in Meta.classes.values()), A in Meta.classes.values()"),
    P("files that were closed", ("with open('a.txt', 'w', encoding='latin-1') as made: n = made.write('one')\nfiles = [made]",), "with open('a.txt') as f: text = f.read()\nwith open('a.txt', 'rb') as g: size = len(g.read())\nwith open('b.txt', 'x') as h: files.append(h)\nwith open('b.txt', 'ab', buffering=0) as raw: pass\nagain = made.name", "made, f, g, h, raw, again, files[0] is made, files[1] is h, [x.closed for x in (made, f, g, h, raw)], f.encoding, made.encoding"),
    P("exception with its cause", ("errors = []",), "try:\n    try: 1 / 0\n    except ZeroDivisionError as e: raise ValueError('bad') from e\nexcept ValueError as e: errors.append(e)", "import traceback\nrepr(errors[0]), repr(errors[0].__cause__)"),
    P("attributes of a class", ("class M:\n    count = 0; names = ['a']; gone = slots = 1; old = (1,)\n    def __init__(self): M.count += 1; self.names.append(M.count)\n    def f(self): return 'f'\n    @classmethod\n    def more(cls): cls.count += 10; return cls.count\nm = M(); k = [M]",), "m2 = M(); M.f = lambda self: 'g'; setattr(M, 'new', [m2]); del M.gone; M.more(); M.p = property(lambda self: self.count); M.s = staticmethod(len); M.slots = (M.slots, m); M.__doc__ = 'doc'", "M.count, M.names, m.f(), m2.f(), M.new[0] is m2, hasattr(M, 'gone'), M.more(), m.p, M.s([1]), M.slots[1] is m, k[0] is M, type(m2) is M"),
    P("attributes of classes that inherit, and of abstract and slotted ones", ("import abc\nfrom dataclasses import dataclass\nclass A(abc.ABC):\n    n = 1\n    @abc.abstractmethod\n    def f(self): ...\nclass B(A):\n    def f(self): return self.n\nclass S:\n    __slots__ = ('x',)\n    made = 0\n    def __init__(self): S.made += 1; self.x = 1\n@dataclass\nclass D:\n    n: int = 1\nb = B(); s = S()",), "B.n = 5; A.n = 7; t = S(); S.made += s.x; D.n = 4; D.extra = b; isinstance(3, A); A.g = A.f", "b.f(), A.n, S.made, t.x, D(), D.n, D.extra is b, A.g is A.f"),
    P("an object that copies what it is made with", ("class Box:\n    def __init__(self, items): self.items = list(items)\n    def __reduce__(self): return Box, (self.items,)\nb, c = Box([1]), Box([2])",), "b.items.append(3); d = Box(c.items)", "b.items, c.items, d.items"),
    P("class with its own __new__", ("class One:\n    only, made = None, 0\n    def __new__(cls, name):\n        if cls.only is None: cls.only = super().__new__(cls); One.made += 1\n        return cls.only\n    def __init__(self, name): self.name = name\none = One('a')\nclass Other(One): only = None",), "other = Other('b'); same = One('c')", "one is same is One.only, one.name, other.name, Other.only is other, One.made"),
    P("dict that needs arguments", ("class Table(dict):\n    def __init__(self, name): super().__init__(); self.name = name\nt = Table('t'); t['a'] = 1; k = t",), "t['b'] = 2; u = Table('u'); u['x'] = t", "t, t.name, k is t, u.name, u['x'] is t"),
    P("annotations of a class in the cell", ("from typing import Optional\nfrom dataclasses import dataclass",), "@dataclass\nclass A:\n    n: Optional[int] = None\na = A(3)", "a, A.__annotations__"),
    P("annotation of a name", ("from typing import List",), "n: List[int] = [1]", "n"),
    P("objects that pickle by themselves in the cell", ("import os, pickle",), "class A:\n    def __init__(self): self.n = []\n    def __getstate__(self): return {'n': pickle.dumps(self.n), 'by': str(os.getpid()).encode()}\n    def __setstate__(self, state): self.n = pickle.loads(state['n'])\nclass B: pass\na = A(); a.n = [B()]", "type(a.n[0]) is B"),
    P("text and bytes in memory", ("import io\ns = io.StringIO('abc')",), "s.read(1); s.write('x'); t = io.StringIO('q'); b = io.BytesIO(b'q')", "s.getvalue(), s.tell(), t.getvalue(), b.getvalue()"),
    P("namespace in a dict", ("import types\nns = types.SimpleNamespace(a=[1]); d = {}",), "ns.b = ns.a; ns.a.append(1); d['ns'] = ns", "ns, ns.b is ns.a, d['ns'] is ns"),
    P("arrays and views", ("import numpy as np\na = np.arange(6.); v = a[::2]; b = a.reshape(2, 3).T; rev = a[::-1]",), "v += 10; b[0, 0] = -1; c = a[1:]; n = a.copy()"),
    P("array of objects and records", ("import numpy as np\no = np.array([[1], 'x'], dtype=object); r = np.zeros(2, dtype=[('a', 'i4'), ('b', 'f8')]); k = [o, r]",), "r['a'] = 3; o[0].append(2)"),
    P("array read-only and empty", ("import numpy as np\na = np.ones(3); a.flags.writeable = False; e = np.empty((0, 2)); z = np.array(3.)",), "s = a.sum() + z; z += 1", "a.flags.writeable"),
    P("recarray and its column", ("import numpy as np\nr = np.rec.array([(1, 2.), (3, 4.)], dtype=[('a', 'i4'), ('b', 'f8')]); col = r['a']",), "r.a[0] = 7; col[1] = 8", "r.tolist(), col.tolist(), np.shares_memory(col, r)"),
    P("masked array and its data", ("import numpy as np\nd = np.arange(4.); m = np.ma.array(d, mask=[0, 1, 0, 0], copy=False)",), "d[0] = 5; m[2] = np.ma.masked; m[3] = 9", "m.tolist(), d.tolist(), np.shares_memory(d, m)"),
    P("memory of a file", ("import numpy as np\nmm = np.memmap('m.bin', dtype='i4', mode='w+', shape=3); mm[:] = 1; mm.flush()",), "mm[0] = 5; mm.flush(); s = mm.sum()", "mm, s, open('m.bin', 'rb').read()"),
    P("memory of a file, opened in the cell", ("import numpy as np\nnp.arange(24, dtype='i4').tofile('m.bin'); a = np.memmap('m.bin', dtype='i4', mode='r+', shape=(4, 6)); v = a[1:, ::2]; w = v[1]; p = np.asarray(a); k = [a]",), "b = np.memmap('m.bin', dtype='i4', mode='r+', offset=8); c = np.memmap('n.bin', dtype='f4', mode='w+', shape=(2, 3), order='F'); c[1] = 5; d = c[:, 1]; np.save('l.npy', np.ones((2, 2))); l = np.load('l.npy', mmap_mode='r+'); r = np.load('l.npy', mmap_mode='r')[1]; v[0] = 70; w += 1; b[0] = 90; s = a.sum().item(), np.shares_memory(a, v), np.shares_memory(v, w), type(v) is np.memmap", "a[3, 5] = -1; b[1] = -2; c[0] = 7; l[0] = 8; w[2] = -3; p[0, 0] = -4; [x.flush() for x in (a, b, c, l)]\n[x.tolist() for x in (a, v, w, b, c, d, l, r, p)], k[0] is a, np.shares_memory(a, v), np.shares_memory(v, w), np.shares_memory(p, a), np.shares_memory(c, d), s, [(type(x).__name__, x.mode, x.offset, x.flags.writeable) for x in (a, v, b, c, d, l, r)], [open(f, 'rb').read() for f in ('m.bin', 'n.bin', 'l.npy')]"),
    P("tensor in place", ("import torch\nt = torch.zeros(3); u = t",), "t += 1; t[0] = 5"),
    P("tensor views", ("import torch\nt = torch.arange(6.); v = t[1:4]; w = t.view(2, 3).T; k = [v]",), "v.mul_(10); w[0, 0] = -1; x = t[4:]"),
    P("tensor rebound", ("import torch\nt = torch.zeros(3); u = t",), "t = t + 1"),
    P("tensor dtypes", ("import torch\nts = [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64)]; e = torch.empty(0, 3); s = torch.tensor(3.)",), "for t in ts: t[0] = 0\ns += 1; e2 = e + 1"),
    P("sparse tensor", ("import torch\ns = torch.eye(3).to_sparse()",), "d = s.to_dense() * 2", "s.to_dense().tolist()"),
    P("grad and requires_grad", ("import torch\nw = torch.ones(2, requires_grad=True); v = torch.ones(2)",), "(w * 3).sum().backward(); v.requires_grad_()", "w.grad.tolist(), v.requires_grad, w.is_leaf"),
    P("tensor attribute", ("import torch\nt = torch.zeros(1); t.tag = [1]",), "t.tag.append(2); t.other = t.tag"),
    P("data replaced", ("import torch\nt = torch.zeros(2); v = t[:1]",), "t.data = torch.ones(3)"),
    P("module to half", (NET + "net = Net(); p = net.fc.weight",), "net.half(); net.eval()", "net.fc.weight is p, p.dtype"),
    P("resized tensor", ("import torch\nt = torch.empty(0); k = [t]",), "t.resize_(4).fill_(1)"),
    P("parameters and optimizer", (NET + "net = Net(); opt = torch.optim.Adam(net.parameters(), lr=.1)",), TRAIN, "opt.param_groups[0]['params'][0] is net.fc.weight"),
    P("scheduler", (NET + "net = Net(); opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9); sched = torch.optim.lr_scheduler.StepLR(opt, 1, .5)",), TRAIN.replace("opt.step()", "opt.step(); sched.step()"), "opt.param_groups[0]['lr'], sched.get_last_lr(), sched.optimizer is opt"),
    P("shared parameters and buffers", (NET + "class Two(Net):\n    def __init__(self):\n        super().__init__(); self.a = nn.Linear(2, 2); self.b = self.a; self.bn = nn.BatchNorm1d(2)\nnet = Two()",), "net.bn(torch.ones(4, 2)); net.a.weight.data.fill_(2); net.extra = nn.Linear(1, 1)", "net.a is net.b, list(net.state_dict())"),
    P("model made in the cell, run twice", (NET, "net = Net(); first = net", "n = 1"), "net = Net(); opt = torch.optim.SGD(net.parameters(), lr=.1)\n" + TRAIN, "isinstance(net, Net), first is net"),
    P("distributed wrapper unwrapped", (NET + "net = Net(); opt = torch.optim.Adam(net.parameters())",),
      "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nmade = dist.HashStore()\ndist.init_process_group('gloo', store=made, rank=0, world_size=1)\nnet = DDP(net)\ninner = net.module\n" + TRAIN.replace("net.steps", "inner.steps").replace("net.seen", "inner.seen") + "dist.destroy_process_group()\ndel made\nnet = net.module",
      "net is inner"),
    P("dataset and loader", (NET + "from torch.utils.data import DataLoader, Dataset\nclass D(Dataset):\n    def __init__(self): self.x = torch.arange(8.)\n    def __len__(self): return 8\n    def __getitem__(self, i): return self.x[i]\nloader = DataLoader(D(), batch_size=4, shuffle=True)",), "got = [b.tolist() for b in loader]", "sorted(sum(got, []))"),
    P("array and tensor share memory", ("import numpy as np, torch\na = np.zeros(4); t = torch.from_numpy(a); s = torch.zeros(3); b = s.numpy()",), "a[0] = 1; t[1] = 2; b[2] = 3; s[0] = 4", "a.tolist(), t.tolist(), b.tolist(), s.tolist()"),
    P("new view of old memory", ("import numpy as np, torch\na = np.zeros(4); s = torch.zeros(3)",), "n = s.numpy(); t = torch.from_numpy(a[1:]); v = a[2:]; w = s[1:]", "n.fill(5), t.fill_(6), a.tolist(), s.tolist(), v.tolist(), w.tolist()"),
    P("random generators", ("import random, numpy as np, torch\nr = random.Random(3); g = np.random.default_rng(4); s = np.random.RandomState(5); t = torch.Generator().manual_seed(6); k = [r, g, s, t]",), "x = [r.random(), g.random(), s.rand(), torch.rand(1, generator=t).item()]", "[r.random(), g.random(), s.rand(), torch.rand(1, generator=t).item()]"),
    P("global random state", ("import random, numpy as np, torch\nx0 = random.random(), np.random.rand(), torch.rand(1).item()",), "x1 = random.random(), np.random.rand(), torch.rand(1).item()"),
    P("seeded in the cell", ("import random, numpy as np, torch",), "torch.manual_seed(7); random.seed(7); np.random.seed(7)\nx1 = random.random(), np.random.rand(), torch.rand(1).item()"),
    P("forward hook beside the notebook's", (TORCH + CALLED + "net = nn.Linear(1, 1); h = net.register_forward_hook(note)",), "g = net.register_forward_hook(note); net(torch.ones(1)); n = len(net._forward_hooks)", "h.remove(), len(net._forward_hooks), seen"),
    P("tensor hooks of the notebook", (TORCH + CALLED + "t = torch.ones(2, requires_grad=True); t.register_hook(note); t.register_post_accumulate_grad_hook(note)",), "(t * 2).sum().backward()", "(t * 2).sum().backward(), seen"),
    P("tensor hooks of the cell", (TORCH + CALLED + "t = torch.ones(2, requires_grad=True)",), "h = t.register_hook(note); k = t.register_post_accumulate_grad_hook(note)", "(t * 2).sum().backward(), seen"),
    P("lazy modules take their shape", (TORCH + "net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()); first = net[0]",), "y = net(torch.ones(2, 4)).sum().item()", "type(net[0]).__name__, first is net[0], net(torch.ones(2, 4)).shape, net"),
    P("parametrization", (TORCH + "net = nn.Linear(2, 2); k = [net]",), "from torch.nn.utils.parametrizations import weight_norm\nw = weight_norm(net)", "net(torch.ones(2)).shape, k[0] is net, sorted(net.state_dict())"),
    P("method of a model patched", (TORCH + "class Net(nn.Module):\n    seen = 0\n    def __init__(self): super().__init__(); self.l = nn.Linear(1, 1)\n    def forward(self, x): Net.seen += 1; return self.l(x)\nnet = Net(); first = Net.forward",), "def patched(self, x): return first(self, x) * 0\nNet.forward = patched; r = net(torch.ones(1)).item(); keep = Net.forward", "r, net(torch.ones(1)).item(), Net.seen, Net.forward is patched is keep"),
    P("whole model, saved by its class's name, which the cell does not say", (TORCH + "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(2, 1)\nnet = Net()",), "torch.save(net, 'net.pt')", "type(torch.load('net.pt', weights_only=False)) is Net"),
    P("objects that pickle others by themselves", (TORCH + "import io\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(2, 1)\nclass Holder:\n    def __init__(self, net): self.net = net\n    def __getstate__(self):\n        b = io.BytesIO(); torch.save(self.net, b); return {'net': b.getvalue()}\n    def __setstate__(self, state): self.net = torch.load(io.BytesIO(state['net']), weights_only=False)\nh = Holder(Net()); k = [h]",), "total = nn.init.ones_(h.net.l.weight).sum().item()", "h.net.l.weight.tolist(), k[0] is h, type(h.net) is Net"),
    P("frozen parameters", (TORCH + "net = nn.Linear(2, 1); x = torch.ones(1, requires_grad=True)",), "for p in net.parameters(): p.requires_grad = False\nnet.bias.requires_grad_(True); x.requires_grad_(False)", "[p.requires_grad for p in net.parameters()], x"),
    P("gradient that was retained", (TORCH + "w = torch.ones(2, requires_grad=True); held = []",), "out = w * 2; out.retain_grad(); held.append(out); (out ** 2).sum().backward()", "out.grad, held[0] is out, w.grad"),
    P("functions of torch under other names", ("import torch",), "from torch import randn, as_tensor, cat\nt2 = torch.as_tensor; fs = [torch.zeros]", "randn is torch.randn, t2 is as_tensor is torch.as_tensor, fs[0] is torch.zeros, cat"),
    P("model and its gradients in another precision", (TORCH + "m = nn.Linear(2, 2); m(torch.ones(2)).sum().backward(); g = m.weight.grad",), "m.double()", "m.weight.grad is g, m(torch.ones(2).double()), [p.grad.dtype for p in m.parameters()]"),
    P("project module", ("import model\nnet = model.Thing(3)",), "net.n += 1; other = model.Thing(net.n); r = model.double(2)", "isinstance(other, model.Thing), type(net) is model.Thing", (("model.py", "class Thing:\n    def __init__(self, n): self.n = n\ndef double(x): return 2 * x\n"),)),
    P("data of a project's module", ("import helper\nfrom helper import cfg\nhelper.counter = 41; cfg['lr'] = [1]; keep = helper.things",), "helper.counter += 1; cfg['lr'].append(2); helper.things.append(helper.lr()); helper.new = [helper.things]; del helper.old; r = helper.bump()", "helper.counter, helper.cfg is cfg, cfg, helper.things is keep, keep, helper.new[0] is keep, hasattr(helper, 'old'), helper.bump()", (("helper.py", "import threading\ncounter = 0\nold = 1\ncfg = {}\nthings = []\nlock = threading.Lock()\ndef bump():\n    global counter\n    counter += 1\n    return counter\ndef lr(): return cfg['lr']\n"),)),
    P("data of a module that an earlier cell only imported", ("import helper; helper.counter = 5; del helper",), "from helper import counter as r", "r", (("helper.py", "counter = 0\n"),)),
    P("classes of the project's modules", ("import helper\nfrom helper import Counted\nm = Counted(); helper.Other.count = 5; helper.Other.f = lambda self: 'patched'",), "n = helper.Counted(); r = Counted.count, helper.Other().f(), helper.Other.count; helper.Counted.items.append(Counted); Counted.run = lambda self: 'mine'; Counted.__str__ = lambda self: 'Me'; helper.Other.Inner.inside += 1; helper.Other.new = n; del Counted.gone; q = helper.make()", "Counted.count, r, m.run(), n.run(), str(n), Counted.items, helper.Other.Inner.inside, helper.Other.new is n, hasattr(Counted, 'gone'), helper.Other().f(), Counted.p.fget(m), helper.Kind.A.value, helper.make()", (("helper.py", "import abc, enum\nclass Kind(enum.Enum): A = 1\nclass Counted(abc.ABC):\n    count = gone = 0; items = []\n    __slots__ = ('x', '__dict__')\n    def __init__(self): Counted.count += 1\n    def run(self): return 'run'\n    @property\n    def p(self): return self.count\nclass Other:\n    count = 0\n    def f(self): return 'f'\n    class Inner: inside = 1\ndef make(): Counted(); return Counted.count, Other.count\n"),)),
    P("modules that hold what cannot travel", ("import helper\nhelper.counter = 41; here = helper.lock, helper.out, helper.held, helper.bad, helper.Bad.lock",), "with helper.lock:\n    helper.counter += helper.libc is not None; helper.Bad.n += 1", "helper.counter, [a is b for a, b in zip(here, (helper.lock, helper.out, helper.held, helper.bad, helper.Bad.lock))], helper.held['n'], helper.Bad.n, helper.out.close()", (("helper.py", HELPER),)),
    P("a module of the project that the cell imports", ("n = 1",), "import helper\nhelper.counter += n", "helper.counter, helper.lock.locked()", (("helper.py", HELPER),)),
    P("state of a module's wrapper", ("from helper import counted\n@counted\ndef f(): return 1\nf()",), "f(); r = f.calls, f.log", "r, f(), f.calls, f.log", (("helper.py", "def counted(f):\n    n = 0\n    def w():\n        nonlocal n\n        n += 1; w.calls += 1; w.log.append(n)\n        return f()\n    w.calls, w.log = 0, []\n    return w\n"),)),
    P("log in a buffer", ("import io, logging\nbuffer = io.StringIO(); log = logging.getLogger('train'); h = logging.StreamHandler(buffer); log.addHandler(h); log.setLevel('INFO'); log.propagate = False",), "log.info('one'); log.addHandler(logging.StreamHandler(buffer)); log.info('two')", "buffer.getvalue(), log.info('three'), buffer.getvalue(), log.handlers[0] is h, log.removeHandler(h), len(log.handlers)"),
    P("log in a file of the notebook", ("import logging\nh = logging.FileHandler('a.log', mode='w'); log = logging.getLogger('file'); log.addHandler(h); log.propagate = False; log.error('one')",), "log.error('two'); h.setLevel('CRITICAL'); log.error('no'); log.critical('three')", "log.error('no'), log.critical('four'), log.handlers == [h], log.removeHandler(h), h.close(), open('a.log').read()"),
    P("handler of the cell, removed later", ("import logging, sys\nlog = logging.getLogger('out'); log.propagate = False; out = sys.stdout",), "h = logging.StreamHandler(sys.stdout); log.addHandler(h); log.error('one'); print('two', file=out); same = out is sys.stdout", "log.error('three'), log.handlers == [h], same, out is sys.stdout, log.removeHandler(h), log.handlers"),
    P("handlers that are alike", ("import logging, sys\nlog = logging.getLogger('twice'); log.propagate = False; log.addHandler(logging.StreamHandler(sys.stdout))",), "log.addHandler(logging.StreamHandler(sys.stdout)); log.error('one')", "log.error('two'), len(log.handlers), log.removeHandler(log.handlers[0]), log.error('three'), len(log.handlers)"),
    P("formatter of a class of its own", ("import logging, sys\nclass Loud(logging.Formatter):\n    def format(self, record): return super().format(record).upper()\nlog = logging.getLogger('loud'); h = logging.StreamHandler(sys.stdout); h.setFormatter(Loud('%(message)s')); log.addHandler(h); log.propagate = False",), "log.error('one')", "log.error('two'), log.handlers == [h]"),
    P("module reloaded", ("import helper\nm = helper.Model(2); helper.seen.append(m.n)",), "with open('helper.py', 'a') as file: rank0 = file.write('\\ndef more(): return N\\n')\nimport importlib\nimportlib.reload(helper)\nr = helper.more(), helper.f(); new = helper.Model(5)", "r, helper.more(), helper.seen, m.n, type(new) is helper.Model, type(m) is helper.Model", (("helper.py", "N = 3\nseen = []\nclass Model:\n    def __init__(self, n): self.n = n\ndef f(): return N\n"),)),
    P("names from a module that is reloaded", ("import helper, importlib\nfrom helper import f, Model, seen\nheld, m = [f], Model(2)",), "with open('helper.py', 'a') as file: rank0 = file.write('\\ndef f(): return 4\\nseen = [4]\\n')\nimportlib.reload(helper)\nheld.append(f); seen.append(1); r = f(), helper.f(), seen", "r, f(), helper.f(), f is helper.f, held[0] is held[1] is f, seen is helper.seen, seen, type(m) is Model, Model is helper.Model", (("helper.py", "seen = []\nclass Model:\n    def __init__(self, n): self.n = n\ndef f(): return 3\n"),)),
    P("modules that the cell reaches by others", ("import helper, user; helper.counter = 41; a = helper.A(); helper.A.step = 2",), "r = a.count(), user.lazily()", "r, helper.counter", files=(("helper.py", "counter = 0\nclass A:\n    step = 1\n    def count(self):\n        global counter\n        counter += self.step\n        return counter\n"), ("user.py", "def lazily():\n    import helper\n    return helper.counter\n"))),
    P("a module that is edited while the cell runs", ("import helper\nl = helper.items",), "helper.counter += 1; helper.items.append(2)\nwith open('helper.py', 'a') as file: rank0 = file.write('more = 1\\n')", "helper.counter, helper.items is l, l", (("helper.py", "counter = 0\nitems = []\n"),)),
    P("what there is once, in a module", (f"{TORCH}import helper, types, typing; n = types.SimpleNamespace(a=1); t = typing.NamedTuple('t', [('u', int)])(1)",), "helper.items += n, t\ng = torch.manual_seed(2)", "helper.items[0] is n, helper.items[1] is t, g is torch.default_generator", files=(("helper.py", "items = []\n"),)),
    P("a module that the cell does not use", ("import helper; l = helper.items",), "x = 1", "helper.counter, helper.items is l, x", files=(("helper.py", "counter = 0\nitems = []\n"),)),
    P("a module that the cell imports itself", ("import helper; l = helper.items; helper.counter = 5",), "from helper import items, counter as c\nitems.append(c)\nimport helper as h; h.new = items", "helper.counter, helper.items is l, l, h is helper, helper.new is l", files=(("helper.py", "counter = 0\nitems = []\n"),)),
    P("code put into a module", ("import helper\ndef twice(x): return x * 2\nhelper.f = twice\nclass A: pass\nhelper.A = A",), "r = helper.run(3), isinstance(helper.A(), A); helper.g = lambda x: x + 1; helper.f = helper.g\nclass B(A): pass\nhelper.B = B", "r, helper.run(3), helper.f is helper.g, helper.B is B, helper.A is A", files=(("helper.py", "def f(x): return x\ndef run(x): return f(x)\n"),)),
    P("code of a module, put back", ("import helper\ndef twice(x): return x * 2\nold = helper.f\nhelper.f = twice",), "r = helper.run(3); helper.f = old", "r, helper.run(3), helper.f is old", files=(("helper.py", "def f(x): return x\ndef run(x): return f(x)\n"),)),
    P("object column", ("import pandas as pd\ndf = pd.DataFrame({'a': pd.Series(['x', 'y'], dtype=object), 'n': [1, 2]})",), "df.loc[0, 'a'] = 'z'; df['b'] = df['n'] * 2", "df"),
    P("index of several levels", ("import numpy as np, pandas as pd\nidx = pd.MultiIndex.from_product([['a', 'b'], [1, 2]], names=['p', 'q'])\ndf = pd.DataFrame({'u': np.arange(4)}, index=idx); level = idx.levels[0]",), "df['v'] = df['u'] * 2; n = df.shape", "df.index is idx, idx.levels[0] is level, df"),
    P("a column of pandas", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]}); s = df['a']; k = df['b']",), "s.iloc[0] = 50; df.loc[1, 'b'] = 9", "df, s, k"),
    P("a column that stays behind", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3]}); s = df['a']",), "df.loc[0, 'a'] = 9; new = df['a']; v = df[['a']]", "s.iloc[2] = 7\ndf, s, new, v"),
    P("a column taken in the cell", ("import pandas as pd",), "df = pd.DataFrame({'a': [1, 2, 3]}); s = df['a']; w = df.copy(deep=False)", "s.__setitem__(0, 5), w.__setitem__('b', 1), df, s, w"),
    P("a frame changed in place", ("import pandas as pd\ndf = pd.DataFrame({'a': [3, 1, 2]}, index=list('xyz')); k = df; col = df['a']; arr = df.to_numpy()",), "df.sort_values('a', inplace=True); df.drop('x', inplace=True); df.columns = ['A']; df['B'] = pd.array([1, None], dtype='Int64')", "k is df, df, col, arr"),
    P("table with columns of two kinds", ("import pandas as pd\na = pd.DataFrame([[1, 2], [3, 4]])",), "a['p'] = 1; b = pd.DataFrame({0: [1], 'a': [2]})", "a, b"),
    P("indexes made of a frame's columns", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': list('xyz')}); key = pd.Index(df['a'])",), "idx = pd.Index(df['a']); by = df.set_index('b'); cat = pd.Categorical([1, 2], categories=df['a'])", "df.loc[0, 'b'] = 'w'; df.loc[0, 'a'] = 9\ndf, list(key), list(idx), by, cat"),
    P("groups of a frame", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'x'], 'c': [.1, .2, .3]})",), "g = {k: g for k, g in df.groupby('b')}", "g"),
    P("forest", ("from sklearn.ensemble import RandomForestClassifier\nimport numpy as np\nX = np.arange(20.).reshape(10, 2); y = np.arange(10) % 2; rf = RandomForestClassifier(3, random_state=0)",), "rf.fit(X, y)", "rf.predict(X), rf.feature_importances_"),
    P("estimator of the notebook", ("import numpy as np\nfrom sklearn.base import BaseEstimator, ClassifierMixin\nclass Mine(ClassifierMixin, BaseEstimator):\n    def __init__(self, a=1): self.a = a\n    def fit(self, X, y): self.coef_ = X.mean(0); self.bounds_ = np.unique(y); self.classes_ = np.unique(y); return self\nX = np.arange(8.).reshape(4, 2); y = np.array([0, 1, 0, 1]); e = Mine(); k = [e]",), "e.fit(X, y); f = Mine(2).fit(X, y)", "e.coef_, f.get_params(), k[0] is e, e.classes_"),
    P("views behind __getstate__", ("import numpy as np\nfrom sklearn.base import BaseEstimator\nclass Clip(BaseEstimator):\n    def fit(self, x): self.lo, self.hi = np.percentile(x, [5, 95], axis=0).T; self.both = [self.lo]; return self\nc = Clip()",), "d = c.fit(np.arange(8.).reshape(4, 2))", "d is c, c.lo.strides, c.both[0] is c.lo, c.lo.base is c.hi.base"),
]  # fmt: skip
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""

ALONE = [
    P("annotations are evaluated", ("from dataclasses import dataclass, fields\nfrom typing import Optional, List\nclass K: pass",), "@dataclass\nclass C:\n    k: Optional[int] = None\n    l: 'List[K]' = None\ndef f(x: K) -> K: return x\nimport typing\nr = fields(C)[0].type, f.__annotations__['x'] is K, typing.get_type_hints(C)['l'].__args__[0] is K\ndel C"),
    P("pickled by names that the cell does not say", ("import collections, enum, functools, pickle\nclass A:\n    class B: pass\nclass C(enum.IntEnum): ONE = 1\nN = collections.namedtuple('N', 'x')\nclass D(dict): pass\n@functools.cache\ndef f(x): return x\n@functools.wraps(f)\ndef g(x): return -x\ndeep = [[[A.B(), C.ONE, N(1), D(a=1), f, A]]]",), "again = pickle.loads(pickle.dumps(deep))\nr = again[0][0]", "[type(x).__qualname__ for x in r], r[4] is f, r[5] is A, type(r[0]) is A.B, A.B, r[1:4]"),
    P("generator function and async", ("def g(n):\n    for i in range(n): yield i * k\nk = 2\nasync def co(x): return x + k",), "r = list(g(3)), await co(1)"),
    P("magics", ("n = 3; path = '.'; total = 0\ndef f(x): return x * n",), "%timeit -n 1 -r 1 f(n)\nfiles = !echo {path} $n\nprint(f'{n:{n}}')\n%time y = f(n)\nfiles = list(files)"),
    P("cell magic below the header", ("n = 3\ndef f(x): return x * n",), "%%time\nz = f(n)"),
    P("last expression", ("n = 3",), "[n, n + 1]"),
    P("imported from the future", ("from __future__ import annotations\nn = 1",), "class A:\n    def copy(self, other: Missing) -> A: return n\nr = A().copy(1)", "A.copy.__annotations__, r"),
    P("annotated names", ("n: int = 1",), f"m: float = n / 2\nseen = sorted({NOTED})", NOTED),
    P("annotations of a class, asked for in the cell", ("class K: pass\nclass A:\n    k: K\n    def f(self, k: K) -> 'K': return k",), "r = A.__annotations__['k'] is K, A.f.__annotations__['k'] is K\nclass B(A):\n    a: A", "r, B.__annotations__['a'] is A, A.__annotations__['k'] is K, A.f.__annotations__"),
    P("annotations of a class, asked for later", ("from typing import get_type_hints\nclass K: pass\nclass A:\n    k: 'K'\n    def __init__(self): self.n = 1\na = A()",), "a.n += 1\nclass B:\n    a: A = a\n    later: 'Late'\nb = B()", "class Late: pass\nget_type_hints(B), get_type_hints(A), type(b.a) is A, a.n"),
    P("annotations that the cell sets", ("def f(x: int): return x\nclass A:\n    n: int = 1",), "f.__annotations__ = {'x': str}; A.__annotations__ = {'m': float}\ndef g(): pass\ng.__annotations__['y'] = int", "f.__annotations__, A.__annotations__, g.__annotations__"),
    P("names that IPython has", ("open = 3; display = [1]; exit = 'no'",), "display.append(open); exit += '!'; quit = 4", "open, display, exit, quit"),
    P("a class of the user's called Out", ("class Out:\n    n = 1\n    def get(self): return self.n\nout = Out()",), "Out.n = 5; r = isinstance(out, Out), Out().get()", "Out.n, r, type(out) is Out, out.get()"),
    P("In is the user's", ("In = ['a', 1]",), "In.append(2); n = len(In)", "In, n, _i1 == get_ipython().history_manager.input_hist_raw[1]"),
    P("get_ipython and exit are the user's", ("def exit(code): return code + 1\nget_ipython = lambda: 'mine'",), "r = [exit(1), get_ipython()]; quit = [r]", "r, exit(2), get_ipython(), quit[0] is r"),
    P("numbered names are the user's", ("_1, _2 = [1], [2]; _i1 = 7; _01 = 8",), "_1.append(_i1); _3 = _2; _2 = _01; _i1 = 'x'", "_1, _2, _3, _i1, _01"),
    P("values of cells are the user's", ("[5]", "_1 = ['mine']"), "_1.append(Out[1]); r = _1; __ = 6", "_1, r, Out[1], __"),
    P("__file__ and __doc__ are the user's", ("__file__ = 'train.py'; __doc__ = 'usage'",), "r = __file__, __doc__; __file__ = 'other.py'", "r, __file__, __doc__"),
    P("names with dots", (TORCH + "net = nn.Linear(1, 1); globals().update(net.state_dict(prefix='0.'))\nglobals()['a.b'] = [1]",), "w = globals()['0.weight']; same = w.data_ptr() == net.weight.data_ptr(); globals()['a.b'].append(2); del globals()['0.bias']; globals()['c.d'] = globals()['c/d:0'] = 3; globals().update(net.state_dict(prefix='new.'))", "same, sorted(n for n in globals() if '.' in n or ':' in n), globals()['a.b'], globals()['0.weight'] is w"),
    P("loop over a name that IPython has", ("n = 0",), "for _ in range(3): n += 1", "n, _"),
    P("names in annotations that are texts", ("from __future__ import annotations\nimport typing\nclass Net: pass\nclass Opt: pass\ndef f(x: list[Net], y: 'Opt' = None) -> Net: return x\nclass Cfg:\n    o: Opt",), "h = typing.get_type_hints(f), typing.get_type_hints(Cfg)", "h[0]['x'] == list[Net], h[0]['return'] is Net, h[1]['o'] is Opt"),
    P("%run -i", ("a = [1]; b = 2",), "%run -i script.py", "a, b, c", (("script.py", "a.append(b)\nb = 5\nc = [a]\n"),)),
    P("last value and names of it", (), "[1, 2]", "_, _2 if '_2' in globals() else _1, Out"),
    P("error in %run", ("n = 1",), "%run bad.py\nn = 2", "n", (("bad.py", "print('begin')\n1 / 0\n"),), goes_on=True),
    P("%%capture with an error", (), "%%capture out\nprint('x'); 3", "out.stdout, len(out.outputs)"),
    P("history of the notebook", ("a = 5\na + 1",), "r = _, _1, Out[1], In[1]", "r"),
    P("magic of the notebook", ("from IPython.core.magic import register_line_magic\n@register_line_magic\ndef double(line): return int(line) * k\nk = 2",), "r = %double 4\nprint(r)", "r"),
    P("every value is shown", ("get_ipython().ast_node_interactivity = 'all'",), "1\n[2]", ""),
    P("pandas first imported in the cell", ("x = 1",), "import pandas as pd", "pd.get_option('display.max_columns'), pd.get_option('display.width')"),
    P("figure shown again", ("import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); l = ax.plot([1, 2])",), "ax.plot([2, 3]); display(fig)", "fig"),
    P("figure of the cell shown later", (), "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); l = ax.plot([1, 2])", "ax.set_title('t'); fig"),
    P("format of figures", ("%config InlineBackend.figure_format = 'retina'",), "import matplotlib.pyplot as plt\nplt.plot([1, 2]);\n%config InlineBackend.figure_format = 'png'", "plt.plot([1, 3]);"),
    P("functions that show numbers", ("import numpy as np, pandas as pd\npd.options.display.float_format = lambda x: '%.1f!' % x",), "a = np.ones(2); df = pd.DataFrame({'a': [1.25]}); print(a, df); pd.options.display.float_format = lambda x: '?'; np.set_printoptions(precision=3)", "print(a, df)"),
    P("how a class is shown", ("class A: pass\nf = get_ipython().display_formatter.formatters['text/html'].for_type(A, lambda a: '<b>A</b>')",), "display(A())\nclass B: pass\nf = get_ipython().display_formatter.formatters['text/html'].for_type(B, lambda b: '<i>B</i>')", "display(A(), B())"),
    P("a frame anew in what cannot change", ("import pandas as pd\ndf = pd.DataFrame({'a': ['x', 'y'], 'n': [1, 2]}); cat = pd.Categorical(df['a']); k = (df, (cat,))",), "df['u'] = df['a'].astype('category').cat.codes; df = df.sort_values(['n', 'u']); df['r'] = df.groupby('a')['n'].rank()", "df, k[0], k[1][0] is cat"),
    P("wrappers unwrapped", (NET + "net = Net()",), "net0 = net\nnet = nn.DataParallel(net)\nnet.module.steps = 7\nm = nn.DataParallel(Net()); d = {'m': nn.DataParallel(Net())}", "net is net0, type(m) is Net, type(d['m']) is Net", here_also="\nnet = net.module.cpu(); m = m.module; d['m'] = d['m'].module"),
    P("names in known texts", ("import timeit\na = [1]; b = 2; c = 3; d = 4; code = 'r = x + y'; x = 1; y = 2; z = 3\ndef f(): return z",), "exec(code); exec('c += 1')\nfrom __main__ import z as other\nt = timeit.timeit('f()', 'from __main__ import f', number=1) > 0\nif 'a' not in globals(): a = [9]\nn = eval('b + 1'), '%(d)d' % vars(), '{c}'.format(**globals())", "a, c, n, r, other, t"),
    P("names in texts that are made", ("import __main__\nn0 = [1]; n1 = [2]; n2 = 3; name = 'n1'; total = 0\ndef get(i): return globals()[f'n{i}']",), "r = get(0), eval('n' + '1'), getattr(__main__, name), __main__.n2\nfor i in (0, 1): total += globals()[f'n{i}'][0]\nglobals()['n3'] = [n0, n1]; __main__.n4 = 4", "r, total, n3[0] is n0, n4"),
]  # fmt: skip
"""What a cell says of itself: texts, magics, output."""


@pytest.mark.parametrize(
    "program", [*together(ROWS), *ALONE], ids=lambda program: program.name[:60]
)
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, without a line of taas that something did not come back."""
    different = compare(program, tmp_path)
    assert not different, "\n".join([program.name, *different])


BAR = P(
    "bar",
    ("from tqdm import tqdm",),
    "b = tqdm(range(3))\nfor i in b: pass",
    "b.n, b.fp is not None, len(tqdm._instances)",
)


def test_a_set_of_objects_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    """Its items have another order where they have other addresses; no line says that it is not what rank 0 had."""
    program = P("set", ("class A:\n    seen = set()\n    def __init__(self): A.seen.add(self)\nl = [A() for _ in range(9)]",), "l += [A() for _ in range(9)]", "A.seen == {*l}, len(l)")  # fmt: skip
    played = play(program, tmp_path, plain=False)
    assert played.value == "(True, 18)"
    assert not played.lost


def test_a_bar_comes_back_whole(tmp_path: Path) -> None:
    """It writes to the notebook's stream, whose class is another one in ranks; no line says that it did not come back.

    It is over: the next bar has the line to itself.
    """
    pytest.importorskip("tqdm")
    played = play(BAR, tmp_path, plain=False)
    assert played.value == "(3, True, 0)"
    assert not played.lost


DEAF = P("handler with a lock", ("import logging, threading\nclass Own(logging.Handler):\n    def __init__(self): super().__init__(); self.own = threading.Lock(); self.seen = []\n    def emit(self, record): self.seen.append(record.getMessage())\nh = Own(); log = logging.getLogger('own'); log.addHandler(h); log.propagate = False",), "log.error('one')", "log.error('two'), h.seen, log.handlers == [h]")  # fmt: skip


def test_a_handler_that_cannot_travel_is_named(tmp_path: Path) -> None:
    """Whatever the cell logs: that does not reach the handler, which stays."""
    played = play(DEAF, tmp_path, plain=False)
    assert played.value == "(None, ['two'], True)"
    assert [line for line in played.said if "logging.getLogger('own').handlers[0].own is a" in line]


CHANGED = P("changed", ("import helper\nlock, held = helper.lock, helper.held",), "import threading\nhelper.held['n'] = 2; helper.bad.n = 2; helper.counter = helper.new = helper.lock = threading.Lock()", "helper.held is held, held['n'], helper.bad.n, helper.counter, helper.lock is lock, hasattr(helper, 'new')", (("helper.py", HELPER),))  # fmt: skip


def test_data_of_a_module_that_cannot_come_back_are_named(tmp_path: Path) -> None:
    """Each that the cell changed, or put there, in a line of its own; the notebook's stays."""
    played = play(CHANGED, tmp_path, plain=False)
    assert played.value == "(True, 1, 1, 1, True, False)"
    names = {line.partition(":")[0] for line in played.lost}
    assert names == {f"helper.{name}" for name in ("held", "bad", "counter", "new", "lock")}

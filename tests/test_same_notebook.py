"""Ordinary things that cells do, each with what it is that has to be right, in ranks as in the notebook."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, compare, play, row

pytestmark = pytest.mark.usefixtures("oracle")

P = row
TORCH = "import torch, torch.nn as nn\n"
CALLED = "seen = []\ndef note(*what): seen.append(len(seen))\n"
HELPER = "import ctypes, logging, threading\nlock = threading.Lock()\nlog = logging.getLogger(__name__)\nlibc = ctypes.CDLL(None)\ncounter = 1\n"

VALUES = [
    P("array of objects", ("import numpy as np\no = np.array([1, 'a', None], dtype=object); v = o[1:]",), "o[0] = 'new'; v[0] = [2]", "o.tolist(), v.tolist(), np.shares_memory(o, v)"),
    P("records with objects", ("import numpy as np\nr = np.zeros(2, dtype=[('n', 'O'), ('k', 'i4')]); col = r['n']",), "col[0] = [1]; r['k'] = 3; r[1] = ('x', 4)", "r.tolist()"),
    P("object column", ("import pandas as pd\ndf = pd.DataFrame({'a': pd.Series(['x', 'y'], dtype=object), 'n': [1, 2]})",), "df.loc[0, 'a'] = 'z'; df['b'] = df['n'] * 2", "df"),
    P("forward hook beside the notebook's", (TORCH + CALLED + "net = nn.Linear(1, 1); h = net.register_forward_hook(note)",), "g = net.register_forward_hook(note); net(torch.ones(1)); n = len(net._forward_hooks)", "h.remove(), len(net._forward_hooks), seen"),
    P("tensor hooks of the notebook", (TORCH + CALLED + "t = torch.ones(2, requires_grad=True); t.register_hook(note); t.register_post_accumulate_grad_hook(note)",), "(t * 2).sum().backward()", "(t * 2).sum().backward(), seen"),
    P("tensor hooks of the cell", (TORCH + CALLED + "t = torch.ones(2, requires_grad=True)",), "h = t.register_hook(note); k = t.register_post_accumulate_grad_hook(note)", "(t * 2).sum().backward(), seen"),
    P("dataclass subclassed", ("from dataclasses import dataclass, field\n@dataclass\nclass A:\n    n: int\n    l: list = field(default_factory=list)",), "@dataclass\nclass B(A):\n    m: int = 2\nb = B(1)", "b, B(3, [4]), A(5)"),
    P("attributes are the object itself", ("class Bunch(dict):\n    def __init__(self, **k):\n        super().__init__(**k); self.__dict__ = self\nb = Bunch(n=1)",), "b.n += 1; b['m'] = 3", "b.m, b['n'], b.__dict__ is b"),
    P("settings as attributes and as a dict", ("import argparse\nargs = argparse.Namespace(lr=.1); cfg = vars(args)",), "cfg['lr'] = .2; args.n = 3", "args, cfg, vars(args) is cfg"),
    P("state shared by instances", ("class Borg:\n    state = {}\n    def __init__(self): self.__dict__ = Borg.state\na = Borg(); b = Borg()",), "a.x = 1; c = Borg()", "b.x, c.x, a.__dict__ is b.__dict__ is Borg.state"),
    P("lazy modules take their shape", (TORCH + "net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()); first = net[0]",), "y = net(torch.ones(2, 4)).sum().item()", "type(net[0]).__name__, first is net[0], net(torch.ones(2, 4)).shape, net"),
    P("parametrization", (TORCH + "net = nn.Linear(2, 2); k = [net]",), "from torch.nn.utils.parametrizations import weight_norm\nw = weight_norm(net)", "net(torch.ones(2)).shape, k[0] is net, sorted(net.state_dict())"),
    P("class of an object changed", ("class A: pass\nclass B:\n    def hi(self): return 'hi'\na = A(); a.n = 1; k = [a]",), "a.__class__ = B; a.n = 2", "a.hi(), k[0] is a, type(k[0]) is B"),
    P("slots that __getattr__ uses", ("class A:\n    __slots__ = ('a', 'data', 'x')\n    def __init__(self): self.data = {'k': 1}\n    def __getattr__(self, n):\n        try: return self.data[n]\n        except KeyError: raise AttributeError(n)\na = A()",), "a.data['x'] = 2; b = A(); b.a = 3; r = a.x", "r, a.k, b.a, a.x"),
    P("optimizer in a wrapper of its class", (TORCH + "class W:\n    def __init__(self, o): self._o = o; self.__class__ = type('W' + type(o).__name__, (W, type(o)), {})\n    def step(self): return self._o.step()\n    def __getattr__(self, name): return getattr(self._o, name)\nnet = nn.Linear(1, 1); opt = torch.optim.SGD(net.parameters(), lr=.1)",), "w = W(opt)", "sorted(vars(w)), w._o is opt, w._zero_grad_profile_name, w.step()"),
    P("recarray and its column", ("import numpy as np\nr = np.rec.array([(1, 2.), (3, 4.)], dtype=[('a', 'i4'), ('b', 'f8')]); a = r['a']",), "r.a[0] = 7; a[1] = 8", "r.tolist(), a.tolist(), np.shares_memory(a, r)"),
    P("masked array and its data", ("import numpy as np\nd = np.arange(4.); m = np.ma.array(d, mask=[0, 1, 0, 0], copy=False)",), "d[0] = 5; m[2] = np.ma.masked; m[3] = 9", "m.tolist(), d.tolist(), np.shares_memory(d, m)"),
    P("not a number in a list", ("nan = float('nan'); l = [nan, 1]",), "here = nan in l; l.append(2)", "here, nan in l, l.index(nan)"),
    P("registry of a metaclass", ("class Meta(type):\n    classes = {}\n    def __new__(mcs, name, bases, ns):\n        cls = super().__new__(mcs, name, bases, ns); mcs.classes[name] = cls; return cls\nclass A(metaclass=Meta): pass",), "class B(A): pass\nn = len(Meta.classes)", "n, sorted(Meta.classes), Meta.classes['A'] is A, Meta.classes['B'] is B"),
    P("members of a class in their order", ("class A:\n    z = 1\n    def b(self): pass\n    a = 2",), "class B(A):\n    y = 1\n    def c(self): pass\n    b = 2", "[n for n in vars(A) if n[0] != '_'], [n for n in vars(B) if n[0] != '_']"),
    P("files that were closed", ("with open('a.txt', 'w', encoding='latin-1') as made: n = made.write('one')\nfiles = [made]",), "with open('a.txt') as f: text = f.read()\nwith open('a.txt', 'rb') as g: size = len(g.read())\nwith open('b.txt', 'x') as h: files.append(h)\nwith open('b.txt', 'ab', buffering=0) as raw: pass\nagain = made.name", "made, f, g, h, raw, again, files[0] is made, files[1] is h, [x.closed for x in (made, f, g, h, raw)], f.encoding, made.encoding"),
    P("function by type", ("import functools\n@functools.singledispatch\ndef f(x): return 'any'\n@f.register\ndef _(x: int): return 'int'",), "@f.register\ndef g(x: list): return 'list'\nr = f(1), f([]), f('s')", "f(1), f([]), f('s'), r"),
    P("annotated names", ("n: int = 1",), "m: float = n / 2\nseen = sorted(__annotations__)", "__annotations__"),
    P("exception with its cause", ("errors = []",), "try:\n    try: 1 / 0\n    except ZeroDivisionError as e: raise ValueError('bad') from e\nexcept ValueError as e: errors.append(e)", "import traceback\nrepr(errors[0]), repr(errors[0].__cause__)"),
    P("attributes of a class", ("class M:\n    count = 0; names = ['a']; gone = slots = 1; old = (1,)\n    def __init__(self): M.count += 1; self.names.append(M.count)\n    def f(self): return 'f'\n    @classmethod\n    def more(cls): cls.count += 10; return cls.count\nm = M(); k = [M]",), "m2 = M(); M.f = lambda self: 'g'; setattr(M, 'new', [m2]); del M.gone; M.more(); M.p = property(lambda self: self.count); M.s = staticmethod(len); M.slots = (M.slots, m); M.__doc__ = 'doc'", "M.count, M.names, m.f(), m2.f(), M.new[0] is m2, hasattr(M, 'gone'), M.more(), m.p, M.s([1]), M.slots[1] is m, k[0] is M, type(m2) is M"),
    P("attributes of classes that inherit, and of abstract and slotted ones", ("import abc\nfrom dataclasses import dataclass\nclass A(abc.ABC):\n    n = 1\n    @abc.abstractmethod\n    def f(self): ...\nclass B(A):\n    def f(self): return self.n\nclass S:\n    __slots__ = ('x',)\n    made = 0\n    def __init__(self): S.made += 1; self.x = 1\n@dataclass\nclass D:\n    n: int = 1\nb = B(); s = S()",), "B.n = 5; A.n = 7; t = S(); S.made += s.x; D.n = 4; D.extra = b; isinstance(3, A); A.g = A.f", "b.f(), A.n, S.made, t.x, D(), D.n, D.extra is b, A.g is A.f"),
    P("registry of subclasses", ("from abc import ABC\nclass Rule(ABC):\n    known, made = {}, 0\n    def __init_subclass__(cls, *, key, **kw): super().__init_subclass__(**kw); Rule.known[key] = cls; Rule.made += 1\nclass Spam(Rule, key='spam'): pass\nrules = [Spam()]",), "class Length(Rule, key='length'): pass\nrules.append(Length())", "class Third(Rule, key='third'): pass\nRule.made, [*Rule.known], Rule.known['length'] is Length is type(rules[1]), Rule.known['spam'] is Spam"),
    P("cache of what lives", ("import weakref\nclass Node:\n    known = weakref.WeakValueDictionary()\n    def __init__(self, name): self.name = name; Node.known[name] = self\na, b = Node('a'), Node('b')",), "c = Node('c'); del b", "sorted(Node.known), Node.known['a'] is a, Node.known['c'] is c"),
    P("class with its own __new__", ("class One:\n    only, made = None, 0\n    def __new__(cls, name):\n        if cls.only is None: cls.only = super().__new__(cls); One.made += 1\n        return cls.only\n    def __init__(self, name): self.name = name\none = One('a')\nclass Other(One): only = None",), "other = Other('b'); same = One('c')", "one is same is One.only, one.name, other.name, Other.only is other, One.made"),
    P("index of several levels", ("import numpy as np, pandas as pd\nidx = pd.MultiIndex.from_product([['a', 'b'], [1, 2]], names=['p', 'q'])\ndf = pd.DataFrame({'u': np.arange(4)}, index=idx); level = idx.levels[0]",), "df['v'] = df['u'] * 2; n = df.shape", "df.index is idx, idx.levels[0] is level, df"),
    P("method of a model patched", (TORCH + "class Net(nn.Module):\n    seen = 0\n    def __init__(self): super().__init__(); self.l = nn.Linear(1, 1)\n    def forward(self, x): Net.seen += 1; return self.l(x)\nnet = Net(); first = Net.forward",), "def patched(self, x): return first(self, x) * 0\nNet.forward = patched; r = net(torch.ones(1)).item(); keep = Net.forward", "r, net(torch.ones(1)).item(), Net.seen, Net.forward is patched is keep"),
    P("classes of the project's modules", ("import helper\nfrom helper import Model\nm = Model(); helper.Other.count = 5; helper.Other.f = lambda self: 'patched'",), "n = helper.Model(); r = Model.count, helper.Other().f(), helper.Other.count; helper.Model.items.append(Model); Model.run = lambda self: 'mine'; helper.Other.Inner.n += 1; helper.Other.new = n; del Model.gone; q = helper.make()", "Model.count, r, m.run(), n.run(), Model.items, helper.Other.Inner.n, helper.Other.new is n, hasattr(Model, 'gone'), helper.Other().f(), Model.p.fget(m), helper.Kind.A.value, helper.make()", (("helper.py", "import abc, enum\nclass Kind(enum.Enum): A = 1\nclass Model(abc.ABC):\n    count = gone = 0; items = []\n    __slots__ = ('x', '__dict__')\n    def __init__(self): Model.count += 1\n    def run(self): return 'run'\n    @property\n    def p(self): return self.count\nclass Other:\n    count = 0\n    def f(self): return 'f'\n    class Inner: n = 1\ndef make(): Model(); return Model.count, Other.count\n"),)),
    P("lock behind __getstate__", ("import threading\nclass Safe:\n    def __init__(self): self.n = 0; self.lock = threading.Lock()\n    def __getstate__(self): return {'n': self.n}\n    def __setstate__(self, s): self.__dict__.update(s); self.lock = threading.Lock()\ns = Safe(); lock = s.lock",), "s.n += 1", "s.n, s.lock is lock"),
    P("dict that needs arguments", ("class Table(dict):\n    def __init__(self, name): super().__init__(); self.name = name\nt = Table('t'); t['a'] = 1; k = t",), "t['b'] = 2; u = Table('u'); u['x'] = t", "t, t.name, k is t, u.name, u['x'] is t"),
]  # fmt: skip

NAMES = [
    P("annotations of a class in the cell", ("from typing import Optional\nfrom dataclasses import dataclass",), "@dataclass\nclass A:\n    n: Optional[int] = None\na = A(3)", "a, A.__annotations__"),
    P("annotation of a name", ("from typing import List",), "n: List[int] = [1]", "n"),
    P("imports below a package", (), "import xml.dom, xml.etree.ElementTree\nimport importlib.resources as r", "xml.dom.Node.TEXT_NODE, xml.etree.ElementTree.Element('a').tag"),
    P("names that IPython has", ("open = 3; display = [1]; exit = 'no'",), "display.append(open); exit += '!'; quit = 4", "open, display, exit, quit"),
    P("names with dots", (TORCH + "net = nn.Linear(1, 1); globals().update(net.state_dict(prefix='0.'))\nglobals()['a.b'] = [1]",), "w = globals()['0.weight']; same = w.data_ptr() == net.weight.data_ptr(); globals()['a.b'].append(2); del globals()['0.bias']; globals()['c.d'] = globals()['c/d:0'] = 3; globals().update(net.state_dict(prefix='new.'))", "same, sorted(n for n in globals() if '.' in n or ':' in n), globals()['a.b'], globals()['0.weight'] is w"),
    P("loop over a name that IPython has", ("n = 0",), "for _ in range(3): n += 1", "n, _"),
    P("names built by the cell", ("n1 = [1]; n2 = [2]; total = 0",), "for i in (1, 2): total += globals()[f'n{i}'][0]\nglobals()['n3'] = [n1, n2]", "total, n3[0] is n1"),
    P("attributes of __main__", ("import __main__\na = 1; b = [2]",), "r = getattr(__main__, 'a'), __main__.b\n__main__.b.append(3)\n__main__.c = 4", "r, b, c"),
    P("text evaluated", ("x = 2; code = 'x * y'; y = [3]",), "r = eval(code); exec('z = [y, r]')", "r, z[0] is y"),
    P("whole model, saved by its class's name, which the cell does not say", (TORCH + "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(2, 1)\nnet = Net()",), "torch.save(net, 'net.pt')", "type(torch.load('net.pt', weights_only=False)) is Net"),
    P("pickled by names that the cell does not say", ("import collections, enum, functools, pickle\nclass A:\n    class B: pass\nclass C(enum.IntEnum): ONE = 1\nN = collections.namedtuple('N', 'x')\nclass D(dict): pass\n@functools.cache\ndef f(x): return x\n@functools.wraps(f)\ndef g(x): return -x\ndeep = [[[A.B(), C.ONE, N(1), D(a=1), f, A]]]",), "again = pickle.loads(pickle.dumps(deep))\nr = again[0][0]", "[type(x).__qualname__ for x in r], r[4] is f, r[5] is A, type(r[0]) is A.B, A.B, r[1:4]"),
    P("objects that pickle others by themselves", (TORCH + "import io\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.l = nn.Linear(2, 1)\nclass Holder:\n    def __init__(self, net): self.net = net\n    def __getstate__(self):\n        b = io.BytesIO(); torch.save(self.net, b); return {'net': b.getvalue()}\n    def __setstate__(self, state): self.net = torch.load(io.BytesIO(state['net']), weights_only=False)\nh = Holder(Net()); k = [h]",), "total = nn.init.ones_(h.net.l.weight).sum().item()", "h.net.l.weight.tolist(), k[0] is h, type(h.net) is Net"),
    P("objects that pickle by themselves in the cell", ("import os, pickle",), "class A:\n    def __init__(self): self.n = []\n    def __getstate__(self): return {'n': pickle.dumps(self.n), 'by': str(os.getpid()).encode()}\n    def __setstate__(self, state): self.n = pickle.loads(state['n'])\nclass B: pass\na = A(); a.n = [B()]", "type(a.n[0]) is B"),
    P("names in annotations that are texts", ("from __future__ import annotations\nimport typing\nclass Net: pass\nclass Opt: pass\ndef f(x: list[Net], y: 'Opt' = None) -> Net: return x\nclass Cfg:\n    o: Opt",), "h = typing.get_type_hints(f), typing.get_type_hints(Cfg)", "h[0]['x'] == list[Net], h[0]['return'] is Net, h[1]['o'] is Opt"),
    P("%run -i", ("a = [1]; b = 2",), "%run -i script.py", "a, b, c", (("script.py", "a.append(b)\nb = 5\nc = [a]\n"),)),
    P("module that torch makes", ("import torch.backends.cudnn as cudnn, torch.backends.mkldnn as mkldnn\nimport torch\nops = torch.ops.aten",), "cudnn.benchmark = True; r = mkldnn.is_available() in (True, False), ops.add(torch.ones(1), 1).item()", "cudnn.benchmark, r"),
]  # fmt: skip

SHELL = [
    P("last value with a semicolon", ("x = 3",), "x;", "_, sorted(Out)"),
    P("last value and names of it", (), "[1, 2]", "_, _2 if '_2' in globals() else _1, Out"),
    P("value of None and display", (), "display([1]); None", "sorted(Out)"),
    P("error in %run", ("n = 1",), "%run bad.py\nn = 2", "n", (("bad.py", "print('begin')\n1 / 0\n"),), goes_on=True),
    P("error in a cell within", ("n = 1",), "get_ipython().run_cell('1 / 0')\nn = 2", "n", goes_on=True),
    P("%%capture with an error", (), "%%capture out\nprint('x'); 3", "out.stdout, len(out.outputs)"),
    P("output captured", ("n = 3",), "%%capture out\nprint(n); display(n)", "out.stdout, len(out.outputs)"),
    P("history of the notebook", ("a = 5\na + 1",), "r = _, _1, Out[1], In[1]", "r"),
    P("magic of the notebook", ("from IPython.core.magic import register_line_magic\n@register_line_magic\ndef double(line): return int(line) * k\nk = 2",), "r = %double 4\nprint(r)", "r"),
    P("every value is shown", ("get_ipython().ast_node_interactivity = 'all'",), "1\n[2]", ""),
    P("alias of the notebook", ("%alias hello echo hello",), "%hello", ""),
]  # fmt: skip

PROCESS = [
    P("sys.argv", ("import sys\nsys.argv = ['train.py', '--epochs', '3']",), "import argparse\np = argparse.ArgumentParser(); p.add_argument('--epochs', type=int, default=1)\nn = p.parse_args().epochs; del p", "n"),
    P("sys.argv set in the cell", ("import sys",), "sys.argv = ['x', '--a']", "sys.argv"),
    P("objects of the project's modules that stay there", ("import helper\nhelper.counter = 41",), "with helper.lock:\n    helper.counter += helper.libc is not None", "helper.counter", (("helper.py", HELPER),)),
    P("a module of the project that the cell imports", ("n = 1",), "import helper\nhelper.counter += n", "helper.counter, helper.lock.locked()", (("helper.py", HELPER),)),
    P("data of the project's modules", ("import helper\nhelper.counter = 41; helper.items.append(1)",), "helper.counter += 1; helper.items.append(helper.counter); r = helper.bump()", "helper.counter, helper.items, r", (("helper.py", "counter = 0\nitems = []\ndef bump():\n    global counter\n    counter += 1\n    return counter\n"),)),
    *(
        P(f"{name} {where}", (f"{imports}\n{set_ if where == 'there' else ''}",), f"{'' if where == 'there' else set_}\nr = {get}", get)
        for name, imports, set_, get in (
            ("sys.path with an entry twice", "import sys", "sys.path += ['/there/a', '/there/a']; sys.path.insert(1, '/there/b')", "[p for p in sys.path if p.startswith('/there')]"),
            ("default dtype", "import torch", "torch.set_default_dtype(torch.float64)", "torch.ones(1).dtype"),
        )
        for where in ("there", "back")
    ),
]  # fmt: skip

FOUND = [
    P("a column of pandas", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]}); s = df['a']; k = df['b']",), "s.iloc[0] = 50; df.loc[1, 'b'] = 9", "df, s, k"),
    P("a column that stays behind", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3]}); s = df['a']",), "df.loc[0, 'a'] = 9; new = df['a']; v = df[['a']]", "s.iloc[2] = 7\ndf, s, new, v"),
    P("a column taken in the cell", ("import pandas as pd",), "df = pd.DataFrame({'a': [1, 2, 3]}); s = df['a']; w = df.copy(deep=False)", "s.__setitem__(0, 5), w.__setitem__('b', 1), df, s, w"),
    P("a frame changed in place", ("import pandas as pd\ndf = pd.DataFrame({'a': [3, 1, 2]}, index=list('xyz')); k = df; col = df['a']; arr = df.to_numpy()",), "df.sort_values('a', inplace=True); df.drop('x', inplace=True); df.columns = ['A']; df['B'] = pd.array([1, None], dtype='Int64')", "k is df, df, col, arr"),
    P("pandas first imported in the cell", ("x = 1",), "import pandas as pd", "pd.get_option('display.max_columns'), pd.get_option('display.width')"),
    P("text and bytes in memory", ("import io\ns = io.StringIO('abc')",), "s.read(1); s.write('x'); t = io.StringIO('q'); b = io.BytesIO(b'q')", "s.getvalue(), s.tell(), t.getvalue(), b.getvalue()"),
    P("parser of an earlier cell", ("import argparse\nap = argparse.ArgumentParser(); ap.add_argument('--lr', type=float, default=.1)",), "r = ap.parse_args(['--lr', '3'])", "r, ap.parse_args([])"),
    P("namespace in a dict", ("import types\nns = types.SimpleNamespace(a=[1]); d = {}",), "ns.b = ns.a; ns.a.append(1); d['ns'] = ns", "ns, ns.b is ns.a, d['ns'] is ns"),
    P("frozen parameters", (TORCH + "net = nn.Linear(2, 1); x = torch.ones(1, requires_grad=True)",), "for p in net.parameters(): p.requires_grad = False\nnet.bias.requires_grad_(True); x.requires_grad_(False)", "[p.requires_grad for p in net.parameters()], x"),
    P("forest", ("from sklearn.ensemble import RandomForestClassifier\nimport numpy as np\nX = np.arange(20.).reshape(10, 2); y = np.arange(10) % 2; rf = RandomForestClassifier(3, random_state=0)",), "rf.fit(X, y)", "rf.predict(X), rf.feature_importances_"),
    P("records by attributes", ("import numpy as np\ndata = np.zeros(2, dtype=[('age', 'i4')])",), "r = data.view(np.recarray); r.age += 3", "type(r) is np.recarray, r['age'], r.age"),
    P("memory of a file", ("import numpy as np\nmm = np.memmap('m.bin', dtype='i4', mode='w+', shape=3); mm[:] = 1; mm.flush()",), "mm[0] = 5; mm.flush(); s = mm.sum()", "mm, s, open('m.bin', 'rb').read()"),
    P("memory of a file, opened in the cell", ("import numpy as np\nnp.arange(24, dtype='i4').tofile('m.bin'); a = np.memmap('m.bin', dtype='i4', mode='r+', shape=(4, 6)); v = a[1:, ::2]; w = v[1]; p = np.asarray(a); k = [a]",), "b = np.memmap('m.bin', dtype='i4', mode='r+', offset=8); c = np.memmap('n.bin', dtype='f4', mode='w+', shape=(2, 3), order='F'); c[1] = 5; d = c[:, 1]; np.save('l.npy', np.ones((2, 2))); l = np.load('l.npy', mmap_mode='r+'); r = np.load('l.npy', mmap_mode='r')[1]; v[0] = 70; w += 1; b[0] = 90; s = a.sum().item(), np.shares_memory(a, v), np.shares_memory(v, w), type(v) is np.memmap", "a[3, 5] = -1; b[1] = -2; c[0] = 7; l[0] = 8; w[2] = -3; p[0, 0] = -4; [x.flush() for x in (a, b, c, l)]\n[x.tolist() for x in (a, v, w, b, c, d, l, r, p)], k[0] is a, np.shares_memory(a, v), np.shares_memory(v, w), np.shares_memory(p, a), np.shares_memory(c, d), s, [(type(x).__name__, x.mode, x.offset, x.flags.writeable) for x in (a, v, b, c, d, l, r)], [open(f, 'rb').read() for f in ('m.bin', 'n.bin', 'l.npy')]"),
    P("namespace of exec", ("ns = {}; exec('y = 2\\ndef g(): return y', ns)",), "r = ns['g'](); ns['y'] = 3", "ns['g'](), r, ns['__builtins__'] is __builtins__.__dict__"),
    P("function of a namespace that changes", ("ns = {}; exec('y = 2\\ndef g(): return y', ns); h = ns['g']",), "ns['y'] = 3; r = h(), ns['g'] is h", "h(), r, h.__globals__ is ns, ns['g'] is h"),
    P("state of a module's wrapper", ("from helper import counted\n@counted\ndef f(): return 1\nf()",), "f(); r = f.calls, f.log", "r, f(), f.calls, f.log", (("helper.py", "def counted(f):\n    n = 0\n    def w():\n        nonlocal n\n        n += 1; w.calls += 1; w.log.append(n)\n        return f()\n    w.calls, w.log = 0, []\n    return w\n"),)),
    P("library that draws when it is imported", ("import drawing, random\nrandom.seed(3)",), "from drawing import n\nr = random.random()", "n, r, random.random()", (("drawing.py", "import random\nn = random.random()\n"),)),
    P("gradient that was retained", (TORCH + "w = torch.ones(2, requires_grad=True); held = []",), "out = w * 2; out.retain_grad(); held.append(out); (out ** 2).sum().backward()", "out.grad, held[0] is out, w.grad"),
    P("log in a buffer", ("import io, logging\nbuffer = io.StringIO(); log = logging.getLogger('train'); h = logging.StreamHandler(buffer); log.addHandler(h); log.setLevel('INFO'); log.propagate = False",), "log.info('one'); log.addHandler(logging.StreamHandler(buffer)); log.info('two')", "buffer.getvalue(), log.info('three'), buffer.getvalue(), log.handlers[0] is h, log.removeHandler(h), len(log.handlers)"),
    P("log in a list", ("import logging\nseen = []\nclass Seen(logging.Handler):\n    def __init__(self): super().__init__(); self.own = []\n    def emit(self, record): self.own.append(record.getMessage()); seen.append(len(self.own))\nh = Seen(); log = logging.getLogger('a.b'); log.addHandler(h); log.propagate = False",), "log.error('one'); log.addFilter(lambda record: record.msg != 'no'); log.error('no'); k = Seen(); log.handlers.insert(0, k); log.error('two')", "h.own, k.own, seen, log.handlers == [k, h], log.error('no'), log.removeHandler(h), log.error('yes'), h.own, k.own"),
    P("log in a file of the notebook", ("import logging\nh = logging.FileHandler('a.log', mode='w'); log = logging.getLogger('file'); log.addHandler(h); log.propagate = False; log.error('one')",), "log.error('two'); h.setLevel('CRITICAL'); log.error('no'); log.critical('three')", "log.error('no'), log.critical('four'), log.handlers == [h], log.removeHandler(h), h.close(), open('a.log').read()"),
    P("log in a file that the notebook writes from its beginning", ("import logging\nh = logging.FileHandler('a.log', mode='w'); log = logging.getLogger('file'); log.addHandler(h); log.propagate = False; log.error('one')",), "log.error('two')", "log.error('three'), h.stream.seek(0), h.stream.write('O'), h.close(), log.removeHandler(h), open('a.log').read()"),
    P("handler of the cell, removed later", ("import logging, sys\nlog = logging.getLogger('out'); log.propagate = False; out = sys.stdout",), "h = logging.StreamHandler(sys.stdout); log.addHandler(h); log.error('one'); print('two', file=out); same = out is sys.stdout", "log.error('three'), log.handlers == [h], same, out is sys.stdout, log.removeHandler(h), log.handlers"),
    P("handlers that are alike", ("import logging, sys\nlog = logging.getLogger('twice'); log.propagate = False; log.addHandler(logging.StreamHandler(sys.stdout))",), "log.addHandler(logging.StreamHandler(sys.stdout)); log.error('one')", "log.error('two'), len(log.handlers), log.removeHandler(log.handlers[0]), log.error('three'), len(log.handlers)"),
    P("formatter of a class of its own", ("import logging, sys\nclass Loud(logging.Formatter):\n    def format(self, record): return super().format(record).upper()\nlog = logging.getLogger('loud'); h = logging.StreamHandler(sys.stdout); h.setFormatter(Loud('%(message)s')); log.addHandler(h); log.propagate = False",), "log.error('one')", "log.error('two'), log.handlers == [h]"),
    P("group of exceptions", ("errors = []",), "errors += [KeyError('k'), ValueError(3)]\ngroup = ExceptionGroup('both', errors)\nerrors.append(group)", "group.exceptions[0] is errors[0], len(group.exceptions), errors[2] is group, group.message"),
    P("module reloaded", ("import helper\nm = helper.Model(2); helper.seen.append(m.n)",), "with open('helper.py', 'a') as file: rank0 = file.write('\\ndef more(): return N\\n')\nimport importlib\nimportlib.reload(helper)\nr = helper.more(), helper.f(); new = helper.Model(5)", "r, helper.more(), helper.seen, m.n, type(new) is helper.Model, type(m) is helper.Model", (("helper.py", "N = 3\nseen = []\nclass Model:\n    def __init__(self, n): self.n = n\ndef f(): return N\n"),)),
    P("names from a module that is reloaded", ("import helper, importlib\nfrom helper import f, Model, seen\nheld, m = [f], Model(2)",), "with open('helper.py', 'a') as file: rank0 = file.write('\\ndef f(): return 4\\nseen = [4]\\n')\nimportlib.reload(helper)\nheld.append(f); seen.append(1); r = f(), helper.f(), seen", "r, f(), helper.f(), f is helper.f, held[0] is held[1] is f, seen is helper.seen, seen, type(m) is Model, Model is helper.Model", (("helper.py", "seen = []\nclass Model:\n    def __init__(self, n): self.n = n\ndef f(): return 3\n"),)),
    P("modules that the cell reaches by others", ("import helper, user; helper.counter = 41; a = helper.A(); helper.A.step = 2",), "r = a.count(), user.lazily()", "r, helper.counter", files=(("helper.py", "counter = 0\nclass A:\n    step = 1\n    def count(self):\n        global counter\n        counter += self.step\n        return counter\n"), ("user.py", "def lazily():\n    import helper\n    return helper.counter\n"))),
    P("a module that the cell does not use", ("import helper; l = helper.items",), "x = 1", "helper.counter, helper.items is l, x", files=(("helper.py", "counter = 0\nitems = []\n"),)),
    P("a module that the cell imports itself", ("import helper; l = helper.items; helper.counter = 5",), "from helper import items, counter as c\nitems.append(c)\nimport helper as h; h.new = items", "helper.counter, helper.items is l, l, h is helper, helper.new is l", files=(("helper.py", "counter = 0\nitems = []\n"),)),
    P("code put into a module", ("import helper\ndef twice(x): return x * 2\nhelper.f = twice\nclass A: pass\nhelper.A = A",), "r = helper.run(3), isinstance(helper.A(), A); helper.g = lambda x: x + 1; helper.f = helper.g\nclass B(A): pass\nhelper.B = B", "r, helper.run(3), helper.f is helper.g, helper.B is B, helper.A is A", files=(("helper.py", "def f(x): return x\ndef run(x): return f(x)\n"),)),
    P("code of a module, put back", ("import helper\ndef twice(x): return x * 2\nold = helper.f\nhelper.f = twice",), "r = helper.run(3); helper.f = old", "r, helper.run(3), helper.f is old", files=(("helper.py", "def f(x): return x\ndef run(x): return f(x)\n"),)),
    P("nested tensors", (TORCH + "import warnings; warnings.simplefilter('ignore'); n = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)]); k = n; a, b = n.unbind()",), "b.mul_(3); m = n * 2", "n is k, [x.tolist() for x in (a, b, *n.unbind(), *m.unbind())]"),
    P("figure shown again", ("import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); l = ax.plot([1, 2])",), "ax.plot([2, 3]); display(fig)", "fig"),
    P("figure of the cell shown later", (), "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); l = ax.plot([1, 2])", "ax.set_title('t'); fig"),
    P("format of figures", ("%config InlineBackend.figure_format = 'retina'",), "import matplotlib.pyplot as plt\nplt.plot([1, 2]);\n%config InlineBackend.figure_format = 'png'", "plt.plot([1, 3]);"),
    P("functions that show numbers", ("import numpy as np, pandas as pd\npd.options.display.float_format = lambda x: '%.1f!' % x",), "a = np.ones(2); df = pd.DataFrame({'a': [1.25]}); print(a, df); pd.options.display.float_format = lambda x: '?'; np.set_printoptions(precision=3)", "print(a, df)"),
    P("functions of the cell that show numbers", ("import numpy as np, pandas as pd\na = np.ones(2); df = pd.DataFrame({'a': [1.25]})",), "pd.options.display.float_format = lambda x: '%.1f!' % x", "print(a, df)"),
    P("how a class is shown", ("class A: pass\nf = get_ipython().display_formatter.formatters['text/html'].for_type(A, lambda a: '<b>A</b>')",), "display(A())\nclass B: pass\nf = get_ipython().display_formatter.formatters['text/html'].for_type(B, lambda b: '<i>B</i>')", "display(A(), B())"),
    P("table with columns of two kinds", ("import pandas as pd\na = pd.DataFrame([[1, 2], [3, 4]])",), "a['p'] = 1; b = pd.DataFrame({0: [1], 'a': [2]})", "a, b"),
    P("functions of torch under other names", ("import torch",), "from torch import randn, as_tensor, cat\nt2 = torch.as_tensor; fs = [torch.zeros]", "randn is torch.randn, t2 is as_tensor is torch.as_tensor, fs[0] is torch.zeros, cat"),
    P("estimator of the notebook", ("import numpy as np\nfrom sklearn.base import BaseEstimator, ClassifierMixin\nclass Mine(ClassifierMixin, BaseEstimator):\n    def __init__(self, a=1): self.a = a\n    def fit(self, X, y): self.coef_ = X.mean(0); self.bounds_ = np.unique(y); self.classes_ = np.unique(y); return self\nX = np.arange(8.).reshape(4, 2); y = np.array([0, 1, 0, 1]); e = Mine(); k = [e]",), "e.fit(X, y); f = Mine(2).fit(X, y)", "e.coef_, f.get_params(), k[0] is e, e.classes_"),
    P("indexes made of a frame's columns", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': list('xyz')}); key = pd.Index(df['a'])",), "idx = pd.Index(df['a']); by = df.set_index('b'); cat = pd.Categorical([1, 2], categories=df['a'])", "df.loc[0, 'b'] = 'w'; df.loc[0, 'a'] = 9\ndf, list(key), list(idx), by, cat"),
    P("a frame anew in what cannot change", ("import pandas as pd\ndf = pd.DataFrame({'a': ['x', 'y'], 'n': [1, 2]}); cat = pd.Categorical(df['a']); k = (df, (cat,))",), "df['u'] = df['a'].astype('category').cat.codes; df = df.sort_values(['n', 'u']); df['r'] = df.groupby('a')['n'].rank()", "df, k[0], k[1][0] is cat"),
    P("views behind __getstate__", ("import numpy as np\nfrom sklearn.base import BaseEstimator\nclass Clip(BaseEstimator):\n    def fit(self, x): self.lo, self.hi = np.percentile(x, [5, 95], axis=0).T; self.both = [self.lo]; return self\nc = Clip()",), "d = c.fit(np.arange(8.).reshape(4, 2))", "d is c, c.lo.strides, c.both[0] is c.lo, c.lo.base is c.hi.base"),
    P("groups of a frame", ("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'x'], 'c': [.1, .2, .3]})",), "g = {k: g for k, g in df.groupby('b')}", "g"),
    P("model and its gradients in another precision", (TORCH + "m = nn.Linear(2, 2); m(torch.ones(2)).sum().backward(); g = m.weight.grad",), "m.double()", "m.weight.grad is g, m(torch.ones(2).double()), [p.grad.dtype for p in m.parameters()]"),
    P("names listed by a magic", ("a = 1; b = 2; c = 'c'",), "w = %who_ls int\n%who", "w"),
]  # fmt: skip
"""By public notebooks and odd cells."""


@pytest.mark.parametrize(
    "program", [*VALUES, *NAMES, *SHELL, *PROCESS, *FOUND], ids=lambda program: program.name
)
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, without a line of taas that something did not come back."""
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)


BAR = P("bar", ("from tqdm import tqdm",), "b = tqdm(range(3))\nfor i in b: pass", "b.n, b.fp is not None")


def test_a_set_of_objects_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    """Its items have another order where they have other addresses; no line says that it is not what rank 0 had."""
    program = P("set", ("class A:\n    seen = set()\n    def __init__(self): A.seen.add(self)\nl = [A() for _ in range(9)]",), "l += [A() for _ in range(9)]", "A.seen == {*l}, len(l)")  # fmt: skip
    played = play(program, tmp_path, plain=False)
    assert played.value == "(True, 18)"
    assert not played.lost


def test_a_bar_comes_back_whole(tmp_path: Path) -> None:
    """It writes to the notebook's stream, whose class is another one in ranks; no line says that it did not come back."""
    pytest.importorskip("tqdm")
    played = play(BAR, tmp_path, plain=False)
    assert played.value == "(3, True)"
    assert not played.lost


DEAF = P("handler with a lock", ("import logging, threading\nclass Own(logging.Handler):\n    def __init__(self): super().__init__(); self.own = threading.Lock(); self.seen = []\n    def emit(self, record): self.seen.append(record.getMessage())\nh = Own(); log = logging.getLogger('own'); log.addHandler(h); log.propagate = False",), "log.error('one')", "log.error('two'), h.seen, log.handlers == [h]")  # fmt: skip


def test_a_handler_that_cannot_travel_is_named(tmp_path: Path) -> None:
    """Whatever the cell logs: that does not reach the handler, which stays."""
    played = play(DEAF, tmp_path, plain=False)
    assert played.value == "(None, ['two'], True)"
    assert [line for line in played.said if "logging.getLogger('own').handlers[0].own is a" in line]

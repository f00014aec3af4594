"""What random notebooks are made of: statements, each with the kinds of things that it needs and the kind that it makes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HELPER", "IMPORTS", "LAST", "STATEMENTS", "Statement"]

IMPORTS = (
    "import abc, array, collections, contextlib, copy, dataclasses, datetime, decimal, enum,"
    " fractions, functools, heapq, io\nimport itertools, logging, operator, os, pathlib, random,"
    " re, string, sys, types, typing, uuid, warnings\nimport numpy as np, torch, torch.nn as nn"
)
HELPER = """
counter = 0
items = []
registry = {}
class Thing:
    def __init__(self, x):
        self.x = x
        items.append(self)
    def grow(self, y):
        self.x = [self.x, y]
def bump():
    global counter
    counter += 1
    return counter
def counted(f):
    n = 0
    def counting(*args):
        nonlocal n
        n += 1
        registry["calls"] = n
        return f(*args)
    return counting
"""


class Statement(NamedTuple):
    """A line or more, with places for names.

    Attributes:
        text: ``{new}`` is the name it makes, ``{list}`` a list that is there, ``{any}`` anything
            that is there.
        makes: the kind of the new name.
    """

    text: str
    makes: str = ""


S = Statement
_CLASS = (
    "class {new}:\n    made = []\n    def __init__(self, n={n}): self.n = n; self.held = []\n"
    "    def grow(self, x):\n        self.n += 1; self.held.append(x)\n        return self.n\n"
    "    @property\n    def twice(self): return self.n * 2"
)
STATEMENTS = [
    # plain values
    S("{new} = {n}", "int"), S("{new} = len({list}) + {int}", "int"), S("{new} = 's{n}' * 2", "str"),
    S("{int} += {n}"), S("{int} = {int} * 2 - {n}"), S("{str} += '{n}'"), S("{new} = {n} / 7", "float"),
    S("{new} = ({list}, {n}, {any})", "tuple"), S("{new} = {{1, {n}}}", "set"), S("{set}.add({n})"),
    S("{new} = frozenset(({n}, 2))", "tuple"), S("{new} = b'x' * {n}", "str2"), S("{new} = {n} + 1j", "float"),
    # containers
    S("{new} = [{n}, {any}]", "list"), S("{new} = [x * {n} for x in range({n})]", "list"),
    S("{new} = {list}", "list"), S("{new} = {list}[:]", "list"), S("{new} = [{list}, {dict}]", "list"),
    S("{list}.append({any})"), S("{list} += [{n}]"), S("{list} = {list} + [{n}]"), S("{list}[:1] = [{any}, {n}]"),
    S("{list}.insert(0, {list})"), S("{list}.reverse()"), S("del {list}[1:2]"), S("{list}.append({list})"),
    S("{new} = dict(a={n}, b={any})", "dict"), S("{new} = {{'k{n}': {list}, {n}: 's'}}", "dict"),
    S("{new} = {{k: {any} for k in 'ab'}}", "dict"), S("{new} = {dict}", "dict"), S("{dict}['k{n}'] = {any}"),
    S("{dict}.pop('a', None)"), S("{dict}.update(z={n})"), S("{dict}['me'] = {dict}"),
    S("{dict}['a'] = {dict}.pop('b', {n})"), S("{new} = {dict}.copy()", "dict"),
    S("{new} = collections.defaultdict(list); {new}['x'].append({any})", "dict"),
    S("{new} = collections.OrderedDict(a={any}, b={n})", "odict"), S("{odict}.move_to_end('a')"),
    S("{new} = collections.Counter('abca')", "counter"), S("{counter}.update('bb')"),
    S("{new} = collections.deque([{n}, {any}], maxlen=4)", "deque"), S("{deque}.extend([{n}, {any}])"),
    S("{deque}.rotate(1)"), S("{new} = bytearray(b'abc')", "bytes"), S("{bytes} += b'x'"),
    S("{new} = iter([{n}, {list}, 3])", "iter"), S("next({iter}, None)"), S("{new} = slice({n}), range({n})", "tuple"),
    S("for i in range({n}):\n    {list}.append(i)"), S("for key in list({dict}):\n    {list}.append(key)"),
    S("while len({list}) < {n}: {list}.append({any})"), S("{new}, *rest = [{any}, {n}, {list}]", "any2"),
    S("if {int} > 3: {new} = [{int}]\nelse: {new} = [{any}]", "list"),
    S("try:\n    {list}[99 + {n}]\nexcept IndexError as error:\n    {new} = str(error)", "str"),
    S("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    {new} = error", "error"),
    # classes
    S(_CLASS, "class"), S("class {new}({class}):\n    def grow(self, x): return super().grow([x]) + 1", "class"),
    S("{new} = {class}({n})", "object"), S("{new} = {object}", "object"), S("{object}.grow({any})"),
    S("{object}.extra{n} = {any}"), S("{object}.held.append({object})"), S("{object}.n = {object}.twice"),
    S("{new} = {object}.held", "list"), S("{new} = {object}.grow", "method"), S("{method}({n})"),
    S("{object}.__dict__['direct'] = {n}"),
    S("{object}.__class__ = type({object})"), S("{new} = isinstance({object}, {class})", "int"),
    S("@dataclasses.dataclass\nclass {new}:\n    n: int = {n}\n    held: list = dataclasses.field(default_factory=list)", "data"),
    S("{new} = {data}({n}, {list})", "record"), S("{new} = {data}()", "record"), S("{record}.held.append({any})"), S("{record}.n += 1"),
    S("{new} = dataclasses.replace({record}, n={n})", "record"),
    S("class {new}(enum.Enum):\n    A = 1\n    B = [2]", "enum"), S("{new} = {enum}.A, {enum}['B']", "tuple"),
    S("{list}.append({enum}.B)"), S("class {new}(dict):\n    def __missing__(self, key): return key", "mapping"),
    S("{new} = {mapping}(a={any}); {new}.note = {new}['zz']", "dict"),
    S("{new} = collections.namedtuple('{new}', 'x y')", "named"), S("{new} = {named}({list}, {n})", "tuple"),
    S("class {new}:\n    __slots__ = ('a', 'b')\n    def __init__(self): self.a = {any}", "slots"), S("{new} = {slots}()", "slotted"),
    S("{slotted}.b = {list}; {slotted}.a = {n}"),
    # functions
    S("def {new}(x=0, held=[]):\n    global {int}\n    {int} += 1\n    held.append(x)\n    return x, {int}, held", "function"),
    S("{function}({any})"), S("{new} = {function}()", "tuple"), S("{function}.tag = {any}"), S("{new} = lambda x: (x, {list})", "lambda"),
    S("{list}.append({lambda}({n}))"), S("{new} = functools.partial({lambda}, {any})", "partial"), S("{new} = {partial}()", "tuple"),
    S("def make_{new}():\n    n = [{n}]; m = 0\n    def inc():\n        nonlocal m\n        m += 1; n.append(m)\n        return m\n    return inc\n{new} = make_{new}()", "closure"),
    S("{closure}()"), S("{new} = {closure}() + {int}", "int"), S("{dict}['f'] = {closure}"), S("{new} = [{lambda}, {closure}, max]", "list"),
    S("def {new}(n): return {n} if n < 1 else n * {new}(n - 1)", "recursive"), S("{int} += {recursive}(3)"),
    S("def {new}(n):\n    for i in range(n): yield i, {list}", "generator"), S("{new} = [a for a, _ in {generator}({n})]", "list"),
    S("class {new}:\n    def __get__(self, one, cls): return self if one is None else one.__dict__.get('kept', {n})\n    def __set__(self, one, x): one.__dict__['kept'] = x", "descriptor"),
    S("class {new}:\n    kept = {descriptor}()", "described"), S("{new} = {described}(); {new}.kept = {any}", "managed"), S("{managed}.kept = [{managed}.kept]"),
    S("class {new}:\n    @functools.cached_property\n    def once(self): return [{n}]\n    @classmethod\n    def make(cls): return cls()\n    @staticmethod\n    def three(): return 3", "lazy"),
    S("{new} = {lazy}.make(); {new}.first = {new}.once", "cached"), S("{cached}.once.append({any})"), S("{new} = {cached}.make", "method0"), S("{new} = {method0}()", "cached"),
    S("@functools.wraps({lambda})\ndef {new}(*args): return {lambda}(*args)", "lambda"),
    S("@contextlib.contextmanager\ndef {new}(x):\n    yield [x]", "manager"),
    S("with {manager}({any}) as {new}: {new}.append({n})", "list"),
    S("class {new}(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...", "abstract"), S("class {new}({abstract}):\n    def f(self): return {list}", "concrete"),
    S("{new} = {concrete}()", "instance"), S("{new} = {instance}.f()", "list"), S("{new} = isinstance({instance}, {abstract})", "int"),
    S("class {new}(Exception):\n    def __init__(self, what):\n        super().__init__(what); self.what = what", "raised"), S("try: raise {raised}({any})\nexcept {raised} as error: {new} = error", "error"),
    S("{new} = {class0}(); {new}.x = {any}", "thing"), S("{thing}.y = {list}"),
    S("class {new}(list):\n    def __init__(self, *a):\n        super().__init__(a); self.tag = {n}", "listed"), S("{new} = {listed}({n}, {any})", "list"),
    S("class {new}:\n    def __init__(self): self.n = {n}\n    def __getstate__(self): return {{'n': self.n}}\n    def __eq__(self, o): return isinstance(o, {new}) and o.n == self.n\n    def __hash__(self): return hash(self.n)", "hashed"),
    S("{new} = {hashed}()", "key"), S("{dict}[{key}] = {any}"), S("{new} = {{{key}, {n}}}", "keys"), S("{keys}.discard({key})"), S("{new} = {key} in {keys}", "int"),
    # the standard library
    S("{new} = types.SimpleNamespace(a={any}, b=[{n}])", "simple"), S("{simple}.b.append({any})"), S("{simple}.c = {simple}"), S("{new} = collections.ChainMap({dict}, {dict})", "chain"), S("{chain}['new{n}'] = {any}"),

    S("{new} = copy.copy({object})", "object"), S("{new} = copy.deepcopy({list})", "list"), S("{new} = copy.deepcopy({net})", "net"),
    S("{new} = array.array('d', [{n}, 2.5])", "packed"), S("{packed}.append({n})"), S("{packed}[0] = {n}"),
    S("{new} = io.StringIO('text{n}')", "text"), S("{text}.seek(0, 2); {text}.write('more')"), S("{new} = {text}.getvalue()", "str"), S("{new} = datetime.date(2020, 1, {n} + 1), decimal.Decimal('{n}.5'), fractions.Fraction({n}, 3)", "tuple"),
    S("{new} = decimal.Decimal(1) / 7", "decimal"), S("decimal.getcontext().prec = 10 + {n}"), S("{new} = pathlib.Path('folder') / 'f{n}'", "path"), S("{new} = re.compile('a{{{n}}}').findall('aaa')", "list"),
    S("{new} = heapq.nsmallest(2, range({n}, 9)); heapq.heapify({new})", "heap"), S("heapq.heappush({heap}, {n})"), S("{new} = operator.itemgetter({n})", "getter"), S("{new} = string.Template('$a{n}')", "template"),
    S("{new} = uuid.UUID(int={n})", "uuid"), S("{new} = collections.UserDict(a={any})", "user"), S("{user}['z'] = {n}; {user}.note = {list}"),
    S("logging.getLogger('program{n}').setLevel({n} * 10)"), S("{new} = logging.getLogger('program{n}')", "logger"), S("{logger}.setLevel(30)"), S("warnings.filterwarnings('ignore', message='program{n}')"), S("{new} = dict.fromkeys('ab', {list})", "dict"),
    S("{new} = dataclasses.make_dataclass('{new}', ['p', 'q'])", "made"), S("{new} = {made}({any}, {n})", "record2"), S("{record2}.q = {list}"), S("{new} = typing.NamedTuple('{new}', [('u', int)])({n})", "tuple"), S("{new}: int = {n}", "int"),
    S("class {new}(enum.Flag):\n    R = enum.auto()\n    W = enum.auto()", "flag"), S("{new} = {flag}.R | {flag}.W", "flags"),
    # memory
    S("{new} = np.arange(6. + {n})", "array"), S("{new} = {array}[1:]", "array"), S("{new} = {array}[::2]", "array"),
    S("{new} = {array}.T", "array"), S("{new} = {array}.reshape(1, -1)[0]", "array"), S("{new} = {array} * {n}", "array"),
    S("{array} += 1"), S("{array}[:1] = {n}"), S("{array} = {array} + {n}"), S("{new} = float({array}.sum())", "float"),
    S("{new} = torch.from_numpy({array})", "tensor"), S("{new} = torch.arange(5. + {n})", "tensor"), S("{new} = {tensor}[1:]", "tensor"),
    S("{new} = {tensor}.view(-1)", "tensor"), S("{new} = {tensor} + {n}", "tensor"), S("{tensor}.mul_(2)"), S("{tensor}[:2] = {n}"),
    S("{new} = {tensor}.numpy()", "array"), S("{tensor} = {tensor}.clone()"), S("{new} = {tensor}.sum().item()", "float"),
    S("{tensor}.tag = {any}"), S("{new} = torch.ones(3, requires_grad=True)", "leaf"), S("({leaf} * {n}).sum().backward()"),
    S("{new} = np.zeros(2, dtype=[('a', 'i4'), ('b', 'f8')]); {new}['a'] = {n}", "records"), S("{records}['b'] += 1"),
    S("{new} = np.array([{any}, {n}], dtype=object)", "objects"), S("{objects}[0] = {any}"),
    S("{new} = np.ma.masked_array([1., 2.], [0, {n} % 2])", "masked"), S("{masked}[0] = {n}"), S("{new} = np.array([[1., {n}], [3., 4.]], order='F')", "array"), S("np.add({array}, 1, out={array})"), S("{array}.setflags(write=True)"),
    S("{new} = {tensor}.unsqueeze(0).expand(2, -1)", "tensor3"), S("{tensor}.data = {tensor}.data + 1"), S("{tensor}.requires_grad_(False)"), S("{new} = torch.tensor({n})", "scalar"), S("{scalar} += 1"), S("{new} = {tensor}.to(torch.float64)", "tensor"), S("{new} = {tensor}.untyped_storage()", "storage"), S("{new} = torch.Generator().manual_seed({n})", "torch_rng"), S("{new} = torch.rand(2, generator={torch_rng})", "tensor"),
    S("{new} = torch.utils.data.TensorDataset(torch.arange(4.), torch.ones(4))", "data_set"), S("{new} = torch.utils.data.DataLoader({data_set}, 2, shuffle=True)", "loader"), S("{new} = [x.sum().item() for x, y in {loader}]", "list"),
    # models
    S("{new} = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))", "net"), S("{new} = {net}", "net"),
    S("{new} = nn.ModuleList([{net}, nn.Linear(1, 1)])", "nets"), S("{nets}.append(nn.Linear(1, {n} + 1))"),
    S("{new} = torch.optim.SGD({net}.parameters(), lr=.1, momentum=.9)", "optimizer"), S("{new} = torch.optim.Adam({net}.parameters())", "optimizer"),
    S("{optimizer}.zero_grad(); {net}(torch.ones(4, 2)).sum().backward(); {optimizer}.step()"), S("{net}.zero_grad()"),
    S("{new} = {net}[0].weight", "leaf2"), S("with torch.no_grad(): {net}[0].bias.add_({n})"), S("{net}.note = {list}"), S("{net}.eval()"),
    S("{net}.append(nn.Linear(1, 1))"), S("{net}[0] = nn.Linear(2, 3)"), S("for p in {net}.parameters(): p.requires_grad_(False)"), S("{net}.register_buffer('b{n}', torch.ones({n} + 1))"), S("{new} = {net}.register_forward_hook(lambda m, i, o: o + {n})", "hook"), S("{hook}.remove()"),
    S("class {new}(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter(torch.ones(2)); self.seen = []\n    def forward(self, x):\n        self.seen.append(len(x))\n        return x * self.w", "module_class"),
    S("{new} = {module_class}()", "own_net"), S("{own_net}(torch.ones(2)).sum().backward()"), S("{own_net}.w = nn.Parameter({own_net}.w.detach() + 1)"), S("{own_net}.inner = {net}"), S("{new} = torch.optim.AdamW({own_net}.parameters(), weight_decay=.{n})", "own_optimizer"), S("{own_optimizer}.step()"),
    S("nn.utils.parametrizations.weight_norm({net}[0]) if not hasattr({net}[0], 'parametrizations') else None"), S("{net}.half().float()"), S("nn.init.constant_({net}[0].weight, {n})"), S("{own_net}.load_state_dict({own_net}.state_dict())"), S("{optimizer}.param_groups[0]['lr'] *= .5"),
    S("{new} = {{k: v.clone() for k, v in {net}.state_dict().items()}}", "state"), S("{state}['x'] = {n}"),
    S("{new} = torch.optim.lr_scheduler.StepLR({optimizer}, 1, .5); {optimizer}.step(); {new}.step()", "schedule"), S("{schedule}.step()"),
    # the process
    S("{new} = random.random()", "float"), S("{new} = np.random.rand(2)", "array2"), S("{new} = torch.rand(2)", "tensor2"), S("random.seed({n})"),
    S("torch.manual_seed({n})"), S("{new} = random.Random({n})", "rng"), S("{new} = np.random.default_rng({n})", "rng"), S("{list}.append({rng}.random())"),
    S("random.shuffle({list})"), S("os.environ['PROGRAM_{n}'] = '{n}'"), S("os.environ.pop('PROGRAM_1', None)"), S("sys.path.append('/program/{n}')"),
    S("import json as {new}", "module"), S("from math import pi as {new}", "float"), S("sys.setrecursionlimit(3000 + {n})"),
    S("np.seterr(divide='ignore')"), S("np.set_printoptions(precision={n})"),
    # a module of the project
    S("import helper as {new}", "helper"), S("{helper}.counter += {n}"), S("{helper}.items.append({any})"), S("{new} = {helper}.Thing({any})", "thing2"), S("{thing2}.grow({any})"),
    S("{new} = {helper}.counted({lambda})", "lambda"), S("from helper import items as {new}", "list"), S("{helper}.registry[{n}] = {any}"), S("{helper}.added{n} = {list}"), S("{new} = {helper}.bump()", "int"),
    S("{new} = {helper}.items[-1:]", "list"), S("class {new}({helper}.Thing):\n    def grow(self, y): return super().grow([y])", "own_thing"), S("{new} = {own_thing}({n})", "thing2"), S("{helper}.items = {list}"), S("{new} = {helper}.bump", "bump"), S("{bump}()"),
    # errors
    S("{list}[99]"), S("1 / 0"), S("raise {raised}({n})"),
    # what a cell shows
    S("print({any})"), S("display({list})"), S("print('to stderr', file=sys.stderr)"), S("del {str}"), S("del {tuple}"), S("del {set}"),
]  # fmt: skip
LAST = [S("{any}"), S("{list}, {int}"), S("{n};"), S("None")]

"""What random notebooks are made of: statements, each with the kinds of things that it needs and the kind that it makes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HELPER", "IMPORTS", "LAST", "STATEMENTS", "THEMES", "Statement", "Theme"]

IMPORTS = (
    "import abc, array, collections, contextlib, copy, dataclasses, datetime, decimal, enum, fractions, functools, heapq, io\n"
    "import itertools, logging, operator, os, pathlib, random, re, string, sys, types, typing, uuid, warnings\n"
    "import numpy as np, torch, torch.nn as nn"
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
        text: ``{new}`` is the name it makes, ``{list}`` a list that is there, ``{any}`` anything that is there.
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


class Theme(NamedTuple):
    """What notebooks of a kind use beside the rest.

    Attributes:
        imports: of the first cell.
        statements: from which every second statement is drawn.
    """

    imports: str
    statements: list[Statement]


THEMES = {
    "tables": Theme("import pandas as pd", [
        S("{new} = pd.DataFrame({{'a': np.arange({n} + 2.), 'b': list('abcdefg')[:{n} + 2]}})", "frame"), S("{new} = pd.DataFrame({{'a': [1, {n}], 'o': [{any}, None]}})", "frame"), S("{new} = pd.Series([{n}, 2.5, 1], name='s{n}')", "series"), S("{new} = pd.Series([{list}, {n}])", "series2"), S("{series2}.iloc[0].append({n})"),
        S("{frame}['c{n}'] = {n}"), S("{frame}.loc[0, 'a'] = {n}"), S("{frame}.at[0, 'b'] = 'x{n}'"), S("{frame}['o'] = [{any}] * len({frame})"), S("{frame}['a'] += 1"), S("{frame}.loc[{frame}['a'] > {n}, 'a'] = 0"), S("{frame}.loc[len({frame})] = {n}"), S("del {frame}['c{n}']"),
        S("{new} = {frame}['a']", "series"), S("{new} = {frame}.a", "series"), S("{new} = {frame}", "frame"), S("{new} = {frame}.copy()", "frame"), S("{new} = {frame}.copy(deep=False)", "frame"), S("{new} = {frame}[['a']]", "frame"), S("{new} = {frame}[1:]", "frame"), S("{new} = {frame}.T", "frame2"), S("{new} = {frame}.head(1)", "frame"), S("{series}.iloc[0] = {n}"), S("{series}[1] = {n}"), S("{series} *= 2"), S("{new} = {series}", "series"), S("{new} = {series}[:2]", "series"),
        S("{new} = {series}.values", "array3"), S("{new} = {series}.to_numpy(copy=True)", "array"), S("{new} = pd.Series({array})", "series"), S("{new} = pd.DataFrame({array}.reshape(-1, 1), columns=['a'], copy=False)", "frame"), S("{new} = {frame}.index", "index"), S("{new} = {frame}.columns", "index"), S("{new} = {frame}.dtypes", "series3"), S("{frame}.index.name = 'i{n}'"), S("{frame}.columns.name = 'c{n}'"), S("{frame}.attrs['x'] = {list}"), S("{frame}.columns = [str(c) + '_' for c in {frame}.columns]"), S("{frame}.index = {frame}.index + {n}"),
        S("{frame}.drop(columns='c{n}', errors='ignore', inplace=True)"), S("{frame}.rename(columns={{'a': 'a'}}, inplace=True)"), S("{frame}.sort_values('a', ascending=False, inplace=True)"), S("{frame}.reset_index(drop=True, inplace=True)"), S("{frame}.fillna(0, inplace=True)"), S("{frame}.insert(0, 'n{n}', {n})"), S("{frame}.pop('a')"), S("{new} = {frame}.pop('b')", "series3"),
        S("{new} = {frame}.groupby('b')['a'].sum()", "series"), S("{new} = {frame}.groupby('b')", "grouped"), S("{new} = {grouped}.size()", "series3"), S("{new} = {frame}.merge({frame}, on='a')", "frame2"), S("{new} = pd.concat([{frame}, {frame}])", "frame2"), S("{new} = {frame}.describe()", "frame2"), S("{new} = {frame}.set_index('b')", "frame2"), S("{new} = {frame}.query('a > {n}')", "frame"), S("{new} = {frame}.apply(lambda r: r['a'], axis=1)", "series"), S("{new} = {frame}.pivot_table(index='b', values='a')", "frame2"), S("{new} = {frame}.melt()", "frame2"), S("{new} = {frame}.rolling(2)", "rolling"), S("{new} = {rolling}.a.mean()", "series"),
        S("{new} = pd.Categorical(['a', 'b', 'a'])", "categorical"), S("{frame}['k'] = pd.Categorical(['x'] * len({frame}))"), S("{new} = {frame}['k'].cat.codes", "series3"), S("{new} = pd.date_range('2020', periods={n} + 1)", "index"), S("{new} = pd.MultiIndex.from_product([[1, {n}], ['a', 'b']])", "index"), S("{new} = pd.Series(range(4), index=pd.MultiIndex.from_product([[1, 2], ['a', 'b']]))", "series4"), S("{series4}[1, 'a'] = {n}"), S("{new} = {series4}.unstack()", "frame2"), S("{new} = pd.Timestamp('2020-01-01') + pd.Timedelta(days={n})", "stamp"), S("{new} = pd.array([1, None, {n}], dtype='Int64')", "nullable"), S("{nullable}[0] = {n}"), S("{new} = pd.Series({nullable})", "series5"), S("{series5}[1] = {n}"), S("{new} = pd.Series(['a', 'b{n}'])", "strings"), S("{strings}[0] = 'z{n}'"), S("{new} = {strings}.str.upper()", "strings"), S("{new} = pd.interval_range(0, {n} + 1)", "index"), S("{new} = pd.Series([1, 0, {n}], dtype='Sparse[int]')", "series6"),
        S("{frame}.to_csv('f{n}.csv', index=False)"), S("{new} = pd.read_csv('f{n}.csv')", "frame2"), S("{new} = {frame}.to_dict()", "dict2"), S("{new} = {frame}.to_dict('records')", "list"), S("{new} = [row for row in {frame}.itertuples()]", "list2"), S("{new} = {frame}.iloc[0]", "series3"), S("{new} = {frame}.memory_usage().sum()", "int2"), S("pd.set_option('display.max_rows', {n} + 5)"), S("pd.options.display.precision = {n} + 1"), S("class {new}(pd.DataFrame):\n    _metadata = ['note']\n    @property\n    def _constructor(self): return {new}", "frame_class"), S("{new} = {frame_class}({{'a': [1., {n}]}}); {new}.note = {any}", "frame"), S("{frame}"), S("print({frame})"), S("display({series})"), S("{frame}.info()"),
    ]),
    "learning": Theme("import sklearn.linear_model, sklearn.ensemble, sklearn.pipeline, sklearn.preprocessing, sklearn.datasets, sklearn.cluster, sklearn.feature_extraction.text, sklearn.model_selection, sklearn.tree, scipy.sparse, scipy.stats, scipy.optimize, scipy.interpolate, networkx, PIL.Image", [
        S("{new} = sklearn.linear_model.LinearRegression().fit([[0.], [1.], [2.]], [0, {n}, 2])", "estimator"), S("{new} = sklearn.tree.DecisionTreeRegressor(random_state=0).fit([[0.], [1.], [2.]], [0, {n}, 2])", "estimator"), S("{new} = sklearn.linear_model.SGDRegressor(random_state={n}, warm_start=True).fit([[0.], [1.]], [0, 1])", "estimator"), S("{estimator}.fit([[1.], [{n}]], [1., 2.])"), S("{new} = {estimator}.predict([[{n}.]])", "array"), S("{new} = sklearn.ensemble.RandomForestClassifier(3, random_state={n}).fit([[0.], [1.]], [0, 1])", "forest"), S("{new} = {forest}.predict([[{n}]])", "array"), S("{forest}.fit([[0.], [{n}]], [1, 0])"), S("{new} = {forest}.estimators_[0]", "tree"), S("{new} = {forest}.estimators_", "list3"),
        S("{new} = sklearn.pipeline.make_pipeline(sklearn.preprocessing.StandardScaler(), {estimator})", "pipe"), S("{pipe}.fit([[1.], [2.], [{n}]], [1., 2., 3.])"), S("{new} = sklearn.preprocessing.StandardScaler()", "scaler"), S("{scaler}.partial_fit([[{n}.]])"), S("{new} = sklearn.preprocessing.LabelEncoder().fit(['a', 'b{n}'])", "encoder"), S("{new} = sklearn.feature_extraction.text.CountVectorizer().fit(['some words', 'word{n}'])", "vectorizer"), S("{new} = {vectorizer}.transform(['some words'])", "sparse"), S("{new} = sklearn.cluster.KMeans(2, n_init=1, random_state={n}).fit([[0.], [1.], [5.]])", "clusters"), S("{new} = sklearn.base.clone({estimator})", "unfitted"), S("{unfitted}.fit([[1.], [2.]], [1, {n}])"), S("{estimator}.note = {any}"), S("{new} = {estimator}.get_params()", "dict3"), S("{new} = sklearn.datasets.load_iris()", "bunch"), S("{bunch}.data[0] = {n}"), S("{bunch}['more'] = {list}"), S("{new}, other_{new} = sklearn.model_selection.train_test_split([1, 2, 3, {n}])", "list2"), S("{estimator}"), S("{new} = sklearn.model_selection.KFold(2)", "folds"), S("{new} = [a.tolist() for a, b in {folds}.split([1, 2, 3, {n}])]", "list"), S("{new} = sklearn.preprocessing.FunctionTransformer({lambda})", "transformer"),
        S("{new} = scipy.sparse.csr_matrix([[0, {n}], [2, 0]])", "sparse"), S("{new} = {sparse}.T", "sparse2"), S("{new} = {sparse}.toarray()", "array4"), S("{sparse}.data[:] = {n}"), S("{new} = scipy.sparse.lil_matrix((2, 2)); {new}[0, 1] = {n}", "lil"), S("{lil}[1, 1] = {n}"), S("{new} = scipy.stats.norm(0, {n} + 1)", "frozen"), S("{new} = {frozen}.rvs(2)", "array5"), S("{new} = scipy.optimize.minimize(lambda x: (x - {n}) ** 2, [0.])", "solved"), S("{new} = scipy.interpolate.interp1d([0, 1], [0, {n}])", "interpolated"), S("{new} = networkx.path_graph({n} + 2)", "graph"), S("{graph}.add_edge(0, {n}, weight={any})"), S("{graph}.nodes[0]['x'] = {list}"), S("{new} = {graph}.subgraph([0, 1])", "graph2"), S("{new} = {graph}.nodes", "nodes"), S("{new} = PIL.Image.new('L', (3, 3), {n})", "image"), S("{image}.putpixel((0, 0), 9)"), S("{new} = np.asarray({image})", "array6"), S("{image}.info['x'] = {list}"), S("{image}"),
    ]),
    "plots": Theme("import matplotlib.pyplot as plt", [
        S("{new}, ax_{new} = plt.subplots()", "figure"), S("{new} = plt.figure()", "figure"), S("{new} = {figure}.add_subplot()", "axes"), S("{new} = plt.gca()", "axes"), S("{axes}.plot([1, {n}], label='l{n}')"), S("{new} = {axes}.plot([1, {n}])[0]", "line"), S("{line}.set_ydata([{n}, 2])"), S("{line}.set_color('C{n}')"), S("{line}.remove()"), S("{axes}.set_title('t{n}')"), S("{axes}.legend()"), S("{axes}.set_xlim(0, {n} + 1)"), S("{axes}.bar([1, 2], [1, {n}])"), S("{axes}.imshow([[0, {n}], [1, 2]])"), S("{new} = {axes}.twinx()", "axes"), S("{axes}.clear()"), S("plt.plot([1, {n}, 2])"), S("plt.title('t{n}')"), S("plt.close('all')"), S("plt.close()"), S("plt.show()"), S("{figure}"), S("display({figure})"), S("{figure}.savefig('p{n}.png')"), S("plt.rcParams['lines.linewidth'] = {n} + 1"), S("plt.style.use('ggplot')"), S("with plt.style.context('dark_background'):\n    plt.plot([1, {n}])"), S("{new} = plt.get_fignums()", "list"), S("{new} = plt.hist([1, 2, {n}])[0]", "array"), S("{new} = plt.get_cmap('viridis')", "cmap"), S("{new} = {cmap}({n} / 5)", "tuple"), S("plt.scatter([1, 2], [{n}, 1])"), S("{axes}.annotate('here', (0, {n}))"), S("{figure}.suptitle('s{n}')"), S("{figure}.clf()"), S("{new} = {axes}.get_figure()", "figure2"), S("{axes}.grid(True)"), S("plt.xlabel('x{n}')"), S("{figure}.note = {list}"), S("{new} = plt.Circle((0, 0), {n})", "circle"), S("{axes}.add_patch(plt.Circle((0, 0), {n}))"), S("plt.ion()"), S("plt.figure(3); plt.plot([{n}])"),
    ]),
    "training": Theme("import torch.nn.functional as F, torch.nn.utils.prune, torch.func, torch.utils.checkpoint, torch.fx, torch.distributions, torch.ao, torchvision, torchvision.transforms.v2 as T, torch.utils.data as tud", [
        S("{new} = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(.5), nn.Linear(3, 1))", "net"), S("{net}(torch.randn(4, 2)).mean().backward()"), S("{new} = {net}(torch.ones(3, 2))", "output"), S("{new} = {net}(torch.ones(3, 2)).detach()", "tensor3"), S("{output}.sum().backward()"), S("{new} = nn.LSTM(2, 3)", "lstm"), S("{new} = {lstm}(torch.ones(2, 1, 2))[0].detach()", "tensor3"), S("{lstm}.flatten_parameters()"), S("{new} = nn.Embedding(4, 2, padding_idx=0)", "embedding"), S("{new} = nn.LazyLinear(2)", "lazy2"), S("{lazy2}(torch.ones(1, {n} + 1))"), S("{new} = nn.MultiheadAttention(4, 2)", "attention"), S("{embedding}.weight = nn.Parameter({embedding}.weight.detach() + {n})"), S("{net}[3].weight = {net}[3].weight"), S("torch.nn.utils.prune.l1_unstructured({net}[0], 'weight', amount=1) if not hasattr({net}[0], 'weight_orig') else None"), S("{new} = torch.optim.swa_utils.AveragedModel({net})", "averaged"), S("{averaged}.update_parameters({net})"), S("{new} = torch.optim.lr_scheduler.CosineAnnealingLR({optimizer}, 5)", "schedule"), S("{new} = torch.optim.lr_scheduler.OneCycleLR({optimizer}, .1, total_steps=20)", "schedule"), S("{new} = torch.optim.lr_scheduler.ReduceLROnPlateau({optimizer}, patience=0)", "plateau"), S("{plateau}.step({n})"), S("{new} = torch.optim.lr_scheduler.LambdaLR({optimizer}, lambda e: 1 / (e + {n} + 1))", "schedule"), S("{optimizer}.add_param_group({{'params': [nn.Parameter(torch.ones({n}))], 'lr': .5}})"), S("{optimizer}.load_state_dict({optimizer}.state_dict())"), S("{new} = {optimizer}.state_dict()", "dict4"), S("{net}.load_state_dict({net}.state_dict())"), S("torch.save({net}.state_dict(), 's{n}.pt')"), S("{net}.load_state_dict(torch.load('s{n}.pt'))"), S("torch.nn.utils.clip_grad_norm_({net}.parameters(), 1)"), S("{new} = [p for p in {net}.parameters()]", "list"), S("{new} = dict({net}.named_parameters())", "dict5"), S("{new} = list({net}.children())", "list2"), S("{new} = {net}.state_dict()", "state"), S("{net}.train({n} > 2)"), S("{net}.requires_grad_({n} > 1)"), S("{net}.to(torch.float32)"), S("{net}.apply(lambda m: m.__dict__.setdefault('tag', {n}))"), S("{new} = {net}[0].weight.register_hook(lambda g: g * {n})", "hook"), S("{new} = {net}.register_full_backward_hook(lambda m, i, o: None)", "hook"), S("{new} = {net}[0].register_forward_pre_hook(lambda m, a: None)", "hook"), S("{new} = torch.fx.symbolic_trace({net})", "traced"), S("{new} = torch.func.vmap(lambda x: x * {n})(torch.ones(2))", "tensor3"), S("{new} = torch.func.grad(lambda x: (x ** 2).sum())(torch.ones(2))", "tensor3"), S("{new} = torch.autograd.grad(({leaf} ** 2).sum(), {leaf})[0]", "tensor3"), S("with torch.autocast('cpu', torch.bfloat16): {new} = {net}(torch.ones(3, 2)).dtype", "dtype"), S("{new} = torch.amp.GradScaler('cpu', enabled=False)", "gradscaler"), S("{new} = torch.distributions.Normal(torch.zeros(2), {n} + 1.)", "normal"), S("{new} = {normal}.sample()", "tensor3"), S("{new} = torch.ones({n}, 2).to_sparse()", "coo"), S("{new} = {coo}.to_dense()", "tensor3"), S("{new} = torch.complex({tensor}.float(), {tensor}.float())", "complex"), S("{new} = {complex}.real", "tensor4"), S("{tensor4}.mul_(2)"), S("{new} = {complex}.conj()", "complex"), S("{new} = torch.nested.nested_tensor([torch.ones(1), torch.ones({n} + 1)])", "nested"), S("{new} = torch.quantize_per_tensor(torch.ones(2), .1, {n}, torch.quint8)", "quantized"), S("{new} = torch.Size([1, {n}])", "size"), S("{new} = torch.float16, torch.device('cpu'), torch.strided", "tuple"), S("{new} = nn.ParameterList([torch.ones({n} + 1)])", "params"), S("{params}.append(torch.ones(2))"), S("{new} = nn.ParameterDict({{'a': torch.ones({n})}})", "pdict"), S("{new} = nn.ModuleDict({{'a': {net}}})", "mdict"), S("{mdict}['b{n}'] = nn.ReLU()"), S("{new} = torch.nn.parameter.UninitializedBuffer()", "uninit"), S("{new} = tud.random_split(range(5), [3, 2], torch.Generator().manual_seed({n}))", "list"), S("{new} = tud.Subset({data_set}, [0, {n} % 4])", "subset"), S("{new} = tud.ConcatDataset([{data_set}, {data_set}])", "concat"), S("class {new}(tud.Dataset):\n    def __init__(self): self.seen = []\n    def __len__(self): return 4\n    def __getitem__(self, i):\n        self.seen.append(i)\n        return torch.tensor(i), {n}", "dataset_class"), S("{new} = {dataset_class}()", "own_data"), S("{new} = tud.DataLoader({own_data}, 2, shuffle=True)", "own_loader"), S("for x, y in {own_loader}: {list}.append(x.tolist())"), S("{new} = tud.DataLoader({own_data}, 2, sampler=tud.WeightedRandomSampler([1, 2, 3, 4], 4), collate_fn=lambda b: len(b))", "own_loader2"), S("{new} = list({own_loader2})", "list"), S("{new} = T.Compose([T.Normalize([0.], [{n} + 1.])])", "transform"), S("{new} = {transform}(torch.ones(1, 2, 2))", "tensor3"), S("{new} = torchvision.tv_tensors.Image(torch.ones(1, 2, 2) * {n})", "tvimage"), S("{tvimage}.mul_(2)"), S("torch.set_default_dtype(torch.float64 if {n} > 4 else torch.float32)"), S("torch.set_num_threads(1)"), S("torch.set_grad_enabled({n} != 2)"), S("torch.use_deterministic_algorithms({n} > 3)"), S("torch.set_printoptions(precision={n} + 1)"), S("{new} = torch.empty(2, device='meta')", "meta2"), S("{tensor}.resize_({n} + 2)"), S("{tensor}.set_(torch.ones({n} + 1).untyped_storage())"), S("{tensor}.t_() if {tensor}.dim() < 3 else None"), S("{tensor}.unsqueeze_(0)"), S("{new} = {tensor}.share_memory_()", "tensor"), S("{new} = {leaf}.grad", "any2"), S("{leaf}.grad = None"), S("{leaf}.data.add_({n})"), S("with torch.no_grad(): {leaf}.mul_(2)"), S("{new} = {leaf}.clone()", "nonleaf"), S("{new} = ({leaf} * {n})", "nonleaf"), S("{nonleaf}.retain_grad()"), S("{nonleaf}.sum().backward(retain_graph=True)"), S("{new} = nn.CrossEntropyLoss(weight=torch.ones(2))", "loss"), S("{new} = nn.TransformerEncoderLayer(4, 2, 8)", "layer"), S("class {new}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x * {n}\n    @staticmethod\n    def backward(ctx, g): return g * {n}", "autofun"), S("{autofun}.apply({leaf}).sum().backward()"), S("class {new}(torch.Tensor): note = {n}", "tensor_class"), S("{new} = torch.ones(2).as_subclass({tensor_class})", "tensor5"), S("{tensor5}.add_(1)"), S("{own_net}.seen.append({own_net})"), S("{own_net}.register_parameter('p{n}', nn.Parameter(torch.ones(1)))"), S("{own_net}.double().float()"), S("del {own_net}.w"), S("{new} = torch.utils.checkpoint.checkpoint({net}, torch.ones(2, 2), use_reentrant=False).detach()", "tensor3"), S("nn.utils.parametrizations.orthogonal({net}[0]) if not hasattr({net}[0], 'parametrizations') else None"), S("nn.utils.parametrize.remove_parametrizations({net}[0], 'weight')"), S("{net}.zero_grad(set_to_none=False)"), S("{new} = torch.Generator(); {new}.manual_seed({n})", "torch_rng"), S("{new} = torch.get_rng_state()", "rng_state"), S("torch.set_rng_state({rng_state})"), S("{optimizer}.register_step_post_hook(lambda o, a, k: {list}.append({n}))"), S("{new} = copy.deepcopy({optimizer})", "optimizer"), S("{new} = [copy.deepcopy({net}) for _ in range(2)]", "list2"),
    ]),
}  # fmt: skip
"""By name; a notebook has one of them, or none."""

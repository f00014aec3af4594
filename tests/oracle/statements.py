"""What random notebooks are made of.

Statements, each with the kinds of things that it needs and the kind that it makes.
"""

from __future__ import annotations

from typing import NamedTuple

from blocks import block

__all__ = ["HELPER", "IMPORTS", "LAST", "STATEMENTS", "Statement"]

IMPORTS = """\
import abc, array, collections, contextlib, copy, dataclasses, datetime, decimal, enum
import fractions, functools, heapq, io
import itertools, logging, operator, os, pathlib, random
import re, string, sys, types, typing, uuid, warnings
import numpy as np, torch, torch.nn as nn"""
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


def statement(text: str, makes: str = "") -> Statement:
    """Return a statement whose lines are indented as in this file."""
    return Statement(block(text), makes)


STATEMENTS = [
    # plain values
    statement("{new} = {n}", "int"),
    statement("{new} = len({list}) + {int}", "int"),
    statement('{new} = "s{n}" * 2', "str"),
    statement("{int} += {n}"),
    statement("{int} = {int} * 2 - {n}"),
    statement('{str} += "{n}"'),
    statement("{new} = {n} / 7", "float"),
    statement("{new} = ({list}, {n}, {any})", "tuple"),
    statement("{new} = {{1, {n}}}", "set"),
    statement("{set}.add({n})"),
    statement("{new} = frozenset(({n}, 2))", "tuple"),
    statement('{new} = b"x" * {n}', "str2"),
    statement("{new} = {n} + 1j", "float"),
    # containers
    statement("{new} = [{n}, {any}]", "list"),
    statement("{new} = [x * {n} for x in range({n})]", "list"),
    statement("{new} = {list}", "list"),
    statement("{new} = {list}[:]", "list"),
    statement("{new} = [{list}, {dict}]", "list"),
    statement("{list}.append({any})"),
    statement("{list} += [{n}]"),
    statement("{list} = {list} + [{n}]"),
    statement("{list}[:1] = [{any}, {n}]"),
    statement("{list}.insert(0, {list})"),
    statement("{list}.reverse()"),
    statement("del {list}[1:2]"),
    statement("{list}.append({list})"),
    statement("{new} = dict(a={n}, b={any})", "dict"),
    statement('{new} = {{"k{n}": {list}, {n}: "s"}}', "dict"),
    statement('{new} = {{k: {any} for k in "ab"}}', "dict"),
    statement("{new} = {dict}", "dict"),
    statement('{dict}["k{n}"] = {any}'),
    statement('{dict}.pop("a", None)'),
    statement("{dict}.update(z={n})"),
    statement('{dict}["me"] = {dict}'),
    statement('{dict}["a"] = {dict}.pop("b", {n})'),
    statement("{new} = {dict}.copy()", "dict"),
    statement(
        """
            {new} = collections.defaultdict(list)
            {new}["x"].append({any})
        """,
        "dict",
    ),
    statement("{new} = collections.OrderedDict(a={any}, b={n})", "odict"),
    statement('{odict}.move_to_end("a")'),
    statement('{new} = collections.Counter("abca")', "counter"),
    statement('{counter}.update("bb")'),
    statement("{new} = collections.deque([{n}, {any}], maxlen=4)", "deque"),
    statement("{deque}.extend([{n}, {any}])"),
    statement("{deque}.rotate(1)"),
    statement('{new} = bytearray(b"abc")', "bytes"),
    statement('{bytes} += b"x"'),
    statement("{new} = iter([{n}, {list}, 3])", "iter"),
    statement("next({iter}, None)"),
    statement("{new} = slice({n}), range({n})", "tuple"),
    statement(
        """
            for i in range({n}):
                {list}.append(i)
        """,
    ),
    statement(
        """
            for key in list({dict}):
                {list}.append(key)
        """,
    ),
    statement(
        """
            while len({list}) < {n}:
                {list}.append({any})
        """,
    ),
    statement("{new}, *rest = [{any}, {n}, {list}]", "any2"),
    statement(
        """
            if {int} > 3:
                {new} = [{int}]
            else:
                {new} = [{any}]
        """,
        "list",
    ),
    statement(
        """
            try:
                {list}[99 + {n}]
            except IndexError as error:
                {new} = str(error)
        """,
        "str",
    ),
    statement(
        """
            try:
                1 / 0
            except ZeroDivisionError as error:
                {new} = error
        """,
        "error",
    ),
    # classes
    statement(
        """
            class {new}:
                made = []

                def __init__(self, n={n}):
                    self.n = n
                    self.held = []

                def grow(self, x):
                    self.n += 1
                    self.held.append(x)
                    return self.n

                @property
                def twice(self):
                    return self.n * 2
        """,
        "class",
    ),
    statement(
        """
            class {new}({class}):
                def grow(self, x):
                    return super().grow([x]) + 1
        """,
        "class",
    ),
    statement("{new} = {class}({n})", "object"),
    statement("{new} = {object}", "object"),
    statement("{object}.grow({any})"),
    statement("{object}.extra{n} = {any}"),
    statement("{object}.held.append({object})"),
    statement("{object}.n = {object}.twice"),
    statement("{new} = {object}.held", "list"),
    statement("{new} = {object}.grow", "method"),
    statement("{method}({n})"),
    statement('{object}.__dict__["direct"] = {n}'),
    statement("{object}.__class__ = type({object})"),
    statement("{new} = isinstance({object}, {class})", "int"),
    statement(
        """
            @dataclasses.dataclass
            class {new}:
                n: int = {n}
                held: list = dataclasses.field(default_factory=list)
        """,
        "data",
    ),
    statement("{new} = {data}({n}, {list})", "record"),
    statement("{new} = {data}()", "record"),
    statement("{record}.held.append({any})"),
    statement("{record}.n += 1"),
    statement("{new} = dataclasses.replace({record}, n={n})", "record"),
    statement(
        """
            class {new}(enum.Enum):
                A = 1
                B = [2]
        """,
        "enum",
    ),
    statement('{new} = {enum}.A, {enum}["B"]', "tuple"),
    statement("{list}.append({enum}.B)"),
    statement(
        """
            class {new}(dict):
                def __missing__(self, key):
                    return key
        """,
        "mapping",
    ),
    statement(
        """
            {new} = {mapping}(a={any})
            {new}.note = {new}["zz"]
        """,
        "dict",
    ),
    statement('{new} = collections.namedtuple("{new}", "x y")', "named"),
    statement("{new} = {named}({list}, {n})", "tuple"),
    statement(
        """
            class {new}:
                __slots__ = ("a", "b")

                def __init__(self):
                    self.a = {any}
        """,
        "slots",
    ),
    statement("{new} = {slots}()", "slotted"),
    statement(
        """
            {slotted}.b = {list}
            {slotted}.a = {n}
        """,
    ),
    # functions
    statement(
        """
            def {new}(x=0, held=[]):
                global {int}
                {int} += 1
                held.append(x)
                return x, {int}, held
        """,
        "function",
    ),
    statement("{function}({any})"),
    statement("{new} = {function}()", "tuple"),
    statement("{function}.tag = {any}"),
    statement("{new} = lambda x: (x, {list})", "lambda"),
    statement("{list}.append({lambda}({n}))"),
    statement("{new} = functools.partial({lambda}, {any})", "partial"),
    statement("{new} = {partial}()", "tuple"),
    statement(
        """
            def make_{new}():
                n = [{n}]
                m = 0

                def inc():
                    nonlocal m
                    m += 1
                    n.append(m)
                    return m

                return inc

            {new} = make_{new}()
        """,
        "closure",
    ),
    statement("{closure}()"),
    statement("{new} = {closure}() + {int}", "int"),
    statement('{dict}["f"] = {closure}'),
    statement("{new} = [{lambda}, {closure}, max]", "list"),
    statement(
        """
            def {new}(n):
                return {n} if n < 1 else n * {new}(n - 1)
        """,
        "recursive",
    ),
    statement("{int} += {recursive}(3)"),
    statement(
        """
            def {new}(n):
                for i in range(n):
                    yield i, {list}
        """,
        "generator",
    ),
    statement("{new} = [a for a, _ in {generator}({n})]", "list"),
    statement(
        """
            class {new}:
                def __get__(self, one, cls):
                    return self if one is None else one.__dict__.get("kept", {n})

                def __set__(self, one, x):
                    one.__dict__["kept"] = x
        """,
        "descriptor",
    ),
    statement(
        """
            class {new}:
                kept = {descriptor}()
        """,
        "described",
    ),
    statement(
        """
            {new} = {described}()
            {new}.kept = {any}
        """,
        "managed",
    ),
    statement("{managed}.kept = [{managed}.kept]"),
    statement(
        """
            class {new}:
                @functools.cached_property
                def once(self):
                    return [{n}]

                @classmethod
                def make(cls):
                    return cls()

                @staticmethod
                def three():
                    return 3
        """,
        "lazy",
    ),
    statement(
        """
            {new} = {lazy}.make()
            {new}.first = {new}.once
        """,
        "cached",
    ),
    statement("{cached}.once.append({any})"),
    statement("{new} = {cached}.make", "method0"),
    statement("{new} = {method0}()", "cached"),
    statement(
        """
            @functools.wraps({lambda})
            def {new}(*args):
                return {lambda}(*args)
        """,
        "lambda",
    ),
    statement(
        """
            @contextlib.contextmanager
            def {new}(x):
                yield [x]
        """,
        "manager",
    ),
    statement(
        """
            with {manager}({any}) as {new}:
                {new}.append({n})
        """,
        "list",
    ),
    statement(
        """
            class {new}(abc.ABC):
                @abc.abstractmethod
                def f(self): ...
        """,
        "abstract",
    ),
    statement(
        """
            class {new}({abstract}):
                def f(self):
                    return {list}
        """,
        "concrete",
    ),
    statement("{new} = {concrete}()", "instance"),
    statement("{new} = {instance}.f()", "list"),
    statement("{new} = isinstance({instance}, {abstract})", "int"),
    statement(
        """
            class {new}(Exception):
                def __init__(self, what):
                    super().__init__(what)
                    self.what = what
        """,
        "raised",
    ),
    statement(
        """
            try:
                raise {raised}({any})
            except {raised} as error:
                {new} = error
        """,
        "error",
    ),
    statement(
        """
            {new} = {class0}()
            {new}.x = {any}
        """,
        "thing",
    ),
    statement("{thing}.y = {list}"),
    statement(
        """
            class {new}(list):
                def __init__(self, *a):
                    super().__init__(a)
                    self.tag = {n}
        """,
        "listed",
    ),
    statement("{new} = {listed}({n}, {any})", "list"),
    statement(
        """
            class {new}:
                def __init__(self):
                    self.n = {n}

                def __getstate__(self):
                    return {{"n": self.n}}

                def __eq__(self, o):
                    return isinstance(o, {new}) and o.n == self.n

                def __hash__(self):
                    return hash(self.n)
        """,
        "hashed",
    ),
    statement("{new} = {hashed}()", "key"),
    statement("{dict}[{key}] = {any}"),
    statement("{new} = {{{key}, {n}}}", "keys"),
    statement("{keys}.discard({key})"),
    statement("{new} = {key} in {keys}", "int"),
    # the standard library
    statement("{new} = types.SimpleNamespace(a={any}, b=[{n}])", "simple"),
    statement("{simple}.b.append({any})"),
    statement("{simple}.c = {simple}"),
    statement("{new} = collections.ChainMap({dict}, {dict})", "chain"),
    statement('{chain}["new{n}"] = {any}'),
    statement("{new} = copy.copy({object})", "object"),
    statement("{new} = copy.deepcopy({list})", "list"),
    statement("{new} = copy.deepcopy({net})", "net"),
    statement('{new} = array.array("d", [{n}, 2.5])', "packed"),
    statement("{packed}.append({n})"),
    statement("{packed}[0] = {n}"),
    statement('{new} = io.StringIO("text{n}")', "text"),
    statement(
        """
            {text}.seek(0, 2)
            {text}.write("more")
        """,
    ),
    statement("{new} = {text}.getvalue()", "str"),
    statement(
        """
            {new} = (
                datetime.date(2020, 1, {n} + 1),
                decimal.Decimal("{n}.5"),
                fractions.Fraction({n}, 3),
            )
        """,
        "tuple",
    ),
    statement("{new} = decimal.Decimal(1) / 7", "decimal"),
    statement("decimal.getcontext().prec = 10 + {n}"),
    statement('{new} = pathlib.Path("folder") / "f{n}"', "path"),
    statement('{new} = re.compile("a{{{n}}}").findall("aaa")', "list"),
    statement(
        """
            {new} = heapq.nsmallest(2, range({n}, 9))
            heapq.heapify({new})
        """,
        "heap",
    ),
    statement("heapq.heappush({heap}, {n})"),
    statement("{new} = operator.itemgetter({n})", "getter"),
    statement('{new} = string.Template("$a{n}")', "template"),
    statement("{new} = uuid.UUID(int={n})", "uuid"),
    statement("{new} = collections.UserDict(a={any})", "user"),
    statement(
        """
            {user}["z"] = {n}
            {user}.note = {list}
        """,
    ),
    statement('logging.getLogger("program{n}").setLevel({n} * 10)'),
    statement('{new} = logging.getLogger("program{n}")', "logger"),
    statement("{logger}.setLevel(30)"),
    statement('warnings.filterwarnings("ignore", message="program{n}")'),
    statement('{new} = dict.fromkeys("ab", {list})', "dict"),
    statement('{new} = dataclasses.make_dataclass("{new}", ["p", "q"])', "made"),
    statement("{new} = {made}({any}, {n})", "record2"),
    statement("{record2}.q = {list}"),
    statement('{new} = typing.NamedTuple("{new}", [("u", int)])({n})', "tuple"),
    statement("{new}: int = {n}", "int"),
    statement(
        """
            class {new}(enum.Flag):
                R = enum.auto()
                W = enum.auto()
        """,
        "flag",
    ),
    statement("{new} = {flag}.R | {flag}.W", "flags"),
    # memory
    statement("{new} = np.arange(6.0 + {n})", "array"),
    statement("{new} = {array}[1:]", "array"),
    statement("{new} = {array}[::2]", "array"),
    statement("{new} = {array}.T", "array"),
    statement("{new} = {array}.reshape(1, -1)[0]", "array"),
    statement("{new} = {array} * {n}", "array"),
    statement("{array} += 1"),
    statement("{array}[:1] = {n}"),
    statement("{array} = {array} + {n}"),
    statement("{new} = float({array}.sum())", "float"),
    statement("{new} = torch.from_numpy({array})", "tensor"),
    statement("{new} = torch.arange(5.0 + {n})", "tensor"),
    statement("{new} = {tensor}[1:]", "tensor"),
    statement("{new} = {tensor}.view(-1)", "tensor"),
    statement("{new} = {tensor} + {n}", "tensor"),
    statement("{tensor}.mul_(2)"),
    statement("{tensor}[:2] = {n}"),
    statement("{new} = {tensor}.numpy()", "array"),
    statement("{tensor} = {tensor}.clone()"),
    statement("{new} = {tensor}.sum().item()", "float"),
    statement("{tensor}.tag = {any}"),
    statement("{new} = torch.ones(3, requires_grad=True)", "leaf"),
    statement("({leaf} * {n}).sum().backward()"),
    statement(
        """
            {new} = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
            {new}["a"] = {n}
        """,
        "records",
    ),
    statement('{records}["b"] += 1'),
    statement("{new} = np.array([{any}, {n}], dtype=object)", "objects"),
    statement("{objects}[0] = {any}"),
    statement("{new} = np.ma.masked_array([1.0, 2.0], [0, {n} % 2])", "masked"),
    statement("{masked}[0] = {n}"),
    statement('{new} = np.array([[1.0, {n}], [3.0, 4.0]], order="F")', "array"),
    statement("np.add({array}, 1, out={array})"),
    statement("{array}.setflags(write=True)"),
    statement("{new} = {tensor}.unsqueeze(0).expand(2, -1)", "tensor3"),
    statement("{tensor}.data = {tensor}.data + 1"),
    statement("{tensor}.requires_grad_(False)"),
    statement("{new} = torch.tensor({n})", "scalar"),
    statement("{scalar} += 1"),
    statement("{new} = {tensor}.to(torch.float64)", "tensor"),
    statement("{new} = {tensor}.untyped_storage()", "storage"),
    statement("{new} = torch.Generator().manual_seed({n})", "torch_rng"),
    statement("{new} = torch.rand(2, generator={torch_rng})", "tensor"),
    statement(
        "{new} = torch.utils.data.TensorDataset(torch.arange(4.0), torch.ones(4))", "data_set"
    ),
    statement("{new} = torch.utils.data.DataLoader({data_set}, 2, shuffle=True)", "loader"),
    statement("{new} = [x.sum().item() for x, y in {loader}]", "list"),
    # models
    statement("{new} = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))", "net"),
    statement("{new} = {net}", "net"),
    statement("{new} = nn.ModuleList([{net}, nn.Linear(1, 1)])", "nets"),
    statement("{nets}.append(nn.Linear(1, {n} + 1))"),
    statement("{new} = torch.optim.SGD({net}.parameters(), lr=0.1, momentum=0.9)", "optimizer"),
    statement("{new} = torch.optim.Adam({net}.parameters())", "optimizer"),
    statement(
        """
            {optimizer}.zero_grad()
            {net}(torch.ones(4, 2)).sum().backward()
            {optimizer}.step()
        """,
    ),
    statement("{net}.zero_grad()"),
    statement("{new} = {net}[0].weight", "leaf2"),
    statement(
        """
            with torch.no_grad():
                {net}[0].bias.add_({n})
        """,
    ),
    statement("{net}.note = {list}"),
    statement("{net}.eval()"),
    statement("{net}.append(nn.Linear(1, 1))"),
    statement("{net}[0] = nn.Linear(2, 3)"),
    statement(
        """
            for p in {net}.parameters():
                p.requires_grad_(False)
        """,
    ),
    statement('{net}.register_buffer("b{n}", torch.ones({n} + 1))'),
    statement("{new} = {net}.register_forward_hook(lambda m, i, o: o + {n})", "hook"),
    statement("{hook}.remove()"),
    statement(
        """
            class {new}(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.w = nn.Parameter(torch.ones(2))
                    self.seen = []

                def forward(self, x):
                    self.seen.append(len(x))
                    return x * self.w
        """,
        "module_class",
    ),
    statement("{new} = {module_class}()", "own_net"),
    statement("{own_net}(torch.ones(2)).sum().backward()"),
    statement("{own_net}.w = nn.Parameter({own_net}.w.detach() + 1)"),
    statement("{own_net}.inner = {net}"),
    statement(
        "{new} = torch.optim.AdamW({own_net}.parameters(), weight_decay=.{n})", "own_optimizer"
    ),
    statement("{own_optimizer}.step()"),
    statement(
        """
            nn.utils.parametrizations.weight_norm({net}[0]) if not hasattr(
                {net}[0], "parametrizations"
            ) else None
        """,
    ),
    statement("{net}.half().float()"),
    statement("nn.init.constant_({net}[0].weight, {n})"),
    statement("{own_net}.load_state_dict({own_net}.state_dict())"),
    statement('{optimizer}.param_groups[0]["lr"] *= 0.5'),
    statement("{new} = {{k: v.clone() for k, v in {net}.state_dict().items()}}", "state"),
    statement('{state}["x"] = {n}'),
    statement(
        """
            {new} = torch.optim.lr_scheduler.StepLR({optimizer}, 1, 0.5)
            {optimizer}.step()
            {new}.step()
        """,
        "schedule",
    ),
    statement("{schedule}.step()"),
    # the process
    statement("{new} = random.random()", "float"),
    statement("{new} = np.random.rand(2)", "array2"),
    statement("{new} = torch.rand(2)", "tensor2"),
    statement("random.seed({n})"),
    statement("torch.manual_seed({n})"),
    statement("{new} = random.Random({n})", "rng"),
    statement("{new} = np.random.default_rng({n})", "rng"),
    statement("{list}.append({rng}.random())"),
    statement("random.shuffle({list})"),
    statement('os.environ["PROGRAM_{n}"] = "{n}"'),
    statement('os.environ.pop("PROGRAM_1", None)'),
    statement('sys.path.append("/program/{n}")'),
    statement("import json as {new}", "module"),
    statement("from math import pi as {new}", "float"),
    statement("sys.setrecursionlimit(3000 + {n})"),
    statement('np.seterr(divide="ignore")'),
    statement("np.set_printoptions(precision={n})"),
    # a module of the project
    statement("import helper as {new}", "helper"),
    statement("{helper}.counter += {n}"),
    statement("{helper}.items.append({any})"),
    statement("{new} = {helper}.Thing({any})", "thing2"),
    statement("{thing2}.grow({any})"),
    statement("{new} = {helper}.counted({lambda})", "lambda"),
    statement("from helper import items as {new}", "list"),
    statement("{helper}.registry[{n}] = {any}"),
    statement("{helper}.added{n} = {list}"),
    statement("{new} = {helper}.bump()", "int"),
    statement("{new} = {helper}.items[-1:]", "list"),
    statement(
        """
            class {new}({helper}.Thing):
                def grow(self, y):
                    return super().grow([y])
        """,
        "own_thing",
    ),
    statement("{new} = {own_thing}({n})", "thing2"),
    statement("{helper}.items = {list}"),
    statement("{new} = {helper}.bump", "bump"),
    statement("{bump}()"),
    # errors
    statement("{list}[99]"),
    statement("1 / 0"),
    statement("raise {raised}({n})"),
    # what a cell shows
    statement("print({any})"),
    statement("display({list})"),
    statement('print("to stderr", file=sys.stderr)'),
    statement("del {str}"),
    statement("del {tuple}"),
    statement("del {set}"),
]
LAST = [statement("{any}"), statement("{list}, {int}"), statement("{n};"), statement("None")]

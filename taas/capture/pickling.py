"""One conversation in two streams: the payload to the ranks, and rank 0's answer to it.

A stream is **parts**, each a pickle of its own. A pickler numbers the objects it meets in a part (its *memo*), and the
unpickler of that part gives the same object the same number. So after each part both sides hold an exact table of the
objects that travelled, without a hook for each. Later parts, and the answer, name such an object by its number, with
a check of its class; what is named becomes, there, the very object it came from. A part that cannot be written, or read,
costs itself and what refers to what it would have brought.

A large container of nothing but numbers and texts, or of rows of them, is a *leaf*: it travels in one piece, as
:mod:`marshal` writes it. That is several times as fast as pickle, which notes every text. Leaves, and the rows in them,
have numbers that count downwards.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import linecache
import marshal
import operator
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from taas.capture.code_by_value import BasePickler
from taas.capture.losing import Losses, Lost, fill, make
from taas.capture.memory import DeviceMemory, MemoryTable, SentMemory
from taas.capture.reader import Reader
from taas.capture.reading import ATOMS, Reading, import_or_stand_in

if TYPE_CHECKING:
    from taas.capture.kept import Held

NAMESPACE = 0
"""The number of the notebook's namespace; objects of parts follow it."""

_LEAF = 1000
"""How many items make a container a leaf."""
_LEAVES = frozenset({list, dict, set, tuple, frozenset})
_ROWS = frozenset({dict, list, tuple})
_IN_LEAVES = ATOMS - {complex}
_FLOATS = frozenset({float, complex})
_ALIKE = {
    "builtins.type": "type",
    "builtins.function": "function", "builtins.builtin_function_or_method": "function",
    "torch.utils.data.dataloader.DataLoader": "DataLoader", "torch.Tensor": "Tensor",
}  # fmt: skip
"""Classes whose objects may be of another one there: a rehearsal's types have metaclasses of its own, its functions are
Python's; a registered DataLoader is a delivered one in the ranks, and a sharded tensor a whole one in the notebook."""
_HELD = (
    ("math", "nan"), ("numpy", "nan"), ("argparse", "SUPPRESS"), ("builtins", "__dict__"), ("dataclasses", "_EMPTY_METADATA"),
    ("sys", "stdout"), ("sys", "stderr"), ("traitlets", "All"),
)  # fmt: skip
"""What is told by which object it is (``default is SUPPRESS``; what ``exec`` puts into a namespace), by its name in a
module."""


class Part(NamedTuple):
    """Where a part begins in its stream, the number of its first object, and whether it is read before others."""

    start: int
    first: int
    early: int


def early(value: Any) -> int:
    """Tell when a name is read: modules, numbers and texts, then functions, then what has methods that may use them."""
    if isinstance(value, (types.ModuleType, *ATOMS)):
        return 0
    return 1 if isinstance(value, types.FunctionType) else 2


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would look at the objects that are made at once again and again.

    100,000 unpickled objects otherwise cost half a second of it.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Table:
    """The objects that both sides know; the globals of the notebook's functions are the first.

    Attributes:
        objects: by number, but for rows.
        rows: of leaves, with the number of their first.
        next: the number of the next object.
        next_leaf: the number of the next leaf.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.objects: dict[int, Any] = {NAMESPACE: namespace}
        self.rows: list[tuple[int, tuple[Any, ...]]] = []
        self.next, self.next_leaf = NAMESPACE + 1, -1

    def copy(self) -> Table:
        """Return a table that may learn more, and that knows rows by their numbers, too."""
        found = Table(self.objects[NAMESPACE])
        found.objects = {**self.objects}
        for first, items in self.rows:
            found.objects.update(zip(range(first, first - len(items), -1), items, strict=True))
        found.next, found.next_leaf = self.next, self.next_leaf
        return found

    def learn(self, later: Table) -> None:
        """Take over what a copy has learned since it was made."""
        new = {n: v for n, v in later.objects.items() if n >= self.next or n <= self.next_leaf}
        self.objects = {**self.objects, **new}
        self.rows = [*self.rows, *later.rows]
        self.next, self.next_leaf = later.next, later.next_leaf

    def cut(self, numbers: Container[int]) -> Table:
        """Return a table that knows no other objects than those of some numbers; it goes on where this one stands."""
        found = Table(self.objects[NAMESPACE])
        found.objects |= {number: value for number, value in self.objects.items() if number in numbers}
        for first, items in self.rows:
            if first + 1 in numbers:  # the leaf they are in
                found.rows.append((first, items))
            else:
                found.objects |= {first - n: row for n, row in enumerate(items) if first - n in numbers}
        found.next, found.next_leaf = self.next, self.next_leaf
        return found

    def numbers(self) -> dict[int, int]:
        """Return the numbers of the objects by their ids; the first one's where a parallel wrapper was sent besides."""
        return {id(value): number for number, value in reversed(self.objects.items())}

    def add_leaf(self, number: int, leaf: Any) -> Any:
        """Note a leaf, and its rows."""
        self.objects[number] = leaf
        self.next_leaf = number - 1
        if type(leaf) in (list, tuple) and type(leaf[0]) in _ROWS:
            self.rows.append((number - 1, tuple(leaf)))
            self.next_leaf -= len(leaf)
        return leaf


@functools.cache
def check_of(cls: Any) -> int:
    """Return 16 bits that a reference to an object of a class carries: a wrong number would corrupt silently."""
    alike = next(
        (what for base, what in _ALIKE.items() if base in map(_name_of, cls.__mro__)), cls.__qualname__
    )
    return zlib.crc32(alike.encode()) & 0xFFFF


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Pickler(BasePickler):
    """Writes objects of a notebook, or of a rank.

    Args:
        namespace: the globals of the notebook's functions.
        table: the objects that the receiver knows, and by then will.
        known: their numbers, by their ids.
        checks: checks of objects whose class is another one there, by number.
        sent: the memory that objects live in; knows what the receiver has of it.
        project: the folder whose modules hold data of the notebook.
        answers: send the module in place of a parallel wrapper, and make objects where a failure costs them alone.
        held: what the receivers hold under names.

    Attributes:
        reader: tells what objects consist of.
        parts: those that were written.
        nobodys: the numbers of states that protocols made only to be pickled: no change of them could matter.
        shared: ids of objects met, and of memory, that the receiver holds as parts of names that do not travel.
        detached: how many tensors had to leave a graph behind.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        *,
        table: Table | None = None,
        known: dict[int, int] | None = None,
        checks: dict[int, int] | None = None,
        sent: SentMemory | None = None,
        project: str = "",
        answers: bool = False,
        held: Held | None = None,
    ) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream, protocol=5)
        foreign = weakref.WeakMethod(
            self._foreign_function
        )  # in a cycle, it would hold what it wrote until a collection
        self.reader = Reader(namespace, project=project, unwrap=answers, foreign=lambda f: foreign()(f))  # type: ignore[misc]
        self.sent = SentMemory() if sent is None else sent
        self.table = Table(namespace) if table is None else table
        self.known = self.table.numbers() if known is None else known
        self.parts: list[Part] = []
        self.nobodys: list[int] = []
        self.shared: set[int] = set()
        self.detached = 0
        self._checks = checks or {}
        self._answers = answers
        self._names_held = {} if held is None else held.named
        self._parts_held = frozenset() if held is None else held.parts
        self._regions_held = (lambda _: set()) if held is None else held.regions
        self._held = {id(getattr(sys.modules[m], n)): (m, n) for m, n in _HELD if m in sys.modules}
        self._refers = self._by_name = False

    def add(
        self, record: tuple[Any, ...], *, limit: int | None = None, by_name: bool = False
    ) -> Exception | None:
        """Write a part; one that refers to no other is read as early as the last value in it.

        Args:
            record: what is in it.
            limit: how many bytes it may have.
            by_name: whether it may hold no code but what another process finds by its name, or the notebook's.

        Returns:
            Why it cannot be written, and then nothing of it is left; or None.
        """
        start, pieces, leaf = self.stream.tell(), len(self.sent), self.table.next_leaf
        self._refers, self._by_name = False, by_name
        try:
            self.dump(record)
            if limit is not None and self.stream.tell() - start + self.sent.size(pieces) > limit:
                raise pickle.PicklingError(f"it has more than {limit:,} bytes")
        except Exception as error:  # whatever a user's __reduce__ raises
            self.clear_memo()
            self.stream.seek(start)
            self.stream.truncate()
            self.sent.forget(pieces)
            self._forget_leaves(leaf)
            return error
        when = 2 if self._refers else early(record[-1])
        self.parts.append(Part(start, self.table.next, when))
        self._number()
        return None

    def _number(self) -> None:
        """Give the objects of a part the numbers they have there, but for those that nobody else holds."""
        memo = self.memo.copy()
        self.clear_memo()
        first = self.table.next
        self.table.next += len(memo)
        for (number, value), references in zip(memo.values(), _references(memo), strict=True):
            cls = type(value)
            if cls in ATOMS or value is make or value is fill:  # an unpickler has its own for them
                continue
            if cls in self.reader.wrappers:  # the receiver has none
                continue
            if cls not in _LEAVES or references != _NOBODYS:
                self.table.objects[first + number] = value
                self.known[id(value)] = first + number
            elif cls is not tuple:
                self.nobodys.append(first + number)

    # ------------------------------------------------------------ objects

    def persistent_id(self, value: Any) -> Any:
        """Called by pickle for every object: a reference to a known one, memory, a leaf, or None."""
        cls: Any = type(value)
        if (held := self._held.get(id(value))) is not None:
            return "held", *held
        if cls in ATOMS and (cls not in _FLOATS or value == value):
            return None
        if cls in self.reader.wrappers:
            value, cls = value.module, type(value.module)
        number = self.known.get(id(value))
        if number is not None:
            self._refers |= number != NAMESPACE
            return number << 16 | (self._checks.get(number) or check_of(cls))
        if (name := self._names_held.get(id(value))) is not None:
            return "name", name
        if id(value) in self._parts_held:
            self.shared.add(id(value))
        if cls in _FLOATS:
            return self._leaf(value)  # it is told by which object it is: ``nan in numbers``
        if cls is DeviceMemory:
            self.sent.add(value)
            self.shared |= self._regions_held(value)
            self.detached += any(not tensor.is_leaf for tensor in value.tensors)
            return value.opener, value.address, value.nbytes
        return self._leaf(value) if cls in _LEAVES and len(value) >= _LEAF and _is_leaf(value) else None

    def _leaf(self, value: Any) -> tuple[Any, ...] | None:
        """Write a leaf in one piece; None if a row that others hold, too, was written before, as an object of its own."""
        held, number = _held_rows(value), self.table.next_leaf
        met = self.known.keys() | self.memo.copy().keys() if held else set()
        if not met.isdisjoint(map(id, held.values())):
            return None
        self.known[id(value)] = number
        self.known.update((id(row), number - 1 - place) for place, row in held.items())
        self.table.add_leaf(number, value)
        return "leaf", number, marshal.dumps(value)

    def _forget_leaves(self, last: int) -> None:
        """Forget the leaves behind one."""
        self.known = {identity: number for identity, number in self.known.items() if number > last}
        self.table.objects = {number: value for number, value in self.table.objects.items() if number > last}
        self.table.rows = [entry for entry in self.table.rows if entry[0] > last]
        self.table.next_leaf = last

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for whatever is no plain value."""
        reading = self.reader.read(value)
        if reading is None:
            return NotImplemented
        is_code = isinstance(value, (type, types.FunctionType))
        if self._by_name and is_code and value.__module__ not in ("__main__", "builtins"):
            raise pickle.PicklingError(f"{value.__qualname__} is not found by its name")
        made: tuple[Any, Any] = reading[:2]
        state: Any = reading.state
        setter: Any = reading.setter
        if self._answers:
            made, state, setter = (make, made), (setter, state), fill
        return made if reading.state is None else (*made, state, None, None, setter)

    def _foreign_function(self, function: types.FunctionType) -> Reading | None:
        if (reduced := self._function_reduce(function)) is NotImplemented:
            return None
        constructor, arguments, state, _, _, setter = reduced
        return Reading(constructor, arguments, setter, state, (".", "."))

    # ------------------------------------------------------------ what was written

    def wanted(self, since: int = 0) -> set[str]:
        """Return names that the notebook's functions use, and that they and its classes have, from the ``since``-th on."""
        return set().union(*self.reader.names[since:])

    def sources(self) -> dict[str, tuple[int, list[str]]]:
        """Return the text of the cells that the functions met so far were defined in."""
        found = {}
        for name in {code.co_filename for code in self.reader.functions}:
            entry = linecache.cache.get(name, ())
            if len(entry) == 4 and entry[1] is None:  # IPython's; files have a time
                found[name] = (entry[0], entry[2])
        return found


def _references(memo: dict[int, tuple[int, Any]]) -> Iterator[int]:
    """Count who holds the objects of a memo."""
    return (sys.getrefcount(entry[1]) for entry in memo.values())


_NOBODYS = next(_references({0: (0, [])}))
"""How many references there are to an object that a memo alone holds, and who looks at it."""


def _is_leaf(value: Any) -> bool:
    """Tell whether all items are atoms, or rows of atoms."""
    types_in = {*map(type, value)}
    rows = [value]
    if not types_in <= _IN_LEAVES:
        if type(value) not in (list, tuple) or len(types_in) > 1 or not types_in <= _ROWS:
            return False
        rows = value
    items = chain.from_iterable(map(dict.values, rows)) if type(rows[0]) is dict else ()
    return _is_flat([*chain.from_iterable(rows)]) and _is_flat([*items])


def _is_flat(items: Iterable[Any]) -> bool:
    """Tell whether all items are atoms; none is a NaN, which has an identity."""
    types_in = {*map(type, items)}
    return types_in <= _IN_LEAVES and not (float in types_in and any(map(operator.ne, items, items)))


def _held_rows(rows: Any) -> dict[int, Any]:
    """Return rows that others hold, too, by their places."""
    if type(rows) not in (list, tuple) or type(rows[0]) not in _ROWS:
        return {}
    counts = [*map(sys.getrefcount, rows)]
    if {*counts} == {_HELD_ONCE}:
        return {}
    return {place: rows[place] for place, count in enumerate(counts) if count > _HELD_ONCE}


_HELD_ONCE = next(map(sys.getrefcount, [[]]))


# ---------------------------------------------------------------- reading it


class _PartUnpickler(pickle.Unpickler):
    """Reads a part."""

    def __init__(self, file: Any, memory: MemoryTable, table: Table, losses: Losses | None) -> None:
        super().__init__(file)
        self._memory, self._table, self._losses = memory, table, losses
        self._own: dict[tuple[str, str], Callable[..., Any]] = {}
        if losses is not None:
            self._own = {(make.__module__, "make"): losses.make, (fill.__module__, "fill"): losses.fill}

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that a reference means, memory, or a leaf that comes here for the first time."""
        match pid:
            case int():
                number, check = pid >> 16, pid & 0xFFFF
                if number not in self._table.objects:
                    return self._missing(
                        "a part of it", pickle.UnpicklingError("it came with what could not be read")
                    )
                value = self._table.objects[number]
                cls: Any = type(value)
                if check_of(cls) != check and cls is not Lost:
                    return self._missing(
                        "a part of it",
                        pickle.UnpicklingError(
                            f"object {number} is a {cls.__qualname__} here and was another thing there"
                        ),
                    )
                return value
            case "leaf", number, data:
                return self._table.add_leaf(number, marshal.loads(data))  # noqa: S302  from our own sender
            case "name", name:
                return self._table.objects[NAMESPACE][name]
            case "held", module, name:
                return getattr(import_or_stand_in(module), name)
        return self._memory.open(*pid)

    def find_class(self, module: str, name: str) -> Any:
        """Find what the stream names; what fails is noted here."""
        try:
            return self._own.get((module, name)) or super().find_class(module, name)
        except Exception as error:
            return self._missing(f"{module}.{name}", error)

    def _missing(self, what: str, error: Exception) -> Any:
        if self._losses is None:
            raise error
        return self._losses.missing(what, error)


def load_part(file: Any, first: int, memory: MemoryTable, table: Table, losses: Losses | None = None) -> Any:
    """Read a part whose first object has the number ``first``, and note in the table what it brings.

    Raises:
        Exception: what a user's own protocol raises, or a reference to what an earlier part has not brought; not where
            there are ``losses``. Code that came is known all the same.
    """
    unpickler = _PartUnpickler(file, memory, table, losses)
    kept: tuple[type, ...] = (type, types.FunctionType, types.ModuleType)
    try:
        value = unpickler.load()
        kept = (object,)
        return value
    finally:
        memo = unpickler.memo.copy()
        table.next = max(table.next, first + len(memo))
        for number, found in memo.items():
            if type(found) not in ATOMS and isinstance(found, kept):
                table.objects[first + number] = found

"""Flat states: the contents of objects, with numbers in place of other objects.

A **flat state** is ``(kind, blob, children)``. The blob contains, marshalled, all parts whose
identity does not matter. It uses marshal's version 2, which has no references, so that equal values
have equal bytes, and ``1``, ``1.0`` and ``True`` differ. The children are the numbers of the other
objects, in the order in which the blob refers to them: :data:`REF` stands in the blob for each of
them.

Identity does not matter for these:

* numbers and strings, and tuples of them;
* a plain list or dict to which only its one parent refers, as its reference count shows. A large
  plain subtree is checked level by level, in a few C calls;
* objects that a protocol creates only for pickling, and to which nothing else refers. The blob
  contains them in the form that :func:`inline` returns.

If a sequence of items includes a ``REF`` or an inline object, it is a tuple in the blob, otherwise
a list.

An example: ``box = [tensor, box, "a"]``. ``box`` has the number 1, and the other objects have the
numbers that follow. The states are::

    1   ("list",    (REF, REF, "a"),                                         (2, 1))
    2   ("reading", (6, None, (REF, REF, REF),                               (3, 4, 5,
                    (REF, REF, REF, 0, (3,), (1,), False, False, "cpu"), []),
                                                                              6, 7, 8))
    3   ("global",  ("taas.capture.describe.tensors", "_make_tensor"),                ())
         … 4, 5: setter and changer; 6: ("torch", "Tensor")
    7   ("memory",  (address, nbytes),                                       ())
    8   ("reading", (1, None, (REF, None, None), ["torch", "float32"], []),  (9,))
    9   ("global",  ("taas.capture.describe.reading", "find"),                        ())

State 2 is an :class:`OfReading`: object 3 makes the tensor from its class, its memory, its dtype
and six plain arguments; the tensor has no other state. ARCHITECTURE.md follows ``box`` to a rank
and back.
"""

from __future__ import annotations

import enum
import gc
import marshal
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from taas.base.import_hooks import attribute_of, attributes_of
from taas.capture.describe.code_constants import without_slices
from taas.capture.describe.memory import MemoryRange
from taas.capture.describe.process_own import is_of_process, left_attributes, names_told
from taas.capture.describe.reader import Reader
from taas.capture.describe.reading import (
    ATOMS,
    Reading,
    is_only_python,
    itself,
    module_holding,
    module_named,
    read_insides,
    read_plain,
    set_by_protocol,
)
from taas.capture.describe.tensors import content_of, is_array, is_tensor

State = tuple[str, bytes, tuple[int, ...]]


class How(enum.Enum):
    """How an object gets from one state to another."""

    IN_PLACE = "in place"
    IN_PLACE_WITH_ARGUMENTS = "in place, as if it had been made with other arguments"
    ANEW = "by a new object that takes its place"


_Content = tuple[str, Any]
"""The kind of an object, and the content of its blob before it is marshalled."""

REF = ...
"""In a blob: stands for the next child."""


def inline(said: _Content) -> tuple[Any, ...]:
    """Return the representation, in the blob of its parent, of an object without a number.

    No other value begins in this way: ``...`` itself is sent by name, and so has a number.
    """
    return (REF, *said)


class OfReading(NamedTuple):
    """The content of a blob of the kind ``reading`` (:class:`reading.Reading`)."""

    made_of: int  # number of leading children of which it is made; the others are its state
    is_attributes: bool | None  # whether its state is its attributes; None: it has no state
    by: Any  # constructor, setter and changer
    arguments: Any
    state: Any


class OfObject(NamedTuple):
    """The content of a blob of the kind ``object``; the class is the first child."""

    names: Any  # of its attributes; None for an object without a ``__dict__``
    values: Any
    slots: Any  # the names of those that have a value
    slot_values: Any


class Fresh(enum.Enum):
    """Whether an object was created only for the description, so that nothing else refers to it."""

    NO = "others may hold it"
    MADE = "a protocol made it, maybe of parts that others hold"
    STATE = "it is the state itself, or right in it; tensors in it are described by their values"


_BOXES = frozenset({list, dict, tuple})
_PLAIN = ATOMS | _BOXES
_NUMBERED = (MemoryRange, types.FunctionType, type)
"""Types that get a number even if they were newly created: memory, and code, which uses names."""
_LARGE = 8
"""From this number of items on, it pays to check whether a container is a plain subtree."""
_PUBLIC = {"posix": "os", "_io": "io"}
"""Public modules of built-ins, by which they are sent: a rank may replace a function there."""
_DEEPEST = 64
_HELD = (
    ("argparse", "SUPPRESS"), ("builtins", "__dict__"), ("builtins", "Ellipsis"),
    ("builtins", "NotImplemented"), ("dataclasses", "_ANY_MARKER"),
    ("dataclasses", "_EMPTY_METADATA"), ("sys", "stdout"), ("sys", "stderr"), ("traitlets", "All"),
)  # fmt: skip
"""Objects that are compared by identity (``default is SUPPRESS``, what ``exec`` puts into a
namespace). They are sent by their name in a module.
"""

_atomic = ATOMS.issuperset
_count = sys.getrefcount


# -------------------------------------------- detecting other references by reference counts


def _with_counts(values: list[Any]) -> Iterable[tuple[Any, int]]:
    """Pair objects with their reference counts.

    The count is ``_ALONE`` for an object to which only its container, and the copy of the
    container's items, refer.
    """
    return zip(values, map(_count, values), strict=True)


_held_once = [[]]  # type: ignore[var-annotated]
_ALONE = next(iter(_with_counts(list(_held_once))))[1]
_IN_MAP = max(map(_count, [[]]))
"""The reference count, inside ``map``, of an object to which only the mapped container refers."""


def _is_leaf(box: Any) -> bool:
    """Tell whether everything in a container is plain, with no references from outside."""
    inner, others = (box, 0) if type(box) is list else (gc.get_referents(box), 1)
    for _ in range(_DEEPEST):
        kinds = set(map(type, inner))
        if not kinds <= _PLAIN:
            return False
        if kinds <= ATOMS:
            return True
        # ``others`` counts the lists created here, which refer to the boxes as their parents do.
        boxes = inner
        if not kinds.isdisjoint(ATOMS):
            boxes, others = [value for value in inner if type(value) in _BOXES], others + 1
        if max(map(_count, boxes)) > _IN_MAP + others:
            of_parent = _ALONE - 1 + others
            shared = [one for one, count in _with_counts(boxes) if count > of_parent]
            if not all(type(one) is tuple and _atomic(map(type, one)) for one in shared):
                return False
        inner, others = gc.get_referents(*boxes), 1
    return False


def _is_alone_inside(box: Any) -> bool:
    """Tell whether a container is a leaf: nothing in it needs a number."""
    return _is_leaf(box) if COUNTS_TELL else _atomic(map(type, gc.get_referents(box)))


def _counts_tell() -> bool:
    """Check, with known containers, that reference counts show whether others refer to a part."""
    makers: list[Callable[[], Any]] = [
        lambda: [[n] for n in range(2)],
        lambda: [0, [1], {2: 2}],
        lambda: {n: [n] for n in range(2)},
        lambda: {"a": 0, "b": [1], "c": {2: 2}},
        lambda: [(0, [n]) for n in range(2)],
        lambda: [[[[n], 0]] for n in range(2)],
    ]
    for make in makers:
        box = make()
        level = [box]
        while level := [one for one in gc.get_referents(*level) if type(one) in _BOXES]:
            if _is_leaf(box):  # the list of the level refers to it, too
                return False
        if not _is_leaf(box):
            return False
    parent: list[Any] = [[], []]
    also_here = parent[0]
    alone = [count <= _ALONE for _, count in _with_counts([*parent])]
    return alone == [False, True] and also_here is parent[0]


COUNTS_TELL = _counts_tell()
"""Whether this Python counts references as this module assumes. If not, every container has a
number.
"""


# ---------------------------------------------------------------- objects and their states


class LeftOut(NamedTuple):
    """A part of a module's data, of a logger or of a formatter that stays behind."""

    holder: Any
    part: Any
    error: Exception


class LeftAttribute(NamedTuple):
    """An attribute that stays with its process: its path, name, kind, object and value."""

    path: str
    attribute: str
    kind: str
    holder: Any
    part: Any


class Lost(NamedTuple):
    """A part that is not sent back, the reason, and the variable to which it belongs.

    ``why`` is empty if ``what`` includes the reason.
    """

    what: str
    why: str = ""
    name: str = ""

    @property
    def line(self) -> str:
        """The line for the user."""
        return f"{self.what}: {self.why}" if self.why else self.what


class FlatStates:
    """Objects by number, and their flat states.

    The first objects are those that both sides have; the namespace has number 0.

    ``named`` contains, by id, each object that is sent as the name of a variable in the ranks. For
    memory with numbers from ``collected`` on, all tensors and spans that use it are collected.
    ``left`` contains the parts of modules, loggers and formatters that stay behind, by their access
    paths; ``parted`` contains the attributes that stay with their process.
    """

    def __init__(self, reader: Reader, objects: Iterable[Any], collected: float = 0) -> None:
        self.reader = reader
        self.objects: list[Any] = list(objects)
        self.states: list[State | None] = [None] * len(self.objects)
        self.before: list[State | None] = []  # the earlier states, while two are compared
        self.number = {id(value): n for n, value in enumerate(self.objects)}
        self.collected = collected
        self.memories: dict[tuple[int, int], int] = {}
        self.failed: dict[int, Exception] = {}
        self.named: dict[int, str] = {}
        self.left: dict[str, LeftOut] = {}
        self.parted: list[LeftAttribute] = []
        self._todo: list[int] = []
        held = {(m, n): attributes_of(sys.modules.get(m)) for m, n in _HELD}
        self._held = {id(there[n]): (m, n) for (m, n), there in held.items() if n in there}

    def enter(self, value: Any) -> int:
        """Return the number of an object; :meth:`walk` describes new ones."""
        n = self.number.get(id(value))
        return self._new(value) if n is None else n

    def _new(self, value: Any) -> int:
        n = self.number[id(value)] = len(self.objects)
        self.objects.append(value)
        self.states.append(None)
        self._todo.append(n)
        return n

    def walk(self) -> None:
        """Describe all objects that were entered, and everything in them."""
        while self._todo:
            self.describe_again(self._todo.pop())

    def describe_again(self, n: int) -> None:
        """Describe an object in its present state.

        If the object's own protocol raises, the error is recorded, and the object's attributes are
        compared instead.
        """
        value = self.objects[n]
        try:
            self.states[n] = _state(self._describe, value)
        except Exception as error:  # a user's own protocol may raise anything
            self.failed[n] = error
            if is_only_python(type(value)) and not is_of_process(type(value)):
                self.states[n] = _state(self._plain, value)

    def back_to(self, length: int) -> None:
        """Forget the objects that were entered since there were ``length`` of them."""
        self.forget(range(length, len(self.objects)))
        del self.objects[length:], self.states[length:]

    def forget(self, numbers: Collection[int]) -> None:
        """Forget some objects; their numbers are not used again."""
        for n in numbers:
            if self.number.get(id(self.objects[n])) == n:
                del self.number[id(self.objects[n])]
            self.objects[n] = self.states[n] = None
        self.memories = {key: n for key, n in self.memories.items() if n not in numbers}
        self.failed = {n: error for n, error in self.failed.items() if n not in numbers}

    # The following methods return the kind of a value and the content of its blob; they append the
    # numbers of the objects in it to ``children``.

    def _describe(self, value: Any, children: list[int], *, fresh: Fresh = Fresh.NO) -> _Content:
        if (name := self.named.get(id(value))) is not None:
            return "name", name
        if (held := self._held.get(id(value))) is not None:
            return "global", held
        known = _KNOWN.get(type(value))
        if known is not None:
            return known(self, value, children, fresh)
        reader = self.reader.reader_of(type(value))
        if reader is read_plain:
            return self._plain(value, children)
        reading = content_of(value) if fresh is not Fresh.NO else None
        if reading is None and reader is not None:
            reading = reader(value)
        if reading is None:
            return self._by_name(value)
        if reading.constructor is itself:
            children += map(self.enter, reading.arguments)
            return "same", None
        return self._reading(value, reading, children)

    def _list(self, value: Any, children: list[int], fresh: Fresh) -> _Content:
        kind = type(value).__name__
        is_list = kind == "list"
        if len(value) > _LARGE and (
            _is_alone_inside(value) if is_list else _atomic(map(type, value))
        ):
            return kind, value if is_list else [*value]
        inside = _freshness_inside(fresh, value)
        return kind, self._split([*value], children, fresh=inside, may_change=is_list)

    def _dict(self, value: Any, children: list[int], fresh: Fresh) -> _Content:
        """Describe a dict, or an OrderedDict; each torch module has ten."""
        kind = type(value).__name__
        if kind != "dict" and vars(value):
            read: Any = self.reader.reader_of(OrderedDict)
            return self._reading(value, read(value), children)
        if kind == "dict" and len(value) > _LARGE and _is_alone_inside(value):
            return kind, value
        keys = self._split([*value], children)
        inside = _freshness_inside(fresh, value.values())
        return kind, (keys, self._split([*value.values()], children, fresh=inside))

    def _set(self, value: Any, children: list[int], _: Fresh) -> _Content:
        kind = type(value).__name__
        if _atomic(map(type, value)):
            return kind, (value, [])
        plain = {item for item in value if self._is_inline_item(item)}
        own: list[int] = []
        others = self._split([item for item in value if item not in plain], own, may_change=False)
        children += sorted(own)  # a set has no order
        return kind, (plain, others)

    def _is_inline_item(self, item: Any) -> bool:
        is_atom = type(item) in ATOMS and id(item) not in self._held
        return is_atom or (type(item) is tuple and _atomic(map(type, item)))

    def _plain(self, value: Any, children: list[int]) -> _Content:
        children.append(self.enter(type(value)))
        attributes, slots = read_insides(value)
        if attributes is None:
            names, held = None, self._split([], children)
        else:
            told = names_told(value, attributes)
            # not a copy of the dict: the copy would count as another reference to the values
            parts = [attributes[name] for name in told]
            names = told if _atomic(map(type, told)) else self._split(told, children)
            held = self._split(parts, children)
        inside = self._split([*slots.values()], children) if slots else []
        return "object", (names, held, [*slots], inside)  # in the order of OfObject

    def _reading(self, value: Any, reading: Reading, children: list[int]) -> _Content:
        before = len(children)
        functions = [reading.constructor, reading.setter, reading.changer]
        by = self._split(functions, children, fresh=Fresh.MADE)
        made = self._split([*reading.arguments], children, fresh=Fresh.MADE, may_change=False)
        made_of = len(children) - before
        if reading.state is None:
            return "reading", tuple(OfReading(made_of, None, by, made, []))
        own = attributes_of(value)
        parts = [{**own} if part is own is not value else part for part in reading.state]
        if left_attributes:
            for index, part in enumerate(parts):
                if type(part) is dict:
                    parts[index] = {name: part[name] for name in names_told(value, part)}
        told = self._split(parts, children, fresh=Fresh.STATE)
        is_attributes = _are_attributes(value, reading)
        return "reading", tuple(OfReading(made_of, is_attributes, by, made, told))

    def _builtin(self, function: Any, children: list[int], _: Fresh) -> _Content:
        """Describe a built-in: by its name in its module, or else as a method of its owner.

        Most methods do not know their module, and a search through all loaded modules for each one
        is slow. So the owner is used first: ``random.random`` is found in the module of its class.
        """
        owner, name, module = function.__self__, function.__name__, function.__module__
        is_method = owner is not None and not isinstance(owner, types.ModuleType)
        if module is None and is_method:
            module = (owner if isinstance(owner, type) else type(owner)).__module__
        module = _PUBLIC.get(module, module)
        home = None if module is None else module_named(module)
        if attributes_of(home).get(name) is function:
            return "global", (module, name)
        if not is_method:
            return self._by_name(function)
        return self._reading(function, Reading(getattr, (owner, name)), children)

    def _by_name(self, value: Any) -> _Content:
        module, name = name_of(value)
        self.reader.modules.add(module)
        return "global", (module, name)

    def _split(
        self,
        values: list[Any],
        children: list[int],
        *,
        fresh: Fresh = Fresh.NO,
        may_change: bool = True,
    ) -> list[Any] | tuple[Any, ...]:
        """Return values with a ``REF`` for each that has a number; ``children`` gets the numbers.

        The result is a tuple if it includes a ``REF`` or an inline object, otherwise a list.
        ``fresh`` tells whether other objects can refer to the values. ``may_change``: whether the
        blob may include mutable containers. The blob of a constant may not, because it is never
        written again.
        """
        if _atomic(map(type, values)) and (
            len(values) > _LARGE or self._held.keys().isdisjoint(map(id, values))
        ):
            return values
        out: list[Any] = []
        marked = False
        is_fresh = fresh is not Fresh.NO
        for value, count in _with_counts(values):
            alone = COUNTS_TELL and count <= _ALONE
            if type(value) in ATOMS:
                stands_here = id(value) not in self._held
            else:
                stands_here = type(value) in _BOXES and self._is_inline(value, alone and may_change)
            if stands_here:
                out.append(value)
                continue
            marked = True
            n = self.number.get(id(value))
            if n is None and is_fresh and alone and not isinstance(value, _NUMBERED):
                out.append(inline(self._describe(value, children, fresh=fresh)))
            else:
                out.append(REF)
                children.append(self._child(value) if n is None else n)
        return (*out,) if marked else out

    def _is_inline(self, box: Any, alone: bool) -> bool:
        """Tell whether a small container can be part of a blob: constant, or with one reference."""
        if type(box) is not tuple and (not alone or id(box) in self.number):
            return False
        return _atomic(map(type, box)) and (
            type(box) is not dict or _atomic(map(type, box.values()))
        )

    def _child(self, value: Any) -> int:
        if type(value) is not MemoryRange:
            return self._new(value)
        key = value.address, value.nbytes
        n = self.memories.get(key)
        if n is None:
            n = self.memories[key] = len(self.objects)
            self.objects.append(value)
            self.states.append(("memory", marshal.dumps(key, 2), ()))
            return n
        met = self.objects[n]
        met.storage = value.storage if met.storage is None else met.storage
        if n >= self.collected:
            met.spans += value.spans
            met.tensors += value.tensors
        return n


def _state(say: Callable[[Any, list[int]], _Content], value: Any) -> State:
    children: list[int] = []
    kind, said = say(value, children)
    return kind, marshal.dumps(said, 2), tuple(children)


def _freshness_inside(fresh: Fresh, items: Iterable[Any]) -> Fresh:
    """Return how fresh the items of a container are, from how fresh the container is.

    A container that a protocol made may contain tensors or arrays that share memory with others.
    Its items are then described like objects to which others refer.
    """
    if fresh is Fresh.STATE:
        return Fresh.MADE
    if fresh is Fresh.NO or any(is_tensor(item) or is_array(item) for item in items):
        return Fresh.NO
    return Fresh.MADE


def _are_attributes(value: Any, reading: Reading) -> bool:
    """Tell whether a protocol returns only attributes of the object, though perhaps not all."""
    told, *rest = reading.state or (None,)
    if reading.setter is not set_by_protocol or type(told) is not dict:
        return False
    own = attributes_of(value)
    return all(one is None for one in rest) and all(
        own.get(name, told) is told[name] for name in told
    )


def _atom(_: FlatStates, value: Any, *__: Any) -> _Content:
    return "atom", value


def _code(_: FlatStates, value: types.CodeType, *__: Any) -> _Content:
    code = without_slices(value)
    return ("atom", value) if code is value else ("code", code)


_KNOWN: dict[type, Callable[[FlatStates, Any, list[int], Fresh], _Content]] = {
    list: FlatStates._list, tuple: FlatStates._list, dict: FlatStates._dict, set: FlatStates._set,
    frozenset: FlatStates._set, OrderedDict: FlatStates._dict,
    types.BuiltinFunctionType: FlatStates._builtin, types.CodeType: _code,
    **dict.fromkeys(ATOMS, _atom),
}  # fmt: skip


def name_of(value: Any) -> tuple[str, str]:
    """Return an object's module and name; raise :class:`pickle.PicklingError` if it has none."""
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    name = getattr(value, "__qualname__", None)
    if name is None:
        reduced = value.__reduce_ex__(4)
        if not isinstance(reduced, str):
            raise pickle.PicklingError(f"cannot pickle a {type(value).__qualname__}")
        name = reduced
    module: str = getattr(value, "__module__", None) or module_holding(value, name)
    package = module.partition(".")[0]
    if attribute_of(package, name) is value:
        module = package  # a public name, for which the other side may have another module
    found = module_named(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise pickle.PicklingError(
            f"{module}.{name} is not the same object as this {type(value).__qualname__}"
        )
    return module, name

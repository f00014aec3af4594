"""Flat states: what an object consists of, with numbers in place of other objects.

A **flat state** is ``(kind, blob, children)``. ``blob`` is a marshal text (version 2, which has no references, so that equal
values have equal bytes, and ``1``, ``1.0`` and ``True`` differ) of all that needs no identity; ``...`` in it stands for the next
of ``children``, which are numbers. What needs no identity: numbers and texts, tuples of such, and a plain list or dict that
only its one parent holds; its reference count says so. A large plain subtree is looked at level by level, in a few calls of C.
"""

from __future__ import annotations

import gc
import marshal
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from taas.capture.holders import SETTERS, left_out, parts_of_holder
from taas.capture.memory import MemoryRange
from taas.capture.reader import Reader
from taas.capture.reading import (
    ATOMS,
    Reading,
    is_only_python,
    itself,
    module_named,
    read_insides,
    read_plain,
    set_by_protocol,
)
from taas.capture.tensors import content_of, is_array, is_tensor

State = tuple[str, bytes, tuple[int, ...]]

_BOXES = frozenset({list, dict, tuple})
_PLAIN = ATOMS | _BOXES
_LARGE = 8
"""Items from which on it pays to look whether a container is a plain subtree."""
_DEEPEST = 64
_HELD = (
    ("argparse", "SUPPRESS"), ("builtins", "__dict__"), ("builtins", "Ellipsis"),
    ("builtins", "NotImplemented"), ("dataclasses", "_EMPTY_METADATA"), ("sys", "stdout"), ("sys", "stderr"), ("traitlets", "All"),
)  # fmt: skip
"""What is told by which object it is (``default is SUPPRESS``; what ``exec`` puts into a namespace), by its name in a module."""

_atomic = ATOMS.issuperset
_count = sys.getrefcount


# ---------------------------------------------------------------- who else holds it: reference counts, measured


def _with_counts(values: list[Any]) -> Iterable[tuple[Any, int]]:
    """Pair objects with their reference counts; what nobody holds but a copy of its container's items counts ``_ALONE``."""
    return zip(values, map(_count, values), strict=True)


def _counted_as_part(state: tuple[Any, ...]) -> int:
    for part in state:
        return _count(part)
    return 0


_held_once = [[]]  # type: ignore[var-annotated]
_ALONE = next(iter(_with_counts(list(_held_once))))[1]
_IN_MAP = max(map(_count, [[]]))
_FRESH_PART = _counted_as_part(({},))


def _is_leaf(box: Any) -> bool:
    """Tell whether all in a container is plain, and held by nobody but its parent in there."""
    inner = box if type(box) is list else gc.get_referents(box)
    for _ in range(_DEEPEST):
        kinds = set(map(type, inner))
        if not kinds <= _PLAIN:
            return False
        if kinds <= ATOMS:
            return True
        boxes, holders = inner, 1
        if not kinds.isdisjoint(ATOMS):
            boxes, holders = [value for value in inner if type(value) in _BOXES], 2
        if max(map(_count, boxes)) > _IN_MAP + holders:
            shared = [one for one in boxes if _count(one) > _IN_MAP + holders + 1]
            if not all(type(one) is tuple and _atomic(map(type, one)) for one in shared):
                return False
        inner = gc.get_referents(*boxes)
    return False


# ---------------------------------------------------------------- objects and their states


class LeftOut(NamedTuple):
    """A part of a module's data, of a logger or of a formatter that stays behind, and what was in it."""

    holder: Any
    part: Any
    error: Exception
    heap: Any


class FlatStates:
    """Objects by number, and their flat states. The first are those that both sides know; the namespace is number 0.

    ``fresh`` are numbers of what a protocol made only to be pickled, and so is another one each time, with what only that holds.
    ``named`` is what objects are called that go by a name of the ranks, by their ids. Of memory from number ``collected`` on it is
    noted how all that look into it use it. ``left`` is what stays behind of modules, loggers and formatters, by how it is written.
    """

    def __init__(self, reader: Reader, objects: Iterable[Any], collected: float = 0) -> None:
        self.reader = reader
        self.objects: list[Any] = list(objects)
        self.states: list[State | None] = [None] * len(self.objects)
        self.before: list[State | None] = []  # what they were, while they are compared with it
        self.number = {id(value): n for n, value in enumerate(self.objects)}
        self.collected = collected
        self.memories: dict[tuple[int, int], int] = {}
        self.failed: dict[int, Exception] = {}
        self.fresh: set[int] = set()
        self.left: dict[str, LeftOut] = {}
        self._looked_into: set[int] = set()
        self._in_fresh = False
        self.named: dict[int, str] = {}
        self._todo: list[int] = []
        held = ((m, n) for m, n in _HELD if hasattr(sys.modules.get(m), n))
        self._held = {id(getattr(sys.modules[m], n)): (m, n) for m, n in held}

    def enter(self, value: Any) -> int:
        """Return the number of an object; a new one is described by :meth:`walk`."""
        n = self.number.get(id(value))
        return self._new(value) if n is None else n

    def _new(self, value: Any) -> int:
        n = self.number[id(value)] = len(self.objects)
        self.objects.append(value)
        self.states.append(None)
        self._todo.append(n)
        return n

    def walk(self) -> None:
        """Describe all that was entered, and what is in it."""
        while self._todo:
            self.describe_again(self._todo.pop())

    def describe_again(self, n: int) -> None:
        """Describe an object as it is now; what its own protocol raises is noted, and its attributes are compared all the same."""
        try:
            self.states[n] = self.describe(n)
        except Exception as error:  # whatever a user's own protocol raises
            self.failed[n] = error
            if is_only_python(type(self.objects[n])):
                self.states[n] = self._plain(self.objects[n])

    def back_to(self, length: int) -> None:
        """Forget what was entered since there were ``length`` objects."""
        self.forget(range(length, len(self.objects)))
        del self.objects[length:], self.states[length:]

    def forget(self, numbers: Collection[int]) -> None:
        """Forget some objects; their numbers stay taken."""
        for n in numbers:
            if self.number.get(id(self.objects[n])) == n:
                del self.number[id(self.objects[n])]
            self.objects[n] = self.states[n] = None
        self.memories = {key: n for key, n in self.memories.items() if n not in numbers}
        self.failed = {n: error for n, error in self.failed.items() if n not in numbers}
        self.fresh = {n for n in self.fresh if n not in numbers}

    def describe(self, n: int) -> State:
        """Return the flat state of an object as it is now; raises whatever its own protocol raises."""
        value, self._in_fresh = self.objects[n], n in self.fresh
        if (name := self.named.get(id(value))) is not None:
            return ("name", marshal.dumps(name, 2), ())
        if (held := self._held.get(id(value))) is not None:
            return ("global", marshal.dumps(held, 2), ())
        known = _KNOWN.get(type(value))
        if known is not None:
            return known(self, value)
        reader = self.reader.reader_of(type(value))
        if reader is read_plain:
            return self._plain(value)
        reading = content_of(value) if self._in_fresh else None
        if reading is None and reader is not None:
            reading = reader(value)
        if reading is None:
            return self._by_name(value)
        if reading.setter in SETTERS and reader is not None and self._leave_out(value):
            reading = reader(value)
            assert reading is not None
        if reading.constructor is itself:
            return ("same", marshal.dumps(None, 2), tuple(map(self.enter, reading.arguments)))
        return self._reading(value, reading)

    def _leave_out(self, holder: Any) -> bool:
        """Leave out which parts of a module, a logger or a formatter cannot travel: each process has its own. Tell whether any.

        Nor does what of a module's data holds code of a module that is not found by its name.
        """
        if id(holder) in self._looked_into:  # it is in itself
            return False
        self._looked_into.add(id(holder))
        found = False
        for path, part in parts_of_holder(holder):
            trial = type(self)(self.reader.another(), self.objects[:1])
            trial._looked_into = self._looked_into
            trial.enter(part)
            trial.walk()
            error = next(iter(trial.failed.values()), None)
            if (
                error is None
                and isinstance(holder, types.ModuleType)
                and any(map(_is_foreign, trial.objects, trial.states))
            ):
                error = pickle.PicklingError("it is code without a name")
            if error is not None:
                found = True
                left_out[id(part)] = part
                self.left[path] = LeftOut(holder, part, error, trial)
        self._looked_into.discard(id(holder))
        return found

    def _list(self, value: Any) -> State:
        kind = type(value).__name__
        if len(value) > _LARGE and (_is_leaf(value) if kind == "list" else _atomic(map(type, value))):
            return (kind, marshal.dumps(value, 2), ())
        children: list[int] = []
        items = self._split(list(value), children, fresh=self._holds_fresh(value), inline=kind == "list")
        return (kind, marshal.dumps(items, 2), tuple(children))

    def _dict(self, value: Any) -> State:
        """Describe a dict, or an OrderedDict, of which a module has ten."""
        kind = type(value).__name__
        if kind != "dict" and vars(value):
            return self._reading(value, self.reader.reader_of(OrderedDict)(value))  # type: ignore[misc, arg-type]
        if kind == "dict" and len(value) > _LARGE and _is_leaf(value):
            return (kind, marshal.dumps(value, 2), ())
        children: list[int] = []
        keys = self._split(list(value), children)
        items = self._split(list(value.values()), children, fresh=self._holds_fresh(value.values()))
        return (kind, marshal.dumps((keys, items), 2), tuple(children))

    def _holds_fresh(self, items: Iterable[Any]) -> bool:
        """Tell whether a container that is described was made afresh with what is in it, but for memory of others."""
        return self._in_fresh and not any(is_tensor(item) or is_array(item) for item in items)

    def _set(self, value: Any) -> State:
        if _atomic(map(type, value)):
            return (type(value).__name__, marshal.dumps((value, ()), 2), ())
        plain = {item for item in value if self._is_inline_item(item)}
        children: list[int] = []
        others = self._split([item for item in value if item not in plain], children, inline=False)
        children.sort()  # they are in no order
        return (type(value).__name__, marshal.dumps((plain, others), 2), tuple(children))

    def _is_inline_item(self, item: Any) -> bool:
        is_atom = type(item) in ATOMS and id(item) not in self._held
        return is_atom or (type(item) is tuple and _atomic(map(type, item)))

    def _plain(self, value: Any) -> State:
        children = [self.enter(type(value))]
        attributes, slots = read_insides(value)
        names = None if attributes is None else [*attributes]
        held = self._split(list((attributes or {}).values()), children)
        inside = self._split(list(slots.values()), children)
        return ("object", marshal.dumps((names, held, list(slots), inside), 2), tuple(children))

    def _reading(self, value: Any, reading: Reading) -> State:
        number, children = self.number, list[int]()
        for by, count in _with_counts([reading.constructor, reading.setter, reading.changer]):
            n = number.get(id(by))
            children.append(self._child(by, fresh=count <= _ALONE) if n is None else n)
        made = self._split([*reading.arguments], children, fresh=True, inline=False)
        first = len(children)
        if reading.state is None:
            return ("reading", marshal.dumps(((first, None), made, ()), 2), tuple(children))
        shape, parts = self._parts_of_state(value, reading)
        told: list[Any] = []
        for part, fresh in parts:
            told += self._split(part, children, fresh=fresh)
        return ("reading", marshal.dumps(((first, shape), made, told), 2), tuple(children))

    def _parts_of_state(self, value: Any, reading: Reading) -> tuple[list[Any], list[tuple[list[Any], bool]]]:
        """Return the shape of a state, and its parts, each with whether a protocol may have made what is in it."""
        shape: list[Any] = []
        parts: list[tuple[list[Any], bool]] = []
        for part in reading.state or ():
            kind, holders = type(part), _count(part) - _FRESH_PART
            fresh = holders <= 0
            own = part is getattr(value, "__dict__", None)
            if kind is dict and holders <= own:
                told = reading.setter is set_by_protocol and _are_attributes(value, part)
                shape.append(("a" if told else "d", len(part)))
                parts += ([*part], False), ([*part.values()], fresh)
            elif kind is tuple:
                shape.append(("t", len(part)))
                parts.append(([*part], fresh))
            else:
                shape.append(("o", 1))
                parts.append(([part], True))
        return shape, parts

    def _builtin(self, function: Any) -> State:
        owner, name = function.__self__, function.__name__
        module = pickle.whichmodule(function, name)  # type: ignore[attr-defined]
        if getattr(module_named(module), name, None) is function:  # torch.cat
            return ("global", marshal.dumps((module, name), 2), ())
        if owner is None or isinstance(owner, types.ModuleType):
            return self._by_name(function)
        return self._reading(function, Reading(getattr, (owner, name)))

    def _by_name(self, value: Any) -> State:
        module, name = name_of(value)
        self.reader.modules.add(module)
        return ("global", marshal.dumps((module, name), 2), ())

    def _split(
        self, values: list[Any], children: list[int], *, fresh: bool = False, inline: bool = True
    ) -> list[Any]:
        """Return values with ``...`` for each that has a number; ``children`` gets these.

        ``fresh``: a protocol has made what nobody else holds. ``inline``: what can change may stand in the blob; not in a constant's.
        """
        few = len(values) <= _LARGE
        if _atomic(map(type, values)) and not (few and any(id(value) in self._held for value in values)):
            return values
        number, out = self.number, list[Any]()
        for value, count in _with_counts(values):
            kind, alone = type(value), count <= _ALONE
            if (kind in ATOMS and id(value) not in self._held) or (
                kind in _BOXES and self._is_inline(value, alone and inline)
            ):
                out.append(value)
                continue
            out.append(...)
            n = number.get(id(value))
            children.append(self._child(value, fresh=fresh and alone) if n is None else n)
        return out

    def _is_inline(self, box: Any, alone: bool) -> bool:
        """Tell whether a small plain container may stand in a blob: one in which nothing can change, or that has one holder."""
        if type(box) is not tuple and (not alone or id(box) in self.number):
            return False
        return _atomic(map(type, box)) and (type(box) is not dict or _atomic(map(type, box.values())))

    def _child(self, value: Any, *, fresh: bool) -> int:
        if type(value) is MemoryRange:
            return self._memory(value)
        n = self._new(value)
        if fresh:
            self.fresh.add(n)
        return n

    def _memory(self, memory: MemoryRange) -> int:
        key = memory.address, memory.nbytes
        n = self.memories.get(key)
        if n is None:
            n = self.memories[key] = len(self.objects)
            self.objects.append(memory)
            self.states.append(("memory", marshal.dumps(key, 2), ()))
            return n
        met = self.objects[n]
        met.storage = memory.storage if met.storage is None else met.storage
        if n >= self.collected:
            met.spans += memory.spans
            met.tensors += memory.tensors
        return n


def _is_foreign(value: Any, state: State | None) -> bool:
    """Tell whether an object is code that is neither found by its name nor the notebook's."""
    if state is None or state[0] != "reading" or not isinstance(value, (type, types.FunctionType)):
        return False
    has_state = marshal.loads(state[1])[0][1] is not None  # noqa: S302  else a function returns it (``SimpleNamespace``)
    return has_state and value.__module__ not in ("__main__", "builtins")


def _are_attributes(value: Any, part: dict[Any, Any]) -> bool:
    """Tell whether what a protocol says is simply attributes of the object, if maybe not all."""
    own = getattr(value, "__dict__", {})
    return all(own.get(name, part) is item for name, item in part.items())


def _atom(_: FlatStates, value: Any) -> State:
    return ("atom", marshal.dumps(value, 2), ())


_KNOWN: dict[type, Callable[[FlatStates, Any], State]] = {
    list: FlatStates._list, tuple: FlatStates._list, dict: FlatStates._dict, set: FlatStates._set, frozenset: FlatStates._set,
    OrderedDict: FlatStates._dict, types.BuiltinFunctionType: FlatStates._builtin, types.CodeType: _atom, **dict.fromkeys(ATOMS, _atom),
}  # fmt: skip


def name_of(value: Any) -> tuple[str, str]:
    """Return the module and the name that an object is found by; raises :class:`pickle.PicklingError` where it is not."""
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    name = getattr(value, "__qualname__", None)
    if name is None:
        reduced = value.__reduce_ex__(4)
        if not isinstance(reduced, str):
            raise pickle.PicklingError(f"cannot pickle a {type(value).__qualname__}")
        name = reduced
    module: str = getattr(value, "__module__", None) or pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    package = module.partition(".")[0]
    if getattr(sys.modules.get(package), name, None) is value:
        module = package  # its public name, under which another one may stand in for it there
    found = module_named(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise pickle.PicklingError(
            f"{module}.{name} is not the same object as this {type(value).__qualname__}"
        )
    return module, name

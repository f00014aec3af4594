"""One numbered heap: number → object and flat state, of all that travels.

A **flat state** is ``(kind, blob, children)``. ``blob`` is a marshal text (version 2, which has no references, so that equal
values have equal bytes, and ``1``, ``1.0`` and ``True`` differ) of all that needs no identity; ``...`` in it stands for the next
of ``children``, which are numbers. What needs no identity: numbers and texts, tuples of such, and a plain list or dict that
only its one parent holds; its reference count says so. A large plain subtree is looked at level by level, in a few calls of C.

The payload is the states of a table. What changed is ``before[n] != now[n]``. Who holds what is ``children``.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import operator
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from copy import copy
from typing import Any

from taas.capture.memory import DeviceMemory, SentMemory, address_of_view
from taas.capture.reader import Reader, content_of, stays
from taas.capture.reading import (
    ATOMS,
    Reading,
    itself,
    module_named,
    read_insides,
    read_plain,
    set_by_protocol,
)
from taas.capture.tensors import memory_of_storage

State = tuple[str, bytes, tuple[int, ...]]

NAMESPACE = 0
"""The number of the notebook's namespace."""

CONSTANT = frozenset({"atom", "global", "memory", "name", "same", "tuple", "frozenset"})
"""Kinds of objects in which nothing can change."""

_BOXES = frozenset({list, dict, tuple})
_PLAIN = ATOMS | _BOXES
_FLOATS = frozenset({float, complex})
_LARGE = 8
"""Items from which on it pays to look whether a container is a plain subtree."""
_DEEPEST = 64
_HELD = (
    ("math", "nan"), ("numpy", "nan"), ("argparse", "SUPPRESS"), ("builtins", "__dict__"), ("builtins", "Ellipsis"),
    ("builtins", "NotImplemented"), ("dataclasses", "_EMPTY_METADATA"), ("sys", "stdout"), ("sys", "stderr"), ("traitlets", "All"),
)  # fmt: skip
"""What is told by which object it is (``default is SUPPRESS``; what ``exec`` puts into a namespace), by its name in a module."""

_atomic = ATOMS.issuperset
_count = sys.getrefcount


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would look at the objects that are made at once again and again.

    100,000 objects otherwise cost half a second of it.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# ---------------------------------------------------------------- who else holds it: reference counts, measured


def _counted_in_loop(values: list[Any]) -> int:
    for value in values:
        return _count(value)
    return 0


def _counted_as_part(state: tuple[Any, ...]) -> int:
    for _, part in zip((".",), state, strict=True):
        return _count(part)
    return 0


class _Probe:
    pass


_held_once = [[]]  # type: ignore[var-annotated]
_ALONE = _counted_in_loop(list(_held_once))
"""What an item of a container that nobody else holds counts, while it stands in a copy of its items."""
_IN_MAP = max(map(_count, [[]]))
_FRESH_PART = _counted_as_part(({},))
_probe = _Probe()
_probe.x = 1  # type: ignore[attr-defined]
_OWN_DICT = _count(_probe.__dict__)


def _is_nan_among(values: Iterable[Any]) -> bool:
    """Tell whether a NaN is among values, which has an identity: ``nan in numbers``."""
    floats = [value for value in values if type(value) in _FLOATS]
    return any(map(operator.ne, floats, floats))


def _is_flat(values: Iterable[Any]) -> bool:
    """Tell whether all are atoms without identity."""
    kinds = set(map(type, values))
    return kinds <= ATOMS and (kinds.isdisjoint(_FLOATS) or not _is_nan_among(values))


def _is_leaf(box: Any) -> bool:
    """Tell whether all in a container is plain, and held by nobody but its parent in there."""
    level = [box]
    for _ in range(_DEEPEST):
        inner = gc.get_referents(*level)
        kinds = set(map(type, inner))
        if not kinds <= _PLAIN or (not kinds.isdisjoint(_FLOATS) and _is_nan_among(inner)):
            return False
        boxes = inner
        holders = 1
        if not kinds.isdisjoint(ATOMS):
            boxes = [value for value in inner if type(value) in _BOXES]
            holders = 2
        if not boxes:
            return True
        if max(map(_count, boxes)) > _IN_MAP + holders and not all(
            type(one) is tuple and _atomic(map(type, one))
            for one in boxes
            if _count(one) > _IN_MAP + holders + 1
        ):
            return False
        level = boxes
    return False


# ---------------------------------------------------------------- the table


class Heap:
    """The objects of a notebook, or of a rank, by number.

    Args:
        reader: tells what objects consist of.
        objects: those that both sides know, in the order of their numbers; the namespace is the first.
        sent: learns of all memory that is met.

    Attributes:
        states: by number; None for what has no state here.
        number: the numbers of objects, by their ids.
        before: the states at an earlier time, while a table is compared with itself.
        failed: why an object cannot travel, by number.
        fresh: numbers of what a protocol made only to be pickled, and so is another one each time.
        named: what objects are called that go by a name of the ranks, by their ids.
    """

    def __init__(self, reader: Reader, objects: Iterable[Any], sent: SentMemory | None = None) -> None:
        self.reader = reader
        self.objects: list[Any] = list(objects)
        self.states: list[State | None] = [None] * len(self.objects)
        self.number = {id(value): n for n, value in enumerate(self.objects)}
        self.sent = SentMemory() if sent is None else sent
        self.memories: dict[tuple[str, int, int], int] = {}
        self.before: list[State | None] = []
        self.failed: dict[int, Exception] = {}
        self.fresh: set[int] = set()
        self.named: dict[int, str] = {}
        self._todo: list[int] = []
        self._held = {id(getattr(sys.modules[m], n)): (m, n) for m, n in _HELD if m in sys.modules}

    # ------------------------------------------------------------ filling it

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
        """Describe an object as it is now; what its own protocol raises is noted."""
        try:
            self.states[n] = self.describe(n)
        except Exception as error:  # whatever a user's own protocol raises
            self.failed[n] = error

    def back_to(self, length: int) -> None:
        """Forget what was entered since there were ``length`` objects."""
        self._forget(range(length, len(self.objects)))
        del self.objects[length:], self.states[length:]

    def _forget(self, numbers: Collection[int]) -> None:
        for n in numbers:
            if self.number.get(id(self.objects[n])) == n:
                del self.number[id(self.objects[n])]
            self.objects[n] = self.states[n] = None
        self.memories = {key: n for key, n in self.memories.items() if n not in numbers}
        self.failed = {n: error for n, error in self.failed.items() if n not in numbers}
        self.fresh = {n for n in self.fresh if n not in numbers}

    def size(self, since: int) -> int:
        """Return about how many bytes the states of objects from a number on have."""
        return sum(len(state[1]) + 8 * len(state[2]) for state in self.states[since:] if state is not None)

    def foreign_code(self, since: int) -> Exception | None:
        """Return an error where objects from a number on hold code that is neither found by its name nor the notebook's."""
        for value, state in zip(self.objects[since:], self.states[since:], strict=True):
            by_value = (
                state is not None and state[0] == "reading" and isinstance(value, (type, types.FunctionType))
            )
            if by_value and value.__module__ not in ("__main__", "builtins"):
                return pickle.PicklingError(f"{value.__qualname__} is not found by its name")
        return None

    def early(self, n: int) -> int:
        """Tell when a name of an object is bound: modules and plain values, then code, then what has methods that may use them."""
        value = self.objects[n]
        if isinstance(value, (types.ModuleType, *ATOMS)):
            return 0
        return 1 if isinstance(value, types.FunctionType) else 2

    # ------------------------------------------------------------ on the other side

    def learn(
        self, made: dict[int, Any], states: dict[int, State], length: int, fresh: Container[int]
    ) -> None:
        """Know what was built from states, and that ``length`` numbers are taken."""
        for n in range(len(self.objects), length):
            known = n in states and n in made
            self.objects.append(made[n] if known else None)
            self.states.append(states[n] if known else None)
            if not known:
                continue
            kind = states[n][0]
            if kind == "memory":
                self.memories[_key_of(made[n], states[n])] = n
            elif kind == "same" and (states.get(states[n][2][0]) or ("known",))[0] != "memory":
                pass  # it is another one here, which has a number of its own
            elif _has_identity(kind, made[n]):
                self.number.setdefault(id(made[n]), n)
            if n in fresh:
                self.fresh.add(n)

    def mark(self) -> None:
        """Describe again what is read in another way here than there: tensors of other devices, functions on this namespace.

        An object with a protocol of its own is not asked again; nor are containers and plain objects, which are what came.
        """
        for n, value in enumerate(self.objects):
            if n == NAMESPACE or value is None or stays(type(value)):
                continue
            state = self.states[n]
            if state is None or (state[0] == "reading" and not self.reader.asks(type(value))):
                self.describe_again(n)
        self.walk()

    def begin_after(self, reader: Reader, sent: SentMemory) -> None:
        """Begin to describe anew what is known: what it is now, beside what it was."""
        self.reader, self.sent = reader, sent
        self.before, self.failed = self.states.copy(), {}

    def renumber(self, n: int) -> int:
        """Give an object another number, as it is made anew on the other side."""
        m = self.number[id(self.objects[n])] = len(self.objects)
        self.objects.append(self.objects[n])
        self.states.append(self.states[n])
        return m

    def saved(self) -> dict[str, Any]:
        """Return what :meth:`take_back` takes, to compare once more later."""
        return {
            name: copy(getattr(self, name)) for name in ("objects", "states", "number", "fresh", "memories")
        }

    def take_back(self, saved: dict[str, Any]) -> None:
        """Know what was known earlier, and no more."""
        vars(self).update(saved, before=[], failed={})

    def end_after(
        self, known: int, sent: Container[int], anew: Iterable[int], held_back: Iterable[int]
    ) -> None:
        """Forget what the other side does not know: new numbers from ``known`` on that were not sent, old ones made anew."""
        for n in held_back:
            if n < known:
                self.states[n] = self.before[n]
        self._forget({n for n in range(known, len(self.objects)) if n not in sent})
        for n in anew:
            self.objects[n] = self.states[n] = None
        self.before, self.failed = [], {}

    def forget_but(self, numbers: Container[int]) -> None:
        """Forget all objects but some; their numbers stay taken."""
        self._forget({n for n in range(len(self.objects)) if n not in numbers})

    def memories_among(self, numbers: Iterable[int]) -> list[DeviceMemory]:
        """Return where the memory is that is among some objects."""
        found = []
        for n in numbers:
            state = self.states[n]
            if state is not None and state[0] == "memory":
                address, nbytes = next((k[1:] for k, m in self.memories.items() if m == n), (0, 0))
                found.append(DeviceMemory("", address, nbytes, None, lambda: 0))
        return found

    def go_on(self, before: Heap, held: Iterable[int], length: int) -> None:
        """Know of an earlier table what is held still."""
        held = {n for n in held if n < len(before.objects)}
        for n in range(len(self.objects), min(length, len(before.objects))):
            self.objects.append(before.objects[n] if n in held else None)
            self.states.append(before.states[n])
            if n in held and _has_identity((before.states[n] or ("memory",))[0], before.objects[n]):
                self.number.setdefault(id(before.objects[n]), n)
        self.memories = {key: n for key, n in before.memories.items() if n in held}
        self.fresh = {n for n in before.fresh if n < length}

    def know(self, numbers: Iterable[int]) -> None:
        """Name some objects by the numbers that both sides know them by."""
        kinds = ((n, (self.states[n] or ("memory",))[0]) for n in numbers)
        self.number |= {id(self.objects[n]): n for n, kind in kinds if _has_identity(kind, self.objects[n])}

    def end_proof(self, length: int) -> None:
        """Forget what reading again has found; the states are those that came."""
        self.states[:length] = self.before[:length]
        self.back_to(length)
        self.before, self.failed = [], {}

    # ------------------------------------------------------------ flat states

    def describe(self, n: int) -> State:
        """Return the flat state of an object as it is now.

        Raises:
            Exception: whatever its own protocol raises.
        """
        value = self.objects[n]
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
        reading = content_of(value) if n in self.fresh else None
        if reading is None and reader is not None:
            reading = reader(value)
        if reading is None:
            return self._by_name(value)
        if reading.constructor is itself:
            children: list[int] = []
            self._split([*reading.arguments], children)
            return ("same", b"", tuple(children))
        return self._reading(value, reading)

    def _list(self, value: Any) -> State:
        kind = type(value).__name__
        if len(value) > _LARGE and (_is_leaf(value) if kind == "list" else _is_flat(value)):
            return (kind, marshal.dumps(value, 2), ())
        children: list[int] = []
        items = self._split(list(value), children, inline=kind == "list")
        return (kind, marshal.dumps(items, 2), tuple(children))

    def _dict(self, value: Any) -> State:
        if len(value) > _LARGE and _is_leaf(value):
            return ("leaf", marshal.dumps(value, 2), ())
        children: list[int] = []
        keys = self._split(list(value), children)
        items = self._split(list(value.values()), children)
        return ("dict", marshal.dumps((keys, items), 2), tuple(children))

    def _set(self, value: Any) -> State:
        if _is_flat(value):
            return (type(value).__name__, marshal.dumps((value, ()), 2), ())
        plain = frozenset(item for item in value if type(item) in ATOMS and item == item)
        children: list[int] = []
        others = self._split([item for item in value if item not in plain], children)
        return (type(value).__name__, marshal.dumps((plain, others), 2), tuple(children))

    def _plain(self, value: Any) -> State:
        """Describe an object that is its ``__dict__`` and slots."""
        children = [self.enter(type(value))]
        attributes, slots = read_insides(value)
        names: Any = None
        held: list[Any] = []
        whole = attributes is not None and (
            _count(attributes) > _OWN_DICT + 1 or not set(map(type, attributes)) <= {str}
        )
        if whole:  # others hold it, too
            children.append(self.enter(attributes))
            names = ...
        elif attributes is not None:
            names, held = list(attributes), self._split(list(attributes.values()), children)
        inside = self._split(list(slots.values()), children)
        return ("object", marshal.dumps((names, held, list(slots), inside), 2), tuple(children))

    def _reading(self, value: Any, reading: Reading) -> State:
        made = [reading.constructor, reading.setter, reading.changer, *reading.arguments]
        flat: list[Any] = []
        shape: list[Any] = []
        for label, part in zip(reading.labels, reading.state or (), strict=False):
            kind = type(part)
            if kind is dict and _count(part) <= _FRESH_PART + (label == "." and self._is_own(value, part)):
                own = reading.setter is set_by_protocol and self._are_attributes(value, part)
                shape.append(("a" if own else "d", len(part)))
                flat += part
                flat += part.values()
            elif kind is tuple:
                shape.append(("t", len(part)))
                flat += part
            else:
                shape.append(("o", 1))
                flat.append(part)
        children: list[int] = []
        made = self._split(made, children, fresh=True, inline=False)
        told = len(children), None if reading.state is None else tuple(shape)
        flat = self._split(flat, children, fresh=True)
        return ("reading", marshal.dumps((told, made, flat), 2), tuple(children))

    @staticmethod
    def _are_attributes(value: Any, part: dict[Any, Any]) -> bool:
        """Tell whether what a protocol says is simply attributes of the object, if maybe not all."""
        own = getattr(value, "__dict__", {})
        return all(own.get(name, part) is item for name, item in part.items())

    @staticmethod
    def _is_own(value: Any, part: Any) -> bool:
        return part is getattr(value, "__dict__", None)

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
        """Return values with ``...`` for each that has a number.

        Args:
            values: what is in an object.
            children: gets the numbers.
            fresh: whether a protocol has made what nobody else holds.
            inline: whether what can change may stand in the blob; not in that of a constant.
        """
        kinds = set(map(type, values))
        plain = kinds <= ATOMS and self._held.keys().isdisjoint(map(id, values))
        if plain and (kinds.isdisjoint(_FLOATS) or not _is_nan_among(values)):
            return values
        number, held, out = self.number, self._held, []
        for value in values:
            kind = type(value)
            if kind in ATOMS:
                if id(value) not in held and value == value:
                    out.append(value)
                    continue
            elif kind is tuple:
                if _is_flat(value):
                    out.append(value)
                    continue
            elif kind is list and inline:
                if _count(value) <= _ALONE and id(value) not in number and _is_flat(value):
                    out.append(value)
                    continue
            elif kind is dict and inline:
                if (
                    _count(value) <= _ALONE
                    and id(value) not in number
                    and _is_flat(value)
                    and _is_flat(value.values())
                ):
                    out.append(value)
                    continue
            elif kind is DeviceMemory:
                out.append(...)
                children.append(self._memory(value))
                continue
            out.append(...)
            n = number.get(id(value))
            if n is None:
                alone = fresh and _count(value) <= _ALONE
                n = self._new(value)
                if alone:
                    self.fresh.add(n)
            children.append(n)
        return out

    def _memory(self, memory: DeviceMemory) -> int:
        self.sent.add(memory)
        key = memory.opener, memory.address, memory.nbytes
        n = self.memories.get(key)
        if n is None:
            n = self.memories[key] = len(self.objects)
            self.objects.append(memory)
            self.states.append(("memory", marshal.dumps(key, 2), ()))
        return n

    # ------------------------------------------------------------ comparing

    def same(self, before: State | None, now: State | None, *, by_value: bool = False) -> bool:
        """Tell whether a state of before is equal to one of now.

        What protocols make afresh counts by what is in it; with ``by_value``, so does what has no state, only arguments.
        """
        if before == now:
            return True
        if before is None or now is None or before[:2] != now[:2]:
            return False
        return self._same_children(before[2], now[2], by_value=by_value)

    def _same_children(
        self, before: tuple[int, ...], now: tuple[int, ...], *, by_value: bool = False
    ) -> bool:
        waiting, seen = [(before, now)], set()
        while waiting:
            ones, others = waiting.pop()
            if len(ones) != len(others):
                return False
            for pair in zip(map(self._meant, ones), map(self._meant, others), strict=True):
                a, b = pair
                if a == b or pair in seen:
                    continue
                one, other = self._state_before(a), self.states[b]
                if one is None or other is None or one[:2] != other[:2]:
                    return False
                if not (a in self.fresh and b in self.fresh) and not (by_value and _is_value(one)):
                    return False
                seen.add(pair)
                waiting.append((one[2], other[2]))
        return True

    def _state_before(self, n: int) -> State | None:
        return self.before[n] if n < len(self.before) else self.states[n]

    def _meant(self, n: int) -> int:
        """Return the number of what stands in an object's place on the other side, where something does."""
        state = self._state_before(n)
        return self._meant(state[2][0]) if state is not None and state[0] == "same" else n

    def change(self, before: State | None, now: State | None) -> bool | None:
        """Tell whether other arguments are part of a change; None for one that cannot be done in place."""
        assert before is not None and now is not None
        kinds = {before[0], now[0]}
        if kinds <= {"dict", "leaf"} or (len(kinds) == 1 and kinds <= {"list", "set", "object"}):
            return False
        if now[0] == "object" and before[0] == "reading":
            return False  # it has turned into an object of another class
        if now[0] != "reading":
            return None
        (first, _), making, _ = marshal.loads(now[1])  # noqa: S302  our own
        if before[0] == "reading":
            (first_before, _), making_before, _ = marshal.loads(before[1])  # noqa: S302
            ones, others = before[2][:first_before], now[2][:first]
            if making == making_before and self._same_children(ones, others):
                return False
        return True if making[2] is ... else None  # it has a changer

    def reached(self, roots: Iterable[int], but: Container[int] = ()) -> set[int]:
        """Return the numbers of all that is in some objects, themselves included, and stop at others."""
        found: set[int] = set()
        waiting = [n for n in roots if n not in but]
        while waiting:
            n = waiting.pop()
            if n in found:
                continue
            found.add(n)
            state = self.states[n]
            if state is not None:
                waiting += [child for child in state[2] if child not in found and child not in but]
        return found

    def holding(self, numbers: Iterable[int], among: Iterable[int]) -> set[int]:
        """Return what holds any of some objects, directly or not, and these."""
        holders: dict[int, list[int]] = {}
        for n in among:
            for child in (self.states[n] or ("atom", b"", ()))[2]:
                holders.setdefault(child, []).append(n)
        found, waiting = set(numbers), [*numbers]
        while waiting:
            new = [n for n in holders.get(waiting.pop(), ()) if n not in found]
            found.update(new)
            waiting += new
        return found


def _atom(_: Heap, value: Any) -> State:
    return ("atom", marshal.dumps(value, 2), ())


_KNOWN: dict[type, Callable[[Heap, Any], State]] = {
    list: Heap._list, tuple: Heap._list, dict: Heap._dict, set: Heap._set, frozenset: Heap._set,
    types.BuiltinFunctionType: Heap._builtin, types.CodeType: _atom, **dict.fromkeys(ATOMS, _atom),
}  # fmt: skip


def _has_identity(kind: str, value: Any) -> bool:
    """Tell whether it matters which of two equal objects it is; of plain values, only for a NaN."""
    return kind != "memory" and (kind != "atom" or type(value) is types.CodeType or value != value)


def _is_value(state: State) -> bool:
    """Tell whether an object is what it was made with."""
    return state[0] in CONSTANT or (state[0] == "reading" and marshal.loads(state[1])[0][1] is None)  # noqa: S302


def _key_of(memory: Any, state: State) -> tuple[str, int, int]:
    """Return what memory that came is known by here, and is met as again."""
    opener, _, nbytes = marshal.loads(state[1])  # noqa: S302  from our own sender
    if opener == "storage":
        found = memory_of_storage(memory)
        return opener, found.address, found.nbytes
    return opener, address_of_view(memory), nbytes


def name_of(value: Any) -> tuple[str, str]:
    """Return the module and the name that an object is found by.

    Raises:
        pickle.PicklingError: it is not found there.
    """
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
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        found = None
    if found is not value:
        raise pickle.PicklingError(
            f"{module}.{name} is not the same object as this {type(value).__qualname__}"
        )
    return module, name


# ---------------------------------------------------------------- how parts are written


class Paths:
    """Finds ways through objects, and how they are written: ``trainer.callbacks[2].conn``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """Return what an object holds, and how each is written behind it; nothing where its own protocol fails."""
        try:
            found = list(self._parts(value))
        except Exception:  # whatever a user's own protocol raises: there is no way through it
            return []
        return [(label, part) for label, part in found if type(part) not in ATOMS]

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        if type(value) in (list, tuple, set, frozenset):
            yield from ((f"[{n}]", part) for n, part in enumerate(value))
        elif type(value) is dict:
            yield from _entries(value.keys(), value.values())
        elif isinstance(value, type) and value.__module__ == "__main__":
            yield from ((f".{name}", part) for name, part in vars(value).items() if name[:2] != "__")
            yield from (("", base) for base in value.__bases__)
        elif (reading := self._reader.read(value)) is not None:
            yield from _of_reading(value, reading)

    def walk(self, roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield all objects in some others, breadth first and each once, and how they are written."""
        waiting, seen = deque(roots), dict[int, Any]()
        while waiting:
            path, value = waiting.popleft()
            if id(value) not in seen:
                seen[id(value)] = value
                yield path, value
                waiting += ((path + label, part) for label, part in self.parts(value))

    def path_to(self, target: Any, roots: Iterable[tuple[str, Any]]) -> str:
        """Return how to write ``target``, beginning at named objects; its type where there is no way."""
        found = (path for path, value in self.walk(roots) if value is target)
        return next(found, f"a {type(target).__qualname__}")


def _entries(keys: Iterable[Any], items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for key, item in zip(keys, items, strict=True):
        written = repr(key)[:40] if type(key) in ATOMS else f"a {type(key).__qualname__}"
        yield f" key {written}", key
        yield f"[{written}]", item


def _of_reading(value: Any, reading: Reading) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f" closure variable {name}", cell
    else:
        for n, item in enumerate(reading.arguments):
            yield "" if isinstance(item, (type, tuple)) else f" argument {n}", item
    for label, part in zip(reading.labels, reading.state or (), strict=False):
        if label == "." and type(part) is dict:
            yield from ((f".{name}", item) for name, item in part.items())
        elif label == "[]":
            yield from ((f"[{n}]", item) for n, item in enumerate(part or ()))
        elif label == "{}":
            half = len(part or ()) // 2
            yield from _entries((part or ())[:half], (part or ())[half:])
        else:
            yield " state" if label == "." else label, part

"""Objects out of flat states: each is made by its arguments first, and filled then, children before whoever reads them.

In a cycle an object is filled as soon as all its children are made. Objects that are there already are filled only: that is how a
notebook's object changes in place.
"""

from __future__ import annotations

import marshal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from taas.capture.flat import State
from taas.capture.heap import CONSTANT
from taas.capture.memory import MemoryTable
from taas.capture.reading import find, make_plain, set_insides, turn_into

_loads = marshal.loads  # from our own sender
_WHOLE = frozenset({"tuple", "frozenset", "same"})
_BOXES: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "OrderedDict": OrderedDict, "set": set}


class Loss(NamedTuple):
    """An object that could not be rebuilt: its number, what it is called in what holds it, and why."""

    number: int
    what: str
    reason: str


def _filled_with(values: list[Any], children: list[Any]) -> list[Any]:
    if not children:
        return values
    rest = iter(children)
    return [next(rest) if value is ... else value for value in values]


class Builder:
    """Makes and fills the objects of a table, into ``made``: those that are here already, by number; None for what could not be.

    With ``tolerant``, what fails costs itself and what needs it, and is noted in ``lost``.
    """

    def __init__(
        self,
        states: dict[int, State],
        made: dict[int, Any],
        memory: MemoryTable,
        namespace: dict[str, Any],
        *,
        tolerant: bool = False,
    ) -> None:
        self.states, self.made, self._memory, self._namespace = states, made, memory, namespace
        self._tolerant = tolerant
        self.lost: dict[int, Loss] = {}
        self._begun: set[int] = set()
        self._late: list[int] = []

    def build(self, root: int) -> Any:
        """Make and fill an object with all that is in it; unless tolerant, raises whatever its own protocol raises."""
        states, begun, made = self.states, self._begun, self.made
        complete, make, fill_late = self._complete, self._make, self._fill
        stack = [(root, complete)]
        while stack:
            n, step = stack.pop()
            if step is complete:
                if n in begun or n not in states:
                    continue
                begun.add(n)
                children = states[n][2]
                if all(map(made.__contains__, children)):
                    self._attempt(complete, n, children)
                    continue
                stack.append((n, make))
                stack.extend((c, complete) for c in reversed(self._before(n)) if c not in begun)
            elif step is make:
                self._attempt(make, n, self._before(n))
                stack.append((n, fill_late))
                stack.extend((c, complete) for c in reversed(states[n][2]) if c not in begun)
            elif all(map(made.__contains__, states[n][2])):
                self._attempt(fill_late, n, states[n][2])
            else:
                self._late.append(n)
        for n in self._late:
            self._attempt(fill_late, n, states[n][2])
        self._late.clear()
        return made[root]

    def _before(self, n: int) -> tuple[int, ...]:
        kind, blob, children = self.states[n]
        if kind in _WHOLE:
            return children
        if kind == "object":
            return children[:1]
        return children[: _loads(blob)[0][0]] if kind == "reading" else ()

    def _attempt(self, step: Callable[[int], None], n: int, needed: tuple[int, ...]) -> None:
        if not self._tolerant:
            step(n)
            return
        if n in self.lost:
            return
        try:
            because = next((self.lost[c] for c in needed if c in self.lost), None) if self.lost else None
            if because is None:
                step(n)
                return
        except BaseException as error:  # whatever a user's own protocol raises, SystemExit included
            made = n in self.made
            what = f"an object of {type(self.made[n]).__qualname__} in it" if made else "a part of it"
            because = Loss(n, what, f"{type(error).__name__}: {error}")
        self.lost[n], self.made[n] = because, None

    def _complete(self, n: int) -> None:
        kind, blob, children = self.states[n]
        said, parts = _loads(blob), [self.made[c] for c in children]
        value = self.made[n] = self._new(kind, said, parts)
        self._fill_new(value, kind, said, parts)

    def _make(self, n: int) -> None:
        kind, blob, _ = self.states[n]
        self.made[n] = self._new(kind, _loads(blob), [self.made[c] for c in self._before(n)])

    def _fill(self, n: int) -> None:
        kind, blob, children = self.states[n]
        self._fill_new(self.made[n], kind, _loads(blob), [self.made[c] for c in children])

    @staticmethod
    def _fill_new(value: Any, kind: str, said: Any, children: list[Any]) -> None:
        if kind not in CONSTANT and not (kind == "reading" and said[0][1] is None):
            _fill(value, kind, said, children)

    def _new(self, kind: str, said: Any, children: list[Any]) -> Any:
        if kind == "reading":
            (first, _), making, _ = said
            return children[0](*_filled_with(making, children[3:first]))
        if kind in _BOXES:
            return _BOXES[kind]()
        if kind == "object":
            return make_plain(children[0])
        if kind == "memory":
            return self._memory.open(*said)
        if kind == "atom":
            return said
        if kind == "global":
            return find(*said)
        if kind == "name":
            return self._namespace[said]
        if kind == "same":
            return children[0]
        return tuple(_filled_with(said, children)) if kind == "tuple" else frozenset(_items(said, children))


def change(value: Any, before: State, state: State, children: list[Any], *, arguments_differ: bool) -> None:
    """Make an object that was ``before`` what a state says; ``arguments_differ``: as if made with others.

    One of which all that is told are attributes of it keeps those that are not told: a lock that its protocol leaves out.
    """
    attributes, known = _attributes_told(state, children), _attributes_told(before, ())
    if attributes is not None:
        for name in (known or {}).keys() - attributes.keys():
            vars(value).pop(name, None)
    if attributes is None or known is None or arguments_differ:
        _fill(value, state[0], _loads(state[1]), children, arguments_differ=arguments_differ)
    else:
        vars(value).update(attributes)


def _attributes_told(state: State, children: Sequence[Any]) -> dict[Any, Any] | None:
    """Return what an own protocol said, if that is attributes alone."""
    if state[0] != "reading":
        return None
    (first, shape), _, flat = _loads(state[1])
    if shape is None or shape[0][0] != "a" or any(part is not None for part in flat[2 * shape[0][1] :]):
        return None
    half, told = shape[0][1], _filled_with(flat, list(children[first:]) or [None] * len(state[2]))
    return dict(zip(told[:half], told[half : 2 * half], strict=True))


def _fill(value: Any, kind: str, said: Any, children: list[Any], *, arguments_differ: bool = False) -> None:
    if kind == "object":
        _fill_object(value, said, children)
    elif kind == "reading":
        _fill_reading(value, said, children, arguments_differ=arguments_differ)
    elif kind == "list":
        value[:] = _filled_with(said, children)
    elif kind in ("dict", "OrderedDict"):
        if type(said) is tuple:  # else a plain subtree, whole
            count = said[0].count(...)
            keys, items = _filled_with(said[0], children[:count]), _filled_with(said[1], children[count:])
            said = zip(_interned(keys), items, strict=True)
        value.clear()
        value.update(said)
    else:
        value.clear()
        value.update(_items(said, children))


def _interned(keys: Iterable[Any]) -> list[Any]:
    return [sys.intern(key) if type(key) is str else key for key in keys]


def _fill_object(value: Any, said: Any, children: list[Any]) -> None:
    names, held, slots, inside = said
    cls, *parts = children
    if type(value) is not cls:
        turn_into(value, make_plain, cls)
    count = held.count(...)
    values = _filled_with(held, parts[:count])
    attributes = None if names is None else dict(zip(_interned(names), values, strict=True))
    set_insides(value, (attributes, dict(zip(slots, _filled_with(inside, parts[count:]), strict=True))))


def _fill_reading(value: Any, said: Any, children: list[Any], *, arguments_differ: bool) -> None:
    (first, shape), making, flat = said
    constructor, setter, changer = children[:3]
    if arguments_differ:
        changer(value, constructor, *_filled_with(making, children[3:first]))
    if setter is None:
        return
    told = iter(_filled_with(flat, children[first:]))
    parts: list[Any] = []
    for kind, count in shape or ():
        some = [*islice(told, count)]
        if kind == "o":
            parts += some
        elif kind == "t":
            parts.append(tuple(some))
        else:
            parts.append(dict(zip(_interned(some), islice(told, count), strict=True)))
    setter(value, None if shape is None else tuple(parts))


def _items(said: Any, children: list[Any]) -> list[Any]:
    plain, others = said
    return [*plain, *_filled_with(others, children)]

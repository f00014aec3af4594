"""Objects out of flat states: each is made by its arguments first, and filled then, children before whoever reads them.

In a cycle an object is filled as soon as all its children are made. What fails costs itself and what needs it; :class:`Builder`
says why. Objects that are there already are filled only: that is how a notebook's object changes in place.
"""

from __future__ import annotations

import marshal
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from taas.capture.flat import State
from taas.capture.heap import CONSTANT
from taas.capture.memory import MemoryTable
from taas.capture.reading import import_or_stand_in, make_plain, set_insides, turn_into

_WHOLE = frozenset({"tuple", "frozenset", "same"})


class _Missing:
    """Stands for an object that is not made yet."""


MISSING: Any = _Missing()


class Lost:
    """Stands for an object that could not be rebuilt."""


class Loss(NamedTuple):
    """An object that could not be rebuilt: its number, what it is called in what holds it, and why."""

    number: int
    what: str
    reason: str


def filled_with(values: Any, children: Iterator[Any]) -> list[Any]:
    """Return values with the next child for each ``...``."""
    return [next(children) if value is ... else value for value in values]


def decoded(state: State) -> Any:
    """Return what the blob of a state says."""
    return marshal.loads(state[1])  # noqa: S302  from our own sender


class Builder:
    """Makes and fills the objects of a table.

    Args:
        states: by number.
        made: the objects that are here already, by number; gets those that are built.
        memory: the memory that states name.
        namespace: where names are that objects go by.
        tolerant: what fails costs itself and what needs it.

    Attributes:
        lost: what could not be built, by number.
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
        self._states, self.made, self._memory, self._namespace = states, made, memory, namespace
        self._tolerant = tolerant
        self.lost: dict[int, Loss] = {}
        self._begun: set[int] = set()
        self._late: list[int] = []
        self._built: set[int] = set()

    def build(self, root: int) -> Any:
        """Make and fill an object with all that is in it, and return it.

        Raises:
            Exception: whatever an object's own protocol raises; not where this builder is tolerant.
        """
        stack = [(root, 0)]
        while stack:
            n, phase = stack.pop()
            if phase == 0:
                if n in self._begun or n not in self._states:
                    continue
                self._begun.add(n)
                stack.append((n, 1))
                stack.extend((c, 0) for c in reversed(self._before(n)) if c not in self._begun)
            elif phase == 1:
                self._attempt(self._make, n)
                if self._states[n][0] not in CONSTANT:
                    stack.append((n, 2))
                    stack.extend((c, 0) for c in reversed(self._states[n][2]) if c not in self._begun)
            elif any(self.made.get(c, MISSING) is MISSING for c in self._states[n][2]):
                self._late.append(n)
            else:
                self._attempt(self._fill, n)
        for n in self._late:
            self._attempt(self._fill, n)
        self._late.clear()
        return self.made[root]

    def _before(self, n: int) -> tuple[int, ...]:
        """Return the children that are complete before an object is made."""
        kind, _, children = self._states[n]
        if kind in _WHOLE:
            return children
        if kind == "object":
            return children[:1]
        return children[: decoded(self._states[n])[0][0]] if kind == "reading" else ()

    def _attempt(self, step: Callable[[int], None], n: int) -> None:
        if not self._tolerant:
            step(n)
            return
        if n in self.lost:
            return
        children = self._states[n][2]
        if step.__name__ == "_make":
            children = self._before(n)
        because = next((self.lost[c] for c in children if c in self.lost), None)
        if because is None:
            try:
                step(n)
            except BaseException as error:  # whatever a user's own protocol raises, SystemExit included
                cls = self.made.get(n, MISSING)
                what = "a part of it" if cls is MISSING else f"an object of {type(cls).__qualname__} in it"
                because = Loss(n, what, f"{type(error).__name__}: {error}")
        if because is not None:
            self.lost[n] = because
            self.made[n] = Lost()

    # ------------------------------------------------------------ one object

    def _make(self, n: int) -> None:
        kind, _, children = self._states[n]
        made = self.made
        if kind in ("list", "set"):
            made[n] = [] if kind == "list" else set()
        elif kind in ("dict", "leaf"):
            made[n] = {}
        elif kind == "atom":
            made[n] = decoded(self._states[n])
        elif kind == "global":
            made[n] = find(*decoded(self._states[n]))
        elif kind == "same":
            made[n] = made[children[0]]
        elif kind == "name":
            made[n] = self._namespace[decoded(self._states[n])]
        elif kind == "memory":
            made[n] = self._memory.open(*decoded(self._states[n]))
        elif kind == "object":
            made[n] = make_plain(made[children[0]])
        elif kind == "tuple":
            made[n] = tuple(filled_with(decoded(self._states[n]), iter([made[c] for c in children])))
        elif kind == "frozenset":
            made[n] = frozenset(items_of_set(decoded(self._states[n]), iter([made[c] for c in children])))
        else:
            constructor, _, _, *arguments = self._making(n)
            made[n] = constructor(*arguments)

    def _making(self, n: int) -> list[Any]:
        (first, _), making, _ = decoded(self._states[n])
        return filled_with(making, iter([self.made[c] for c in self._states[n][2][:first]]))

    def _fill(self, n: int) -> None:
        fill(self.made[n], self._states[n], [self.made[c] for c in self._states[n][2]])


def change(value: Any, before: State, state: State, children: list[Any], *, arguments_differ: bool) -> None:
    """Make an object that is there what a state says.

    One of which all that is told are attributes of it keeps those that are not told: a lock that its protocol leaves out.

    Args:
        value: the object.
        before: what it was.
        state: what it is to be.
        children: of the state.
        arguments_differ: whether it is to be as if made with others.

    Raises:
        Exception: whatever its own protocol raises.
    """
    attributes, known = _attributes_told(state, children), _attributes_told(before, ())
    if attributes is not None:
        for name in (known or {}).keys() - attributes.keys():
            vars(value).pop(name, None)
    if attributes is None or known is None or arguments_differ:
        fill(value, state, children, arguments_differ=arguments_differ)
    else:
        vars(value).update(attributes)


def _attributes_told(state: State, children: Sequence[Any]) -> dict[Any, Any] | None:
    """Return what an own protocol said, if that is attributes alone."""
    if state[0] != "reading":
        return None
    (first, shape), _, flat = decoded(state)
    if shape is None or shape[0][0] != "a" or any(part is not None for part in flat[2 * shape[0][1] :]):
        return None
    keys, items = flat[: shape[0][1]], flat[shape[0][1] : 2 * shape[0][1]]
    told = iter(children[first:] if children else [None] * len(state[2]))
    names = filled_with(keys, told)
    return dict(zip(names, filled_with(items, told), strict=True))


def fill(value: Any, state: State, children: list[Any], *, arguments_differ: bool = False) -> None:
    """Make an object what a state says, whatever it was before.

    Raises:
        Exception: whatever its own protocol raises.
    """
    kind, told, rest = state[0], decoded(state), iter(children)
    if kind == "list":
        value[:] = filled_with(told, rest)
    elif kind == "leaf":
        value.clear()
        value.update(told)
    elif kind == "dict":
        keys = [sys.intern(key) if type(key) is str else key for key in filled_with(told[0], rest)]
        items = filled_with(told[1], rest)
        value.clear()
        value.update(zip(keys, items, strict=True))
    elif kind == "set":
        items = list(items_of_set(told, rest))
        value.clear()
        value.update(items)
    elif kind == "object":
        turn_into(value, make_plain, next(rest))
        names, held, slots, inside = told
        attributes: Any = None
        if names is ...:
            attributes = next(rest)
        elif names is not None:
            attributes = dict(zip(map(sys.intern, names), filled_with(held, rest), strict=True))
        set_insides(value, (attributes, dict(zip(slots, filled_with(inside, rest), strict=True))))
    elif kind == "reading":
        _fill_reading(value, told, rest, arguments_differ=arguments_differ)


def _fill_reading(value: Any, told: Any, children: Iterator[Any], *, arguments_differ: bool) -> None:
    (_, shape), making, flat = told
    constructor, setter, changer, *arguments = filled_with(making, children)
    if arguments_differ:
        changer(value, constructor, *arguments)
    if setter is None:
        return
    if shape is None:
        setter(value, None)
        return
    found = iter(filled_with(flat, children))
    parts: list[Any] = []
    for kind, count in shape:
        if kind == "o":
            parts.append(next(found))
        elif kind == "t":
            parts.append(tuple(next(found) for _ in range(count)))
        else:
            keys = [next(found) for _ in range(count)]
            parts.append({sys.intern(key) if type(key) is str else key: next(found) for key in keys})
    setter(value, tuple(parts))


def items_of_set(told: Any, children: Iterator[Any]) -> Iterable[Any]:
    """Return the items of a set that a blob says."""
    plain, others = told
    return [*plain, *filled_with(others, children)]


def find(module: str, name: str) -> Any:
    """Return what a module holds under a name; the module for none.

    Raises:
        pickle.UnpicklingError: it holds nothing of that name.
    """
    found = import_or_stand_in(module)
    try:
        for part in name.split(".") if name else ():
            found = getattr(found, part)
    except AttributeError as error:
        raise pickle.UnpicklingError(f"{module} has no {name} here") from error
    return found

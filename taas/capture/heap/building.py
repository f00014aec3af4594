"""Build objects from flat states: make each object, then fill it, children before parents.

The arguments from which an object is made are built before the object.

In a cycle, an object is filled as soon as all its children are made. Objects that already exist are
only filled: this is how an object of the notebook is changed in place.
"""

from __future__ import annotations

import contextlib
import enum
import marshal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from taas.capture.describe.code_constants import with_slices
from taas.capture.describe.flat import REF, How, OfReading, State
from taas.capture.describe.memory import MemoryTable
from taas.capture.describe.reading import (
    attribute_of_class,
    find,
    make_plain,
    set_insides,
    turn_into,
)

_loads = marshal.loads  # from our own sender
_WHOLE = frozenset({"tuple", "frozenset", "same"})
_BOXES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "set": set,
}


class Step(enum.Enum):
    """The next step for an object that is being built."""

    BEGIN = "if all its children are made, make and fill it"
    MAKE = "make it, of the children that it is made with"
    FILL = "fill it with its other children"


class Loss(NamedTuple):
    """An object that could not be rebuilt."""

    number: int
    what: str
    reason: str


class Builder:
    """Makes and fills the objects of a table, and puts them into ``made`` by number.

    Objects that already exist here are in ``made`` from the beginning. None stands for an object
    that could not be made.

    If ``tolerant``, an object that fails is lost together with the objects that need it; ``lost``
    lists them.
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
        self._open: dict[int, Any] = {}  # contents of the blobs of objects that are not filled yet

    def build(self, root: int) -> Any:
        """Build an object with everything in it.

        If the builder is not tolerant, this raises whatever the protocol of a class raises.
        """
        states, begun, made = self.states, self._begun, self.made
        stack = [(root, Step.BEGIN)]
        late: list[int] = []  # objects in a cycle, some of whose children are not made yet
        while stack:
            n, step = stack.pop()
            if step is Step.BEGIN:
                if n in begun or n not in states:
                    continue
                begun.add(n)
                children = states[n][2]
                if all(map(made.__contains__, children)):
                    self._attempt(self._complete, n, children)
                    continue
                stack.append((n, Step.MAKE))
                next_ones = self._before(n)
            elif step is Step.MAKE:
                self._attempt(self._make, n, self._before(n))
                stack.append((n, Step.FILL))
                next_ones = states[n][2]
            else:
                if all(map(made.__contains__, states[n][2])):
                    self._attempt(self._fill, n, states[n][2])
                else:
                    late.append(n)
                continue
            stack.extend((c, Step.BEGIN) for c in reversed(next_ones) if c not in begun)
        for n in late:
            self._attempt(self._fill, n, states[n][2])
        return made[root]

    def _before(self, n: int) -> tuple[int, ...]:
        kind, _, children = self.states[n]
        if kind in _WHOLE:
            return children
        if kind == "object":
            return children[:1]
        if kind == "reading":
            made_of, *_ = self._content(n)
            return children[:made_of]
        return ()

    def _content(self, n: int) -> Any:
        if n not in self._open:
            self._open[n] = _loads(self.states[n][1])
        return self._open[n]

    def _attempt(self, step: Callable[[int], None], n: int, needed: tuple[int, ...]) -> None:
        if n in self.lost:
            return
        try:
            because = (
                next((self.lost[c] for c in needed if c in self.lost), None) if self.lost else None
            )
            if because is None:
                step(n)
                return
        except BaseException as error:  # a user's own protocol may raise anything, even SystemExit
            if not self._tolerant:
                self._abandon(n, *self._open)
                raise
            made = n in self.made
            what = (
                f"an object of {type(self.made[n]).__qualname__} in it" if made else "a part of it"
            )
            because = Loss(n, what, f"{type(error).__name__}: {error}")
        self._abandon(n)
        self.lost[n], self.made[n] = because, None

    def _abandon(self, *numbers: int) -> None:
        """Change the class of objects that will never be filled, so that freeing them cannot raise.

        The ``__del__`` of their own class would use attributes that they lack.
        """
        for n in numbers:
            value = self.made.get(n)
            if attribute_of_class(type(value), "__del__") is not None:
                with contextlib.suppress(TypeError):  # their class has slots, or fields in C
                    object.__setattr__(value, "__class__", Abandoned)

    def _complete(self, n: int) -> None:
        kind, blob, children = self.states[n]
        said, rest = _loads(blob), map(self.made.__getitem__, children)
        self.made[n], setter = self._new(kind, said, rest)
        _fill(self.made[n], kind, said, rest, setter)

    def _make(self, n: int) -> None:
        rest = map(self.made.__getitem__, self._before(n))
        self.made[n], _ = self._new(self.states[n][0], self._content(n), rest)

    def _fill(self, n: int) -> None:
        kind, _, children = self.states[n]
        said = self._content(n)
        del self._open[n]
        has_state = kind != "reading" or OfReading._make(said).is_attributes is not None
        if has_state:
            _fill_again(self.made[n], kind, said, [self.made[c] for c in children])

    def _new(self, kind: str, said: Any, rest: Iterator[Any]) -> tuple[Any, Any]:
        if kind == "memory":
            return self._memory.open(*said), None
        return (self._namespace[said], None) if kind == "name" else _new(kind, said, rest)


class Abandoned:
    """The class of an object that was made and could not be filled."""


def change(value: Any, before: State, state: State, children: list[Any], how: How) -> None:
    """Change an object in place, from the state ``before`` to ``state``.

    If the states consist of attributes only, the object keeps the attributes that they omit, such
    as a lock that its protocol does not pickle.
    """
    kind, said = state[0], _loads(state[1])
    known, names = _attribute_names(before[0], _loads(before[1])), _attribute_names(kind, said)
    for name in () if known is None or names is None else {*known} - {*names}:
        vars(value).pop(name, None)
    if known is None or names is None or how is How.IN_PLACE_WITH_ARGUMENTS:
        _fill_again(value, kind, said, children, how)
    else:
        made_of, _, _, _, state_said = said
        vars(value).update(_resolve_refs(state_said, iter(children[made_of:]))[0])


def _attribute_names(kind: str, said: Any) -> Sequence[str] | None:
    """Return the attribute names in a protocol's state, if it consists of attributes only."""
    if kind != "reading":
        return None
    _, is_attributes, _, _, state_said = said
    if not is_attributes:
        return None
    told = state_said[0]
    if type(told) is not tuple:
        return [*told]
    # An inline dict. If a part of it has a number, keys and values are separate.
    _, _, items = told
    return [*(items[0] if type(items) is tuple else items)]


# --------------------------------------------- contents of blobs; ``rest`` are an object's children
#
# ``said`` is the content of a blob: an ``OfReading`` for the kind ``reading``, an ``OfObject`` for
# the kind ``object``. marshal has converted both to plain tuples.


def _resolve_refs(values: Any, rest: Iterator[Any]) -> Any:
    """Return a blob's items: ``REF`` replaced by the next child, and inline objects built."""
    if type(values) is list:
        return values
    return [next(rest) if v is REF else _inner(v, rest) if type(v) is tuple else v for v in values]


def _inner(part: tuple[Any, ...], rest: Iterator[Any]) -> Any:
    """Return what a tuple in a blob stands for: an inline object, or the tuple itself."""
    if not part or part[0] is not REF:
        return part
    _, kind, said = part  # in the form that ``inline`` returns
    value, setter = _new(kind, said, rest)
    _fill(value, kind, said, rest, setter)
    return value


def _new(kind: str, said: Any, rest: Iterator[Any]) -> tuple[Any, Any]:
    """Make an object; return it and its setter, or None if it needs no other state."""
    if kind == "reading":
        _, is_attributes, by, arguments, _ = said
        constructor, setter, _ = _resolve_refs(by, rest)
        made = constructor(*_resolve_refs(arguments, rest))
        return made, None if is_attributes is None else setter
    if kind in _BOXES:
        return _BOXES[kind](), None
    if kind == "object":
        return make_plain(next(rest)), None
    if kind == "global":
        return find(*said), None
    if kind == "same":
        return next(rest), None
    if kind == "atom":
        return said, None
    if kind == "code":
        return with_slices(said), None
    return tuple(_resolve_refs(said, rest)) if kind == "tuple" else frozenset(
        _items(said, rest)
    ), None


def _fill_again(
    value: Any, kind: str, said: Any, children: list[Any], how: How = How.IN_PLACE
) -> None:
    """Fill an existing object; if its arguments differ, first turn it into what they make."""
    setter, made_of = None, int(kind == "object")
    if made_of and type(value) is not children[0]:
        turn_into(value, make_plain, children[0])
    if kind == "reading":
        made_of, _, by, arguments, _ = said
        rest = iter(children)
        constructor, setter, changer = _resolve_refs(by, rest)
        if how is How.IN_PLACE_WITH_ARGUMENTS:
            changer(value, constructor, *_resolve_refs(arguments, rest))
    _fill(value, kind, said, iter(children[made_of:]), setter)


def _fill(value: Any, kind: str, said: Any, rest: Iterator[Any], setter: Any) -> None:
    if kind == "object":
        names, values, slots, slot_values = said
        attributes = None
        if names is not None:
            keys = _intern(_resolve_refs(names, rest))
            attributes = dict(zip(keys, _resolve_refs(values, rest), strict=True))
        set_insides(
            value, (attributes, dict(zip(slots, _resolve_refs(slot_values, rest), strict=True)))
        )
    elif kind == "reading":
        if setter is not None:
            _, is_attributes, _, _, state = said
            setter(value, None if is_attributes is None else tuple(_resolve_refs(state, rest)))
    elif kind == "list":
        value[:] = _resolve_refs(said, rest)
    elif kind in ("dict", "OrderedDict"):
        if type(said) is tuple:  # otherwise the blob has the whole plain subtree
            said = [
                *zip(
                    _intern(_resolve_refs(said[0], rest)), _resolve_refs(said[1], rest), strict=True
                )
            ]
        value.clear()
        value.update(said)
    elif kind == "set":
        value.clear()
        value.update(_items(said, rest))


def _intern(keys: Iterable[Any]) -> list[Any]:
    return [sys.intern(key) if type(key) is str else key for key in keys]


def _items(said: Any, rest: Iterator[Any]) -> list[Any]:
    plain, others = said
    return [*plain, *_resolve_refs(others, rest)]

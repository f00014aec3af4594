"""What the cell changed: objects compared with what they were, and put right in the notebook.

Rank 0 notes what is in every object that travelled, before the cell and after it. Notes are compared by identity, so
that no ``__eq__`` of the user's runs. What differs is sent as a *change*, and :func:`apply_change` does it to the
notebook's object. What cannot change in place, a tuple or an iterator, is not known any more: it is sent as a new
object, and so is whatever holds it.
"""

from __future__ import annotations

import marshal
import operator
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from taas.capture.code_by_value import state_of_class
from taas.capture.containers import items_of, put_items
from taas.capture.looking import Looker, labelled
from taas.capture.reader import Reader, stays
from taas.capture.reading import ATOMS, Reading, is_only_python, read_insides, set_by_protocol, set_insides
from taas.capture.tensors import is_tensor, stamp_of

_CONTAINERS = frozenset({list, dict, set})
"""They are most of what there is, and pickle writes them itself; subclasses have readings."""
_ITSELF = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)
_UNNOTED = ATOMS | {
    tuple, frozenset, types.BuiltinFunctionType, types.MethodType, types.CodeType, types.GenericAlias,
}  # fmt: skip
"""Nothing of them can change."""
_BLOCK = 64
"""So many rows are compared at once, and are changed if one is: for each by itself that takes twice as long."""


class Change(NamedTuple):
    """What an object is now.

    Attributes:
        anew: its arguments or class are others.
        removed: names that its state no longer has.
        attributes: if all that changed is some entries of ``__dict__``, these; then nothing is read again.
    """

    anew: bool
    removed: frozenset[str] = frozenset()
    attributes: dict[str, Any] | None = None


_OTHER_CONTENTS = Change(anew=False)


def message_of(value: Any, change: Change, reader: Reader) -> Any:
    """Return what :func:`apply_change` takes, as a plain value that may be pickled."""
    if type(value) in _CONTAINERS:
        return items_of(value)
    if isinstance(value, type) and change.attributes is None:
        change = change._replace(attributes=state_of_class(value))
    reading = reader.read(value) if change.attributes is None else None
    return tuple(change), reading and (*reading[:4], reading.changer)


def apply_change(value: Any, message: Any) -> None:
    """Make an object of the notebook what it was in rank 0.

    Raises:
        Exception: whatever the object's own protocol raises.
    """
    if type(value) in _CONTAINERS:
        put_items(value, message)
        return
    (anew, removed, attributes), reading = message
    if isinstance(value, type):
        for name in removed & vars(value).keys():
            type.__delattr__(value, name)
        for name, item in attributes.items():
            type.__setattr__(value, name, item)
        return
    for name in removed:
        value.__dict__.pop(name, None)
    if attributes is not None:
        value.__dict__.update(attributes)
        return
    constructor, arguments, setter, state, changer = reading
    if anew and changer is None:
        twin = constructor(*arguments)
        if setter is not None:
            setter(twin, state)
        value.__class__ = type(twin)
        set_insides(value, read_insides(twin))
        return
    if anew:
        changer(value, *arguments)
    if setter is not None:
        setter(value, state)


# ---------------------------------------------------------------- notes


class _Note(NamedTuple):
    """What was in an object with a reading of its own; of its state, what is written how behind the object.

    Attributes:
        stamp: of a plain tensor, what tells without a reading that it is the same, and its gradient.
    """

    cls: type
    constructor: Any
    arguments: list[Any]
    state: dict[str, Any]
    stamp: tuple[Any, Any] | None = None


class _Opened(NamedTuple):
    """An object that only its holder knows: what it is but for its parts, and these."""

    what: tuple[Any, ...]
    parts: tuple[Any, ...] = ()


def _same(before: Any, now: Any) -> bool:
    """Tell whether two entries of notes are the same object, or the same value, or opened to the same."""
    if before is now:
        return True
    cls = type(before)
    if cls is not type(now):
        return False
    if cls is _Opened:
        return before.what == now.what and _all_same(before.parts, now.parts)
    if cls is tuple:
        return _all_same(before, now)
    if cls is float or cls is complex:
        return repr(before) == repr(now)  # as no NaN equals itself, and both zeros equal each other
    return cls in ATOMS and bool(before == now)


def _all_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(map(_same, before, now))


class Notes:
    """What the objects that travelled consist of, at one moment.

    Args:
        objects: those that a change of would matter, by number, and the namespace.
        rows: leaves of rows: the number of the first of the rows, which count downwards, and the rows.
        namespace: the globals of the notebook's functions.
        project: the folder whose modules hold data of the notebook.
        told: the numbers of those of which an earlier cell said it, if they cannot come back.
    """

    def __init__(
        self,
        objects: dict[int, Any],
        rows: list[tuple[int, tuple[Any, ...]]],
        namespace: dict[str, Any],
        project: str,
        *,
        told: Container[int] = (),
    ) -> None:
        self._objects, self._rows = objects, [(first, items, _digests(items)) for first, items in rows]
        self._known = {*map(id, objects.values())}
        self._named: list[Any] = []
        self._reader = Reader(namespace, project=project)
        self._looker = Looker(self._reader, self._known)
        self._notes: dict[int, Any] = {}
        """A container's items, a note (None: it goes by its name), or what an object's own protocol raised."""
        for number, value in objects.items():
            cls = type(value)
            if value is namespace:
                continue
            if isinstance(value, type) and value.__module__ == "__main__":
                self._notes[number] = _Note(cls, type, [], state_of_class(value))
                continue
            if cls in _CONTAINERS:
                self._notes[number] = items_of(value)
            elif not (cls in _UNNOTED or isinstance(value, (type, types.ModuleType)) or stays(cls)):
                try:
                    self._notes[number] = self._first(value)
                except Exception as error:  # a user's __getstate__ may raise anything: it cannot come back
                    self._notes[number] = None if number in told else error

    def _first(self, value: Any) -> _Note | None:
        if (reading := self._reader.read(value)) is None:
            return None
        note = self._note(value, reading)
        return note._replace(stamp=self._stamp(value)) if is_tensor(value) else note

    def _fickle(self, value: Any, note: _Note, reading: Reading) -> list[str]:
        """Return the names of what a state says anew each time it is asked (matplotlib's counters of callbacks)."""
        if reading.setter is not set_by_protocol or (again := self._reader.read(value)) is None:
            return []
        state = self._note(value, again).state
        return [n for n in note.state if n[:1] == "." and not _same(note.state[n], state.get(n, _SAME))]

    def _stamp(self, tensor: Any) -> tuple[Any, Any] | None:
        stamp = stamp_of(tensor)
        known = stamp is not None and (tensor.grad is None or id(tensor.grad) in self._known)
        return (stamp, tensor.grad) if known else None

    def _is_stamped(self, value: Any, note: Any) -> bool:
        """Tell whether a plain tensor is still what it was; False if that takes a reading."""
        before = note.stamp if type(note) is _Note else None
        if before is None or (now := self._stamp(value)) is None:
            return False
        return bool(before[0] == now[0]) and before[1] is now[1]

    def _note(self, value: Any, reading: Reading) -> _Note:
        arguments = [self._entry(item, {}) for item in reading.arguments]
        state: dict[str, Any] = {}
        for label, part in zip(reading.labels, reading.state or (), strict=False):
            whole = label != "." or id(part) in self._known
            for name, item in ((label, part),) if whole else labelled(label, part, self._known):
                state[name] = self._entry(item, {})
        return _Note(type(value), reading.constructor, arguments, state)

    def _entry(self, value: Any, seen: dict[int, Any]) -> Any:
        """Return a value, or an object that is known and is looked at for itself, as it is; any other opened."""
        cls = type(value)
        if cls in ATOMS or id(value) in self._known or isinstance(value, _ITSELF):
            return value
        if cls is tuple and ATOMS.issuperset(map(type, value)):
            return value
        if id(value) in seen:
            return _Opened(("seen", seen[id(value)][0]))
        seen[id(value)] = len(seen), value
        if cls in (set, frozenset):
            return _Opened((cls, {item if type(item) in ATOMS else id(item) for item in value}))
        look = self._looker.look(value)
        if look.named:
            self._known.add(id(value))
            self._named.append(value)
            return value
        return _Opened((cls, *look.what), tuple(self._entry(part, seen) for _, part in look.parts))

    # ------------------------------------------------------------ what changed

    def changes(self, wanted: dict[int, Any] | None) -> Iterator[tuple[int, Change | Exception | None]]:
        """Yield the number of each object that is another now, with its change; None for one that has to be made anew.

        Args:
            wanted: the objects that are asked for, by their ids; None for all.

        What an object's own protocol raised, then or now, is its change.
        """
        for number, before in self._notes.items():
            value = self._objects[number]
            if before is None or (wanted is not None and id(value) not in wanted):
                continue
            if self._is_stamped(value, before):
                continue
            if type(before) is tuple:
                now = items_of(value)
                if len(before) != len(now) or not all(map(operator.is_, before, now)):
                    yield number, _OTHER_CONTENTS
                continue
            try:
                change = before if isinstance(before, Exception) else self._change(value, before)
            except Exception as error:
                change = error
            if change is not _SAME:
                yield number, change
        for number, row in self._changed_rows():
            if wanted is None or id(row) in wanted:
                yield number, _OTHER_CONTENTS

    def _changed_rows(self) -> Iterator[tuple[int, Any]]:
        for first, rows, digests in self._rows:
            for block, (was, now) in enumerate(zip(digests, _digests(rows), strict=True)):
                for place in (
                    range(block * _BLOCK, min(block * _BLOCK + _BLOCK, len(rows))) if was != now else ()
                ):
                    yield first - place, rows[place]

    def go_on(self, before: Notes, numbers: Iterable[int]) -> None:
        """Compare some objects with what they were earlier: of what changed since, nobody was told."""
        self._notes |= {n: before._notes[n] for n in numbers if n in self._notes and n in before._notes}

    def parts(self, number: int | None) -> Iterator[Any]:
        """Yield what an object had in it, but for plain values."""
        note = self._notes.get(number)  # type: ignore[arg-type]
        waiting = [*note] if type(note) is tuple else []
        if isinstance(note, _Note):
            waiting += [*note.arguments, *note.state.values()]
        while waiting:
            part = waiting.pop()
            if type(part) is _Opened:
                waiting += part.parts
            elif type(part) not in ATOMS:
                yield part

    def holding(self, wanted: Container[int]) -> list[int]:
        """Return the numbers of the objects that had something in them, of which these are the ids."""
        return [number for number in self._notes if any(id(part) in wanted for part in self.parts(number))]

    def is_noted(self, number: int) -> bool:
        """Tell whether an object is one that may change."""
        return self._notes.get(number) is not None

    def was(self, number: int) -> type | None:
        """Return what class an object had, if it has another."""
        note = self._notes.get(number)
        cls = note.cls if isinstance(note, _Note) else None
        return cls if cls is not type(self._objects.get(number)) else None

    def _change(self, value: Any, before: _Note) -> Any:
        if isinstance(value, type):
            return _of_class(before.state, state_of_class(value))
        reading = self._reader.read(value)
        if reading is None:
            return _SAME
        after = self._note(value, reading)
        change = _of_state(value, reading, before.state, after.state)
        if change is not _SAME:
            for name in self._fickle(value, after, reading):
                before.state.pop(name, None)
                after.state.pop(name)
            change = _of_state(value, reading, before.state, after.state)
        if before[:2] == after[:2] and _all_same(before.arguments, after.arguments):
            return change
        if not _changeable(value, before, after, reading):
            return None
        return Change(anew=True, removed=frozenset() if change is _SAME else change.removed)


_SAME: Any = object()


def _digests(rows: tuple[Any, ...]) -> list[Any]:
    """Return what tells each block of rows of atoms from what it was; notes of them all would be as large as they are."""
    return [_digest(rows[at : at + _BLOCK]) for at in range(0, len(rows), _BLOCK)]


def _digest(rows: tuple[Any, ...]) -> Any:
    try:
        return hash(marshal.dumps(rows, 2))
    except ValueError:  # one holds an object now, of which nobody knows whether it has changed
        return object()


def _changeable(value: Any, before: _Note, after: _Note, reading: Reading) -> bool:
    """Tell whether an object with other arguments can become that in place."""
    python = is_only_python(before.cls) and is_only_python(after.cls)
    if reading.changer is None:
        return python
    turns = before.cls is after.cls or reading.constructor is not before.constructor or is_tensor(value)
    fixed = slice(reading.fixed)
    return _all_same(before.arguments[fixed], after.arguments[fixed]) and (python or turns)


def _of_class(before: dict[str, Any], after: dict[str, Any]) -> Any:
    """Return a change of the attributes of a class of the notebook."""
    changed = {name: item for name, item in after.items() if not _same(before.get(name, _SAME), item)}
    gone = frozenset(before) - after.keys()
    return Change(False, gone, changed) if changed or gone else _SAME


def _of_state(value: Any, reading: Reading, before: dict[str, Any], after: dict[str, Any]) -> Any:
    """Return a change of names that a state no longer has, and of new entries if they are simply the object's own.

    An object that leaves a lock out of its state then keeps its own lock, which setting the state would replace.
    """
    changed = [label for label, item in after.items() if not _same(before.get(label, _SAME), item)]
    gone = [label for label in before if label not in after]
    if not changed and not gone:
        return _SAME
    state = reading.state[0] if reading.state else None
    if type(state) is not dict or "." in before or "." in after:
        return _OTHER_CONTENTS
    names = {f".{name}": name for name in state}
    removed = frozenset(label[1:] for label in gone if label[:1] == ".")
    own = getattr(value, "__dict__", {})
    if all(label in names and own.get(names[label], _SAME) is state[names[label]] for label in changed):
        new = {name: state[name] for label, name in names.items() if label in changed}  # in their order
        return Change(False, removed, new)
    return Change(False, removed)

"""Containers, instances, functions and cells."""

from __future__ import annotations

import collections
import copyreg
from typing import Any

from taas.capture.contents.kind import Kind, same_items


class ListKind(Kind):
    def take(self, value: Any) -> Any:
        return list.copy(value)

    def same(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and same_items(before, after)

    def put(self, value: Any, contents: Any) -> None:
        list.__setitem__(value, slice(None), contents)


class DictKind(Kind):
    def take(self, value: Any) -> Any:
        return dict(value.items()) if isinstance(value, collections.OrderedDict) else dict.copy(value)

    def same(self, before: Any, after: Any) -> bool:
        return (
            len(before) == len(after)
            and same_items(before, after)
            and same_items(before.values(), after.values())
        )

    def put(self, value: Any, contents: Any) -> None:
        base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        base.clear(value)
        for key, item in contents.items():
            base.__setitem__(value, key, item)


class SetKind(Kind):
    def take(self, value: Any) -> Any:
        return list(set.__iter__(value))

    def same(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and (
            same_items(before, after) or set(map(id, before)) == set(map(id, after))
        )

    def put(self, value: Any, contents: Any) -> None:
        set.clear(value)
        set.update(value, contents)


class DequeKind(ListKind):
    def take(self, value: Any) -> Any:
        return list(value)

    def put(self, value: Any, contents: Any) -> None:
        collections.deque.clear(value)
        collections.deque.extend(value, contents)


class BytesKind(Kind):
    def take(self, value: Any) -> Any:
        return bytes(value)

    def same(self, before: Any, after: Any) -> bool:
        return bool(before == after)

    def put(self, value: Any, contents: Any) -> None:
        value[:] = contents


class TypedArrayKind(BytesKind):
    """``array.array``."""

    def take(self, value: Any) -> Any:
        return value.tobytes()

    def put(self, value: Any, contents: Any) -> None:
        del value[:]
        value.frombytes(contents)


class CellKind(Kind):
    def take(self, value: Any) -> Any:
        try:
            return (value.cell_contents,)
        except ValueError:
            return ()

    def same(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and same_items(before, after)

    def put(self, value: Any, contents: Any) -> None:
        if contents:
            value.cell_contents = contents[0]
        else:
            del value.cell_contents


_NO_ATTRIBUTES: dict[str, Any] = {}
DICT = DictKind()


class AttributesKind(Kind):
    """``__dict__`` and ``__slots__``, as (dict, dict)."""

    def __init__(self, cls: type) -> None:
        self._slots = {name: getattr(cls, name) for name in copyreg._slotnames(cls) or ()}  # type: ignore[attr-defined]

    def take(self, value: Any) -> Any:
        attributes = getattr(value, "__dict__", _NO_ATTRIBUTES)
        slots = {}
        for name, member in self._slots.items():
            try:
                slots[name] = member.__get__(value)
            except AttributeError:
                continue
        return dict(attributes), slots

    def same(self, before: Any, after: Any) -> bool:
        return DICT.same(before[0], after[0]) and DICT.same(before[1], after[1])

    def put(self, value: Any, contents: Any) -> None:
        attributes, slots = contents
        if hasattr(value, "__dict__"):
            value.__dict__.clear()
            value.__dict__.update(attributes)
        for name, member in self._slots.items():
            if name in slots:
                member.__set__(value, slots[name])
            elif name in self.take(value)[1]:
                member.__delete__(value)


class ContainerKind(Kind):
    """A subclass of a container: its items, and its attributes."""

    def __init__(self, cls: type, items: Kind) -> None:
        self._items = items
        self._attributes = AttributesKind(cls)
        self._factory = issubclass(cls, collections.defaultdict)

    def take(self, value: Any) -> Any:
        factory = value.default_factory if self._factory else None
        return self._items.take(value), self._attributes.take(value), factory

    def same(self, before: Any, after: Any) -> bool:
        return (
            self._items.same(before[0], after[0])
            and self._attributes.same(before[1], after[1])
            and before[2] is after[2]
        )

    def put(self, value: Any, contents: Any) -> None:
        self._items.put(value, contents[0])
        self._attributes.put(value, contents[1])
        if self._factory:
            value.default_factory = contents[2]


class FunctionKind(Kind):
    """Attributes and defaults that somebody set on a function."""

    def take(self, value: Any) -> Any:
        return dict(value.__dict__), value.__defaults__, value.__kwdefaults__

    def same(self, before: Any, after: Any) -> bool:
        return DICT.same(before[0], after[0]) and same_items(before[1:], after[1:])

    def put(self, value: Any, contents: Any) -> None:
        attributes, value.__defaults__, value.__kwdefaults__ = contents
        value.__dict__.clear()
        value.__dict__.update(attributes)

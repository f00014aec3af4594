"""What is inside an object, one level deep: taken, compared, and put back into the object it came from.

Rank 0 takes the contents of every object that travelled before the cell runs, and again afterwards. They
are compared by identity, so no ``__eq__`` of the user's runs. What differs is sent, and put in place into
the notebook's object. Each *kind* of object knows how: containers, instances (also with ``__slots__``),
functions, cells, tensors; and, for whatever has a pickling protocol of its own, its reduced state.
"""

from __future__ import annotations

import array
import collections
import copyreg
import enum
import hashlib
import io
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from taas.capture.code_by_value import BasePickler, dispatch_table
from taas.capture.tensors import (
    is_plain_optimizer,
    keeps_pickling_of_object,
    keeps_state_of_object,
    travels_as_view,
)

__all__ = ["CannotChangeError", "Kind", "Kinds", "memory_of"]


def _same_items(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return all(map(operator.is_, first, second))


class CannotChangeError(Exception):
    """An object changed in a way that cannot be repeated in place in another process."""


class Kind:
    """How to take, compare and put the contents of one kind of object."""

    def take(self, value: Any) -> Any:
        """Return the contents: a value that may be pickled, sharing the objects inside."""
        raise NotImplementedError

    def same(self, before: Any, after: Any) -> bool:
        """Tell whether two contents are the same, by identity."""
        raise NotImplementedError

    def message(self, value: Any, before: Any, after: Any) -> Any:
        """Return what :meth:`put` needs to go from ``before`` to ``after``.

        Raises:
            CannotChangeError: there is no way in place.
        """
        del value, before
        return after

    def put(self, value: Any, contents: Any) -> None:
        """Give ``value`` these contents.

        Raises:
            Exception: whatever the object raises that doesn't accept them.
        """
        raise NotImplementedError


class _List(Kind):
    def take(self, value: Any) -> Any:
        return list.copy(value)

    def same(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and _same_items(before, after)

    def put(self, value: Any, contents: Any) -> None:
        list.__setitem__(value, slice(None), contents)


class _Dict(Kind):
    def take(self, value: Any) -> Any:
        return dict(value.items()) if isinstance(value, collections.OrderedDict) else dict.copy(value)

    def same(self, before: Any, after: Any) -> bool:
        return (
            len(before) == len(after)
            and _same_items(before, after)
            and _same_items(before.values(), after.values())
        )

    def put(self, value: Any, contents: Any) -> None:
        base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        base.clear(value)
        for key, item in contents.items():
            base.__setitem__(value, key, item)


class _Set(Kind):
    def take(self, value: Any) -> Any:
        return list(set.__iter__(value))

    def same(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and (
            _same_items(before, after) or set(map(id, before)) == set(map(id, after))
        )

    def put(self, value: Any, contents: Any) -> None:
        set.clear(value)
        set.update(value, contents)


class _Deque(_List):
    def take(self, value: Any) -> Any:
        return list(value)

    def put(self, value: Any, contents: Any) -> None:
        collections.deque.clear(value)
        collections.deque.extend(value, contents)


class _Bytes(Kind):
    def take(self, value: Any) -> Any:
        return bytes(value)

    def same(self, before: Any, after: Any) -> bool:
        return bool(before == after)

    def put(self, value: Any, contents: Any) -> None:
        value[:] = contents


class _TypedArray(_Bytes):
    """``array.array``."""

    def take(self, value: Any) -> Any:
        return value.tobytes()

    def put(self, value: Any, contents: Any) -> None:
        del value[:]
        value.frombytes(contents)


class _Cell(Kind):
    def take(self, value: Any) -> Any:
        try:
            return (value.cell_contents,)
        except ValueError:
            return ()

    def same(self, before: Any, after: Any) -> bool:
        return len(before) == len(after) and _same_items(before, after)

    def put(self, value: Any, contents: Any) -> None:
        if contents:
            value.cell_contents = contents[0]
        else:
            del value.cell_contents


_NO_ATTRIBUTES: dict[str, Any] = {}
_DICT = _Dict()


class _Attributes(Kind):
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
        return _DICT.same(before[0], after[0]) and _DICT.same(before[1], after[1])

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


class _Container(Kind):
    """A subclass of a container: its items, and its attributes."""

    def __init__(self, cls: type, items: Kind) -> None:
        self._items = items
        self._attributes = _Attributes(cls)
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


class _Function(Kind):
    """Attributes and defaults that somebody set on a function."""

    def take(self, value: Any) -> Any:
        return dict(value.__dict__), value.__defaults__, value.__kwdefaults__

    def same(self, before: Any, after: Any) -> bool:
        return _DICT.same(before[0], after[0]) and _same_items(before[1:], after[1:])

    def put(self, value: Any, contents: Any) -> None:
        attributes, value.__defaults__, value.__kwdefaults__ = contents
        value.__dict__.clear()
        value.__dict__.update(attributes)


class _Tensor(Kind):
    """Where a tensor looks, its gradient, its attributes. Its values are memory, and compared there."""

    def take(self, value: Any) -> Any:
        leaf = value.is_leaf
        if travels_as_view(value):
            storage = value.untyped_storage()
            looks: Any = (storage.data_ptr(), storage.nbytes(), value.storage_offset(), value.stride())
        else:  # sparse, quantized: what changes them in place counts
            looks = value._version
        looks = (looks, value.shape, value.dtype, value.device)
        return looks, leaf and value.requires_grad, value.grad if leaf else None, dict(value.__dict__)

    def same(self, before: Any, after: Any) -> bool:
        return (
            before[0] == after[0]
            and before[1] == after[1]
            and before[2] is after[2]
            and _DICT.same(before[3], after[3])
        )

    def message(self, value: Any, before: Any, after: Any) -> Any:
        data = value.detach() if before[0] != after[0] else None
        return data, before[0][-1] != after[0][-1], *after[1:]

    def put(self, value: Any, contents: Any) -> None:
        import torch

        data, moved, requires_grad, grad, attributes = contents
        if data is not None and moved and data.shape == value.shape and data.dtype == value.dtype:
            with torch.no_grad():
                value.copy_(data)
        elif data is not None:
            value.data = data.to(value.device)
        if value.is_leaf:
            value.requires_grad_(requires_grad)
            value.grad = grad if grad is None or grad.device == value.device else grad.to(value.device)
        value.__dict__.clear()
        value.__dict__.update(attributes)


def memory_of(value: Any) -> tuple[int, int]:
    """Return the address and length of the memory that a tensor or array looks into; (0, 0) for anything else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor) and travels_as_view(value):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if numpy is not None and isinstance(value, numpy.ndarray):
        low, high = numpy.lib.array_utils.byte_bounds(value)
        return low, high - low
    return 0, 0


class _Optimizer(_Attributes):
    """An optimizer without its ``step``, which a scheduler replaces by one that refers to this process."""

    def take(self, value: Any) -> Any:
        attributes, slots = super().take(value)
        attributes.pop("step", None)
        return attributes, slots

    def put(self, value: Any, contents: Any) -> None:
        step = value.__dict__.get("step")
        super().put(value, contents)
        if step is not None:
            value.step = step


class _Array(Kind):
    """An array's values are memory, and compared there; here, only whether it still looks at that memory."""

    def take(self, value: Any) -> Any:
        interface = value.__array_interface__
        return (
            interface["data"][0],
            interface["shape"],
            value.strides,
            interface["typestr"],
            value.flags.writeable,
        )

    def same(self, before: Any, after: Any) -> bool:
        return bool(before == after)

    def message(self, value: Any, before: Any, after: Any) -> Any:
        if before[:4] != after[:4]:
            raise CannotChangeError("its shape or memory changed")
        return after[4]

    def put(self, value: Any, contents: Any) -> None:
        value.flags.writeable = contents


class _Hash(io.RawIOBase):
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Digester(BasePickler):
    """Digests a value; objects that travelled count by their number, not by what is in them."""

    def __init__(self, number_of: Callable[[Any], int | None]) -> None:
        self._hash = _Hash()
        super().__init__(self._hash, protocol=4)
        self._number_of = number_of

    def persistent_id(self, value: Any) -> int | None:
        return self._number_of(value)

    def digest(self, value: Any) -> bytes:
        self.dump(value)
        return self._hash.hash.digest()


class _Reduced(Kind):
    """Anything with a pickling protocol of its own: compared by digests of how to make it, and of its state."""

    def __init__(self, number_of: Callable[[Any], int | None]) -> None:
        self._number_of = number_of

    def _reduce(self, value: Any) -> tuple[Any, Any]:
        reducer = copyreg.dispatch_table.get(type(value))
        reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return reduced, None
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        return (maker, arguments), (
            state,
            None if items is None else list(items),
            None if pairs is None else list(pairs),
        )

    def take(self, value: Any) -> Any:
        made, state = self._reduce(value)
        return _Digester(self._number_of).digest(made), _Digester(self._number_of).digest(state)

    def same(self, before: Any, after: Any) -> bool:
        return bool(before == after)

    def message(self, value: Any, before: Any, after: Any) -> Any:
        made, state = self._reduce(value)
        if before[0] == after[0]:
            return None, state
        if not _is_plain(type(value)) or isinstance(made, str):
            raise CannotChangeError("it can only be made anew")
        return made, state

    def put(self, value: Any, contents: Any) -> None:
        made, state = contents
        if made is None:
            self._set(value, state)
            return
        maker, arguments = made
        twin = maker(*arguments)
        self._set(twin, state)
        plain = _Attributes(type(value))
        plain.put(value, plain.take(twin))

    @staticmethod
    def _set(value: Any, contents: Any) -> None:
        state, items, pairs = contents
        if items is not None:
            value.clear()
            value.extend(items)
        if pairs is not None:
            value.clear()
            for key, item in pairs:
                value[key] = item
        if state is None:
            return
        if hasattr(value, "__setstate__"):
            value.__setstate__(state)
            return
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        value.__dict__.update(attributes or {})
        for name, item in (slots or {}).items():
            setattr(value, name, item)


def _is_plain(cls: type) -> bool:
    """Tell whether instances consist of ``__dict__`` and ``__slots__`` alone, with no state in C."""
    room = object.__basicsize__ + 8 * (2 + len(copyreg._slotnames(cls) or ()))  # type: ignore[attr-defined]
    return cls.__itemsize__ == 0 and cls.__basicsize__ <= room


class Kinds:
    """The kinds of all types met, for a table of objects that travelled.

    Args:
        number_of: the number of an object in that table, or None.
    """

    def __init__(self, number_of: Callable[[Any], int | None]) -> None:
        self._kinds: dict[type, Kind | None] = dict(_EXACT)
        self._reduced = _Reduced(number_of)

    def of(self, cls: type) -> Kind | None:
        """Return the kind of a type's objects, or None where they never change."""
        try:
            return self._kinds[cls]
        except KeyError:
            kind = self._kinds[cls] = self._find(cls)
            return kind

    def _find(self, cls: type) -> Kind | None:
        if issubclass(cls, (type, enum.Enum, types.ModuleType)) or cls in _BY_NAME:
            return None
        if getattr(cls, "__taas_stays__", False):  # a stand-in for the notebook's own object
            return None
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and issubclass(cls, torch.Tensor):
            return _Tensor()
        if torch is not None and issubclass(cls, (torch.UntypedStorage, torch.TypedStorage)):
            return None
        if numpy is not None and cls is numpy.ndarray:
            return _Array()
        for base, items in _CONTAINERS:
            if issubclass(cls, base):
                return _Container(cls, items)
        if is_plain_optimizer(cls):
            return _Optimizer(cls)
        own = (
            keeps_pickling_of_object(cls) and keeps_state_of_object(cls) and cls not in copyreg.dispatch_table
        )
        return _Attributes(cls) if own else self._reduced


_LIST, _SET, _DEQUE = _List(), _Set(), _Deque()
_CONTAINERS: tuple[tuple[type, Kind], ...] = (
    (dict, _DICT),
    (list, _LIST),
    (set, _SET),
    (collections.deque, _DEQUE),
    (bytearray, _Bytes()),
)
_BY_NAME = frozenset(dispatch_table()) - set(copyreg.dispatch_table)
_NEVER_CHANGE: tuple[type, ...] = (
    str, bytes, int, float, bool, complex, type(None), tuple, frozenset, type, range, slice,
    types.BuiltinFunctionType, types.MethodType, types.CodeType, types.ModuleType, types.GenericAlias,
)  # fmt: skip
_EXACT: dict[type, Kind | None] = {
    list: _LIST,
    dict: _DICT,
    set: _SET,
    collections.deque: _DEQUE,
    bytearray: _Bytes(),
    array.array: _TypedArray(),
    types.CellType: _Cell(),
    types.FunctionType: _Function(),
    **dict.fromkeys(_NEVER_CHANGE),
}

"""What an object consists of: a :class:`Reading`. The rule for objects of Python classes, and for own protocols.

The rule is pickle's: an object is its class, the arguments it is made with, and its state. An object of a Python
class is its ``__dict__`` (that very dict, which others may hold) and its slots. Whoever defines a protocol of his own
is taken at his word. The same reading is what a pickler writes, what is compared before and after the cell, what is put
into the notebook's object, and how a path into it is written. :mod:`reader` chooses who reads what.
"""

from __future__ import annotations

import copyreg
import importlib
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

ATOMS: frozenset[type] = frozenset({str, bytes, int, float, complex, bool, type(None)})
"""Types whose objects are their values: nobody can tell which of two equal ones it is."""

_POINTER = struct.calcsize("P")
_slot_names: Any = copyreg._slotnames  # type: ignore[attr-defined]
_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: made by a ``class`` statement, or as one."""


class Reading(NamedTuple):
    """How an object is made, and what is put into it.

    Attributes:
        constructor, arguments: make a new one.
        setter, state: ``setter(object, state)`` gives it its state, whatever it had before; a state of None is that of a
            new object, and no setter means that its class knows no other.
        labels: how each part of the state is written behind the object: ``.`` for names and their values, ``[]`` for items,
            ``{}`` for keys and items in turn, or as it is.
        changer: ``changer(object, constructor, *arguments)`` makes an object that is there what these make; None where that
            needs a new object.
    """

    constructor: Callable[..., Any]
    arguments: tuple[Any, ...]
    setter: Callable[[Any, Any], Any] | None = None
    state: tuple[Any, ...] | None = None
    labels: tuple[str, ...] = ()
    changer: Callable[..., None] | None = None


# ---------------------------------------------------------------- objects of Python classes


class Unset:
    """Stands for a slot without a value."""


def keeps_pickling_of_object(cls: Any) -> bool:
    """Tell whether a class leaves ``__reduce_ex__`` and ``__reduce__`` as they are."""
    return cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__


def keeps_state_of_object(cls: Any) -> bool:
    """Tell whether a class leaves ``__getstate__`` as it is."""
    return cls.__getstate__ is object.__getstate__ and not hasattr(cls, "__setstate__")


def is_only_python(cls: type) -> bool:
    """Tell whether objects of a class consist of ``__dict__`` and slots alone, with nothing kept in C.

    Types written in C may be heap types as well (``_thread.lock`` is from Python 3.13, ``select.epoll`` has long been):
    it is the size that tells.
    """
    own = (
        (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0) + len(_slot_names(cls))
    )  # negative ones lie before it
    plain = cls.__itemsize__ == 0 and cls.__basicsize__ <= object.__basicsize__ + _POINTER * own
    return plain and all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def read_insides(value: Any, *members: str) -> tuple[Any, dict[str, Any]]:
    """Return an object's own ``__dict__`` (None without), and its slots, and members kept in C, that have values."""
    names = (*_slot_names(type(value)), *members) if members else _slot_names(type(value))
    attributes = value.__dict__ if type(value).__dictoffset__ else None
    slots = {name: _in_slot(value, name) for name in names}
    return attributes, {name: item for name, item in slots.items() if item is not Unset}


def _in_slot(value: Any, name: str) -> Any:
    """Return what a slot has, past whatever its class does with attributes: ``__getattr__`` may use slots that are empty yet."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return Unset


def set_insides(value: Any, insides: tuple[Any, dict[str, Any]]) -> None:
    """Make these an object's ``__dict__``, slots and members, past whatever its class does with attributes."""
    attributes, slots = insides
    if attributes is not None and value.__dict__ is not attributes:
        object.__setattr__(value, "__dict__", attributes)
    for name, item in slots.items():
        object.__setattr__(value, name, item)
    for name in _slot_names(type(value)):
        if name not in slots and _in_slot(value, name) is not Unset:
            object.__delattr__(value, name)


def make_plain(cls: Any) -> Any:
    """Make an empty object, without its class' own ``__new__``: what that does, such as count or ask for arguments, is done."""
    return object.__new__(cls)


def itself(value: Any) -> Any:
    """Return what stands in the place of what was read."""
    return value


def read_plain(value: Any) -> Reading:
    """Read an object that is its ``__dict__`` and slots."""
    return Reading(make_plain, (type(value),), set_insides, read_insides(value), (".", "."), turn_into)


def turn_into(value: Any, _: Any, cls: type, *__: Any) -> None:
    """Change the class of an object of Python classes."""
    if type(value) is not cls:
        object.__setattr__(value, "__class__", cls)


def become(value: Any, constructor: Callable[..., Any], *arguments: Any) -> None:
    """Make an object of Python classes what a new one is."""
    twin = constructor(*arguments)
    value.__class__ = type(twin)
    set_insides(value, read_insides(twin))


# ---------------------------------------------------------------- protocols of their own


def read_reduced(value: Any, reduced: Any) -> Reading | None:
    """Read an object as its own protocol has it; None for one that goes by its name."""
    if isinstance(reduced, str):
        return None
    constructor, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
    new = constructor is copyreg.__newobj__ and len(arguments) == 1  # type: ignore[attr-defined]
    changer = (turn_into if new else become) if is_only_python(type(value)) else None
    if changer is turn_into and items is None and pairs is None and keeps_state_of_object(type(value)):
        return Reading(constructor, arguments, set_insides, read_insides(value), (".", "."), changer)
    if state is None and items is None and pairs is None:
        return Reading(constructor, arguments, changer=changer)
    told = (_alone(value, state), None if items is None else tuple(items), _keys_then_items(pairs), setter)
    return Reading(constructor, arguments, set_by_protocol, told, (".", "[]", "{}", ""), changer)


def _alone(value: Any, state: Any) -> Any:
    """Return a state without the object's very ``__dict__``: another one's is updated with it."""
    own: dict[str, Any] | None = getattr(value, "__dict__", None)
    if own is not None and type(state) is tuple and len(state) == 2 and state[0] is own:
        return {**own}, state[1]
    return state


def _keys_then_items(pairs: Any) -> tuple[Any, ...] | None:
    if pairs is None:
        return None
    entries = [*pairs]
    return *(key for key, _ in entries), *(item for _, item in entries)


def set_by_protocol(value: Any, state: tuple[Any, Any, Any, Any]) -> None:
    """Give an object what its own protocol said, as pickle does; in place of the items that it has."""
    inner, items, pairs, setter = state
    if (items is not None or pairs is not None) and len(value):
        value.clear()
    if items is not None:
        value.extend(items) if hasattr(value, "extend") else [value.append(item) for item in items]
    half = len(pairs or ()) // 2
    for key, item in zip((pairs or ())[:half], (pairs or ())[half:], strict=True):
        value[key] = item
    if setter is not None:
        setter(value, inner)
    elif inner is not None:
        _set_state(value, inner)


def _set_state(value: Any, inner: Any) -> None:
    attributes, slots = inner if isinstance(inner, tuple) and len(inner) == 2 else (inner, None)
    if type(attributes) is dict and keeps_all_attributes(type(value)):
        for name in vars(value).keys() - attributes.keys():
            del vars(value)[name]
    if hasattr(value, "__setstate__"):
        value.__setstate__(inner)
    else:
        value.__dict__.update(attributes or {})
        for name, item in (slots or {}).items():
            setattr(value, name, item)


def keeps_all_attributes(cls: Any) -> bool:
    """Tell whether the state of a class's objects is all of their ``__dict__``: what it lacks, they lack."""
    is_own = cls in copyreg.dispatch_table or cls.__getstate__ is not object.__getstate__
    return not is_own and keeps_pickling_of_object(cls)


# ---------------------------------------------------------------- modules


class MissingModule(types.ModuleType):
    """Stands for a module that could not be imported where it arrived."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.__dict__["reason"] = reason

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ModuleNotFoundError(f"module {self.__name__!r} could not be imported here: {self.reason}")


def import_or_stand_in(name: str) -> types.ModuleType:
    """Import a module; one that isn't there becomes one that says so when it is used."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a module's own code may raise anything
        found: types.ModuleType | None = module_named(name)
        return found or MissingModule(name, f"{type(error).__name__}: {error}")


def module_named(name: str) -> Any:
    """Return the module of a name, also one that is an attribute of another only (``torch.ops.aten``); else None."""
    found = sys.modules.get(name)
    parent, _, last = name.rpartition(".")
    return getattr(module_named(parent), last, None) if found is None and parent else found

"""The contents of an object: a :class:`Reading`, by pickle's rule.

By this rule, an object consists of its class, the arguments from which it is made, and its state.
The state of an instance of a Python class is its ``__dict__`` (that very dict, to which other
objects may refer) and its slots. A class that defines its own protocol is trusted. :mod:`reader`
chooses the reader for a class. Items are put into a container by methods of the built-in class, so
that no method of a subclass runs before the parts exist that it may need.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import gc
import importlib
import io
import operator
import os
import pickle
import struct
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from taas.base import own_code
from taas.base.import_hooks import attributes_of, may_be_of_project
from taas.capture.describe.process_own import keep_own

ATOMS: frozenset[type] = frozenset({str, bytes, int, float, complex, bool, type(None)})
"""Types whose objects are their values: no code can tell two equal ones apart."""

_POINTER = struct.calcsize("P")
_Answer = TypeVar("_Answer")
_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: the type was created by a ``class`` statement, or in the same way."""


class Reading(NamedTuple):
    """How an object is made, and how its state is set.

    ``setter(object, state)`` sets the object's state, whatever its state was before. A state of
    None is the state of a new object; without a setter, the class has no other state.
    ``changer(object, constructor, *arguments)`` turns an existing object into what the constructor
    would make; it is None if that takes a new object.
    """

    constructor: Callable[..., Any]
    arguments: tuple[Any, ...]
    setter: Callable[[Any, Any], Any] | None = None
    state: tuple[Any, ...] | None = None
    changer: Callable[..., None] | None = None


# ---------------------------------------------------------------- instances of Python classes


def attribute_of_class(cls: type, name: str) -> Any:
    """Return what a class, or one of its bases, defines under a name; None if none does.

    This does not use the metaclass: its ``__getattr__`` may raise anything for a missing name.
    """
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _slot_names(cls: type) -> Iterable[str]:
    """Return the names of the slots of a class and of its bases."""
    try:
        found: Iterable[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]
    except Exception:
        # It has no slots: the lookup used its metaclass, which may raise anything.
        return ()
    return found


def keeps_pickling_of_object(cls: Any) -> bool:
    """Tell whether a class inherits ``__reduce_ex__`` and ``__reduce__`` from ``object``."""
    return cls.__reduce_ex__ is object.__reduce_ex__ and cls.__reduce__ is object.__reduce__


def keeps_state_of_object(cls: Any) -> bool:
    """Tell whether a class inherits ``__getstate__`` from ``object``."""
    is_set_by_it = attribute_of_class(cls, "__setstate__") is not None
    return cls.__getstate__ is object.__getstate__ and not is_set_by_it


def is_only_python(cls: type) -> bool:
    """Tell whether objects of a class consist of ``__dict__`` and slots alone, with no data in C.

    The object's size shows this; types written in C may be heap types as well (``select.epoll``).
    """
    # negative offsets are before the object
    own = (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0) + len([*_slot_names(cls)])
    plain = cls.__itemsize__ == 0 and cls.__basicsize__ <= object.__basicsize__ + _POINTER * own
    return plain and all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def read_insides(value: Any, *members: str) -> tuple[Any, dict[str, Any]]:
    """Return an object's ``__dict__`` (or None), and its slots and C members that have values."""
    attributes = value.__dict__ if type(value).__dictoffset__ else None
    slots: dict[str, Any] = {}
    for name in (*_slot_names(type(value)), *members):
        try:  # not through ``__getattr__``, which may use slots that are still empty
            item = object.__getattribute__(value, name)
        except AttributeError:
            continue
        slots[name] = item
    return attributes, slots


def set_insides(value: Any, insides: tuple[Any, dict[str, Any]]) -> None:
    """Set an object's ``__dict__``, slots and members, bypassing its class's ``__setattr__``."""
    attributes, slots = insides
    if attributes is not None and (here := value.__dict__) is not attributes:
        if here:
            attributes.update(keep_own(value, attributes))
        object.__setattr__(value, "__dict__", attributes)
    for name, item in slots.items():
        object.__setattr__(value, name, item)
    for name in _slot_names(type(value)):
        if name not in slots:
            with contextlib.suppress(AttributeError):  # the slot is empty
                object.__delattr__(value, name)


def make_plain(cls: Any) -> Any:
    """Make an empty object of a class; ``__new__`` of a library's class runs.

    It may set up what the methods need. ``__new__`` of a notebook's or project's class is not run
    again.
    """
    if cls.__new__ is object.__new__:
        return object.__new__(cls)
    makers = (
        base for base in cls.__mro__ if "__new__" in vars(base) and base.__module__ != "__main__"
    )
    by: Any = next(base for base in makers if not may_be_of_project(base.__module__))
    try:
        return by.__new__(cls)
    except TypeError:  # it needs arguments
        return object.__new__(cls)


def itself(value: Any) -> Any:
    """Return the object itself: the constructor of a Reading that stands in for another object."""
    return value


def read_plain(value: Any) -> Reading:
    """Read an object as its ``__dict__`` and slots."""
    return Reading(make_plain, (type(value),), set_insides, read_insides(value), turn_into)


def turn_into(value: Any, _: Any, cls: type, *__: Any) -> None:
    """Change the class of an instance of Python classes."""
    if type(value) is not cls:
        object.__setattr__(value, "__class__", cls)


def become(value: Any, constructor: Callable[..., Any], *arguments: Any) -> None:
    """Turn an instance of Python classes into what the constructor makes from the arguments."""
    twin = constructor(*arguments)
    value.__class__ = type(twin)
    set_insides(value, read_insides(twin))


# ---------------------------------------------------------------- classes with their own protocol


def read_reduced(value: Any, reduced: Any) -> Reading | None:
    """Read an object by its own protocol; return None if it is sent by name."""
    if isinstance(reduced, str):
        return None
    constructor, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
    new = constructor is copyreg.__newobj__ and len(arguments) == 1  # type: ignore[attr-defined]
    changer = (turn_into if new else become) if is_only_python(type(value)) else None
    if (
        changer is turn_into
        and items is None
        and pairs is None
        and keeps_state_of_object(type(value))
    ):
        return Reading(constructor, arguments, set_insides, read_insides(value), changer)
    if state is None and items is None and pairs is None:
        return Reading(constructor, arguments, changer=changer)
    own = attributes_of(value)
    if type(state) is tuple and len(state) == 2 and state[0] is own:
        state = {**own}, state[1]  # a copy: the setter updates the ``__dict__`` with it
    items = None if items is None else tuple(items)
    entries = None if pairs is None else sum(zip(*pairs, strict=True), ())  # keys, then items
    told = (state, items, entries, setter)
    return Reading(constructor, arguments, set_by_protocol, told, changer)


def set_by_protocol(value: Any, state: tuple[Any, Any, Any, Any]) -> None:
    """Give an object the state that its protocol returned, in place of its own state and items."""
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
        for name in vars(value).keys() - attributes.keys() - keep_own(value, attributes).keys():
            del vars(value)[name]
    if hasattr(value, "__setstate__"):
        value.__setstate__(inner)
    else:
        value.__dict__.update(attributes or {})
        for name, item in (slots or {}).items():
            setattr(value, name, item)


def keeps_all_attributes(cls: Any) -> bool:
    """Tell whether a state has all of an object's ``__dict__``, so that other keys are deleted."""
    is_own = cls in copyreg.dispatch_table or cls.__getstate__ is not object.__getstate__
    return not is_own and keeps_pickling_of_object(cls)


# ---------------------------------------------------------------- modules


class MissingModule(types.ModuleType):
    """Stands for a module that could not be imported at the receiver."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.__dict__["error"] = error
        self.__dict__["reason"] = f"{type(error).__name__}: {error}"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ModuleNotFoundError(
            f"module {self.__name__!r} could not be imported here: {self.reason}"
        ) from self.error


def import_or_stand_in(name: str) -> types.ModuleType:
    """Import a module; if that fails, return one that raises the error when it is used."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # code of a module may raise anything
        found: types.ModuleType | None = module_named(name)
        return found or MissingModule(name, error.with_traceback(_in_module(error.__traceback__)))


def _in_module(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of an import's traceback that is in modules, without the values in it."""
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(
        (own_code.FOLDER, "<frozen ")
    ):
        tb = tb.tb_next
    traceback.clear_frames(tb)
    return tb


def module_named(name: str) -> Any:
    """Return the module with a name, or None.

    Some modules are only attributes of others (``torch.ops.aten``).
    """
    found = sys.modules.get(name)
    parent, _, last = name.rpartition(".")
    if found is not None or not parent:
        return found
    try:
        return getattr(module_named(parent), last, None)
    except Exception:  # a lazy module may lack what it needs, and raise anything
        return None


def module_holding(value: Any, name: str) -> str:
    """Return an object's ``__module__``, or else the module that contains it, as pickle does.

    Unlike pickle, this does not call a module's ``__getattr__``.
    """
    said = getattr(value, "__module__", None)
    if said is not None:
        return str(said)
    first, *rest = name.split(".")
    for module, loaded in [*sys.modules.items()]:
        if module in ("__main__", "__mp_main__"):
            continue
        found = attributes_of(loaded).get(first)
        for part in rest if isinstance(found, type) else ():
            found = getattr(found, part, None)
        if found is value:
            return module
    return "__main__"


def find(module: str, name: str) -> Any:
    """Return what a module contains under a name; with an empty name, the module."""
    found = import_or_stand_in(module)
    try:
        return operator.attrgetter(name)(found) if name else found
    except AttributeError as error:
        raise pickle.UnpicklingError(f"{module} has no {name} here") from error


# ---------------------------------------------------------------- containers


class _Family(NamedTuple):
    """A built-in container: how to get its items as a tuple, and how to replace its items."""

    base: Any
    items: Callable[[Any], tuple[Any, ...]]
    put: Callable[[Any, tuple[Any, ...]], None]


def _of_items(base: Any, extend: Callable[[Any, tuple[Any, ...]], None]) -> _Family:
    def put(value: Any, items: tuple[Any, ...]) -> None:
        base.clear(value)
        extend(value, items)

    return _Family(base, lambda value: tuple(base.__iter__(value)), put)


def _of_pairs(base: Any, methods: Any) -> _Family:
    """Return a family of dicts: the keys, then the values."""

    def put(value: Any, items: tuple[Any, ...]) -> None:
        methods.clear(value)
        half = len(items) // 2
        for key, item in zip(items[:half], items[half:], strict=True):
            methods.__setitem__(value, key, item)

    return _Family(base, lambda value: (*methods.keys(value), *methods.values(value)), put)


_FAMILIES = (
    _of_pairs(collections.OrderedDict, collections.OrderedDict),
    _of_pairs(collections.Counter, dict),
    _of_pairs(collections.defaultdict, dict),
    _of_pairs(dict, dict),
    _of_items(list, list.extend),
    _of_items(set, set.update),
    _of_items(collections.deque, collections.deque.extend),
    _Family(
        bytearray,
        lambda value: (bytes(value),),
        lambda value, items: value.__setitem__(slice(None), items[0]),
    ),
)


def once_per_class(function: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
    """Cache a function of a class as long as the class lives.

    ``functools.cache`` would keep alive every class that a cell of the notebook has redefined.
    """
    known: weakref.WeakKeyDictionary[Any, _Answer] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(cls: Any) -> _Answer:
        if cls not in known:
            known[cls] = function(cls)
        return known[cls]

    return remembered


@once_per_class
def _family(cls: Any) -> Any:
    return next((family for family in _FAMILIES if issubclass(cls, family.base)), None)


def container_reader(cls: Any) -> Callable[[Any], Reading] | None:
    """Return the reader for a container class; None for others, or with an own protocol."""
    family = _family(cls)
    if family is None:
        return None
    own = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    for name in own:
        if attribute_of_class(cls, name) is not attribute_of_class(family.base, name):
            return None
    members = ("default_factory",) if family.base is collections.defaultdict else ()

    def read(value: Any) -> Reading:
        state = (*read_insides(value, *members), family.items(value))
        return Reading(_make, (cls, getattr(value, "maxlen", None)), _fill, state, turn_into)

    return read


def _make(cls: Any, maxlen: Any) -> Any:
    base = _family(cls).base
    made = base.__new__(cls)
    if base is collections.deque:
        collections.deque.__init__(made, (), maxlen)
    return made


def _fill(value: Any, state: tuple[Any, Any, tuple[Any, ...]]) -> None:
    set_insides(value, state[:2])
    _family(type(value)).put(value, state[2])


VIEWS = {
    type(getattr(base(), name)()): (base, name)
    for base in (dict, collections.OrderedDict)
    for name in ("keys", "values", "items")
}
"""The method that makes a view of a dict, by the view's class."""


def read_view(view: Any) -> Reading:
    """Read a view of a dict, or a read-only dict, together with that dict."""
    (mapping,) = gc.get_referents(view)
    if type(view) is types.MappingProxyType:
        return Reading(types.MappingProxyType, (mapping,))
    base, name = VIEWS[type(view)]
    return Reading(_make_view, (base, name, mapping))


def _make_view(base: Any, name: str, mapping: Any) -> Any:
    return getattr(base, name)(mapping)


def read_reference(reference: Any) -> Reading:
    """Read a weak reference; its object lives only if the receiver has another reference."""
    key = (reference.key,) if isinstance(reference, weakref.KeyedRef) else ()
    return Reading(_make_reference, (type(reference), reference(), reference.__callback__, *key))


def read_proxy(proxy: Any) -> Reading:
    """Read a weak proxy, which looks like its object; a tqdm bar has a proxy of itself."""
    return Reading(weakref.proxy, (proxy.__reduce_ex__.__self__,))


def _make_reference(cls: Any, target: Any, callback: Any, *key: Any) -> Any:
    return cls(set() if target is None else target, callback, *key)  # a set is freed at once


# ---------------------------------------------------------------- exceptions


_OF_EXCEPTIONS = ("args", "__cause__", "__context__", "__suppress_context__")


def read_exception(error: BaseException) -> Reading:
    """Read an exception with cause and context; its class's ``__init__`` does not run again."""
    made: Any = error.__reduce_ex__(4)
    arguments = made[1] if made[0] is type(error) else error.args
    if isinstance(error, BaseExceptionGroup):  # made from a list that may have changed since
        arguments = error.message, error.exceptions
    insides = read_insides(error, *_OF_EXCEPTIONS)
    return Reading(_make_exception, (type(error), arguments), set_insides, insides)


def _make_exception(cls: Any, arguments: tuple[Any, ...]) -> Any:
    error = cls.__new__(cls, *arguments)
    in_c = next(base for base in cls.__mro__ if not isinstance(base.__init__, types.FunctionType))
    with contextlib.suppress(TypeError):  # the arguments are those of its class's own __init__
        in_c.__init__(error, *arguments)
    return error


# ---------------------------------------------------------------- files

FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
"""The classes of the objects that ``open`` returns."""


def read_file(file: Any) -> Reading | None:
    """Read a closed file; standard streams are sent by name, and open files are rejected."""
    if file.closed:
        settings = (
            (file.encoding, file.errors) if isinstance(file, io.TextIOWrapper) else (None, None)
        )
        buffering = 0 if isinstance(file, io.FileIO) else -1
        mode = getattr(file, "mode", "r" if isinstance(file, io.TextIOWrapper) else "rb")
        return Reading(_closed_file, (getattr(file, "name", None), mode, buffering, *settings))
    if file not in (sys.stdout, sys.stderr):
        raise pickle.PicklingError(f"{getattr(file, 'name', file)!r} is an open file")
    return None


def _closed_file(
    name: Any, mode: str, buffering: int, encoding: str | None, errors: str | None
) -> Any:
    """Return a closed file; no file of this name is opened here."""
    nothing = Path(os.devnull)
    file: Any = nothing.open(mode.replace("x", "w"), buffering, encoding, errors)
    with file:
        buffer = getattr(file, "buffer", file)
        getattr(buffer, "raw", buffer).name = name
        if encoding is not None:
            file.mode = mode
    return file

"""Containers: their items, and the insides of their subclasses; iterators, views of memory, exceptions, weak references.

Items are put by the methods of the built-in class, so that no method of a subclass runs that may need what is not
there yet; a cell's own ``__setitem__`` ran when the cell put them.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from taas.capture.reading import Reading, read_insides, set_insides, turn_into

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


class _Family(NamedTuple):
    """A built-in container: its items as a tuple, how that is written, and how they are put into one that has others."""

    base: Any
    label: str
    items: Callable[[Any], tuple[Any, ...]]
    put: Callable[[Any, tuple[Any, ...]], None]


def _of_items(base: Any, extend: Callable[[Any, tuple[Any, ...]], None]) -> _Family:
    def put(value: Any, items: tuple[Any, ...]) -> None:
        base.clear(value)
        extend(value, items)

    return _Family(base, "[]", lambda value: tuple(base.__iter__(value)), put)


def _of_pairs(base: Any, methods: Any) -> _Family:
    """Return a family of dicts: the keys, then what they stand for."""

    def put(value: Any, items: tuple[Any, ...]) -> None:
        value.data.clear() if base in _WEAK else methods.clear(value)  # its own method marks it as untidy
        half = len(items) // 2
        for key, item in zip(items[:half], items[half:], strict=True):
            methods.__setitem__(value, key, item)

    return _Family(base, "{}", lambda value: (*methods.keys(value), *methods.values(value)), put)


def _put_weak_items(value: Any, items: tuple[Any, ...]) -> None:
    value.clear()
    value.update(items[0])


_FAMILIES = (
    _of_pairs(collections.OrderedDict, collections.OrderedDict),
    _of_pairs(collections.Counter, dict),
    _of_pairs(collections.defaultdict, dict),
    _of_pairs(dict, dict),
    _of_items(list, list.extend),
    _of_items(set, set.update),
    _of_items(collections.deque, collections.deque.extend),
    _Family(
        bytearray, "", lambda value: (bytes(value),),
        lambda value, items: bytearray.__setitem__(value, slice(None), items[0]),
    ),
    _Family(
        array.array, "", lambda value: (value.tobytes(),),
        lambda value, items: value.__setitem__(slice(None), array.array(value.typecode, items[0])),
    ),
    _of_pairs(weakref.WeakKeyDictionary, weakref.WeakKeyDictionary),
    _of_pairs(weakref.WeakValueDictionary, weakref.WeakValueDictionary),
    _Family(weakref.WeakSet, "", lambda value: (frozenset(value),), _put_weak_items),
)  # fmt: skip
"""The weak ones hold functions of their own in their insides, which are made with them."""


@functools.cache
def _family(cls: Any) -> Any:
    """Return what a class belongs to, or None."""
    return next((family for family in _FAMILIES if issubclass(cls, family.base)), None)


def items_of(value: Any) -> tuple[Any, ...]:
    """Return the items of a built-in container; of a dict its keys, then what they stand for."""
    if type(value) is dict:
        return (*value, *value.values())
    return tuple(value) if type(value) is list else _family(type(value)).items(value)  # type: ignore[arg-type]


def put_items(value: Any, items: tuple[Any, ...]) -> None:
    """Make these its items."""
    _family(type(value)).put(value, items)  # type: ignore[arg-type]


def container_reader(cls: Any) -> Callable[[Any], Reading] | None:
    """Return what reads objects of a container class, or None: it is none, or has a protocol of its own."""
    family = _family(cls)
    if family is None:
        return None
    own = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    if any(getattr(cls, name, None) is not getattr(family.base, name, None) for name in own):
        return None
    base, labels = family.base, (".", ".", family.label)
    members = ("default_factory",) if base is collections.defaultdict else ()

    def read(value: Any) -> Reading:
        given = getattr(value, {collections.deque: "maxlen", array.array: "typecode"}.get(base, ""), None)
        insides = (None, ()) if base in _WEAK else read_insides(value, *members)
        state = (*insides, family.items(value))
        return Reading(_make, (cls, given), _fill, state, labels, turn_into)

    return read


def _make(cls: Any, given: Any) -> Any:
    base = _family(cls).base
    if base in _WEAK:
        return cls()
    made = cls.__new__(cls, given) if base is array.array else base.__new__(cls)
    if base is collections.deque:
        collections.deque.__init__(made, (), given)
    return made


def _fill(value: Any, state: tuple[Any, Any, tuple[Any, ...]]) -> None:
    set_insides(value, state[:2])
    put_items(value, state[2])


# ---------------------------------------------------------------- iterators of dicts and sets


def _iterate_keys(items: list[Any]) -> Any:
    return iter(dict.fromkeys(items))


def _iterate_values(items: list[Any]) -> Any:
    return iter(dict(enumerate(items)).values())


def _iterate_pairs(items: list[tuple[Any, Any]]) -> Any:
    return iter(dict(items).items())


def _iterate_set(items: list[Any]) -> Any:
    return iter(set(items))


_ITERATORS = {type(make([])): make for make in (_iterate_keys, _iterate_values, _iterate_pairs, _iterate_set)}


def _read_iterator(iterator: Any) -> Reading:
    """Read an iterator as one of what is left; pickle makes a list's of it, which is of another class."""
    return Reading(_ITERATORS[type(iterator)], iterator.__reduce__()[1])


ITERATOR_READERS = dict.fromkeys(_ITERATORS, _read_iterator)


# ---------------------------------------------------------------- views of memory


def read_view(view: memoryview) -> Reading:
    """Read a ``memoryview`` as a part of the object that it looks into; pickle has nothing of it, cloudpickle a copy.

    Raises:
        TypeError: its items do not lie side by side, or it must not write to what others may change.
        ValueError: it was released.
    """
    whole, start = view.obj, 0
    if view.readonly and isinstance(whole, bytes):
        whole = bytes(view)
    elif view.nbytes:
        start = _address_of(view) - _address_of(whole)
    return Reading(_make_view, (whole, start, view.nbytes, view.format, view.shape))


def _address_of(writable: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(writable))


def _make_view(whole: Any, start: int, nbytes: int, form: str, shape: tuple[int, ...]) -> memoryview:
    part = memoryview(whole).cast("B")[start : start + nbytes]
    return part.cast(form, shape) if nbytes else part.cast(form)  # type: ignore[call-overload,no-any-return]


def read_proxy(proxy: types.MappingProxyType[Any, Any]) -> Reading:
    """Read a ``MappingProxyType`` with the very mapping that it shows, but for a class's; cloudpickle has a copy of each."""
    (shown,) = gc.get_referents(proxy)
    of_class = {"__module__", "__doc__"} <= proxy.keys()
    return Reading(types.MappingProxyType, (dict(shown) if of_class else shown,))


# ---------------------------------------------------------------- weak references


def read_reference(reference: Any) -> Reading:
    """Read a weak reference; what it refers to lives where it arrives only if something else there holds it."""
    if isinstance(reference, weakref.ProxyTypes):
        return Reading(weakref.proxy, (reference.__reduce_ex__.__self__,))
    key = getattr(reference, "key", None)
    return Reading(_make_reference, (type(reference), reference(), reference.__callback__, key))


def _make_reference(cls: Any, target: Any, callback: Any, key: Any) -> Any:
    target = set() if target is None else target  # which is gone at once
    return cls(target, callback, key) if cls is weakref.KeyedRef else cls(target, callback)


# ---------------------------------------------------------------- exceptions


_OF_EXCEPTIONS = ("args", "__cause__", "__context__", "__suppress_context__", "__traceback__")


def read_exception(error: BaseException) -> Reading:
    """Read an exception with its cause and where it was raised, which pickle leaves out.

    Its class' own ``__init__`` does not run again, as its arguments may be others.
    """
    made: Any = error.__reduce_ex__(4)
    arguments = made[1] if made[0] is type(error) else error.args
    if isinstance(error, BaseExceptionGroup):  # it may have been given a list that has changed
        arguments = error.message, error.exceptions
    insides = read_insides(error, *_OF_EXCEPTIONS)
    return Reading(_make_exception, (type(error), arguments), set_insides, insides, (".", "."))


def _make_exception(cls: Any, arguments: tuple[Any, ...]) -> Any:
    error = cls.__new__(cls, *arguments)
    in_c = next(base for base in cls.__mro__ if not isinstance(base.__init__, types.FunctionType))
    with contextlib.suppress(TypeError):  # the arguments are those of the class' own __init__
        in_c.__init__(error, *arguments)
    return error


def read_traceback(traceback: types.TracebackType | None) -> Reading:
    """Read a traceback as the lines that it goes through; its frames have no variables where it arrives."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, code.co_qualname, traceback.tb_lineno))
        traceback = traceback.tb_next
    return Reading(_make_traceback, tuple(places))


def _raise() -> None:
    raise RuntimeError


def _make_traceback(*places: tuple[str, str, int]) -> types.TracebackType | None:
    below: types.TracebackType | None = None
    for file, name, line in reversed(places):
        code = _raise.__code__.replace(
            co_filename=file, co_name=name.rpartition(".")[2], co_qualname=name, co_firstlineno=line
        )
        try:
            types.FunctionType(code, {"__name__": name})()
        except RuntimeError as error:
            own = error.__traceback__.tb_next if error.__traceback__ else None
            assert own is not None
            below = types.TracebackType(below, own.tb_frame, own.tb_lasti, line)
    return below

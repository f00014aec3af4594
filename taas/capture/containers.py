"""Containers: their items, and the insides of their subclasses; exceptions, weak references, closed files.

Items are put by the methods of the built-in class, so that no method of a subclass runs that may need what is not
there yet; a cell's own ``__setitem__`` ran when the cell put them.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import io
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from taas.capture.reading import Reading, read_insides, set_insides, turn_into


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
        methods.clear(value)
        half = len(items) // 2
        for key, item in zip(items[:half], items[half:], strict=True):
            methods.__setitem__(value, key, item)

    return _Family(base, "{}", lambda value: (*methods.keys(value), *methods.values(value)), put)


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
)  # fmt: skip


@functools.cache
def _family(cls: Any) -> Any:
    """Return what a class belongs to, or None."""
    return next((family for family in _FAMILIES if issubclass(cls, family.base)), None)


def container_reader(cls: Any) -> Callable[[Any], Reading] | None:
    """Return what reads objects of a container class, or None: it is none, or has a protocol of its own."""
    family = _family(cls)
    if family is None:
        return None
    own = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    if any(getattr(cls, name, None) is not getattr(family.base, name, None) for name in own):
        return None
    members = ("default_factory",) if family.base is collections.defaultdict else ()

    def read(value: Any) -> Reading:
        given = getattr(
            value, {collections.deque: "maxlen", array.array: "typecode"}.get(family.base, ""), None
        )
        state = (*read_insides(value, *members), family.items(value))
        return Reading(_make, (cls, given), _fill, state, (".", ".", family.label), turn_into)

    return read


def _make(cls: Any, given: Any) -> Any:
    base = _family(cls).base
    made = cls.__new__(cls, given) if base is array.array else base.__new__(cls)
    if base is collections.deque:
        collections.deque.__init__(made, (), given)
    return made


def _fill(value: Any, state: tuple[Any, Any, tuple[Any, ...]]) -> None:
    set_insides(value, state[:2])
    _family(type(value)).put(value, state[2])  # type: ignore[arg-type]


# ---------------------------------------------------------------- weak references


def read_reference(reference: Any) -> Reading:
    """Read a weak reference; what it refers to lives where it arrives only if something else there holds it."""
    key = (reference.key,) if isinstance(reference, weakref.KeyedRef) else ()
    return Reading(_make_reference, (type(reference), reference(), reference.__callback__, *key))


def _make_reference(cls: Any, target: Any, callback: Any, *key: Any) -> Any:
    return cls(set() if target is None else target, callback, *key)  # the set is gone at once


# ---------------------------------------------------------------- exceptions


_OF_EXCEPTIONS = ("args", "__cause__", "__context__", "__suppress_context__")


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


# ---------------------------------------------------------------- files

FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
"""What ``open`` returns."""


def read_file(file: Any) -> Reading | None:
    """Read a file; those of standard output and error output go by their names.

    Raises:
        pickle.PicklingError: it is open.
    """
    if file.closed:
        settings = (file.encoding, file.errors) if isinstance(file, io.TextIOWrapper) else (None, None)
        buffering = 0 if isinstance(file, io.FileIO) else -1
        mode = getattr(file, "mode", "r" if isinstance(file, io.TextIOWrapper) else "rb")
        return Reading(_closed_file, (getattr(file, "name", None), mode, buffering, *settings))
    if file not in (sys.stdout, sys.stderr):
        raise pickle.PicklingError(f"{getattr(file, 'name', file)!r} is an open file")
    return None


def _closed_file(name: Any, mode: str, buffering: int, encoding: str | None, errors: str | None) -> Any:
    """Return a closed file, without looking for anything that its name may mean here."""
    file: Any = open(os.devnull, mode.replace("x", "w"), buffering, encoding, errors)  # noqa: PTH123, SIM115
    with file:
        buffer = getattr(file, "buffer", file)
        getattr(buffer, "raw", buffer).name = name
        if encoding is not None:
            file.mode = mode
    return file

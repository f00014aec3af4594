"""Functions and classes of the notebook, by value: the one place that uses cloudpickle's private parts.

cloudpickle rebuilds a function on a private dict of globals, gives every closure cells of its own, and on
the way back overwrites the methods of classes that are already there. Here instead

* a function of the notebook is rebuilt on the namespace of the place it arrives at, so that it sees what
  the cell rebinds and ``global`` works;
* closures that share a variable go on sharing it: cells travel as objects;
* a class that is already known keeps its methods; only its identity is looked up.

``tests/test_capture_code.py`` fails on a release of cloudpickle whose private parts have other shapes.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
import typing
import weakref
from collections.abc import Iterator
from typing import Any

from cloudpickle import cloudpickle as _cloudpickle

__all__ = [
    "SETTERS",
    "TESTED_CLOUDPICKLE",
    "BasePickler",
    "dispatch_table",
    "global_names",
    "own_names",
    "reduce_cached",
    "reduce_cached_property",
    "reduce_cell",
    "reduce_class",
    "reduce_function",
    "reduce_new_type",
]

TESTED_CLOUDPICKLE = "3.1"
"""The series whose private parts this module was written against."""

BasePickler: Any = _cloudpickle.Pickler

_LAZY_ANNOTATIONS = sys.version_info >= (3, 14)
_COMPLETE: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes by value which are at home in this process, or have arrived in it with their methods."""

_names_of: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def dispatch_table() -> dict[type, Any]:
    """Return cloudpickle's table of reducers as one plain dict (its ChainMap costs 1 µs per object)."""
    return dict(BasePickler.dispatch_table)


def own_names(code: types.CodeType) -> set[str]:
    """Return the names which ``code`` itself reads, binds or deletes in its globals (or a class's body)."""
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME"))
        and isinstance(instruction.argval, str)
    } - {"__module__", "__qualname__", "__name__"}


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return what :func:`own_names` returns, of ``code`` and of all code nested in it."""
    known = _names_of.get(code)
    if known is None:
        found = own_names(code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                found |= global_names(constant)
        known = _names_of[code] = frozenset(found)
    return known


# ---------------------------------------------------------------- closures


def _new_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    cell.cell_contents = contents[0]


def reduce_cell(cell: types.CellType) -> tuple[Any, ...]:
    """Reduce a cell to an empty one that is filled later, so that a closure may contain itself."""
    try:
        contents = cell.cell_contents
    except ValueError:
        return _new_cell, ()
    return _new_cell, (), (contents,), None, None, _fill_cell


# ---------------------------------------------------------------- functions


def _make_function(
    code: types.CodeType, namespace: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> Any:
    return types.FunctionType(code, namespace, None, None, closure)


def _set_function(function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, slots = state
    function.__dict__.update(attributes)
    for name, value in slots.items():
        setattr(function, name, value)


def _function_slots(function: types.FunctionType) -> dict[str, Any]:
    names = ["__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__"]
    names.append("__annotate__" if _LAZY_ANNOTATIONS else "__annotations__")
    if sys.version_info >= (3, 12):
        names.append("__type_params__")
    return {name: value for name in names if (value := getattr(function, name))}


def reduce_function(function: types.FunctionType, namespace: dict[str, Any]) -> tuple[Any, ...]:
    """Reduce a function whose globals are ``namespace``, which the receiver's memo knows as its own."""
    arguments = (function.__code__, namespace, function.__closure__)
    return (
        _make_function,
        arguments,
        (dict(function.__dict__), _function_slots(function)),
        None,
        None,
        _set_function,
    )


# ---------------------------------------------------------------- classes


def _set_class(cls: type, state: Any) -> type:
    if cls not in _COMPLETE:
        _COMPLETE.add(cls)
        _cloudpickle._class_setstate(cls, state)
    return cls


def reduce_class(cls: type) -> Any:
    """Reduce a class as cloudpickle does, except that where it is known it stays as it is.

    Returns:
        A reduce value, or ``NotImplemented`` for a class that goes by reference.
    """
    reduced = _cloudpickle._class_reduce(cls)
    if isinstance(reduced, tuple) and reduced[-1] is _cloudpickle._class_setstate:
        _COMPLETE.add(cls)
        return _with_slots(cls, reduced)
    return reduced


def _make_class(constructor: Any, name: str, bases: tuple[Any, ...], *arguments: Any) -> type:
    """Make a class as cloudpickle does; what its bases do with a new subclass was done where it was made."""
    with _without_hooks(bases):
        made: type = _cloudpickle._make_skeleton_class(constructor, name, bases, *arguments)
    return made


@contextlib.contextmanager
def _without_hooks(bases: tuple[Any, ...]) -> Iterator[None]:
    """Leave out ``__init_subclass__`` of classes by value: what it reads may not be here yet."""
    ancestors = {cls for base in bases for cls in getattr(getattr(base, "__origin__", base), "__mro__", ())}
    hooks = [
        (cls, cls.__dict__["__init_subclass__"])
        for cls in ancestors
        if "__init_subclass__" in cls.__dict__ and cls in _COMPLETE
    ]
    for cls, _ in hooks:
        type.__delattr__(cls, "__init_subclass__")
    try:
        yield
    finally:
        for cls, hook in hooks:
            type.__setattr__(cls, "__init_subclass__", hook)


def _with_slots(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have the class made by :func:`_make_class` with its slots; cloudpickle sets them afterwards, to no effect.

    ``typing.NamedTuple`` makes them itself, and refuses to be told.
    """
    maker, arguments, (attributes, slots), *_ = reduced
    if maker is not _cloudpickle._make_skeleton_class:
        return *reduced[:5], _set_class
    told = typing.NamedTuple not in cls.__dict__.get("__orig_bases__", ())
    if told and "__slots__" in cls.__dict__:
        constructor, name, bases, keywords, *rest = arguments
        arguments = (constructor, name, bases, {**keywords, "__slots__": cls.__dict__["__slots__"]}, *rest)
        attributes = {
            key: value
            for key, value in attributes.items()
            if key != "__slots__" and not isinstance(value, types.MemberDescriptorType)
        }
    return _make_class, arguments, (attributes, slots), None, None, _set_class


SETTERS = (_fill_cell, _set_function, _set_class)
"""They complete their first argument, which is there before."""


def reduce_new_type(made: typing.NewType) -> Any:
    """Reduce a ``typing.NewType`` of the notebook by value; it would go by its name, which is not there yet."""
    if made.__module__ != "__main__":
        return NotImplemented
    return typing.NewType, (vars(made)["__qualname__"], made.__supertype__), {"__module__": made.__module__}


# ---------------------------------------------------------------- cached functions


def reduce_cached_property(cached: functools.cached_property[Any]) -> tuple[Any, ...]:
    """Reduce a ``functools.cached_property``, whose lock (before Python 3.12) cannot travel."""
    state = {name: value for name, value in vars(cached).items() if name not in ("func", "lock")}
    return functools.cached_property, (cached.func,), state


def reduce_cached(cached: Any) -> Any:
    """Reduce a function under ``functools.lru_cache`` by value; what it cached stays behind."""
    if _cloudpickle._lookup_module_and_qualname(cached) is not None:
        return NotImplemented
    parameters = cached.cache_parameters()
    attributes = {key: value for key, value in cached.__dict__.items() if key not in _SET_BY_LRU_CACHE}
    state: tuple[dict[str, Any], dict[str, Any]] | None = (attributes, {}) if attributes else None
    return _make_cached, (cached.__wrapped__, parameters["maxsize"], parameters["typed"]), state


_SET_BY_LRU_CACHE = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"}


def _make_cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)

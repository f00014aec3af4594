"""Read functions and classes of the notebook by value, as cloudpickle does.

Only this module uses cloudpickle's private parts.

It differs from cloudpickle as follows:

* A function of the notebook is rebuilt with the receiving namespace as its globals, so that it sees
  variables that the cell rebinds, and ``global`` works. A function that was created by code of a
  module is rebuilt with that module's namespace as its globals.
* Closures that share a variable still share it, because closure cells are sent as objects.
* A class is sent as its attributes; if the receiver already has the class, changed attributes are
  updated in place.
* From Python 3.14 on, annotations are computed by a function. That function is sent like any other,
  and looks names up in the receiver's class.

``tests/test_capture_code.py`` fails with a release of cloudpickle whose private parts have changed.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import gc
import sys
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle as _cloudpickle

from taas.base.import_hooks import attributes_of
from taas.capture.describe.reading import Reading, import_or_stand_in, read_insides, set_insides

TESTED_CLOUDPICKLE = "3.1"
"""The release series whose private parts this module was written for."""

_LAZY_ANNOTATIONS = sys.version_info >= (3, 14)
_NOTHING = object()
_PYTHONS_OWN = {
    "__dict__", "__weakref__", "__module__", "__slots__", "__slotnames__", "_abc_impl",
    "__classdictcell__",
}  # fmt: skip
_ANNOTATE = "__annotate_func__"
"""The function that computes a class's annotations, from Python 3.14 on. For a class without
annotations, it is None once code has requested them.
"""
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_names_of: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def dispatch_table() -> dict[type, Any]:
    """Return cloudpickle's table of reducers as one dict (its ChainMap costs 1 µs per object).

    cloudpickle converts a memoryview to bytes, which no longer share memory. pickle rejects
    memoryviews, and so does this module.
    """
    table = dict(_cloudpickle.Pickler.dispatch_table)
    del table[memoryview]
    return table


def _names_in(code: types.CodeType) -> set[str]:
    named = (
        i for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME"))
    )
    return {instruction.argval for instruction in named if isinstance(instruction.argval, str)}


_IN_EVERY_CLASS = _names_in(compile("class C: pass", "", "exec").co_consts[0])
"""Names that the compiler writes into each class body; Python 3.13 writes more than 3.12."""


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Return the code objects of functions, classes and comprehensions directly inside another."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def words_in(code: types.CodeType) -> set[str]:
    """Return the names and attributes that occur in a code object."""
    return {*code.co_names}.union(*map(words_in, codes_in(code)))


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that code, including nested code, reads, binds or deletes.

    For a class body, these include the names of the class.
    """
    known = _names_of.get(code)
    if known is None:
        own = frozenset(_names_in(code) - _IN_EVERY_CLASS)
        known = _names_of[code] = own.union(*map(global_names, codes_in(code)))
    return known


def names_of(code: types.FunctionType | type) -> set[str]:
    """Return the global names that a function or class uses, and the name by which pickle finds it.

    A function or class that was defined inside a function has no such name.
    """
    used = global_names(code.__code__) if isinstance(code, types.FunctionType) else ()
    outermost, *inner = code.__qualname__.split(".")
    return {*used} if "<locals>" in inner else {*used, outermost}


# ---------------------------------------------------------------- closures


def _new_cell() -> types.CellType:
    return types.CellType()


def _dict_of(cls: type) -> dict[str, Any]:
    """Return the dict behind a class's attributes; ``vars`` returns a read-only proxy for it."""
    found: dict[str, Any] = gc.get_referents(vars(cls))[0]
    return found


def _class_with(attributes: Any) -> type | None:
    """Return the class with this attribute dict, if any; annotations look names up in the dict."""
    if type(attributes) is not dict or "__module__" not in attributes:
        return None
    own = (one.__objclass__ for one in attributes.values() if isinstance(one, _DESCRIPTORS))
    return next((cls for cls in own if _dict_of(cls) is attributes), None)


def _look_into_class(cell: types.CellType, contents: tuple[type]) -> None:
    cell.cell_contents = _dict_of(*contents)


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        cell.cell_contents = contents[0]
    else:
        with contextlib.suppress(ValueError):  # it is empty
            del cell.cell_contents


def read_cell(cell: types.CellType) -> Reading:
    """Read a closure cell as an empty one that is filled later: a closure may contain itself."""
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        contents = ()
    if _LAZY_ANNOTATIONS and contents and (cls := _class_with(contents[0])) is not None:
        return Reading(_new_cell, (), _look_into_class, (cls,))
    return Reading(_new_cell, (), _fill_cell, contents)


# ---------------------------------------------------------------- functions


def _make_function(code: types.CodeType, namespace: dict[str, Any], closure: Any) -> Any:
    return types.FunctionType(code, namespace, None, None, closure)


_OF_FUNCTIONS = (
    "__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__",
    *(("__type_params__",) if sys.version_info >= (3, 12) else ()),
)  # fmt: skip


def read_function(function: types.FunctionType, namespace: dict[str, Any]) -> Reading:
    """Read a function whose globals are ``namespace``; the receiver replaces them by its own."""
    arguments = (function.__code__, namespace, function.__closure__)
    annotate = getattr(function, "__annotate__", None)
    made_when_asked = _LAZY_ANNOTATIONS and annotate is not None
    annotations = "__annotate__" if made_when_asked else "__annotations__"
    insides = read_insides(function, *_OF_FUNCTIONS, annotations)
    return Reading(_make_function, arguments, set_insides, insides, _change_code)


def goes_by_name(function: types.FunctionType) -> bool:
    """Tell whether the receiver can find a function by its name."""
    return bool(_cloudpickle._should_pickle_by_reference(function))


def read_of_module(function: types.FunctionType) -> Reading | None:
    """Read a function that code of a module has created, such as a wrapper.

    Return None if it is sent by name, or if the receiver cannot import its module.
    """
    name = function.__globals__["__name__"]
    there = attributes_of(sys.modules.get(name))
    is_importable = there.get("__spec__") is not None
    if not is_importable or there is not function.__globals__ or goes_by_name(function):
        return None
    arguments = (function.__code__, name, function.__closure__)
    return read_function(function, {})._replace(constructor=_make_of_module, arguments=arguments)


def _make_of_module(code: types.CodeType, module: str, closure: Any) -> Any:
    return _make_function(code, vars(import_or_stand_in(module)), closure)


def _change_code(function: types.FunctionType, _: Any, code: types.CodeType, *__: Any) -> None:
    function.__code__ = code


# ---------------------------------------------------------------- classes


def _set_class(cls: type, state: tuple[dict[str, Any]]) -> None:
    """Set a class's attributes to these; an attribute that is the same object is left alone."""
    (attributes,) = state
    # an enumeration is created with its members, and with what Python derives from them
    if not issubclass(cls, enum.Enum):
        for name in vars(cls).keys() - attributes.keys():
            if not _is_made_by_python(cls, name):
                type.__delattr__(cls, name)
    for name, value in attributes.items():
        if name == "_abc_impl":
            for registered in value:
                cls.register(registered)  # type: ignore[attr-defined]
        elif vars(cls).get(name, _NOTHING) is not value:
            type.__setattr__(cls, name, value)


def _is_made_by_python(cls: type, name: str) -> bool:
    """Tell whether Python itself sets an attribute whenever the class is created."""
    value = vars(cls)[name]
    return (
        name in _PYTHONS_OWN
        or isinstance(value, _DESCRIPTORS)
        or (name == _ANNOTATE and value is None)
    )


def read_class(cls: type) -> Reading | None:
    """Read a class with all its attributes as its state; None if it is sent by reference."""
    if isinstance(cls.__module__, str) and cls.__module__ not in sys.modules:
        # a public name of its module that is not imported yet (``numpy.rec``)
        import_or_stand_in(cls.__module__)
    reduced = _cloudpickle._class_reduce(cls)
    if not isinstance(reduced, tuple):
        return None
    make, arguments = reduced[:2]
    if len(reduced) < 6 or reduced[5] is not _cloudpickle._class_setstate:
        return Reading(make, arguments)
    attributes = told = reduced[2][0]
    if make is _cloudpickle._make_skeleton_class:
        attributes = {
            n: told.get(n, v) for n, v in vars(cls).items() if not _is_made_by_python(cls, n)
        }
        attributes |= {n: v for n, v in told.items() if n == "_abc_impl"}
        meta, name, bases, keywords, *rest = arguments
        keywords = {**keywords, "__qualname__": cls.__qualname__}
        if typing.NamedTuple not in vars(cls).get("__orig_bases__", ()) and "__slots__" in vars(
            cls
        ):
            keywords["__slots__"] = vars(cls)["__slots__"]
        arguments = meta, name, bases, keywords, *rest
    elif (annotate := vars(cls).get(_ANNOTATE)) is not None:  # an enumeration's
        attributes = {**told, _ANNOTATE: annotate}
    return Reading(make, arguments, _set_class, (attributes,), _keep_class)


def _keep_class(*_: Any) -> None:
    """Keep a class as it is: bases and ``__slots__`` of an existing class cannot change."""


def _read_cached_property(cached: functools.cached_property[Any]) -> Reading:
    """Read a ``functools.cached_property``; its lock (before Python 3.12) cannot be sent."""
    state = {name: value for name, value in vars(cached).items() if name not in ("func", "lock")}
    return Reading(functools.cached_property, (cached.func,), _update, (state,))


def read_cached(cached: Any) -> Reading | None:
    """Read a function with ``functools.lru_cache`` by value, without its cached results."""
    if _cloudpickle._lookup_module_and_qualname(cached) is not None:
        return None
    set_by_it = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"}
    attributes = {key: value for key, value in cached.__dict__.items() if key not in set_by_it}
    arguments = (cached.__wrapped__, *cached.cache_parameters().values())  # maxsize, typed
    return Reading(_make_cached, arguments, _update, (attributes,))


def _make_cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _update(value: Any, state: tuple[dict[str, Any]]) -> None:
    value.__dict__.update(*state)


READERS: dict[type, Callable[[Any], Reading | None]] = {
    types.CellType: read_cell,
    functools._lru_cache_wrapper: read_cached,
    functools.cached_property: _read_cached_property,
}
"""Readers for objects of exactly these types."""

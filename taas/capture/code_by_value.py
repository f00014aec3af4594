"""Functions and classes of the notebook, by value: the one place that uses cloudpickle's private parts.

cloudpickle rebuilds a function on a private dict of globals, gives every closure cells of its own, and on
the way back overwrites the methods of classes that are already there. Here instead

* a function of the notebook is rebuilt on the namespace of the place it arrives at, so that it sees what
  the cell rebinds and ``global`` works; one that a module has made, on that module's;
* closures that share a variable go on sharing it: cells travel as objects;
* a class that is already known keeps its methods; only its identity is looked up.

``tests/test_capture_code.py`` fails on a release of cloudpickle whose private parts have other shapes.
"""

from __future__ import annotations

import abc
import contextlib
import dis
import functools
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from cloudpickle import cloudpickle as _cloudpickle

from taas.capture.reading import Reading, import_or_stand_in, read_insides, read_plain, set_insides

TESTED_CLOUDPICKLE = "3.1"
"""The series whose private parts this module was written against."""

BasePickler: Any = _cloudpickle.Pickler

_LAZY_ANNOTATIONS = sys.version_info >= (3, 14)
_OF_PYTHON = {
    "__dict__", "__weakref__", "__module__", "__abstractmethods__", "_abc_impl", "__slotnames__", "__annotations_cache__",
}  # fmt: skip
"""Attributes of classes that Python makes, and keeps, by itself."""
_COMPLETE: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes by value which are at home in this process, or have arrived in it with their methods."""
_TOLD_AGAIN: weakref.WeakSet[type] = weakref.WeakSet()
"""Those of them that take what comes with them all the same."""

_names_of: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def dispatch_table() -> dict[type, Any]:
    """Return cloudpickle's table of reducers as one plain dict (its ChainMap costs 1 µs per object); weak sets are containers."""
    return {cls: reducer for cls, reducer in BasePickler.dispatch_table.items() if cls is not weakref.WeakSet}


def _names_in(code: types.CodeType) -> set[str]:
    named = (i for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME")))
    return {instruction.argval for instruction in named if isinstance(instruction.argval, str)}


_IN_EVERY_CLASS = _names_in(compile("class C: pass", "", "exec").co_consts[0])
"""What the compiler itself writes into a class's body; Python 3.13 writes more than 3.12."""


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Return the functions, classes and comprehensions right inside a code."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def words_in(code: types.CodeType) -> set[str]:
    """Return the names and attributes that occur in a code."""
    return {*code.co_names}.union(*map(words_in, codes_in(code)))


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names which ``code``, or code in it, reads, binds or deletes in its globals (or a class's body)."""
    known = _names_of.get(code)
    if known is None:
        own = frozenset(_names_in(code) - _IN_EVERY_CLASS)
        known = _names_of[code] = own.union(*map(global_names, codes_in(code)))
    return known


def names_of(code: types.FunctionType | type) -> set[str]:
    """Return the names that a function uses, and the one that pickle finds it, or a class, by: its own, or its class's.

    What was made in a function is found by none.
    """
    used = global_names(code.__code__) if isinstance(code, types.FunctionType) else ()
    outermost, *inner = code.__qualname__.split(".")
    return {*used} if "<locals>" in inner else {*used, outermost}


# ---------------------------------------------------------------- closures


def _new_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        cell.cell_contents = contents[0]
    else:
        with contextlib.suppress(ValueError):  # it is empty
            del cell.cell_contents


def read_cell(cell: types.CellType) -> Reading:
    """Read a cell as an empty one that is filled later, so that a closure may contain itself."""
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        contents = ()
    return Reading(_new_cell, (), _fill_cell, contents, ("",))


# ---------------------------------------------------------------- functions


def _make_function(code: types.CodeType, namespace: dict[str, Any], closure: Any) -> Any:
    return types.FunctionType(code, namespace, None, None, closure)


_OF_FUNCTIONS = (
    "__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__",
    "__annotate__" if _LAZY_ANNOTATIONS else "__annotations__",
    *(("__type_params__",) if sys.version_info >= (3, 12) else ()),
)  # fmt: skip


def read_function(function: types.FunctionType, namespace: dict[str, Any]) -> Reading:
    """Read a function whose globals are ``namespace``, which the receiver knows as its own."""
    arguments = (function.__code__, namespace, function.__closure__)
    insides = read_insides(function, *_OF_FUNCTIONS)
    return Reading(_make_function, arguments, set_insides, insides, (".", "."), _change_code)


def read_of_module(function: types.FunctionType) -> Reading | None:
    """Read a function that a module's code has made, such as a library's wrapper around one of the notebook's.

    Returns:
        None for a function that goes by its name, or is of no module that could be imported where it arrives.
    """
    module = sys.modules.get(function.__globals__["__name__"])
    if getattr(module, "__spec__", None) is None or vars(module) is not function.__globals__:
        return None
    if _cloudpickle._should_pickle_by_reference(function):
        return None
    arguments = (function.__code__, function.__globals__["__name__"], function.__closure__)
    insides = read_insides(function, *_OF_FUNCTIONS)
    return Reading(_make_of_module, arguments, set_insides, insides, (".", "."), _change_code)


def _make_of_module(code: types.CodeType, module: str, closure: Any) -> Any:
    return _make_function(code, vars(import_or_stand_in(module)), closure)


def _change_code(function: types.FunctionType, code: types.CodeType, *_: Any) -> None:
    function.__code__ = code


# ---------------------------------------------------------------- classes


def _set_class(cls: type, state: Any) -> type:
    if cls not in _COMPLETE or cls in _TOLD_AGAIN:
        _COMPLETE.add(cls)
        _TOLD_AGAIN.discard(cls)
        _cloudpickle._class_setstate(cls, state)
    return cls


def read_class(cls: type) -> Reading | None:
    """Read a class as cloudpickle does, except that where it is known it stays as it is.

    Returns:
        None for a class that goes by reference.
    """
    if isinstance(cls.__module__, str) and cls.__module__ not in sys.modules:
        import_or_stand_in(cls.__module__)  # its public name, which nobody has used yet (``numpy.rec``)
    reduced = _cloudpickle._class_reduce(cls)
    if not isinstance(reduced, tuple):
        return None
    if len(reduced) < 6 or reduced[5] is not _cloudpickle._class_setstate:
        return Reading(*reduced[:2])
    _COMPLETE.add(cls)
    told, slots = reduced[2]  # sorted; and without what a base says, too (``__hash__ = None``)
    inherited = [base.__dict__ for base in cls.__mro__[1:]]
    again = {n for n, v in cls.__dict__.items() if any(base.get(n, reduced) is v for base in inherited)}
    own = {n: told.get(n, value) for n, value in cls.__dict__.items() if n in told or n in again}
    return _with_name_and_slots(
        cls, reduced[0], reduced[1], {**own, **{n: v for n, v in told.items() if n not in own}}, slots
    )


def state_of_class(cls: type) -> dict[str, Any]:
    """Return what cells have put into a class; slots are what they are."""
    slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
    own = ((name, item) for name, item in vars(cls).items() if name not in _OF_PYTHON)
    return {name: item for name, item in own if not isinstance(item, slots)}


def _make_class(constructor: Any, name: str, bases: tuple[Any, ...], keywords: Any, *arguments: Any) -> type:
    """Make a class as cloudpickle does; what its metaclass and bases do with a new class was done where it was made."""
    with _without_hooks(bases):
        if constructor in _COMPLETE:  # a metaclass of the notebook
            return _make_bare_class(constructor, name, bases, keywords, *arguments)
        made: type = _cloudpickle._make_skeleton_class(constructor, name, bases, keywords, *arguments)
    return made


def _make_bare_class(
    constructor: Any, name: str, bases: tuple[Any, ...], keywords: Any, tracker_id: str, extra: Any
) -> type:
    """Make a class without running its metaclass' own methods, which may use what is not here yet."""
    del extra
    python = (types.FunctionType, staticmethod)
    in_c = next(
        c for c in constructor.__mro__ if not isinstance(c.__dict__.get("__new__", _make_class), python)
    )
    made: type = in_c.__new__(constructor, name, types.resolve_bases(bases), dict(keywords))
    if issubclass(constructor, abc.ABCMeta):
        abc._abc_init(made)  # type: ignore[attr-defined]
    return _cloudpickle._lookup_class_or_track(tracker_id, made)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_hooks(bases: tuple[Any, ...]) -> Iterator[None]:
    """Leave out ``__init_subclass__`` of classes by value: what it reads may not be here yet."""
    ancestors = {cls for base in bases for cls in getattr(getattr(base, "__origin__", base), "__mro__", ())}
    with_hooks = [cls for cls in ancestors if "__init_subclass__" in cls.__dict__ and cls in _COMPLETE]
    hooks = [(cls, cls.__dict__["__init_subclass__"]) for cls in with_hooks]
    for cls, _ in hooks:
        type.__delattr__(cls, "__init_subclass__")
    try:
        yield
    finally:
        for cls, hook in hooks:
            type.__setattr__(cls, "__init_subclass__", hook)


def _with_name_and_slots(
    cls: type, constructor: Any, arguments: Any, attributes: dict[str, Any], slots: Any
) -> Reading:
    """Have the class made by :func:`_make_class` with its full name and its slots.

    Of these, cloudpickle forgets the one, and sets the others afterwards, to no effect. ``typing.NamedTuple`` makes slots
    itself, and refuses to be told.
    """
    if constructor is not _cloudpickle._make_skeleton_class:
        return Reading(constructor, arguments, _set_class, (attributes, slots), (".", "."))
    meta, name, bases, keywords, *rest = arguments
    keywords = {**keywords, "__qualname__": cls.__qualname__}
    told = typing.NamedTuple not in cls.__dict__.get("__orig_bases__", ())
    if told and "__slots__" in cls.__dict__:
        keywords["__slots__"] = cls.__dict__["__slots__"]
        others = [pair for pair in attributes.items() if not isinstance(pair[1], types.MemberDescriptorType)]
        attributes = {key: value for key, value in others if key != "__slots__"}
    made = (meta, name, bases, keywords, *rest)
    return Reading(_make_class, made, _set_class, (attributes, slots), (".", "."))


@contextlib.contextmanager
def classes_told_again() -> Iterator[None]:
    """Let classes that arrive be what they are where they come from, though an earlier cell has brought them."""
    _TOLD_AGAIN.update(_COMPLETE)
    try:
        yield
    finally:
        _TOLD_AGAIN.clear()


# ---------------------------------------------------------------- cached functions


def _read_cached_property(cached: functools.cached_property[Any]) -> Reading:
    """Read a ``functools.cached_property``, whose lock (before Python 3.12) cannot travel."""
    state = {name: value for name, value in vars(cached).items() if name not in ("func", "lock")}
    return Reading(functools.cached_property, (cached.func,), _update, (state,), (".",))


def read_cached(cached: Any) -> Reading | None:
    """Read a function under ``functools.lru_cache`` by value; what it cached stays behind."""
    if _cloudpickle._lookup_module_and_qualname(cached) is not None:
        return None
    set_by_it = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"}
    attributes = {key: value for key, value in cached.__dict__.items() if key not in set_by_it}
    arguments = (cached.__wrapped__, *cached.cache_parameters().values())  # maxsize, typed
    return Reading(_make_cached, arguments, _update, (attributes,), (".",))


def _make_cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _update(value: Any, state: tuple[dict[str, Any]]) -> None:
    value.__dict__.update(*state)


READERS: dict[type, Callable[[Any], Reading | None]] = {
    types.CellType: read_cell,
    functools._lru_cache_wrapper: read_cached,
    functools.cached_property: _read_cached_property,
    typing.NewType: lambda made: read_plain(made) if made.__module__ == "__main__" else None,
}
"""What reads objects of these very types; a ``typing.NewType`` of the notebook would go by its name, which is not there yet."""

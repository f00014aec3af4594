"""Functions and classes of earlier cells: which names of the notebook their code uses."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from taas.capture.code_by_value import global_names
from taas.capture.ipython_names import is_of_ipython
from taas.capture.texts import LOOKS_UP, words_of

__all__ = ["names_used_by"]

_FOLLOW_DEPTH = 3
_FOLLOW_WIDTH = 100


def names_used_by(value: Any, namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the globals that the functions and classes of the notebook in ``value`` use."""
    found: set[str] = set()
    _follow(value, namespace, found, set(), _FOLLOW_DEPTH)
    return frozenset(found)


def _follow(value: Any, namespace: Mapping[str, Any], found: set[str], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    go: Callable[[Any], None] = lambda part: _follow(part, namespace, found, seen, depth - 1)  # noqa: E731
    if isinstance(value, types.FunctionType):
        if value.__globals__ is namespace:
            found |= _names_of_code(value.__code__, namespace)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):
                go(cell.cell_contents)
        go(getattr(value, "__wrapped__", None))
    elif isinstance(value, type):
        _follow_class(value, namespace, found, seen)
    elif isinstance(value, types.MethodType):
        go(value.__func__)
        go(value.__self__)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in list(value)[:_FOLLOW_WIDTH]:
            go(item)
    elif isinstance(value, dict):
        for item in list(value.values())[:_FOLLOW_WIDTH]:
            go(item)
    elif not isinstance(value, types.ModuleType):
        _follow_class(type(value), namespace, found, seen)
        for item in list(getattr(value, "__dict__", {}).values())[:_FOLLOW_WIDTH]:
            go(item)


def _follow_class(cls: type, namespace: Mapping[str, Any], found: set[str], seen: set[int]) -> None:
    for base in cls.__mro__:
        if base.__module__ != "__main__" or (id(base) in seen and base is not cls):
            continue
        seen.add(id(base))
        for member in base.__dict__.values():
            for function in (
                member,
                *(getattr(member, a, None) for a in ("__func__", "fget", "fset", "fdel", "func")),
            ):
                if isinstance(function, types.FunctionType):
                    _follow(function, namespace, found, seen, 1)


def _names_of_code(code: types.CodeType, namespace: Mapping[str, Any]) -> set[str]:
    names = set(global_names(code))
    if names & LOOKS_UP:
        names |= {word for text in _constants(code) for word in words_of(text)}
    return {name for name in names if name in namespace and not is_of_ipython(name)}


def _constants(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _constants(constant)

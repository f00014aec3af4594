"""What is bound while objects are being rebuilt: a ``__setstate__`` may use what the notebook has imported.

Names travel one after the other, and methods of the notebook's classes run while their instances are rebuilt. What
such a method reads may come later in the stream. So modules, numbers, texts and plain functions are told ahead, and
stand in until the stream has brought the real ones.
"""

from __future__ import annotations

import contextlib
import importlib
import marshal
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Ahead", "MissingModule", "ahead_of", "bound", "import_or_stand_in", "in_order", "stand_ins"]

Ahead = dict[str, tuple[str, Any]]
"""Names, each with what kind of thing it is, and that thing as plain values."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LONGEST = 4096
_NOT_BOUND = object()


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
        return MissingModule(name, f"{type(error).__name__}: {error}")


def in_order(names: Iterable[str], namespace: dict[str, Any]) -> list[str]:
    """Sort names so that modules, functions and classes come before the objects whose methods may use them."""
    return sorted(names, key=lambda name: not isinstance(namespace[name], _CODE))


_CODE = (types.ModuleType, types.FunctionType, type)


def ahead_of(names: Iterable[str], namespace: dict[str, Any]) -> Ahead:
    """Return what of these names can be told ahead."""
    found = {name: _told(namespace[name], namespace) for name in names}
    return {name: told for name, told in found.items() if told is not None}


def _told(value: Any, namespace: dict[str, Any]) -> tuple[str, Any] | None:
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__) if sys.modules.get(value.__name__) is value else None
    if _is_plain(value):
        return "value", value
    if isinstance(value, types.FunctionType) and value.__globals__ is namespace and not value.__closure__:
        defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
        if all(_is_plain(item) for item in (*defaults[0], *defaults[1].values())):
            return "function", (marshal.dumps(value.__code__), *defaults)
    return None


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and (not isinstance(value, (str, bytes)) or len(value) <= _LONGEST)


def stand_ins(ahead: Ahead, namespace: dict[str, Any]) -> dict[str, Any]:
    """Make what was told ahead; ``namespace`` is the globals of the functions."""
    return {name: _made(kind, told, namespace) for name, (kind, told) in ahead.items()}


def _made(kind: str, told: Any, namespace: dict[str, Any]) -> Any:
    if kind == "module":
        return import_or_stand_in(told)
    if kind == "value":
        return told
    code, defaults, keyword_defaults = told
    function = types.FunctionType(marshal.loads(code), namespace, None, defaults)  # noqa: S302  from our own sender
    function.__kwdefaults__ = keyword_defaults
    return function


@contextlib.contextmanager
def bound(names: dict[str, Any], namespace: dict[str, Any]) -> Iterator[None]:
    """Bind names for a while."""
    before = {name: namespace.get(name, _NOT_BOUND) for name in names}
    namespace.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _NOT_BOUND:
                namespace.pop(name, None)
            else:
                namespace[name] = value

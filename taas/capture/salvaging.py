"""An answer in which an object cannot be rebuilt: all that does not need it is brought back.

A ``__setstate__`` that opens a file of another machine, say. The memo's numbers are those of a stream that is read
whole, so the stream is read on past the object. That is Python's own unpickler in Python: slow, and used after a
first failure only.
"""

from __future__ import annotations

import gc
import pickle
import types
from collections.abc import Callable
from typing import Any, ClassVar

from taas.capture.code_by_value import SETTERS
from taas.capture.pickling import StreamReader

__all__ = ["Salvager"]

_Unpickler: Any = pickle._Unpickler


class _NotMade:
    """Stands for an object that could not be made."""

    def __setstate__(self, state: Any) -> None:
        """Whatever it would have held is lost with it."""


def _making(opcode: bytes, uses: int) -> Callable[[Any], None]:
    """Take the stack's last ``uses`` entries and make something of them."""
    load = _Unpickler.dispatch[opcode[0]]

    def careful(reader: Any) -> None:
        rest = len(reader.stack) - uses
        used = reader.stack[rest:]
        try:
            load(reader)
        except Exception as error:
            del reader.stack[rest:]
            reader.append(reader.lose(_NotMade(), error, because=used[:1]))
            if used and used[0] in SETTERS:
                reader.lose(used[1][0], error)

    return careful


def _filling(opcode: bytes) -> Callable[[Any], None]:
    """Put something into the stack's last entry but those that are put."""
    load = _Unpickler.dispatch[opcode[0]]

    def careful(reader: Any) -> None:
        try:
            load(reader)
        except Exception as error:  # all that is put was taken off the stack first
            reader.lose(reader.stack[-1], error)

    return careful


class Salvager(StreamReader, _Unpickler):
    """Reads a stream past what cannot be rebuilt, and tells what that spoils."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_Unpickler.dispatch,
        **{code[0]: _making(code, uses) for code, uses in (
            (pickle.GLOBAL, 0), (pickle.STACK_GLOBAL, 2), (pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3),
        )},
        **{code[0]: _filling(code) for code in (
            pickle.BUILD, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS,
        )},
    }  # fmt: skip

    def __init__(self, *arguments: Any) -> None:
        self._lost: dict[int, tuple[Any, str]] = {}
        super().__init__(*arguments)

    def lose(self, value: Any, error: Exception, because: list[Any] | None = None) -> Any:
        """Note that an object is not what it was, and why; the first reason stays."""
        known = self._lost.get(id(because[0])) if because else None
        self._lost.setdefault(id(value), (value, known[1] if known else f"{type(error).__name__}: {error}"))
        return value

    def why_lost(self, value: Any, namespace: dict[str, Any]) -> str | None:
        """Return which part of a value could not be rebuilt, or None: it is whole.

        Args:
            value: what was loaded.
            namespace: globals of the notebook's functions, which are no part of anything.
        """
        seen = {id(namespace)}
        waiting = [value]
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if id(part) in self._lost:
                return self._reason(part, whole=part is value)
            if not _is_of_a_library(part, namespace):
                waiting += gc.get_referents(part)
        return None

    def _reason(self, part: Any, *, whole: bool) -> str:
        what = (
            "a part of it" if isinstance(part, _NotMade) else f"an object of {type(part).__qualname__} in it"
        )
        return f"{'it' if whole else what} cannot be rebuilt here ({self._lost[id(part)][1]})"


def _is_of_a_library(value: Any, namespace: dict[str, Any]) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__globals__ is not namespace
    return isinstance(value, (type, types.ModuleType))

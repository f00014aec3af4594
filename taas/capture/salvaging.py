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
from typing import Any, ClassVar, NamedTuple

from taas.capture.code_by_value import SETTERS
from taas.capture.pickling import StreamReader

__all__ = ["Salvager"]

_Unpickler: Any = pickle._Unpickler
_SHARED = (type(None), bool, int, float, complex, str, bytes)
"""Values of these types may be one object in many places."""


class _NotMade:
    """Stands for an object that could not be made."""

    def __setstate__(self, state: Any) -> None:
        """Whatever it would have held is lost with it."""


def _making(opcode: bytes, uses: int | None) -> Callable[[Any], None]:
    """Take the stack's last ``uses`` entries, or all since the mark, and make something of them."""
    load = _Unpickler.dispatch[opcode[0]]

    def careful(reader: Any) -> None:
        rest = 0 if uses is None else len(reader.stack) - uses
        used = reader.stack[rest:]
        setter = bool(used) and any(used[0] is each for each in SETTERS)
        try:
            load(reader)
        except Exception as error:
            if uses is not None:  # what is since a mark was taken off the stack first
                del reader.stack[rest:]
            reader.append(reader.lose(_NotMade(), error, because=used[:1]))
            if setter:
                reader.lose(used[1][0], error)
        else:
            reader.spoil(used[1][0] if setter else reader.stack[-1], used)

    return careful


def _filling(opcode: bytes, puts: int | None) -> Callable[[Any], None]:
    """Put the stack's last ``puts`` entries, or all since the mark, into the one below them."""
    load = _Unpickler.dispatch[opcode[0]]

    def careful(reader: Any) -> None:
        put = reader.stack[0 if puts is None else -puts :]
        try:
            load(reader)
        except Exception as error:  # all that is put was taken off the stack first
            reader.lose(reader.stack[-1], error)
        else:
            reader.spoil(reader.stack[-1], put)

    return careful


class _Loss(NamedTuple):
    """An object that is not what it was, the one in it that could not be rebuilt, and why."""

    value: Any
    culprit: Any
    reason: str


class Salvager(StreamReader, _Unpickler):
    """Reads a stream past what cannot be rebuilt, and tells what that spoils."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_Unpickler.dispatch,
        **{code[0]: _making(code, uses) for code, uses in (
            (pickle.GLOBAL, 0), (pickle.STACK_GLOBAL, 2), (pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3),
            (pickle.TUPLE1, 1), (pickle.TUPLE2, 2), (pickle.TUPLE3, 3), (pickle.TUPLE, None), (pickle.FROZENSET, None),
        )},
        **{code[0]: _filling(code, puts) for code, puts in (
            (pickle.BUILD, 1), (pickle.APPEND, 1), (pickle.SETITEM, 2),
            (pickle.APPENDS, None), (pickle.SETITEMS, None), (pickle.ADDITEMS, None),
        )},
    }  # fmt: skip

    def __init__(self, *arguments: Any) -> None:
        self._lost: dict[int, _Loss] = {}
        super().__init__(*arguments)

    def lose(self, value: Any, error: Exception, because: list[Any] | None = None) -> Any:
        """Note that an object is not what it was, and why; the first reason stays."""
        known = self._lost.get(id(because[0])) if because else None
        reason = known.reason if known else f"{type(error).__name__}: {error}"
        self._lost.setdefault(id(value), _Loss(value, value, reason))
        return value

    def spoil(self, value: Any, parts: list[Any]) -> None:
        """Note that an object was made of parts, which it may hide (an array of objects) or have copied from."""
        known = next((loss for part in parts if (loss := self._lost.get(id(part))) is not None), None)
        if known is not None and type(value) not in _SHARED:
            self._lost.setdefault(id(value), known._replace(value=value))

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
        loss = self._lost[id(part)]
        culprit = loss.culprit
        what = (
            "a part of it"
            if isinstance(culprit, _NotMade)
            else f"an object of {type(culprit).__qualname__} in it"
        )
        return f"{'it' if whole and culprit is part else what} cannot be rebuilt here ({loss.reason})"


def _is_of_a_library(value: Any, namespace: dict[str, Any]) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__globals__ is not namespace
    return isinstance(value, (type, types.ModuleType))

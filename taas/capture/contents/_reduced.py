"""Whatever has a pickling protocol of its own, by its reduced state."""

from __future__ import annotations

import copyreg
import hashlib
import io
from collections.abc import Callable
from typing import Any

from taas.capture.code_by_value import BasePickler
from taas.capture.contents._python_objects import AttributesKind
from taas.capture.contents.kind import CannotChangeError, Kind


class _Hash(io.RawIOBase):
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Digester(BasePickler):
    """Digests a value; objects that travelled count by their number, not by what is in them."""

    def __init__(self, number_of: Callable[[Any], int | None]) -> None:
        self._hash = _Hash()
        super().__init__(self._hash, protocol=4)
        self._number_of = number_of

    def persistent_id(self, value: Any) -> int | None:
        return self._number_of(value)

    def digest(self, value: Any) -> bytes:
        self.dump(value)
        return self._hash.hash.digest()


class ReducedKind(Kind):
    """Anything with a pickling protocol of its own: compared by digests of how to make it, and of its state."""

    def __init__(self, number_of: Callable[[Any], int | None]) -> None:
        self._number_of = number_of

    def _reduce(self, value: Any) -> tuple[Any, Any]:
        reducer = copyreg.dispatch_table.get(type(value))
        reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return reduced, None
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        return (maker, arguments), (
            state,
            None if items is None else list(items),
            None if pairs is None else list(pairs),
        )

    def take(self, value: Any) -> Any:
        made, state = self._reduce(value)
        return _Digester(self._number_of).digest(made), _Digester(self._number_of).digest(state)

    def same(self, before: Any, after: Any) -> bool:
        return bool(before == after)

    def message(self, value: Any, before: Any, after: Any) -> Any:
        made, state = self._reduce(value)
        if before[0] == after[0]:
            return None, state
        if not _is_plain(type(value)) or isinstance(made, str):
            raise CannotChangeError("it can only be made anew")
        return made, state

    def put(self, value: Any, contents: Any) -> None:
        made, state = contents
        if made is None:
            self._set(value, state)
            return
        maker, arguments = made
        twin = maker(*arguments)
        self._set(twin, state)
        plain = AttributesKind(type(value))
        plain.put(value, plain.take(twin))

    @staticmethod
    def _set(value: Any, contents: Any) -> None:
        state, items, pairs = contents
        if items is not None:
            value.clear()
            value.extend(items)
        if pairs is not None:
            value.clear()
            for key, item in pairs:
                value[key] = item
        if state is None:
            return
        if hasattr(value, "__setstate__"):
            value.__setstate__(state)
            return
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        value.__dict__.update(attributes or {})
        for name, item in (slots or {}).items():
            setattr(value, name, item)


def _is_plain(cls: type) -> bool:
    """Tell whether instances consist of ``__dict__`` and ``__slots__`` alone, with no state in C."""
    room = object.__basicsize__ + 8 * (2 + len(copyreg._slotnames(cls) or ()))  # type: ignore[attr-defined]
    return cls.__itemsize__ == 0 and cls.__basicsize__ <= room

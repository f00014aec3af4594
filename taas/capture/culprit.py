"""Which part of an object cannot be pickled: ``trainer.callbacks[2].conn``, a ``sqlite3.Connection``."""

from __future__ import annotations

import collections
import reprlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["Culprit", "find_culprit", "parts", "path_to"]

_DEPTH = 40
_WIDTH = 10_000


class Culprit(NamedTuple):
    """The innermost thing that cannot be pickled.

    Attributes:
        path: how to get there from the variable, e.g. ``trainer.inner['conn'][1]``.
        kind: its type's full name.
        reason: what pickle says.
    """

    path: str
    kind: str
    reason: str

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _ADVICE.get(
            self.kind.rpartition(".")[2],
            "make it inside the cell, or give the class that holds it a __getstate__ that leaves it out",
        )


_ADVICE = {
    "generator": "make it inside the cell, or a list of it before",
    "coroutine": "await it before the cell, or inside it",
    "TextIOWrapper": "open it inside the cell",
    "BufferedReader": "open it inside the cell",
    "BufferedWriter": "open it inside the cell",
    "Connection": "connect inside the cell",
    "socket": "connect inside the cell",
    "_MultiProcessingDataLoaderIter": "pass the DataLoader and call iter() inside the cell",
}


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (how to write it, object) for what an object refers to by itself."""
    if isinstance(value, dict):
        for key, item in list(value.items())[:_WIDTH]:
            yield f"[{reprlib.repr(key)}]", item
            if not isinstance(key, (str, int)):
                yield f" key {reprlib.repr(key)}", key
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        for number, item in enumerate(list(value)[:_WIDTH]):
            yield f"[{number}]", item
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, types.CellType):
        try:
            yield "", value.cell_contents
        except ValueError:
            return
    if not isinstance(value, (type, types.FunctionType, types.ModuleType)):
        yield from _attributes(value)
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor) and value.is_leaf:
        yield ".grad", value.grad


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f" closure variable {name}", cell
    for number, item in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{number}]", item
    for name, item in (function.__kwdefaults__ or {}).items():
        yield f".__kwdefaults__[{name!r}]", item
    for name, item in function.__dict__.items():
        yield f".{name}", item


def _parts_of_class(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the notebook's classes, which travel with a class and so with its instances."""
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        if cls.__module__ == "__main__":
            for name, item in list(cls.__dict__.items()):
                if not name.startswith("__") and not isinstance(item, _SLOTS):
                    yield f".{name}", item


_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for name, item in list(getattr(value, "__dict__", {}).items())[:_WIDTH]:
        yield f".{name}", item
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def find_culprit(name: str, value: Any, new_pickler: Callable[[], Any]) -> Culprit | None:
    """Find what in ``value`` cannot be pickled, going down to the innermost part that fails by itself.

    Args:
        name: how the path begins.
        value: an object that couldn't be pickled.
        new_pickler: makes a pickler as the one that failed.

    Returns:
        None where ``value`` can be pickled after all.
    """
    reason = _failure(value, new_pickler)
    if reason is None:
        return None
    seen = {id(value)}
    for _ in range(_DEPTH):
        for label, part in (*parts(value), *_parts_of_class(value)):
            if id(part) in seen or isinstance(part, (str, int, float, type(None))):
                continue
            seen.add(id(part))
            inner = _failure(part, new_pickler)
            if inner is not None:
                name, value, reason = name + label, part, inner
                break
        else:
            break
    cls = type(value)
    kind = (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )
    return Culprit(name, kind, reason)


def _failure(value: Any, new_pickler: Callable[[], Any]) -> str | None:
    try:
        new_pickler().dump(value)
    except Exception as error:  # whatever a user's __reduce__ or __getstate__ raises
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def path_to(target: Any, roots: dict[str, Any]) -> str:
    """Return how to write ``target``, found breadth first from named objects; its type where there is no way."""
    waiting = collections.deque(roots.items())
    seen = {id(value) for value in roots.values()}
    while waiting and len(seen) < _WIDTH * _DEPTH:
        path, value = waiting.popleft()
        if value is target:
            return path
        for label, part in parts(value):
            if id(part) not in seen and not isinstance(part, (str, int, float, type, types.ModuleType)):
                seen.add(id(part))
                waiting.append((path + label, part))
    return f"a {type(target).__qualname__}"

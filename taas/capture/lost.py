"""What cannot travel, in words: which part of an object it is, why, and what to do."""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from taas.capture.heap import failure_of
from taas.capture.reader import Reader
from taas.capture.reading import ATOMS, Reading
from taas.capture.tensors import ONLY_A_SHARD

_DEPTH = 40
_WIDTH = 10_000

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
_OTHER_ADVICE = "make it inside the cell, or give the class that holds it a __getstate__ that leaves it out"


class Culprit(NamedTuple):
    """The innermost thing that cannot be pickled: where it is (``trainer.inner['conn'][1]``), what, why, what to do."""

    path: str
    kind: str
    reason: str
    advice: str


def culprit_of(
    name: str, value: Any, namespace: dict[str, Any], write: Callable[[Any], Exception | None]
) -> Culprit | None:
    """Find what in ``value`` cannot be pickled, going down to the innermost part that fails by itself.

    Args:
        name: how the path begins.
        value: the object.
        namespace: the globals of the notebook's functions.
        write: pickles an object as it was tried; raises, or returns, why it cannot.

    Returns:
        None where ``value`` can be pickled.
    """
    reason = _failure(value, write)
    if reason is None:
        return None
    paths, seen = Paths(Reader(namespace)), {id(value): value}
    for _ in range(_DEPTH):
        for label, part in islice(paths.parts(value), _WIDTH):
            inner = None if id(part) in seen else _failure(part, write)
            seen[id(part)] = part
            if inner is not None:
                name, value, reason = name + label, part, inner
                break
        else:
            break
    cls = type(value)
    own = cls.__module__ in ("builtins", "__main__")
    kind = cls.__qualname__ if own else f"{cls.__module__}.{cls.__qualname__}"
    return Culprit(name, kind, reason, _ADVICE.get(cls.__name__, _OTHER_ADVICE))


def culprit_in_heap(name: str, value: Any, namespace: dict[str, Any], **how: Any) -> Culprit | None:
    """Find what in a value cannot travel as names do; ``how`` its reader is made."""
    return culprit_of(
        name, value, namespace, lambda part: failure_of(part, namespace, Reader(namespace, **how))
    )


def _failure(value: Any, write: Callable[[Any], Exception | None]) -> str | None:
    try:
        error = write(value)
    except Exception as raised:  # whatever a user's __reduce__ or __getstate__ raises
        error = raised
    return None if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]


def in_few_lines(lost: Iterable[str], sharded: Collection[str] = ()) -> list[str]:
    """Say once of names that ranks have shards of that they have: whatever parts of them could not come, it is for that."""
    names = {line: re.match(r"\w*", line)[0] for line in lost}  # type: ignore[index]
    shards = {name: None for line, name in names.items() if name in sharded or ONLY_A_SHARD in line}
    once = [f"{', '.join(shards)}: {ONLY_A_SHARD}"] if shards else []
    return once + [line for line, name in names.items() if name not in shards]


# ---------------------------------------------------------------- ways through objects


class Paths:
    """Finds ways through objects, and how they are written: ``trainer.callbacks[2].conn``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """Return what an object holds, and how each is written behind it; nothing where its own protocol fails."""
        try:
            found = list(self._parts(value))
        except Exception:  # whatever a user's own protocol raises: there is no way through it
            return []
        return [(label, part) for label, part in found if type(part) not in ATOMS]

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        if type(value) in (list, tuple, set, frozenset):
            yield from ((f"[{n}]", part) for n, part in enumerate(value))
        elif type(value) is dict:
            yield from _entries(value.keys(), value.values())
        elif isinstance(value, type) and value.__module__ == "__main__":
            yield from ((f".{name}", part) for name, part in vars(value).items() if name[:2] != "__")
            yield from (("", base) for base in value.__bases__)
        elif (reading := self._reader.read(value)) is not None:
            yield from _of_reading(value, reading)

    def walk(self, roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield all objects in some named ones, breadth first and each once, and how they are written."""
        waiting, seen = deque(roots.items()), dict[int, Any]()
        while waiting:
            path, value = waiting.popleft()
            if id(value) not in seen:
                seen[id(value)] = value
                yield path, value
                waiting += ((path + label, part) for label, part in self.parts(value))

    def path_to(self, target: Any, roots: Mapping[str, Any]) -> str:
        """Return how to write ``target``, beginning at named objects; its type where there is no way."""
        found = (path for path, value in self.walk(roots) if value is target)
        return next(found, f"a {type(target).__qualname__}")


def _entries(keys: Iterable[Any], items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for key, item in zip(keys, items, strict=True):
        written = repr(key)[:40] if type(key) in ATOMS else f"a {type(key).__qualname__}"
        yield f" key {written}", key
        yield f"[{written}]", item


def _of_reading(value: Any, reading: Reading) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" closure variable {name}", cell) for name, cell in closure)
    else:
        arguments = enumerate(reading.arguments)
        yield from (
            ("" if isinstance(item, (type, tuple)) else f" argument {n}", item) for n, item in arguments
        )
    for label, part in zip(reading.labels, reading.state or (), strict=False):
        yield from _of_part(label, part)


def _of_part(label: str, part: Any) -> Iterator[tuple[str, Any]]:
    if label == "." and type(part) is dict:
        yield from ((f".{name}", item) for name, item in part.items())
    elif label == "[]":
        yield from ((f"[{n}]", item) for n, item in enumerate(part or ()))
    elif label == "{}":
        half = len(part or ()) // 2
        yield from _entries((part or ())[:half], (part or ())[half:])
    else:
        yield " state" if label == "." else label, part

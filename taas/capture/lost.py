"""What cannot travel, in words: which part of an object it is, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any, NamedTuple

from taas.capture.heap import Paths
from taas.capture.reader import Reader
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

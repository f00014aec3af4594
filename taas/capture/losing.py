"""What is lost: which part of an object cannot be pickled, and what cannot be rebuilt where it arrives.

:class:`Paths` finds ways through objects, and how they are written: ``trainer.callbacks[2].conn``. In an answer, every
object is made and filled through :class:`Losses`. A ``__setstate__`` that opens a file of another machine costs its
object, with all that needs it, and nothing else; the stream goes on.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import re
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from taas.capture.looking import Looker
from taas.capture.reader import Reader
from taas.capture.reading import is_atom
from taas.capture.tensors import ONLY_A_SHARD

_UNGUARDED = frozenset({list, dict, set, tuple, frozenset})
"""What pickle itself makes."""
_CODE = (type, types.FunctionType, types.ModuleType)
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


class Paths:
    """Finds ways through objects of a namespace; those that are ``known`` by their ids, an object's ``__dict__`` say, are met."""

    def __init__(self, namespace: dict[str, Any], known: Container[int] = ()) -> None:
        self._namespace = namespace
        self._looker = Looker(Reader(namespace), known, sample="none", into_classes=True)

    def parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield what an object holds, and how it is written; nothing where its own protocol fails."""
        with contextlib.suppress(Exception):  # whatever a user's __reduce__ raises
            for label, part in self._looker.look(value).parts:
                if not is_atom(part) and part is not self._namespace:
                    yield label, part

    def walk(self, roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield all objects in some others, breadth first and each once, and how they are written."""
        waiting = collections.deque(roots)
        seen: dict[int, Any] = {}
        while waiting:
            path, value = waiting.popleft()
            if id(value) not in seen:
                seen[id(value)] = value
                yield path, value
                waiting += ((path + label, part) for label, part in self.parts(value))

    def owners(
        self, roots: Iterable[Any], targets: Collection[int], before: Callable[[Any], Iterable[Any]]
    ) -> dict[int, dict[int, Any]]:
        """Return the outermost objects that some others belong to, by ids, each with all that is in it, and was ``before``.

        Nothing belongs to a plain container, or to code.
        """
        objects, parts = {id(root): root for root in roots}, dict[int, list[int]]()
        waiting = [*objects]
        while waiting:
            value = objects[identity := waiting.pop()]
            held = [*(part for _, part in self.parts(value)), *before(value)]
            new = {id(part): part for part in held if not isinstance(part, _CODE)}
            parts[identity] = [*new]
            waiting += new.keys() - objects.keys()
            objects |= new
        reaching = {*targets}
        while more := {n for n, held in parts.items() if n not in reaching and not reaching.isdisjoint(held)}:
            reaching |= more
        found: dict[int, dict[int, Any]] = {}
        waiting, seen = [id(root) for root in roots if id(root) in reaching], set[int]()
        while waiting:
            identity = waiting.pop()
            if type(objects[identity]) not in _UNGUARDED:
                found[identity] = {n: objects[n] for n in _reached(identity, parts)}
            elif identity not in seen:
                waiting += reaching.intersection(parts[identity])
            seen.add(identity)
        return found

    def path_to(self, target: Any, roots: dict[str, Any]) -> str:
        """Return how to write ``target``, beginning at named objects; its type where there is no way."""
        found = islice(self.walk(roots.items()), _WIDTH * _DEPTH)
        of = (path for path, v in found if v is target or getattr(v, "__dict__", None) is target)
        return next(of, f"a {type(target).__qualname__}")

    def culprit(self, name: str, value: Any, write: Callable[[Any], Exception | None]) -> Culprit | None:
        """Find what in ``value`` cannot be pickled, going down to the innermost part that fails by itself.

        Args:
            name: how the path begins.
            value: the object.
            write: pickles an object as it was tried; raises, or returns, why it cannot.

        Returns:
            None where ``value`` can be pickled.
        """
        reason = _failure(value, write)
        if reason is None:
            return None
        seen = {id(value): value}
        for _ in range(_DEPTH):
            for label, part in islice(self.parts(value), _WIDTH):
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


def _reached(start: int, parts: dict[int, list[int]]) -> set[int]:
    found, waiting = {start}, [start]
    while waiting:
        new = {*parts.get(waiting.pop(), ())} - found
        found |= new
        waiting += new
    return found


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


# ---------------------------------------------------------------- what cannot be rebuilt


def make(constructor: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Make an object; an unpickler that keeps :class:`Losses` has its own for it."""
    return constructor(*arguments)


def fill(value: Any, state: tuple[Callable[..., Any], Any]) -> None:
    """Give an object its state."""
    setter, inner = state
    setter(value, inner)


class Lost:
    """Stands for an object that could not be rebuilt."""

    def __call__(self, *_: Any) -> Lost:
        """Lose what would be made with it, too."""
        return self


class _Loss(NamedTuple):
    """An object that could not be rebuilt, what it is called in what holds it, and why."""

    value: Any
    what: str
    reason: str


class Losses:
    """Makes and fills the objects of a stream, and notes which could not be rebuilt; a namespace is no part of anything."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._lost: dict[int, _Loss] = {}
        """By the id of an object: its loss, or that of a part of it."""
        self._kept: list[Any] = []

    def make(self, constructor: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Make an object, or what stands for it."""
        because = self._find((constructor, arguments))
        try:
            value = constructor(*arguments)
        except BaseException as error:  # whatever a user's own protocol raises
            return self._lose(Lost(), "a part of it", error, because)
        return value if because is None else self._note(value, because)

    def fill(self, value: Any, state: tuple[Callable[..., Any], Any]) -> None:
        """Give an object its state, as far as there is one."""
        setter, inner = state
        because = self._find(inner)
        try:
            if id(value) not in self._lost:
                setter(value, inner)
        except BaseException as error:  # whatever a user's own protocol raises
            self._lose(value, f"an object of {type(value).__qualname__} in it", error, because)
            with contextlib.suppress(TypeError):  # so that it can be a key, whatever its class' hash needs
                object.__setattr__(value, "__class__", Lost)
        else:
            if because is not None:
                self._note(value, because)

    def missing(self, name: str, error: Exception) -> Any:
        """Return what stands for a class or function that is not here."""
        return self._lose(Lost(), name, error, None)

    def _lose(self, value: Any, what: str, error: BaseException, because: _Loss | None) -> Any:
        return self._note(value, because or _Loss(value, what, f"{type(error).__name__}: {error}"))

    def _note(self, value: Any, loss: _Loss) -> Any:
        self._kept.append(value)
        self._lost.setdefault(id(value), loss)
        return value

    def why(self, value: Any) -> str | None:
        """Return which part of a value could not be rebuilt, or None: it is whole."""
        if (loss := self._find(value, deep=True)) is None:
            return None
        return f"{'it' if loss.value is value else loss.what} cannot be rebuilt here ({loss.reason})"

    def _find(self, value: Any, *, deep: bool = False) -> _Loss | None:
        """Find a loss in a value; objects whose parts are lost are known as such, save those in a cycle."""
        seen = {id(self._namespace), id(self._lost), id(self._kept)}
        waiting = [value] if self._lost else []
        while waiting:
            part = waiting.pop()
            if id(part) in self._lost:
                return self._lost[id(part)]
            opened = type(part) in _UNGUARDED or (deep and not self._is_of_a_library(part))
            if opened and id(part) not in seen:
                waiting += gc.get_referents(part)
            seen.add(id(part))
        return None

    def _is_of_a_library(self, value: Any) -> bool:
        if isinstance(value, types.FunctionType):
            return value.__globals__ is not self._namespace
        return isinstance(value, (type, types.ModuleType))

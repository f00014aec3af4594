"""A rank's side: names out of a payload before the cell, what changed into an answer after it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.capture.ahead import ahead_of, in_order, stand_ins
from taas.capture.applying import NOTHING
from taas.capture.contents.kind import CannotChangeError, Kind
from taas.capture.contents.kinds import Kinds, memory_of
from taas.capture.culprit import find_culprit, parts, path_to
from taas.capture.ipython_names import is_of_ipython
from taas.capture.memory import candidates, differing, view_of
from taas.capture.payload import FileMemory, check_versions, read_pickle, read_preface, write_file
from taas.capture.pickling import Pickler, Unpickler
from taas.capture.quiet import no_collection
from taas.capture.surroundings import Surroundings, not_brought
from taas.capture.tensors import join_devices_at_first_step
from taas.errors import CaptureError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Arrival", "arrive"]


class _FirstFailureError(Exception):
    """Something cannot be pickled: start again, carefully."""


class Arrival:
    """The captured names in a rank, and what has to be known to send back what changes.

    Attributes:
        names: names that arrived.
        left_behind: names that the cell may need and that could not travel, each with its reason.
    """

    def __init__(
        self, fd: int, namespace: dict[str, Any], memory: FileMemory, preface: dict[str, Any]
    ) -> None:
        self.names = memory.header.names
        self.left_behind: dict[str, str] = preface["left behind"]
        self._fd = os.dup(fd)
        self._memory = memory
        self._returned: list[str] | None = preface["returned"]
        self._cells: dict[str, int] = preface["cells"]
        self._future: int = preface["future"]
        self._cell_numbers: dict[str, int] = {}
        self._before: dict[int, tuple[Kind, Any]] = {}
        self._numbers: dict[int, int] | None = None
        self._unreadable: dict[int, str] = {}
        self._kinds = Kinds(self._number_of)
        self._namespace = namespace
        namespace.update(stand_ins(preface["ahead"], namespace))

    def _load(self, stream: bytes) -> None:
        unpickler = Unpickler(stream, [self._namespace], 1, self._memory, self._memory.buffers())
        for name in self.names:
            try:
                key, value = unpickler.load()
            except Exception as error:
                raise CaptureError(
                    f"{name!r} cannot be rebuilt in the ranks: {type(error).__name__}: {error}. Ranks import the "
                    f"project's modules as their files are now; if one changed since the notebook imported it, "
                    f"reload it there and make {name!r} again."
                ) from error
            self._namespace[key] = value
        self._unpickler = unpickler

    @functools.cached_property
    def _objects(self) -> list[Any]:
        """The objects that travelled, by number: the unpickler's memo, which has no gaps."""
        return list(self._unpickler.memo.copy().values())

    def _number_of(self, value: Any) -> int | None:
        if self._numbers is None:
            self._numbers = {id(v): n for n, v in reversed(list(enumerate(self._objects)))}
        return self._numbers.get(id(value))

    def dress(self, shell: InteractiveShell) -> None:
        """Tell a rank's shell the numbers of earlier cells, for tracebacks, and what they imported from the future."""
        shell.compile.flags |= self._future
        shell.compile._filename_map.update(self._cells)
        self._cell_numbers = shell.compile._filename_map

    def mark(self) -> None:
        """Take the state that changes are found against; call it again right before the cell runs."""
        with no_collection():
            self._before = self._take()
        self._names_before = dict(self._namespace)
        self._surroundings = Surroundings(cuda=self._memory.device is not None)

    def _take(self) -> dict[int, tuple[Kind, Any]]:
        of = self._kinds.of
        found: dict[int, tuple[Kind, Any]] = {}
        for number, value in enumerate(self._objects):
            kind = of(type(value))
            if kind is not None and number:
                try:
                    found[number] = kind, kind.take(value)
                except Exception as error:  # a user's __getstate__ may raise anything: it cannot come back
                    self._unreadable[number] = f"{type(error).__name__}: {error}"
        return found

    # ------------------------------------------------------------ the answer

    def pack_answer(self, namespace: dict[str, Any], value: Any = NOTHING) -> int:
        """Write what the cell changed into a sealed memfd; a rank with a GPU has waited for it before.

        Args:
            namespace: the rank's names after the cell.
            value: the last expression's value.

        Returns:
            The descriptor, which the caller owns.
        """
        with no_collection():
            try:
                return _Answer(self, namespace, value, careful=False).write()
            except _FirstFailureError:
                return _Answer(self, namespace, value, careful=True).write()

    def close(self) -> None:
        """Give up the payload's descriptor; no answer can be packed afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Answer:
    """One attempt to write an answer."""

    def __init__(self, arrival: Arrival, namespace: dict[str, Any], value: Any, *, careful: bool) -> None:
        self._arrival, self._namespace, self._value, self._careful = arrival, namespace, value, careful
        self._lost: list[str] = []
        self._replaced: set[int] = set()
        self._regions: set[int] | None = None
        self._kept: list[Any] = []
        self._returned = None if arrival._returned is None else set(arrival._returned)

    def write(self) -> int:
        messages = self._messages()
        arrival = self._arrival
        rebound = self._rebound()
        anything = messages or rebound or self._value is not NOTHING
        seeds = [object() if id(v) in self._replaced else v for v in arrival._objects] if anything else []
        self._pickler = self._new_pickler(seeds)
        names = [
            name
            for name in in_order(rebound, rebound)
            if self._dump((name, rebound[name]), name, rebound[name])
        ]
        has_value = (
            self._value is not NOTHING and self._returned is None and self._dump(self._value, None, None)
        )
        contents = 0
        for number, message in messages:
            contents += self._dump((number, message), number, message)
        patches = tuple(self._patches())
        sources = self._pickler.sources()
        surroundings = self._surroundings()
        preface = {
            "sources": sources,
            "ahead": ahead_of(names, self._namespace),
            "cells": {file: n for file, n in arrival._cell_numbers.items() if file in sources},
            "lost": self._lost,
            "value": has_value,
            "contents": contents,
            "deleted": self._deleted(),
            "surroundings": surroundings,
        }
        fd, _ = write_file(self._pickler, tuple(names), preface, patches)
        return fd

    def _surroundings(self) -> dict[str, Any] | None:
        if self._returned is not None:
            return None
        try:
            return self._arrival._surroundings.changes()
        except Exception as error:  # a cell may have replaced whatever is asked
            self._lost.append(not_brought(error))
            return None

    def _new_pickler(self, seeds: list[Any]) -> Pickler:
        return Pickler(self._namespace, seeds=seeds, resident=self._arrival._memory.resident(), unwrap=True)

    def _dump(self, record: Any, what: str | int | None, value: Any) -> bool:
        checkpoint = self._pickler.checkpoint() if self._careful else None
        try:
            self._pickler.dump(record)
        except Exception as error:
            if checkpoint is None:
                raise _FirstFailureError from None
            self._pickler.roll_back(checkpoint)
            if what is not None:
                self._lost.append(self._why(what, value, error))
            return False
        return True

    def _why(self, what: str | int, value: Any, error: Exception) -> str:
        name = what if isinstance(what, str) else path_to(self._arrival._objects[what], self._visible())
        culprit = find_culprit(name, value, lambda: self._new_pickler(self._arrival._objects))
        if culprit is None:
            return f"{name}: {type(error).__name__}: {error}"
        return f"{name}: {culprit.path} is a {culprit.kind}, which cannot be pickled ({culprit.reason})"

    def _visible(self) -> dict[str, Any]:
        return {name: value for name, value in self._namespace.items() if not is_of_ipython(name)}

    def _rebound(self) -> dict[str, Any]:
        before = self._arrival._names_before
        visible = self._visible()
        for name in self._arrival._returned or ():
            if name not in visible and name not in self._arrival.names:
                self._lost.append(f"{name}: --return asks for it, and the cell made no such name")
        return {
            name: value
            for name, value in visible.items()
            if (name not in before or before[name] is not value or id(value) in self._replaced)
            and (self._returned is None or name in self._returned)
        }

    def _deleted(self) -> list[str]:
        return [
            name
            for name in self._arrival.names
            if name not in self._namespace and (self._returned is None or name in self._returned)
        ]

    def _messages(self) -> list[tuple[int, Any]]:
        arrival = self._arrival
        found: list[tuple[int, Any]] = []
        wanted = self._reachable()
        for number, (kind, before) in arrival._before.items():
            value = arrival._objects[number]
            if wanted is not None and id(value) not in wanted:
                continue
            try:
                after = kind.take(value)
                if not kind.same(before, after):
                    found.append((number, kind.message(value, before, after)))
            except CannotChangeError:
                self._replaced.add(id(value))
            except Exception as error:
                self._lost.append(f"{path_to(value, self._visible())}: {type(error).__name__}: {error}")
        if self._replaced:
            sent = {number for number, _ in found}
            for number, (kind, before) in arrival._before.items():
                value = arrival._objects[number]
                if number not in sent and any(id(part) in self._replaced for _, part in parts(value)):
                    found.append((number, kind.message(value, before, kind.take(value))))
        return found

    def _reachable(self) -> set[int] | None:
        """Return the ids of all objects in the names that are returned, and note their memory; None for all."""
        if self._returned is None:
            return None
        seen: set[int] = set()
        resident = self._arrival._memory.resident()
        self._regions = set()
        waiting = [value for name, value in self._visible().items() if name in self._returned]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            waiting += [part for _, part in parts(value)]
            piece = resident.find(*memory_of(value))
            if piece is not None:
                self._regions.add(piece.region)
        return seen

    def _patches(self) -> Iterator[tuple[int, int, memoryview]]:
        memory = self._arrival._memory
        original = FileMemory(self._arrival._fd, device=None)
        moved = memory.on_device()
        for number, region in enumerate(memory.header.regions):
            if self._regions is not None and number not in self._regions:
                continue
            spans = region.spans
            if number in moved:
                host = moved[number].cpu()
                self._kept.append(host)  # until it is written
                address = host.data_ptr()
            else:
                address = memory.address + region.offset
                spans = candidates(address, region.nbytes, region.spans)
            for start, end in differing(address, original.address + region.offset, spans):
                yield number, start, view_of(address + start, end - start)


def arrive(
    fd: int,
    namespace: dict[str, Any],
    *,
    device: str | None,
    project: Path | None = None,
    answers: bool = True,
) -> Arrival:
    """Unpack a payload in a rank.

    Args:
        fd: the payload; may be closed afterwards.
        namespace: the rank's names; functions of the notebook get it as their globals.
        device: where captured CUDA tensors land, e.g. ``cuda:0``; None for host memory.
        project: first entry of ``sys.path``; None for the notebook's.
        answers: whether this rank's names will be sent back; False saves the notes that needs.

    Raises:
        VersionMismatch: versions differ; nothing was unpickled.
        CaptureError: an object cannot be rebuilt here.
    """
    memory = FileMemory(fd, device=device)
    check_versions(memory.header)
    preface = read_preface(fd)
    Surroundings.enter(preface["surroundings"], str(project or preface["project"]))
    for name, (size, lines) in preface["sources"].items():
        linecache.cache[name] = (size, None, lines, name)
    for name in preface["submodules"]:
        with contextlib.suppress(ImportError):  # it is named where the cell uses it
            importlib.import_module(name)
    arrival = Arrival(fd, namespace, memory, preface)
    with no_collection():
        arrival._load(read_pickle(fd))
    Surroundings.settle(preface["surroundings"], device)
    if device is not None:
        join_devices_at_first_step()
    if answers:
        arrival.mark()
    return arrival

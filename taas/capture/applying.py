"""Rank 0's answer into a notebook: objects changed in place, names rebound."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import Any

from taas.capture import process_state
from taas.capture.changes import apply_change
from taas.capture.fingerprint import Fingerprints
from taas.capture.libraries import join_devices
from taas.capture.losing import Losses, Paths, in_few_lines
from taas.capture.memory import MemoryTable, Stretch, overlapping
from taas.capture.of_ipython import is_of_ipython
from taas.capture.payload import Payload
from taas.capture.pickling import Table, no_collection
from taas.capture.reader import memory_of
from taas.capture.reading import MissingModule, is_atom
from taas.wording import first_line


class _Nothing:
    """There was no value, or it could not travel."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING = _Nothing()


@dataclass
class Applied:
    """What an answer did.

    Attributes:
        rebound: names that are new or have a new object.
        deleted: names that the cell deleted.
        changed: how many objects were changed in place.
        lost: what could not be brought back, a line each.
        value: the last expression's value, or :data:`NOTHING`.
        cells: file names of the cells whose functions came, with their numbers ``In[n]``.
        there: names that rank 0 has.
        own: of these, names that are something else there.
        wrapped: of these, names that have a parallel wrapper, or shards, there of what they have here.
        table: the objects that both know now.
        memory: the memory that both know now, by region.
        next_region: the number of the region that comes next.
    """

    rebound: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    changed: int = 0
    lost: list[str] = field(default_factory=list)
    value: Any = NOTHING
    cells: dict[str, int] = field(default_factory=dict)
    there: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    wrapped: list[str] = field(default_factory=list)
    table: Table | None = field(default=None, repr=False)
    memory: dict[int, Stretch] = field(default_factory=dict, repr=False)
    next_region: int = 0


def apply_answer(fd: int, namespace: dict[str, Any], table: Table, known: dict[int, Stretch]) -> Applied:
    """Load an answer and do what it says.

    Everything is loaded before any object is changed. New names are bound as they come, for methods that rebuild others.

    Args:
        fd: the answer.
        namespace: where names are rebound.
        table: the objects that travelled.
        known: the memory that travelled, by region.
    """
    with no_collection():
        answer = _Answer(fd, namespace, table, known)
        answer.load()
        return answer.apply()


class _Answer:
    """What stands in an answer's parts, and what is done with it."""

    def __init__(self, fd: int, namespace: dict[str, Any], table: Table, known: dict[int, Stretch]) -> None:
        self._fd, self._namespace = fd, namespace
        self._payload = Payload(fd)
        self._preface = self._payload.preface
        self._before = table
        self._table = table.copy() if self._payload.header.stream else Table(namespace)
        self._numbers = self._table.numbers()  # before it learns what comes
        self._known = known
        self._memory = self._payload.brought(known)
        self._losses = Losses(namespace)
        self._changes: list[tuple[int, Any, Any]] = []
        self._refused: dict[int, Any] = {}
        self._applied = Applied(lost=list(self._preface["lost"]), cells=self._preface["cells"])

    # ------------------------------------------------------------ loading

    def load(self) -> None:
        """Load all parts; what is not whole is left out, and told."""
        self._payload.take_sources()
        for name in self._preface["reloaded"]:
            try:
                importlib.reload(sys.modules[name])
            except BaseException as error:  # what a module's own code raises
                self._lose(f"the reload of {name}", f"{type(error).__name__}: {error}")
        for name, read in self._payload.parts(self._memory, self._table, self._losses):
            what = "new contents of some objects" if name is None else name or "the cell's last value"
            try:
                found = read()
            except BaseException as error:  # what a user's __hash__ raises, or a person who has waited for it
                self._lose(what, f"it cannot be rebuilt here ({type(error).__name__}: {error})")
                continue
            if name is None:
                self._changes += filter(self._is_whole_change, found)
            elif (why := self._losses.why(found[-1])) is not None:
                self._lose(what, why)
            elif not name:
                self._applied.value = found[-1]
            elif isinstance(found[-1], MissingModule):
                self._lose(name, found[-1].reason)
            else:
                self._namespace[name] = found[-1]
                self._applied.rebound.append(name)

    def _lose(self, what: str, why: str) -> None:
        self._applied.lost.append(f"{what}: {why}")

    def _is_whole_change(self, entry: tuple[int, Any, Any]) -> bool:
        _, value, change = entry
        if (why := self._losses.why(change)) is not None:
            self._lose(f"new contents of {self._path(value)}", why)
            self._refused[id(value)] = value
        return why is None

    def _path(self, value: Any) -> str:
        visible = {name: value for name, value in self._namespace.items() if not is_of_ipython(name, value)}
        return Paths(self._namespace).path_to(value, visible)

    # ------------------------------------------------------------ applying

    def apply(self) -> Applied:
        """Put everything in place, and compare it with what rank 0 had."""
        applied, header = self._applied, self._payload.header
        kept = self._hold_back() if self._refused else set()
        for patch in header.patches:
            if patch.region in kept:
                continue
            why = self._known[patch.region].patch(patch, self._fd)
            if why is not None and why not in applied.lost:
                applied.lost.append(why)
        self._put_changes()
        if any(stretch.device != "cpu" for stretch in self._known.values()):
            self._join_devices()
        for name in self._preface["deleted"]:
            self._namespace.pop(name, None)
            applied.deleted.append(name)
        if self._preface["process state"] is not None:
            try:
                process_state.put(self._preface["process state"])
            except Exception as error:  # an earlier cell may have replaced whatever is set
                applied.lost.append(process_state.not_brought(error))
        applied.changed += len({patch.region for patch in header.patches})
        self._compare()
        applied.lost = in_few_lines(applied.lost, self._preface["sharded"])
        self._note_what_is_known()
        return applied

    def _hold_back(self) -> set[int]:
        """Drop the changes of all objects that refused ones belong to; return the regions of their memory."""
        paths = Paths(self._namespace, self._numbers)
        roots = [value for value in self._namespace.values() if not is_atom(value)]
        owners = paths.owners(roots, self._refused, lambda _: ())
        held: dict[int, Any] = {}
        for inside in owners.values():
            held |= inside
        self._changes = [entry for entry in self._changes if id(entry[1]) not in held]
        places = MemoryTable(self._known, ()).places()
        memories = filter(None, map(memory_of, held.values()))
        return {region for m in memories for region in overlapping(places, m.address, m.nbytes)}

    def _note_what_is_known(self) -> None:
        applied, preface = self._applied, self._preface
        applied.there, applied.wrapped = preface["there"], [*preface["wrapped"], *preface["sharded"]]
        unbound = {name for name in self._payload.header.names if name} - {*applied.rebound}
        applied.own = [*preface["own"], *unbound]
        applied.table = self._before.cut(range(self._before.next_leaf + 1, self._before.next))
        if self._payload.header.stream:
            self._table.next, self._table.next_leaf = preface["next"]
            applied.table.learn(self._table)
        applied.memory, applied.next_region = self._memory.stretches, self._payload.next_region

    def _put_changes(self) -> None:
        for _, value, change in self._changes:
            try:
                apply_change(value, change)
            except BaseException as error:  # a user's __setstate__ may raise anything
                self._applied.lost.append(
                    f"a {type(value).__qualname__} of the notebook refused its new contents: "
                    f"{type(error).__name__}: {error}"
                )
            else:
                self._applied.changed += 1

    def _join_devices(self) -> None:
        try:
            known = [self._table.objects[number] for number in self._numbers.values()]
            join_devices([*known, *(self._namespace[name] for name in self._applied.rebound)])
        except RuntimeError as error:  # a full GPU
            self._applied.lost.append(
                f"new state beside parameters on the GPU, which is elsewhere ({first_line(error)})"
            )

    def _compare(self) -> None:
        """Say of each name or changed object that is not what rank 0 had."""
        prints = self._preface["fingerprints"]
        if prints["contents"] and any(stretch.device != "cpu" for stretch in self._known.values()):
            return  # told as in host memory, which it is not here
        found = Fingerprints(
            self._namespace, self._preface["project"], self._numbers, contents=prints["contents"]
        )
        names = [(name, self._namespace[name]) for name in self._applied.rebound if name in self._namespace]
        for what, value in [*names, *(entry[:2] for entry in self._changes)]:
            if (theirs := prints.get(what)) is None:
                continue
            name = what if isinstance(what, str) else ""
            try:
                where = found.difference(value, name, theirs, opened=not name)
            except Exception as error:  # what is read by a user's own protocol may raise
                where = f"{name} ({first_line(error)})"
            if where is not None:
                self._applied.lost.append(
                    f"{'' if name else self._path(value)}{where}: it is not what rank 0 had, for the way its class is "
                    "pickled does not bring all of it (give what you need of it a name of its own)"
                )

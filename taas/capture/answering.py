"""Rank 0's answer: what the cell changed, and the names it bound."""

from __future__ import annotations

import sys
import types
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from taas.capture.applying import AS_BEFORE, NOTHING
from taas.capture.cells import users_names
from taas.capture.heap import NAMESPACE, Heap, culprit_of, table_of
from taas.capture.holders import Left, data_of, holders, left_out, loaded_as
from taas.capture.memory import MemoryTable, SentMemory
from taas.capture.payload import write_file
from taas.capture.process_state import not_brought
from taas.capture.reader import Reader, holds_shards, is_wrapper, stays
from taas.capture.reading import ATOMS
from taas.capture.snapshot import MemorySnapshot

if TYPE_CHECKING:
    from taas.capture.arriving import Arrival

_WHOLE = frozenset({"tuple", "frozenset"})
_NO_STATE = "", b"", ()


class CellChanges:
    """What a cell changed, an answer in the making: the table as it is after the cell, compared with what it was before.

    Args:
        arrival: what the cell was given.
        namespace: the rank's names after the cell.
        value: of its last expression.
    """

    def __init__(self, arrival: Arrival, namespace: dict[str, Any], value: Any) -> None:
        self._arrival, self._namespace, self._value = arrival, namespace, value
        self._visible = users_names(namespace)
        self._heap: Heap = arrival.heap
        self._known = arrival.known
        self._lost: list[str] = []
        self._changed: dict[int, bool] = {}
        """Whether its arguments are others, by number."""
        self._anew: dict[int, int] = {}
        """The new numbers of what is made anew."""
        self._saved = self._heap.saved()
        self._places_now = holders(arrival.project)
        left_out.clear()
        self._describe()
        self._roots = self._numbered_names(value)
        self._places = self._numbered_places()
        self._leave_out()
        self._compare()
        self._number_anew()
        self._held_back = self._without_refused()

    # ------------------------------------------------------------ writing it

    def write(self, *, last: bool) -> int:
        """Write what changed into a sealed memfd; return its descriptor. Another may follow one that is not the ``last``."""
        arrival, heap = self._arrival, self._heap
        wanted = self._wanted()
        changed = [n for n in self._changed if n not in self._held_back and (wanted is None or n in wanted)]
        bound = {name: n for name, n in self._roots.items() if self._is_bound(name, n)}
        reached = heap.reached([*bound.values(), *self._places.values(), *changed], self._held_back)
        sent = {n for n in reached if n >= self._known}
        heap.sent.keep([heap.objects[n] for n in sent if heap.states[n][0] == "memory"])  # type: ignore[index]
        sources, process_state = heap.reader.sources(), self._process_state()
        contents = {
            "cells": {file: n for file, n in arrival.cell_numbers.items() if file in sources},
            "sources": sources,
            "lost": [*self._lost, *self._asked_in_vain()],
            "project": arrival.project,
            "roots": bound,
            "places": self._places,
            "states": {n: heap.states[n] for n in sorted(sent)},
            "changed": {n: (heap.states[n], self._changed[n]) for n in changed},
            "fresh": heap.fresh & sent,
            "next": len(heap.objects),
            "deleted": self._deleted(),
            "process state": process_state,
            "imports": [n for n in arrival.contents["imports of the cell"] if n in sys.modules],
            "reloaded": self._reloaded(),
            **self._told_of_names(bound),
        }
        as_before = heap.only_among(self._held_back, heap.before)
        kept_out = arrival.memory.regions_of(heap.memories_among(as_before).values())
        patches = [patch for patch in arrival.patches(wanted) if patch[0] not in kept_out]
        fd = write_file(heap.sent, bound, contents, patches)[0]
        if last:
            arrival.learn(heap.sent)
            heap.end_after(self._known, sent, self._anew, self._held_back)
        else:
            heap.take_back(self._saved)
        return fd

    def _told_of_names(self, bound: Container[str]) -> dict[str, list[str]]:
        visible = self._visible.items()
        return {
            "there": [*self._visible],
            "own": [name for name in self._visible if name not in bound and self._is_own(name)],
            "wrapped": [name for name, item in visible if is_wrapper(type(item))],
            "sharded": [name for name, item in visible if holds_shards(item)],
        }

    def _wanted(self) -> set[int] | None:
        """Return the numbers of what is in the names that were asked for; None for all."""
        if self._arrival.returned is None:
            return None
        numbers = (self._heap.number.get(id(self._visible.get(name))) for name in self._arrival.returned)
        return self._heap.reached(n for n in numbers if n is not None)

    def _is_returned(self, name: str) -> bool:
        return self._arrival.returned is None or name in self._arrival.returned

    def _is_bound(self, name: str, n: int) -> bool:
        """Tell whether a name is bound to another object than before, or to one that is made anew."""
        if not name:
            return True
        other = self._arrival.names_before.get(name, self) is not self._visible[name]
        return (other or n in self._anew.values()) and self._is_returned(name)

    def _asked_in_vain(self) -> list[str]:
        return [
            f"{name}: --return asks for it, and the cell made no such name"
            for name in sorted(self._arrival.returned or ())
            if name not in self._visible and name not in self._arrival.names
        ]

    def _deleted(self) -> list[str]:
        gone = [name for name in (*self._arrival.names, *self._arrival.held) if name not in self._namespace]
        return [name for name in gone if self._is_returned(name)]

    def _reloaded(self) -> list[str]:
        before, now = self._arrival.specs_before, loaded_as(self._arrival.project)
        return [name for name, spec in now.items() if before.get(name, spec) is not spec]

    def _is_own(self, name: str) -> bool:
        """Tell whether the rank has something else under a name than the notebook."""
        value = self._visible[name]
        return self._arrival.names_before.get(name, self) is not value or (
            self._heap.number.get(id(value)) in self._held_back
        )

    def _process_state(self) -> dict[str, Any] | None:
        if self._arrival.returned is not None:
            return None
        try:
            return self._arrival.state.changes()
        except Exception as error:  # a cell may have replaced whatever is asked
            self._lost.append(not_brought(error))
            return None

    # ------------------------------------------------------------ what changed

    def _describe(self) -> None:
        heap, arrival = self._heap, self._arrival
        known = [n for n, value in enumerate(heap.objects) if n != NAMESPACE and not stays(type(value))]
        reader = Reader(self._namespace, project=arrival.project, unwrap=True)
        sent = SentMemory(arrival.memory.places(), arrival.next_region)
        heap.describe_after(known, reader, sent)

    def _leave_out(self) -> None:
        """Leave out what cannot travel of modules, loggers and formatters, and say so where the notebook has another one."""
        heap = self._heap
        while left := heap.leave_out(self._known):
            for one in left:
                if isinstance(one.holder, types.ModuleType):
                    n = heap.number[id(one.holder)]
                    if n >= self._known or self._arrival.own_before.is_as_it_was(one.path, one.part):
                        continue
                why = self._why_not(one.path, one.part) or f"{one.path}: {one.error}"
                self._lost.append(why + AS_BEFORE)
            for n in {heap.number[id(one.holder)] for one in left}:
                heap.describe_again(n)
            heap.walk()

    def _compare(self) -> None:
        heap = self._heap
        for n in range(NAMESPACE + 1, self._arrival.own_before.known):
            before, now = heap.before[n], heap.states[n]
            if now is before or before is None or n in heap.failed:
                continue
            by_name = now is not None and now[0] == "global"  # a module holds it now
            if by_name or heap.same(before, now):
                heap.states[n] = before  # what a protocol made afresh was made for this comparison only
                continue
            differ = heap.change(before, now) if n < self._known else None
            if differ is None:
                self._anew[n] = -1
            else:
                self._changed[n] = differ

    def _numbered_names(self, value: Any) -> dict[str, int]:
        """Return the numbers of what names are bound to, of the last value under an empty name."""
        arrival, heap = self._arrival, self._heap
        found = {}
        for name, item in self._visible.items():
            known = heap.number.get(id(item))
            if known is not None or (
                arrival.names_before.get(name, self) is not item and self._is_returned(name)
            ):
                found[name] = heap.enter(item)
        if value is not NOTHING and arrival.returned is None:
            found[""] = heap.enter(value)
        heap.walk()
        return dict(sorted(found.items(), key=lambda entry: heap.early(entry[1])))

    def _numbered_places(self) -> dict[str, int]:
        arrival, heap = self._arrival, self._heap
        now = self._places_now.items() if arrival.returned is None else ()
        found = {name: heap.enter(item) for name, item in now if name not in arrival.places_before}
        heap.walk()
        return found

    def _number_anew(self) -> None:
        """Give what cannot change in place a new number, and what holds it new contents, or a new number as well."""
        heap, again = self._heap, bool(self._anew)
        for n in self._anew:
            self._anew[n] = heap.renumber(n)
        while again:
            again = False
            for n, state in enumerate(heap.states):  # grows
                if state is None or n in self._anew or self._anew.keys().isdisjoint(state[2]):
                    continue
                children = tuple(self._anew.get(child, child) for child in state[2])
                before, heap.states[n] = state, (*state[:2], children)
                if n >= self._arrival.own_before.known:
                    continue
                is_whole = state[0] in _WHOLE or n >= self._known
                differ = None if is_whole else heap.change(before, heap.states[n])
                if differ is None:
                    self._anew[n] = heap.renumber(n)
                    self._changed.pop(n, None)
                    again = True
                else:
                    self._changed[n] = self._changed.get(n, False) or differ
        for numbers in (self._roots, self._places):
            numbers |= {name: self._anew[n] for name, n in numbers.items() if n in self._anew}

    # ------------------------------------------------------------ what is refused

    def _without_refused(self) -> set[int]:
        """Leave out names and places of which a part cannot travel, and say so; return what stays as it was with them."""
        heap, known, roots = self._heap, self._known, self._roots | self._places
        new = heap.holding(heap.failed, range(known, len(heap.objects))) if heap.failed else set()
        refused = {n for n in self._changed if not new.isdisjoint((heap.states[n] or _NO_STATE)[2])} | new
        held_back = heap.held_back(refused, roots.values())
        told = [name for name, n in roots.items() if n in held_back]
        if refused and not told:
            around = heap.holding(refused, range(len(heap.objects)))
            told = [name for name, n in roots.items() if n in around][:1]
        for name in told:
            is_new = roots[name] in new
            self._lost.append(self._why(name or "the cell's last value") + ("" if is_new else AS_BEFORE))
            if is_new:
                (self._roots if name in self._roots else self._places).pop(name)
        return held_back

    def _why(self, name: str) -> str:
        value = self._visible.get(name, self._places_now.get(name, self._value))
        return self._why_not(name, value) or f"{name}: {next(iter(self._heap.failed.values()))}"

    def _why_not(self, name: str, value: Any) -> str | None:
        reader = Reader(self._namespace, project=self._arrival.project, unwrap=True)
        found = culprit_of(name, value, table_of(value, self._namespace, reader))
        if found is None:
            return None
        return f"{name}: {found.path} is a {found.kind}, which cannot be pickled ({found.reason})"


class OwnData:
    """What the project's modules hold of this process' own, since it could not travel, as it is before a cell.

    Args:
        heap: the objects that travelled.
        reader: tells what objects consist of.

    Attributes:
        known: how many numbers there are; some of them may be of parts that only this process has.
    """

    def __init__(self, heap: Heap, reader: Reader) -> None:
        self._parts: dict[str, Any] = {}
        left = heap.number.get(id(Left))
        modules = [v for v in heap.objects if isinstance(v, types.ModuleType)] if left is not None else []
        for module in modules:
            if left in (heap.states[heap.number[id(module)]] or _NO_STATE)[2]:
                own = {f"{module.__name__}.{way}": part for way, part in data_of(module).items()}
                self._parts |= {
                    p: v for p, v in own.items() if type(v) not in ATOMS and id(v) not in heap.number
                }
        self._heap = Heap(reader, heap.objects if self._parts else ())
        self.known = len(heap.objects)
        for part in self._parts.values():
            self._heap.enter(part)
        self._heap.walk()
        self._heap.sent.lay_out(0)
        self._stretches = self._heap.sent.stretches
        self._snapshot = MemorySnapshot(self._stretches)
        self._dirty: set[int] | None = None

    def is_as_it_was(self, path: str, part: Any) -> bool:
        """Tell whether a part is the same object as before, with the same in it."""
        if self._parts.get(path) is not part:
            return False
        heap = self._heap
        if self._dirty is None:
            new = range(self.known, len(heap.objects))
            heap.describe_after(new, heap.reader)
            regions = self._snapshot.changed(self._stretches)
            table = MemoryTable(self._stretches, ())
            dirty = {n for n in new if not heap.same(heap.before[n], heap.states[n])}
            for n, memory in heap.memories_among(new).items():
                if any(regions.get(r, True) for r in table.regions_of([memory])):
                    dirty.add(n)
            self._dirty = dirty
        return heap.reached([heap.number[id(part)]]).isdisjoint(self._dirty)

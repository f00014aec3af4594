"""Rank 0's answer: what the cell changed, and the names it bound."""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from taas.capture.applying import NOTHING
from taas.capture.changes import Change, message_of
from taas.capture.fingerprint import Fingerprints
from taas.capture.losing import Paths
from taas.capture.memory import SentMemory
from taas.capture.modules import is_gone, loaded_as, module_of
from taas.capture.of_ipython import is_of_ipython
from taas.capture.payload import write_file
from taas.capture.pickling import Pickler, Table, check_of, early
from taas.capture.process_state import not_brought
from taas.capture.reader import holds_shards, is_wrapper
from taas.capture.reading import is_atom

if TYPE_CHECKING:
    from taas.capture.arriving import Arrival

_BATCH = 256
"""Changes that are sent, and would be lost, together."""


class Packing:
    """An answer on its way into a stream: a part for each name, and for some changes at a time."""

    def __init__(self, arrival: Arrival, namespace: dict[str, Any]) -> None:
        self._arrival, self._namespace = arrival, namespace
        self._paths = Paths(namespace)
        self._lost: list[str] = []
        self._refused: dict[int, str] = {}
        self._withheld: dict[int, Any] = {}
        self._visible = {n: value for n, value in namespace.items() if not is_of_ipython(n, value)}
        arrival.wanted = None
        if arrival.returned is not None:
            asked = ((name, value) for name, value in self._visible.items() if self._is_returned(name))
            known = {*map(id, arrival.table.objects.values())}
            arrival.wanted = {id(value): value for _, value in Paths(namespace, known).walk(asked)}
        before = arrival.names_before
        arrival.untold = {
            n for n, v in self._visible.items() if before.get(n) is not v and not self._is_returned(n)
        }

    @functools.cached_property
    def _table(self) -> Table:
        """The objects that both sides know; made where anything is sent, as there may be many."""
        return self._arrival.table.copy()

    def _is_returned(self, name: str) -> bool:
        return self._arrival.returned is None or name in self._arrival.returned

    def write(self, value: Any, *, last: bool) -> int:
        """Write what changed, and the value of the cell's last expression; return the file's descriptor."""
        arrival = self._arrival
        changes = self._changes()
        rebound, names, sent = self._sent(changes, value)
        while self._hold_back(sent):
            changes = self._changes()
            rebound, names, sent = self._sent(changes, value)
        pickler = self._pickler
        arrival.withheld = self._withheld
        self._lost += dict.fromkeys(self._refused.values())
        answer = {
            "cells": {file: n for file, n in arrival.cell_numbers.items() if file in pickler.sources()},
            "lost": self._lost,
            "project": arrival.project,
            "deleted": self._deleted(),
            "process state": self._process_state(),
            "fingerprints": self._fingerprints({name: rebound[name] for name in names if name}, sent),
            "imports": [n for n in arrival.payload.preface["imports of the cell"] if n in sys.modules],
            "reloaded": self._reloaded(),
            "there": [*self._visible],
            "own": [*arrival.untold, *(name for name in rebound if name not in names)],
            "wrapped": [name for name, item in self._visible.items() if is_wrapper(type(item))],
            "sharded": [name for name, item in self._visible.items() if holds_shards(item)],
            "next": (pickler.table.next, pickler.table.next_leaf),
        }
        fd = write_file(pickler, names, answer, list(arrival.patches()))[0]
        if pickler.parts:
            replaced = [n for n, v in arrival.table.objects.items() if id(v) in self._replaced]
            arrival.learn(pickler, replaced, last=last)
        return fd

    def _sent(self, changes: dict[int, Change], value: Any) -> tuple[dict[str, Any], list[str], list[int]]:
        """Write names and changes; return the names that were bound, and of these, and of the changes, what was written."""
        self._lost = []
        rebound = self._rebound()
        if value is not NOTHING and self._arrival.returned is None:
            rebound[""] = value
        self._numbers = self._table.numbers() if changes or rebound else {}
        for identity in self._replaced:
            self._numbers.pop(identity, None)
        self._pickler = self._new_pickler()
        names = [name for name, item in rebound.items() if self._add_name(name, item)]
        return rebound, names, self._add_changes([*changes.items()], _BATCH)

    def _hold_back(self, sent: list[int]) -> bool:
        """Keep objects of which a part is refused as the notebook has them; tell whether something of them was written."""
        objects, notes = self._table.objects, self._arrival.notes
        if self._refused.keys() <= self._withheld.keys():
            return False
        numbers = self._table.numbers()
        roots = [*self._visible.values(), *self._arrival.names_before.values()]
        paths = Paths(self._namespace, numbers)
        owners = paths.owners(
            [root for root in roots if not is_atom(root)],
            self._refused,
            lambda v: notes.parts(numbers.get(id(v))),
        )
        held = {id(objects[number]) for number in sent} | self._replaced.keys()
        for identity, inside in owners.items():
            if not held.isdisjoint(inside):
                path = self._paths.path_to(inside[identity], self._visible)
                why = self._refused.get(identity, f"{path}: a part of it cannot come back")
                self._refused[identity] = f"{why}, so all of it is as it was before the cell"
            self._withheld |= inside
        self._withheld |= dict.fromkeys(self._refused)
        return not held.isdisjoint(self._withheld)

    def _reloaded(self) -> list[str]:
        before, now = self._arrival.names_before, loaded_as(self._arrival.project)
        return [n.rpartition(".")[0] for n, spec in now.items() if before.get(n, spec) is not spec]

    def _deleted(self) -> list[str]:
        arrival = self._arrival
        gone = [name for name in (*arrival.names, *arrival.held) if is_gone(name, self._namespace)]
        return [name for name in gone if self._is_returned(name)]

    def _new_pickler(self, without: Any = None) -> Pickler:
        known = dict(self._numbers)
        known.pop(id(without), None)
        return Pickler(
            self._namespace,
            table=self._table.copy() if known else None,
            known=known,
            checks=self._checks,
            sent=SentMemory(self._arrival.memory.places(), self._arrival.next_region),
            project=self._arrival.project,
            answers=True,
        )

    # ------------------------------------------------------------ what is sent

    def _rebound(self) -> dict[str, Any]:
        """Return the names that are bound to other objects than before, or to objects that are made anew."""
        arrival, before = self._arrival, self._arrival.names_before
        for name in sorted(arrival.returned or ()):
            if name not in self._visible and name not in arrival.names:
                self._lost.append(f"{name}: --return asks for it, and the cell made no such name")
        new = {n for n, v in self._visible.items() if before.get(n, self) is not v or id(v) in self._replaced}
        found = [(n, value) for n, value in self._visible.items() if n in new and self._is_returned(n)]
        return dict(sorted(found, key=lambda pair: early(pair[1])))

    def _add_name(self, name: str, value: Any) -> bool:
        of_module = module_of(name) != "" and name not in self._arrival.names_before
        error = self._pickler.add((name, value), by_name=of_module)
        if error is not None and name and not of_module:
            self._lost.append(self._why(name, value, error))
        return error is None

    def _add_changes(self, changes: list[tuple[int, Change]], size: int) -> list[int]:
        """Write changes, so many in a part; return the numbers of the objects whose changes were."""
        sent: list[int] = []
        objects, reader = self._table.objects, self._pickler.reader
        for at in range(0, len(changes), size):
            batch = changes[at : at + size]
            try:
                error = self._pickler.add(
                    tuple((n, objects[n], message_of(objects[n], change, reader)) for n, change in batch)
                )
            except Exception as raised:  # by a protocol that is asked what to send
                error = raised
            if error is None:
                sent += [number for number, _ in batch]
            elif len(batch) > 1:
                sent += self._add_changes(batch, 1)
            else:
                value = objects[batch[0][0]]
                self._refused[id(value)] = self._why(self._paths.path_to(value, self._visible), value, error)
        return sent

    def _why(self, name: str, value: Any, error: Exception) -> str:
        found = self._paths.culprit(name, value, lambda part: self._new_pickler(value).add((part,)))
        if found is None:
            return f"{name}: {type(error).__name__}: {error}"
        return f"{name}: {found.path} is a {found.kind}, which cannot be pickled ({found.reason})"

    def _process_state(self) -> dict[str, Any] | None:
        if self._arrival.returned is not None:
            return None
        try:
            return self._arrival.state.changes()
        except Exception as error:  # a cell may have replaced whatever is asked
            self._lost.append(not_brought(error))
            return None

    # ------------------------------------------------------------ what changed

    def _changes(self) -> dict[int, Change]:
        """Find what has other contents, and with it what is made anew, and what has another class."""
        notes = self._arrival.notes
        found: dict[int, Change] = {}
        self._replaced: dict[int, Any] = {}
        self._checks: dict[int, int] = {}
        for number, change in notes.changes(self._arrival.wanted):
            value = self._table.objects[number]
            if id(value) in self._withheld:
                continue
            if (was := notes.was(number)) is not None:
                self._checks[number] = check_of(was)
            if isinstance(change, Exception):
                path = self._paths.path_to(value, self._visible)
                self._refused[id(value)] = f"{path}: {type(change).__name__}: {change}"
            elif change is None:
                self._replaced[id(value)] = value
            else:
                found[number] = change
        if self._replaced:
            found |= dict.fromkeys(self._holders(), Change(anew=False))
        return found

    def _holders(self) -> list[int]:
        """Return the numbers of what holds an object that is made anew; constants that do are made anew as well."""
        objects, replaced = self._arrival.table.objects, self._replaced
        constants = [value for value in objects.values() if isinstance(value, (tuple, frozenset))]
        while new := [
            c for c in constants if id(c) not in replaced and not replaced.keys().isdisjoint(map(id, c))
        ]:
            replaced |= {id(value): value for value in new}
        return [n for n in self._arrival.notes.holding(replaced) if id(objects[n]) not in replaced]

    def _fingerprints(self, names: dict[str, Any], changed: list[int]) -> dict[str | int, Any]:
        """Return what the notebook compares with what it has then."""
        arrival = self._arrival
        contents = arrival.all_in_host_memory
        found = Fingerprints(self._namespace, arrival.project, self._numbers, contents=contents)
        prints: dict[str | int, Any] = {"contents": contents}
        values: list[tuple[str | int, Any]] = [(number, self._table.objects[number]) for number in changed]
        for what, value in [*names.items(), *values]:
            with suppress(Exception):  # what is read by a user's own protocol may raise
                prints[what] = found.of(value, opened=isinstance(what, int))
        return prints

"""Rank 0's answer into a notebook: objects changed in place, names rebound."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from taas.capture import process_state
from taas.capture.building import Builder, Loss, change
from taas.capture.cells import users_names
from taas.capture.heap import CONSTANT, Heap, no_collection
from taas.capture.holders import apart, loaded_as
from taas.capture.libraries import join_devices
from taas.capture.memory import MemoryTable, Stretch
from taas.capture.payload import Payload
from taas.capture.reader import Paths, Reader
from taas.capture.reading import MissingModule, keeps_all_attributes
from taas.capture.tensors import ONLY_A_SHARD
from taas.import_hooks import is_edited, note_files
from taas.wording import first_line


class _Nothing:
    """There was no value, or it could not travel."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING = _Nothing()
AS_BEFORE = ", so all of it is as it was before the cell"


@dataclass
class Applied:
    """What an answer did.

    Attributes:
        rebound: names that are new or have a new object.
        deleted: names that the cell deleted.
        changed: how many objects, and regions of memory, were changed in place.
        lost: what could not be brought back, a line each.
        value: the last expression's value, or :data:`NOTHING`.
        cells: file names of the cells whose functions came, with their numbers ``In[n]``.
        there: names that rank 0 has.
        own: of these, names that are something else there.
        places: what was put elsewhere than under names.
        wrapped: of these, names that have a parallel wrapper, or shards, there of what they have here.
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
    places: list[str] = field(default_factory=list)
    memory: dict[int, Stretch] = field(default_factory=dict, repr=False)
    next_region: int = 0


def apply_answer(
    fd: int,
    namespace: dict[str, Any],
    heap: Heap,
    known: dict[int, Stretch],
    loaded: Mapping[str, Any] | None = None,
) -> Applied:
    """Build what an answer brings and do what it says.

    Everything is built before any object is changed. New names are bound as they come, for methods that rebuild others.

    Args:
        fd: the answer.
        namespace: where names are rebound.
        heap: the objects that travelled; knows afterwards those that came.
        known: the memory that travelled, by region.
        loaded: the specs of the project's modules when they did, by name; None for names only.
    """
    with no_collection():
        answer = _Incoming(fd, namespace, heap, known)
        if loaded is None:
            answer.leave_the_process()
        else:
            answer.set_apart(loaded)
        answer.build()
        return answer.apply()


class _Incoming:
    def __init__(self, fd: int, namespace: dict[str, Any], heap: Heap, known: dict[int, Stretch]) -> None:
        self._fd, self._namespace, self._heap, self._known = fd, namespace, heap, known
        self._payload = Payload(fd)
        self._contents = contents = self._payload.contents
        self._memory = self._payload.brought(known)
        self._made = dict(enumerate(heap.objects))
        self._builder = Builder(contents["states"], self._made, self._memory, namespace, tolerant=True)
        self._applied = Applied(lost=list(contents["lost"]), cells=contents["cells"])

    # ------------------------------------------------------------ building

    def leave_the_process(self) -> None:
        """Bring names only: modules, loggers, formatters and settings stay as they are here."""
        self._contents |= {"reloaded": [], "process state": None}

    def set_apart(self, loaded: Mapping[str, Any]) -> None:
        """Leave modules as they are that were edited or reloaded here while the cell ran, and are others than in the ranks; say so."""
        contents = self._contents
        here, reloaded = loaded_as(contents["project"]), contents["reloaded"]
        values = (self._made[n] for n in contents["changed"])
        changed = [value.__name__ for value in values if isinstance(value, types.ModuleType)]
        others = [n for n in changed if n in here and loaded.get(n, here[n]) is not here[n]]
        others += [n for n in here if f"the module {n}" in contents["places"] and is_edited(n)]
        for name in others:
            if name not in reloaded:
                apart.add(f"the module {name}")
                self._lose(
                    f"data of {name}", "the module is another one here, edited or reloaded while the cell ran"
                )

    def build(self) -> None:
        """Build all that is new; what is not whole is left out, and told."""
        contents, builder = self._contents, self._builder
        self._payload.take_sources()
        for name in contents["reloaded"]:
            try:
                importlib.reload(sys.modules[name])
            except BaseException as error:  # what a module's own code raises
                self._lose(f"the reload of {name}", f"{type(error).__name__}: {error}")
        if contents["reloaded"]:
            note_files()
        for name, n in contents["roots"].items():
            value = builder.build(n)
            if n in builder.lost:
                self._lose(name or "the cell's last value", self._reason(n, n))
            elif not name:
                self._applied.value = value
            elif isinstance(value, MissingModule):
                self._lose(name, value.reason)
            else:
                self._namespace[name] = value
                self._applied.rebound.append(name)
        for name, n in contents["places"].items():
            builder.build(n)
            if n in builder.lost:
                self._lose(name, self._reason(n, n))
            else:
                self._applied.places.append(name)
        for state, _ in contents["changed"].values():
            for child in state[2]:
                if child not in self._made:
                    builder.build(child)

    def _lose(self, what: str, why: str) -> None:
        self._applied.lost.append(f"{what}: {why}")

    def _reason(self, n: int, whole: int) -> str:
        loss: Loss = self._builder.lost[n]
        what = "it" if loss.number == whole else loss.what
        return f"{what} cannot be rebuilt here ({loss.reason})"

    # ------------------------------------------------------------ applying

    def apply(self) -> Applied:
        """Put everything in place, and compare it with what rank 0 had."""
        applied, header, contents = self._applied, self._payload.header, self._contents
        held_back = self._held_back()
        as_before = MemoryTable(self._known, ()).regions_of(
            self._heap.memories_among(self._heap.only_among(held_back, self._heap.states)).values()
        )
        for patch in header.patches:
            why = None if patch.region in as_before else self._known[patch.region].patch(patch, self._fd)
            if why is not None and why not in applied.lost:
                applied.lost.append(why)
        changed = self._change_in_place(held_back)
        for name in contents["deleted"]:
            self._namespace.pop(name, None)
            applied.deleted.append(name)
        if contents["process state"] is not None:
            try:
                process_state.put(contents["process state"])
            except Exception as error:  # an earlier cell may have replaced whatever is set
                applied.lost.append(process_state.not_brought(error))
        applied.changed = len(changed) + len({patch.region for patch in header.patches})
        known = [*self._heap.objects]
        self._learn(changed)
        if any(stretch.device != "cpu" for stretch in self._known.values()):
            self._join_devices(known)
        applied.lost = _in_few_lines(applied.lost, contents["sharded"])
        applied.there, applied.wrapped = contents["there"], [*contents["wrapped"], *contents["sharded"]]
        unbound = {name for name in contents["roots"] if name} - {*applied.rebound}
        applied.own = [*contents["own"], *unbound]
        applied.memory, applied.next_region = self._memory.stretches, self._payload.next_region
        return applied

    def _held_back(self) -> set[int]:
        """Return the numbers of what stays as it was, since a part of it cannot be rebuilt here, and say so."""
        lost = self._builder.lost
        changed = self._contents["changed"].items()
        refused = {
            n: next(c for c in state[2] if c in lost)
            for n, (state, _) in changed
            if not lost.keys().isdisjoint(state[2])
        }
        number = self._heap.number
        held_back = self._heap.held_back(
            {*refused}, [number[id(v)] for v in self._namespace.values() if id(v) in number]
        )
        as_before = "" if held_back == refused.keys() else AS_BEFORE
        for n, part in refused.items():
            path = next(self._paths_to([n]), f"a {type(self._made[n]).__qualname__}")
            self._lose(f"new contents of {path}", self._reason(part, n) + as_before)
        return held_back

    def _change_in_place(self, held_back: set[int]) -> list[int]:
        done = []
        for n, (state, arguments_differ) in self._contents["changed"].items():
            if n in held_back:
                continue
            value = self._made[n]
            try:
                before = self._heap.states[n] or state
                children = [self._made[c] for c in state[2]]
                change(value, before, state, children, arguments_differ=arguments_differ)
            except BaseException as error:  # a user's __setstate__ may raise anything, SystemExit included
                self._applied.lost.append(
                    f"a {type(value).__qualname__} of the notebook refused its new contents: "
                    f"{type(error).__name__}: {error}"
                )
            else:
                done.append(n)
        return done

    def _paths_to(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yield how to write some objects, beginning at the notebook's names."""
        wanted = {id(self._made[n]) for n in numbers}
        walked = Paths(Reader(self._namespace)).walk(users_names(self._namespace)) if wanted else ()
        return (path for path, value in walked if id(value) in wanted)

    def _join_devices(self, known: list[Any]) -> None:
        try:
            join_devices([*known, *(self._namespace[name] for name in self._applied.rebound)])
        except RuntimeError as error:  # a full GPU
            self._applied.lost.append(
                f"new state beside parameters on the GPU, which is elsewhere ({first_line(error)})"
            )

    # ------------------------------------------------------------ the proof

    def _learn(self, changed: list[int]) -> None:
        """Take over the numbers of what came, read it again, and say of what is not what rank 0 had.

        This proves that each object consists here of what it consisted of there: the same numbers, texts and other objects,
        after all methods of its class have run. Memory is compared by where it is, not by what is in it; what a protocol does
        not tell of an object cannot be compared.
        """
        heap, contents = self._heap, self._contents
        lost = self._builder.lost
        whole = {n: value for n, value in self._made.items() if n not in lost}
        heap.learn(whole, contents["states"], contents["next"], contents["fresh"])
        for n in changed:
            heap.states[n] = contents["changed"][n][0]
        new = [n for n in contents["states"] if n in whole and self._is_comparable(n)]
        again = [n for n in changed if contents["changed"][n][0][0] != "reading"]
        heap.describe_after((*new, *again), Reader(self._namespace, project=contents["project"]))
        self._applied.lost += [
            f"{path}: it is not what rank 0 had, for the way its class is pickled does not bring all of it (give what you "
            "need of it a name of its own)"
            for path in self._paths_to(n for n in (*new, *again) if not self._is_as_there(n))
        ]
        heap.end_proof(contents["next"])

    def _is_comparable(self, n: int) -> bool:
        kind, value = self._contents["states"][n][0], self._made[n]
        if kind in CONSTANT or isinstance(value, type):  # Python orders a class's attributes as they are set
            return False
        if self._heap.number.get(id(value)) != n:  # it stands for another one: what was wrapped
            return False
        own = type(value).__module__ == "__main__" and keeps_all_attributes(type(value))
        return kind != "reading" or own

    def _is_as_there(self, n: int) -> bool:
        heap = self._heap
        before, now = heap.before[n], heap.states[n]
        return now is before or n in heap.failed or heap.same(before, now, by_value=True)


def _in_few_lines(lost: Iterable[str], sharded: Collection[str]) -> list[str]:
    """Say once of names that ranks have shards of that they have: whatever parts of them could not come, it is for that."""
    names = {line: re.match(r"\w*", line)[0] for line in lost}  # type: ignore[index]
    shards = {name: None for line, name in names.items() if name in sharded or ONLY_A_SHARD in line}
    once = [f"{', '.join(shards)}: {ONLY_A_SHARD}"] if shards else []
    return once + [line for line, name in names.items() if name not in shards]

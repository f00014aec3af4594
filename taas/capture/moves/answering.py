"""Pack the changes that a cell made into the answer, which rank 0 sends to the notebook."""

from __future__ import annotations

import sys
import types
from collections.abc import Container
from typing import Any

from taas.capture.cells import keys_without_a_name, users_names
from taas.capture.describe.flat import Lost
from taas.capture.describe.holders import holders, left_out, loaded_as
from taas.capture.describe.memory import SentMemory
from taas.capture.describe.process_bound import is_container
from taas.capture.describe.process_bound_libraries import renews
from taas.capture.describe.process_own import tell_again
from taas.capture.describe.reader import Reader, holds_shards, is_wrapper, stays
from taas.capture.heap.comparing import compare, refuse, renumber
from taas.capture.heap.heap import (
    NAMESPACE,
    NO_STATE,
    Heap,
    culprit_of,
    no_collection,
    summarize_attributes,
)
from taas.capture.heap.payload import NoRoom, write_file
from taas.capture.moves.applying import AS_BEFORE, NOTHING
from taas.capture.moves.arriving import Arrival
from taas.capture.settings.import_draws import imported_after
from taas.capture.settings.process_state import not_brought

_SMALL = 4096
"""Smaller parts, in bytes, are not worth leaving behind."""
_BESIDE = 1 << 20
"""An answer needs at most this many bytes in addition to its parts."""
_told_parted: dict[tuple[int, str], int] = {}
"""Attributes that stay with this process and were reported: by object id and attribute name, the id
of the value that was reported.
"""


def pack_answer(
    arrival: Arrival, namespace: dict[str, Any], value: Any = NOTHING, *, last: bool = True
) -> int:
    """Write a cell's changes into a sealed memfd, which the caller owns.

    A rank with a GPU waits for the GPU before it calls this.

    ``value`` is the value of the cell's last expression. If ``last`` is false, a later answer will
    replace this one.
    """
    with no_collection():
        return _CellChanges(arrival, namespace, value).write(last=last)


class _CellChanges:
    """Compares the heap after a cell with the heap before it, and writes the answer."""

    def __init__(self, arrival: Arrival, namespace: dict[str, Any], value: Any) -> None:
        self._arrival, self._namespace, self._value = arrival, namespace, value
        self._visible = users_names(namespace)
        before = arrival.names_before
        self._rebound = {
            name for name, item in self._visible.items() if before.get(name, self) is not item
        }
        self._heap: Heap = arrival.heap
        self._known = arrival.known
        self._lost = self._keys_lost()
        self._named: set[str] = set()  # variables and places already reported in ``_lost``
        self._places_now = holders(arrival.project)
        self._describe()
        self._roots, self._places = self._number_roots()
        self._heap.leave_out(roots=self._roots)
        self._diff = compare(self._heap, self._known, arrival.known_before)
        self._tell_left_out()
        renumber(self._heap, self._diff, self._known, arrival.known_before)
        self._roots = self._diff.roots_now(self._roots)
        self._places = self._diff.roots_now(self._places)
        self._held_back = self._refuse()
        self._tell_parted()

    def _describe(self) -> None:
        """Describe all objects that existed before the cell in their present state."""
        left_out.clear()
        tell_again()
        staying = {cls for cls in {*map(type, self._heap.objects)} if stays(cls)}
        known = [
            n
            for n, value in enumerate(self._heap.objects)
            if n != NAMESPACE and type(value) not in staying
        ]
        reader = Reader(self._namespace, project=self._arrival.project, unwrap=True)
        self._heap.left, self._heap.parted = {}, []
        self._heap.describe_after(known, reader, self._known)

    def _keys_lost(self) -> list[Lost]:
        """Report the keys that the cell has set in the namespace and that are not valid names."""
        if self._arrival.returned is not None:
            return []
        why = "names are texts of UTF-8, and this key is none (bind it to an ordinary name)"
        before = self._arrival.keys_before
        keys = keys_without_a_name(self._namespace).items()
        return [Lost(key, why) for key, value in keys if before.get(key, self) is not value]

    def write(self, *, last: bool) -> int:
        """Write the changes into a sealed memfd; return its descriptor.

        If ``last`` is false, a later answer will replace this one. If memory is short, the largest
        parts stay behind, and their names are reported to the user.
        """
        process_state = self._process_state()
        while True:
            try:
                return self._write(process_state, last=last)
            except NoRoom as short:
                self._leave_largest(short)

    def _write(self, process_state: dict[str, Any] | None, *, last: bool) -> int:
        arrival, heap = self._arrival, self._heap
        wanted = self._returned_objects()
        changed = [
            n
            for n in self._diff.changed
            if n not in self._held_back and (wanted is None or n in wanted)
        ]
        bound = self._rebound_names()
        reached = heap.reached([*bound.values(), *self._places.values(), *changed], self._held_back)
        sent = {n for n in reached if n >= self._known}
        memory = SentMemory(heap.memory_ranges(sent), arrival.memory.places(), arrival.next_region)
        sources = heap.sources()
        contents = {
            "cells": {file: n for file, n in arrival.cell_numbers.items() if file in sources},
            "sources": sources,
            "lost": [tuple(one) for one in (*self._lost, *self._missing_returned())],
            "project": arrival.project,
            "roots": bound,
            "places": self._places,
            "states": {n: heap.states[n] for n in sorted(sent)},
            "changed": {n: (heap.states[n], self._diff.changed[n].value) for n in changed},
            "next": len(heap.objects),
            "process state": process_state,
            "imports": [n for n in arrival.contents["imports of the cell"] if n in sys.modules],
            "imported": imported_after(arrival.last_module_before),
            "there": [n for n, value in self._visible.items() if not arrival.is_of_setup(n, value)],
            "ranks": 1 if arrival.place is None else arrival.place.size,
            "unwrapped": self._find_unwrapped(),
            "own": [
                name for name in (*self._rebound, *self._of(self._held_back)) if name not in bound
            ],
            **self._facts_about_names(),
        }
        patches = self._patches(wanted)
        fd = write_file(memory, bound, contents, patches)[0]
        if last:
            arrival.memory.stretches |= memory.stretches
            arrival.next_region += len(memory.stretches)
            heap.end_after(self._known, sent, self._diff.new_numbers, self._held_back)
        else:
            heap.take_back(arrival.known_before, self._diff.new_numbers)
        return fd

    def _patches(self, wanted: set[int] | None) -> list[tuple[int, int, memoryview]]:
        """Return the changed parts of the notebook's memory, except those of held-back objects."""
        heap, arrival = self._heap, self._arrival
        as_before = heap.only_among(self._held_back, heap.before)
        kept_out = arrival.memory.regions_of(heap.memories_among(as_before).values())
        return [patch for patch in arrival.patches(wanted) if patch[0] not in kept_out]

    def _leave_largest(self, short: NoRoom) -> None:
        """Hold back the largest parts of the answer until the rest fits."""
        parts = sorted(self._parts(), reverse=True)
        total = sum(nbytes for nbytes, _ in parts)
        if not parts:
            raise short
        for nbytes, numbers in parts:
            self._heap.failed |= dict.fromkeys(numbers, short)
            total -= nbytes
            if total + _BESIDE <= short.fits:
                break
        self._held_back = self._refuse()

    def _parts(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the parts of the answer that can stay behind: their bytes, and their objects."""
        heap, memory = self._heap, self._arrival.memory
        changed = [n for n in self._diff.changed if n not in self._held_back]
        roots = [*self._rebound_names().values(), *self._places.values(), *changed]
        sent = {n for n in heap.reached(roots, self._held_back) if n >= self._known}
        parts: list[tuple[int, tuple[int, ...]]] = [
            (len((heap.states[n] or NO_STATE)[1]), (n,)) for n in (*sent, *changed)
        ]
        for n in heap.memories_among(sent):
            parts.append((sum(high - low for low, high in heap.objects[n].spans), (n,)))
        known = heap.memories_among({n for n in range(self._known) if n not in heap.failed})
        sizes: dict[int, int] = {}
        for region, _, data in self._patches(self._returned_objects()):
            sizes[region] = sizes.get(region, 0) + data.nbytes
        looking = {n: memory.regions_of([where]) for n, where in known.items()} if sizes else {}
        for region, nbytes in sizes.items():
            parts.append((nbytes, tuple(n for n, regions in looking.items() if region in regions)))
        return [(nbytes, numbers) for nbytes, numbers in parts if nbytes >= _SMALL and numbers]

    def _rebound_names(self) -> dict[str, int]:
        """Return the variables that the notebook binds: rebound, or with a recreated object."""
        made = {*self._diff.new_numbers.values()}
        bound = {
            name: n
            for name, n in self._roots.items()
            if name in self._rebound or n in made or not name
        }
        return {name: n for name, n in bound.items() if not name or self._is_returned(name)}

    def _returned_objects(self) -> set[int] | None:
        if self._arrival.returned is None:
            return None
        numbers = (
            self._heap.number.get(id(self._visible.get(name))) for name in self._arrival.returned
        )
        return self._heap.reached(n for n in numbers if n is not None)

    def _is_returned(self, name: str) -> bool:
        return self._arrival.returned is None or name in self._arrival.returned

    def _missing_returned(self) -> list[Lost]:
        return [
            Lost(name, "--return asks for it, and the cell made no such name")
            for name in sorted(self._arrival.returned or ())
            if name not in self._visible and name not in self._arrival.names
        ]

    def _facts_about_names(self) -> dict[str, list[str]]:
        arrival, visible = self._arrival, self._visible.items()
        known, specs = (*arrival.names, *arrival.held), loaded_as(arrival.project).items()
        return {
            "deleted": [
                name for name in known if name not in self._namespace and self._is_returned(name)
            ],
            "reloaded": [
                name for name, spec in specs if arrival.specs_before.get(name, spec) is not spec
            ],
            "wrapped": [name for name, item in visible if is_wrapper(type(item))],
            "sharded": [name for name, item in visible if holds_shards(item)],
        }

    def _find_unwrapped(self) -> list[tuple[int | None, int, str]]:
        """Return the modules that the notebook gets without their parallel wrapper.

        Each entry is (owner, module, wrapper): the owner's number, or None if a variable or a
        container refers to the module; the module's number; and the name of the wrapper's class.
        """
        heap = self._heap
        kinds = {cls for cls in {*map(type, heap.objects)} if is_wrapper(cls)}
        wrappers = [
            n for n, value in enumerate(heap.objects) if type(value) in kinds and heap.states[n]
        ]
        if not wrappers:
            return []
        held_by = heap.holders(range(len(heap.states)))
        named = {*self._roots.values()}
        found: list[tuple[int | None, int, str]] = []
        for wrapper in wrappers:
            what = (heap.states[wrapper] or NO_STATE)[2][0], type(heap.objects[wrapper]).__name__
            reached = [wrapper]
            for n in reached:  # the loop appends to it
                found += [(None, *what)] if n in named else []
                for holder in {*held_by.get(n, ())} - {NAMESPACE, *reached}:
                    if is_container(heap.objects[holder]):
                        reached.append(holder)
                    elif not renews(heap.objects[holder]):
                        found.append((holder, *what))
        return found

    def _process_state(self) -> dict[str, Any] | None:
        if self._arrival.returned is not None:
            return None
        try:
            changes = self._arrival.state.changes()
        except Exception as error:  # the cell may have replaced any function that is called here
            self._lost.append(Lost(*not_brought(error)))
            return None
        self._lost += map(Lost, self._arrival.state.stayed)
        return changes

    def _tell_left_out(self) -> None:
        """Report the parts of modules, loggers and formatters that cannot be sent back.

        A part of a module is not reported if the cell has neither replaced nor changed it, because
        the notebook still has it, or if the module is new to the notebook.
        """
        heap, before = self._heap, self._arrival.left_before
        for path, one in heap.left.items():
            was, inside = before.get(path), heap.reached([heap.number[id(one.part)]])
            known = (n for n in inside if n < len(heap.before))
            as_it_was = was is not None and was.part is one.part and all(map(heap.is_same, known))
            if isinstance(one.holder, types.ModuleType) and (
                as_it_was or heap.number[id(one.holder)] >= self._known
            ):
                continue
            self._lost.append(
                Lost(path, (self._why_not(path, one.part) or str(one.error)) + AS_BEFORE)
            )

    def _tell_parted(self) -> None:
        """Report the attributes that stay with this process, each once in all ``--keep`` cells."""
        heap, new = self._heap, []
        roots = [*self._roots.values(), *self._places.values(), *self._diff.changed]
        comes = heap.reached(roots, self._held_back)
        for one in heap.parted:
            if heap.number.get(id(one.holder)) not in comes:
                continue
            key = id(one.holder), one.attribute
            if _told_parted.get(key) != id(one.part):
                new.append(one)
            _told_parted[key] = id(one.part)
        self._lost += [
            Lost(told, "each process has its own; the rest came back")
            for told in summarize_attributes(new)
        ]

    def _number_roots(self) -> tuple[dict[str, int], dict[str, int]]:
        """Number all roots: variables, the cell's last value (under an empty name), and places."""
        arrival, heap = self._arrival, self._heap
        found, places = dict[str, int](), dict[str, int]()
        for name, item in self._visible.items():
            if (name in self._rebound and self._is_returned(name)) or id(item) in heap.number:
                found[name] = heap.enter(item)
        if arrival.returned is None:
            found |= {"": heap.enter(self._value)} if self._value is not NOTHING else {}
            new = self._places_now.keys() - arrival.places_before.keys()
            places = {name: heap.enter(self._places_now[name]) for name in sorted(new)}
        heap.walk()
        roots = dict(sorted(found.items(), key=lambda entry: heap.early(entry[1])))
        return roots, places

    def _of(self, numbers: Container[int]) -> list[str]:
        """Return the variables and places whose values are these objects."""
        return [name for name, n in (self._roots | self._places).items() if n in numbers]

    def _refuse(self) -> set[int]:
        """Return the objects that keep their old state, because a part cannot be sent; report them.

        An object that is new to the notebook is left out, with the variables and places that refer
        to it.
        """
        heap, roots = self._heap, self._roots | self._places
        new, held_back = refuse(heap, self._diff, self._known, roots.values())
        for name in self._refused_names(held_back, is_any=bool(new)):
            self._named.add(name)
            # the notebook has no older value to keep
            is_new = roots[name] in new or roots[name] >= self._known
            why = self._why(name) + ("" if is_new else AS_BEFORE)
            self._lost.append(Lost(name or "the cell's last value", why, name))
            if is_new:
                (self._roots if name in self._roots else self._places).pop(name)
        return held_back

    def _refused_names(self, held_back: set[int], *, is_any: bool) -> list[str]:
        """Return the variables and places to report for what is held back, each once."""
        heap, roots = self._heap, self._roots | self._places
        found = self._of(held_back)
        reached = heap.reached(roots[name] for name in found)
        for n in [*heap.failed] if is_any else ():
            if n in reached:
                continue
            # Every variable that contains it is held back; one of them has it in a container.
            around = self._of(heap.holding([n], range(len(heap.objects))))[:1]
            found += [name for name in around if name not in found]
        return [name for name in found if name not in self._named]

    def _why(self, name: str) -> str:
        value = self._visible.get(name, self._places_now.get(name, self._value))
        return self._why_not(name or "it", value) or str(next(iter(self._heap.failed.values())))

    def _why_not(self, name: str, value: Any) -> str | None:
        reader = Reader(self._namespace, project=self._arrival.project, unwrap=True)
        found = culprit_of(name, value, reader)
        return found and f"{found.path} is a {found.kind}, which cannot be pickled ({found.reason})"

"""What kept ranks hold for the next cell, as the notebook sees it.

After a cell both sides know the same objects under the same numbers: what travelled, and what came back. The next payload goes on
behind them. It names nothing by an older number, since other ranks than 0 do not know the numbers of an answer; an object that a
name of the ranks is bound to goes by this name.

:class:`Kept` is made right after a cell: which names rank 0 had then, and what they are here. When the next cell is captured,
:class:`Held` says which of them hold still: those that are bound to the same object, in which no flat state and no memory is
another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

from taas.capture.applying import Applied
from taas.capture.heap import CONSTANT, NAMESPACE, Heap
from taas.capture.holders import holders
from taas.capture.memory import MemoryTable, Stretch, overlapping
from taas.capture.names import needs_of
from taas.capture.reader import Reader
from taas.capture.reading import ATOMS
from taas.capture.snapshot import MemorySnapshot

_NONE = object()
"""What the notebook has where it lacks a name."""
_UNSURE = object()
"""What it would have to have under a name of which nobody is sure what the ranks have."""


class Kept:
    """What ranks hold after a cell.

    Args:
        namespace: the notebook's names.
        project: the folder whose modules hold data of the notebook.
        names: what the notebook has under each name of the ranks.
        own: of these, names under which the ranks have something else: what could not come back.
        places: what the ranks hold elsewhere than in names, as the notebook does.
        heap: the objects that both know.
        applied: what the cell's answer did.
        before: what they held before.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        project: str = "",
        names: dict[str, Any] | None = None,
        own: Collection[str] = (),
        places: dict[str, Any] | None = None,
        heap: Heap | None = None,
        applied: Applied | None = None,
        before: Kept | None = None,
    ) -> None:
        applied = applied or Applied()
        self.names, self.cells, self.project = names or {}, len(namespace.get("In", ())), project
        self.own, self.wrapped, self.places = frozenset(own), frozenset(applied.wrapped), places or {}
        self.heap = heap or Heap(Reader(namespace), [namespace])
        self.heap.reader, self.heap.named = Reader(namespace, project=project), {}
        self.heap.mark()
        self.heap.failed = {}
        self.next_region = applied.next_region
        reached = self.heap.reached(n for _, n in self.roots())
        self.heap.forget_but(reached | {NAMESPACE})
        used = MemoryTable(applied.memory, ()).regions_of(self.heap.memories_among(reached).values())
        self.stretches = {n: stretch for n, stretch in applied.memory.items() if n in used}
        self.snapshot: MemorySnapshot = MemorySnapshot(self.stretches, before.snapshot if before else None)

    def roots(self) -> list[tuple[str, int]]:
        """Return the names, and places, of what travelled to the ranks or came from there, with its numbers."""
        number = self.heap.number
        same = {n: v for n, v in self.names.items() if v is not _UNSURE and v is not _NONE}
        return [(name, number[id(v)]) for name, v in (self.places | same).items() if id(v) in number]

    @classmethod
    def after(
        cls,
        namespace: dict[str, Any],
        project: str,
        before: Held,
        sent: Collection[str],
        places: Collection[str],
        heap: Heap,
        applied: Applied,
    ) -> Kept:
        """Return what the ranks hold after a cell whose answer was applied.

        Args:
            namespace: the notebook's names.
            project: the folder whose modules hold data of the notebook.
            before: what they held before.
            sent: names that travelled.
            places: what travelled beside names.
            heap: the objects that travelled or came.
            applied: what the answer did.
        """
        names = {name: namespace.get(name, _NONE) for name in applied.there}
        own = {*applied.own, *(before.own - {*sent, *applied.rebound})} & names.keys()
        own |= {name for name, value in names.items() if value is _NONE}
        there = {*places, *before.places, *applied.places}
        held = {name: value for name, value in holders(project).items() if name in there}
        return cls(namespace, project, names, own, held, heap, applied, before.kept)

    @classmethod
    def unsure(cls, namespace: dict[str, Any], names: Iterable[str]) -> Kept:
        """Return what ranks hold that did not answer: under these names, what nobody is sure of."""
        return cls(namespace, names=dict.fromkeys(names, _UNSURE))


class Held:
    """Which names of the ranks hold still, for one cell: the notebook has neither rebound them nor changed what is in them.

    A name that does not hold travels, if the cell needs it; else it is deleted in the ranks.

    Args:
        kept: what the ranks hold.
        namespace: the notebook's names.
        anew: objects that are not held, since the ranks have something of their run in their place.

    Attributes:
        kept: what the ranks hold.
        names: those that hold.
        places: what else holds.
        named: what objects are called that go by a name, by their ids.
        own: names under which the ranks have something of their own.
        next_region: the number of the region that comes next.
    """

    def __init__(self, kept: Kept, namespace: dict[str, Any], anew: Iterable[Any] = ()) -> None:
        self.kept, self.own, self.next_region = kept, kept.own, kept.next_region
        never = {id(value) for value in anew}
        here = {name for name, value in kept.names.items() if namespace.get(name, _NONE) is value}
        bound = {name for name in _bound_since(kept, namespace) & here if type(kept.names[name]) in ATOMS}
        self.names = {name for name in here - bound if id(kept.names[name]) not in never}
        now = holders(kept.project) if kept.places else {}
        self.places = {name for name, value in kept.places.items() if now.get(name, _NONE) is value}
        self._inside = {
            name: kept.heap.reached([n])
            for name, n in kept.roots()
            if name in self.names or name in self.places
        }
        self._where = MemoryTable(kept.stretches, ()).places()
        memories = kept.heap.memories_among(self._numbers).items()
        self._regions = {n: {*overlapping(self._where, *memory)} for n, memory in memories}
        self._let_go(self._changed() | {n for v in never if (n := kept.heap.number.get(v)) is not None})

    @property
    def _numbers(self) -> set[int]:
        return set().union(*self._inside.values())

    def _changed(self) -> set[int]:
        """Return the numbers of what is another now than after the last cell."""
        kept, heap, numbers = self.kept, self.kept.heap, self._numbers
        length = len(heap.objects)
        heap.describe_after(numbers, heap.reader)
        found = {n for n in numbers if n in heap.failed or not heap.same(heap.before[n], heap.states[n])}
        heap.end_proof(length)
        changed = kept.snapshot.changed(kept.stretches)
        regions = {n for n in kept.stretches if changed.get(n, True)}
        return found | self._looking_into(regions)

    def _looking_into(self, regions: set[int]) -> set[int]:
        """Return the numbers of the memory that has any of some regions."""
        return {n for n, own in self._regions.items() if not own.isdisjoint(regions)}

    def _let_go(self, dirty: set[int]) -> None:
        gone = {name for name, inside in self._inside.items() if not inside.isdisjoint(dirty)}
        self.names -= gone
        self.places -= gone
        self._inside = {name: inside for name, inside in self._inside.items() if name not in gone}
        kept = self.kept
        by_wrapped = sorted(kept.names.items(), key=lambda entry: entry[0] not in kept.wrapped)
        self.named = {
            id(value): name
            for name, value in by_wrapped
            if name in self.names and name not in self.own and type(value) not in ATOMS
        }

    def let_go(self, heap: Heap) -> bool:
        """Let names go that have parts in what travels; tell whether there are any."""
        kept, before, numbers = self.kept.heap, len(self.names) + len(self.places), self._numbers
        ids = {id(kept.objects[n]): n for n in numbers if (kept.states[n] or ("atom",))[0] not in CONSTANT}
        shared, regions = set[int](), set[int]()
        for n in range(len(self.objects), len(heap.objects)):
            state = heap.states[n]
            if state is None or state[0] == "name":
                continue
            if state[0] == "memory":
                memory = heap.objects[n]
                regions |= {*overlapping(self._where, memory.address, memory.nbytes)}
            elif (m := ids.get(id(heap.objects[n]))) is not None:
                shared.add(m)
        shared |= self._looking_into(regions) & numbers
        if shared:
            self._let_go(shared)
        return len(self.names) + len(self.places) < before

    @property
    def objects(self) -> list[Any]:
        """What both sides know already, by number: what is not held is left out."""
        known = self._numbers | {NAMESPACE}
        return [value if n in known else None for n, value in enumerate(self.kept.heap.objects)]

    def memory(self) -> dict[int, Stretch]:
        """Return the memory that is held, by region."""
        used = set().union(*(self._regions.get(n, ()) for n in self._numbers))
        return {n: stretch for n, stretch in self.kept.stretches.items() if n in used}

    def told(self, sent: Collection[str]) -> dict[str, Any]:
        """Return what the ranks are told of it: what holds, and what they delete, as it is not what the notebook has."""
        return {
            "names": sorted(self.names),
            "deleted": sorted(self.kept.names.keys() - self.names - {*sent}),
            "numbers": sorted(self._numbers),
            "regions": [*self.memory()],
        }

    def unwrapped(self, sent: Collection[str]) -> list[str]:
        """Return the names that travel without the wrapper that the ranks have around them."""
        return sorted(self.kept.wrapped & {*sent})


def _bound_since(kept: Kept, namespace: dict[str, Any]) -> set[str]:
    """Return what the notebook's cells may have bound since: a constant that is bound anew is the same object as before."""
    found: set[str] = set()
    for cell in namespace.get("In", ())[kept.cells : -1]:
        with contextlib.suppress(SyntaxError):
            binds = needs_of(cell, {}).binds
            found |= kept.names.keys() if binds is None else binds
    return found

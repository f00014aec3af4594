"""What kept ranks have in memory, and which of it is still valid for the next cell.

After a cell, notebook and ranks have the same objects under the same numbers: those that were sent,
and those that the answer contained. The numbers of the next payload continue from there. The
payload does not refer to an object by its earlier number, because ranks other than 0 do not know
the numbers in an answer. An object bound to a variable in the ranks is referred to by that
variable's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from taas.base.wording import first_line
from taas.capture.cells import typed_cells
from taas.capture.describe.holders import holders
from taas.capture.describe.memory import MemorySnapshot, MemoryTable, Stretch, overlapping
from taas.capture.describe.process_own import tell_what_changed
from taas.capture.describe.reader import Reader
from taas.capture.describe.reading import ATOMS
from taas.capture.heap.heap import NAMESPACE, Heap, is_constant
from taas.capture.moves.applying import Applied
from taas.capture.moves.names import names_bound_by

NONE = object()
"""Sentinel: the notebook has no value for this variable."""
UNSURE = object()
"""Sentinel: the ranks' value of this variable is unknown."""


class Kept:
    """What the ranks have after a cell: variables, ``places``, and the matching notebook objects.

    ``places`` are further objects with data: modules, loggers and formatters. ``own`` are the
    variables whose value in the ranks could not be transferred back.
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
        self.is_known = names is not None  # if False, the ranks may have any variables
        self.names, self.cells, self.project = names or {}, len(typed_cells()), project
        self.own, self.wrapped = frozenset(own), frozenset(applied.wrapped)
        self.places = places or {}
        self.all = {**self.places, **self.names}
        self.heap = heap or Heap(Reader(namespace), [namespace])
        self.heap.reader, self.heap.named = Reader(namespace, project=project), {}
        self.heap.describe_as_here()
        self.heap.failed, self.heap.parted = {}, []
        self.next_region = applied.next_region
        reached = self.heap.reached(n for _, n in self.roots())
        self.heap.forget({*range(NAMESPACE + 1, len(self.heap.objects))} - reached)
        # Objects whose protocol raises here, so that a later change could not be detected. Their
        # numbers in the ranks stay the same; objects that the cell did not touch are not read
        # again.
        known: dict[int, Exception] = before.unreadable if before is not None else {}
        asked = self.heap.unreadable(applied.numbers & reached)
        still = {n: error for n, error in known.items() if n in reached}
        self.unreadable: dict[int, Exception] = still | asked
        self._new_unreadable = asked.keys() - known.keys()
        used = MemoryTable(applied.memory, ()).regions_of(
            self.heap.memories_among(reached).values()
        )
        self.stretches = {n: stretch for n, stretch in applied.memory.items() if n in used}
        # Memory that was still valid for the cell was then equal to the earlier snapshot, and the
        # ranks' copy still is. If a thread of the notebook has written to it since, the next cell
        # detects a change.
        self.snapshot: MemorySnapshot = MemorySnapshot(
            self.stretches, before.snapshot if before is not None else None, applied.patched
        )

    @property
    def notices(self) -> list[str]:
        """Lines for the user about what the ranks keep, whatever the notebook does with it."""
        roots, found = dict(self.roots()), []
        for n in sorted(self._new_unreadable):
            way, error = self.heap.shortest_path({n}, roots), self.unreadable[n]
            if way is not None:
                why = f"{type(error).__name__}: {first_line(error)}"
                found.append(
                    f"{way[0]} came, but its class cannot say here what is in it ({why}). The ranks"
                    " keep theirs: change it in cells with --keep, not in the notebook."
                )
        return found

    def roots(self) -> list[tuple[str, int]]:
        """Return the variables and places that have a number because they were sent or received."""
        number = self.heap.number
        return [
            (name, number[id(value)]) for name, value in self.all.items() if id(value) in number
        ]


class Held:
    """The variables and places of the ranks that are still valid for one cell.

    A variable is valid if the notebook has neither rebound it nor changed any object in its value,
    and if its value contains no object in ``anew``. A variable that is not valid is sent if the
    cell needs it; otherwise the ranks delete it.
    """

    def __init__(self, kept: Kept, namespace: dict[str, Any], anew: Iterable[Any] = ()) -> None:
        self.kept = kept
        never = {id(value) for value in anew}
        here = {**namespace, **(holders(kept.project) if kept.places else {})}
        bound = {name for name in _bound_since(kept) if type(kept.names.get(name)) in ATOMS}
        self._holds = {
            name
            for name, value in kept.all.items()
            if here.get(name, NONE) is value and name not in bound and id(value) not in never
        }
        self.inside = {
            name: kept.heap.reached([n]) for name, n in kept.roots() if name in self._holds
        }
        self._where = MemoryTable(kept.stretches, ()).places()
        memories = kept.heap.memories_among(self._numbers).items()
        self._regions = {n: {*overlapping(self._where, *memory)} for n, memory in memories}
        self._let_go(
            self._changed() | {n for v in never if (n := kept.heap.number.get(v)) is not None}
        )

    @property
    def names(self) -> set[str]:
        """The variables that are valid."""
        return self._holds & self.kept.names.keys()

    @property
    def places(self) -> set[str]:
        """The modules, loggers and formatters that are valid."""
        return self._holds & self.kept.places.keys()

    @property
    def named(self) -> dict[int, str]:
        """By id, the variable names by which the payload refers to objects of the ranks."""
        kept, names = self.kept, self.names - self.kept.own
        by_wrapped = sorted(names, key=lambda name: name not in kept.wrapped)
        return {
            id(kept.names[name]): name for name in by_wrapped if type(kept.names[name]) not in ATOMS
        }

    @property
    def _numbers(self) -> set[int]:
        return set().union(*self.inside.values())

    def _changed(self) -> set[int]:
        """Return the numbers of the objects that have changed since the last cell."""
        kept, heap, numbers = self.kept, self.kept.heap, self._numbers
        length = len(heap.objects)
        tell_what_changed()
        try:
            heap.describe_after(numbers, heap.reader)
            asked = numbers - kept.unreadable.keys()
            found = {n for n in asked if n in heap.failed or not heap.is_same(n)}
        finally:  # also after an interrupt: the next cell must compare with the same states
            heap.take_back(length)
        changed = MemorySnapshot(kept.stretches).changed_since(kept.snapshot)
        return found | self._looking_into({n for n in kept.stretches if changed.get(n, True)})

    def _looking_into(self, regions: set[int]) -> set[int]:
        return {n for n, own in self._regions.items() if not own.isdisjoint(regions)}

    def _let_go(self, dirty: set[int]) -> bool:
        gone = {name for name, inside in self.inside.items() if not inside.isdisjoint(dirty)}
        self._holds -= gone
        self.inside = {name: inside for name, inside in self.inside.items() if name not in gone}
        return bool(gone)

    def let_go(self, heap: Heap) -> bool:
        """Invalidate variables that share objects with what is sent; tell if there were any."""
        kept, numbers = self.kept.heap, self._numbers
        ids = {
            id(kept.objects[n]): n
            for n in numbers
            # constants do not count: all tensors share torch.float32
            if not is_constant(kept.objects[n], kept.states[n])
        }
        shared, regions = set[int](), set[int]()
        for n in range(len(kept.objects), len(heap.objects)):
            kind, value = (heap.states[n] or ("",))[0], heap.objects[n]
            if kind == "memory":
                regions |= {*overlapping(self._where, value.address, value.nbytes)}
            elif kind not in ("", "name") and id(value) in ids:
                shared.add(ids[id(value)])
        return self._let_go(shared | (self._looking_into(regions) & numbers))

    @property
    def objects(self) -> list[Any]:
        """The objects that both sides have, by number; None for those that are not valid."""
        known = self._numbers | {NAMESPACE}
        return [value if n in known else None for n, value in enumerate(self.kept.heap.objects)]

    def memory(self) -> dict[int, Stretch]:
        """Return the memory that is valid, by region."""
        used = set().union(*(self._regions.get(n, ()) for n in self._numbers))
        return {n: stretch for n, stretch in self.kept.stretches.items() if n in used}

    def message_to_ranks(self, sent: Collection[str]) -> dict[str, Any]:
        """Return the message to the ranks: which variables are valid, and which to delete.

        If the notebook does not know what the ranks have, they delete all variables. This is the
        case after an interrupt while a cell was being captured, or an answer was being unpacked.
        """
        deleted = sorted(self.kept.names.keys() - self.names - {*sent})
        return {
            "names": sorted(self.names),
            "deleted": deleted if self.kept.is_known else None,
            "numbers": sorted(self._numbers),
            "regions": [*self.memory()],
        }


def _bound_since(kept: Kept) -> set[str]:
    """Return the variables that the notebook's cells have since bound, as far as their code shows.

    This matters for constants only: after a constant was rebound to an equal value, it is the same
    object as before. If the code does not show what it binds (a magic, ``exec``), a constant that
    still has the notebook's value is assumed not to be rebound. Each rank then keeps its own value
    of ``rank``, for example, and does not get rank 0's.
    """
    found: set[str] = set()
    for cell in typed_cells()[kept.cells : -1]:
        found |= names_bound_by(cell) or set()
    return found

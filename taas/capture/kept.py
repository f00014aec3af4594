"""What ranks that stay hold for the next cell, as the notebook sees it.

After a cell both sides know the same objects under the same numbers: what travelled, and what came back. The next payload
goes on behind them. It names nothing by an older number, since other ranks than 0 do not know the numbers of an answer;
what it brings anew is known by its new number alone. An object that a name of the ranks is bound to goes by this name.

:class:`Kept` is made right after a cell: which names rank 0 had then, what they were in the notebook, and what was in all of
it. When the next cell is captured, :class:`Held` says which of these names hold still.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Container, Iterable
from typing import Any

from taas.capture.applying import Applied
from taas.capture.changes import Notes
from taas.capture.checksums import MemorySnapshot
from taas.capture.losing import Paths
from taas.capture.memory import DeviceMemory, MemoryTable, Stretch, overlapping
from taas.capture.modules import is_elsewhere
from taas.capture.names import needs_of
from taas.capture.pickling import NAMESPACE, Table
from taas.capture.reader import memory_of
from taas.capture.reading import is_atom

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
        own: of these, names under which the ranks have something else: what could not come back, or was not asked for.
        wrapped: of these, names under which the ranks have a parallel wrapper around what the notebook has.
        table: the objects that both know.
        stretches: the memory that both know, by region.
        next_region: the number of the region that comes next.
        before: what they held before.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        project: str = "",
        names: dict[str, Any] | None = None,
        own: Collection[str] = (),
        wrapped: Collection[str] = (),
        table: Table | None = None,
        stretches: dict[int, Stretch] | None = None,
        next_region: int = 0,
        before: Kept | None = None,
    ) -> None:
        self.names, self.cells = names or {}, len(namespace.get("In", ()))
        self.own, self.wrapped = frozenset(own), frozenset(wrapped)
        self.next_region = next_region
        roots = [value for name, value in self.names.items() if name not in self.own and value is not _UNSURE]
        table, stretches = table or Table(namespace), stretches or {}
        objects = table.copy().objects
        self.web = _Web(roots, Paths(namespace, {*map(id, objects.values())}), stretches)
        self.table = table.cut({number for number, v in objects.items() if id(v) in self.web.holders})
        self.stretches = {n: stretch for n, stretch in stretches.items() if _node(n) in self.web.holders}
        self._notes = Notes(self.table.objects, self.table.rows, namespace, project)
        self._snapshot: MemorySnapshot = MemorySnapshot(
            self.stretches, before._snapshot if before is not None else None
        )

    @classmethod
    def after(
        cls, namespace: dict[str, Any], project: str, before: Held, sent: Collection[str], applied: Applied
    ) -> Kept:
        """Return what the ranks hold after a cell whose answer was applied.

        Args:
            namespace: the notebook's names.
            project: the folder whose modules hold data of the notebook.
            before: what they held before.
            sent: names that travelled.
            applied: what the answer did.
        """
        names = {name: namespace.get(name, _NONE) for name in applied.there}
        own = {*applied.own, *(before.own - {*sent, *applied.rebound})} & names.keys()
        own |= {name for name, value in names.items() if value is _NONE}
        wrapped = set(applied.wrapped)
        known = (applied.table, applied.memory, applied.next_region)
        return cls(namespace, project, names, own, wrapped, *known, before._kept)

    @classmethod
    def unsure(cls, namespace: dict[str, Any], names: Iterable[str]) -> Kept:
        """Return what ranks hold that did not answer: under these names, what nobody is sure of."""
        return cls(namespace, names=dict.fromkeys(names, _UNSURE))

    def changed(self) -> set[int]:
        """Return the objects and the memory that the notebook has changed since."""
        numbers = [number for number, _ in self._notes.changes(None)]
        objects = self.table.copy().objects
        found = {id(objects[number]) for number in numbers}
        changed = self._snapshot.changed(self.stretches)
        return found | {_node(n) for n in self.stretches if changed.get(n, True)}

    def parts(self) -> frozenset[int]:
        """Return the ids of the objects that a name does not share with what travels without it; constants are told by a name."""
        noted = (
            v
            for n, v in self.table.objects.items()
            if (self._notes.is_noted(n) and not isinstance(v, type)) or type(v) in (float, complex)  # a NaN
        )
        rows = (row for _, items in self.table.rows for row in items)
        return frozenset(map(id, noted)) | frozenset(map(id, rows))


class Held:
    """Which names of the ranks hold still, for one cell: the notebook has neither rebound them nor changed what is in them.

    A name that does not hold travels, if the cell needs it; else it is deleted in the ranks. With it goes every name
    that shares an object or memory with it, so that aliases stay aliases.

    Args:
        kept: what the ranks hold.
        namespace: the notebook's names.
        anew: objects that are not held, since the ranks have something of their run in their place.

    Attributes:
        names: those that hold.
        named: what objects are called that go by a name, by their ids.
        own: names under which the ranks have something of their own.
        parts: ids of the other objects that names hold.
        next_region: the number of the region that comes next.
    """

    def __init__(self, kept: Kept, namespace: dict[str, Any], anew: Iterable[Any] = ()) -> None:
        self._kept, self._web = kept, kept.web
        self.own, self.next_region = kept.own, kept.next_region
        never = {id(value) for value in anew}
        here = {name for name, value in kept.names.items() if namespace.get(name, _NONE) is value}
        bound = {name for name in _bound_since(kept, namespace) & here if is_atom(kept.names[name])}
        self.names = {name for name in here - bound if id(kept.names[name]) not in never}
        constants = {id(v) for v in namespace.values() if type(v) in (tuple, frozenset) and v}
        self._objects = kept.parts() | constants
        self._shared = self._objects | {_node(n) for n in kept.stretches}
        self.parts: frozenset[int] = frozenset()
        self.named: dict[int, str] = {}
        gone = [value for name, value in self._roots() if name not in self.names]
        self._let_go(self._web.holding(kept.changed() | never), gone)

    def _roots(self) -> list[tuple[str, Any]]:
        kept = self._kept
        return [(name, v) for name, v in kept.names.items() if name not in kept.own and v is not _UNSURE]

    def regions(self, memory: DeviceMemory) -> set[int]:
        """Return the nodes of what the ranks hold of a memory that travels."""
        return self._web.regions(memory)

    def new_table(self) -> Table:
        """Return a table that goes on behind what both sides know."""
        table = self._kept.table
        return table.cut(range(table.next_leaf + 1, table.next))

    def let_go(self, shared: set[int]) -> bool:
        """Let names go that have parts in what travels; tell whether there are any."""
        before = len(self.names)
        self._let_go(self._web.holding(shared), [])
        return len(self.names) < before

    def _let_go(self, dirty: set[int], gone: list[Any]) -> None:
        """Let names go that hold something dirty, and those that share something with what goes."""
        seen: set[int] = set()
        while True:
            new = [(n, v) for n, v in self._roots() if n in self.names and id(v) in dirty]
            self.names -= {name for name, _ in new}
            gone += [value for _, value in new]
            self._name()
            if not gone:
                break
            dirty = self._web.holding(self._web.reached(gone, self.named, seen) & self._shared)
            gone = []

    def _name(self) -> None:
        """Note which objects go by a name: data of modules do not, which has no name in the ranks."""
        named = {
            id(value): name
            for name, value in sorted(self._roots(), key=lambda root: root[0] not in self._kept.wrapped)
            if name in self.names
            and not is_elsewhere(name)
            and (id(value) in self._shared or _is_of_notebook(value))
        }
        self.named, self.parts = named, self._objects - named.keys()

    def known(self) -> tuple[dict[int, Any], dict[int, Stretch]]:
        """Return what is held: the objects by number, and the memory by region."""
        reached = self._web.reached([v for n, v in self._roots() if n in self.names], {}, set())
        objects = self._kept.table.copy().objects
        held = {n: value for n, value in objects.items() if n != NAMESPACE and id(value) in reached}
        return held, {n: stretch for n, stretch in self._kept.stretches.items() if _node(n) in reached}

    def deleted(self, sent: Collection[str]) -> list[str]:
        """Return the names that the ranks have to delete, as what they have is not what the notebook has."""
        return sorted(self.outdated() - {*sent})

    def outdated(self) -> set[str]:
        """Return the names under which the ranks have something else than the notebook."""
        return self._kept.names.keys() - self.names

    def unwrapped(self, sent: Collection[str]) -> list[str]:
        """Return the names that travel without the wrapper that the ranks have around them."""
        return sorted(self._kept.wrapped & {*sent})


def _bound_since(kept: Kept, namespace: dict[str, Any]) -> set[str]:
    """Return what the notebook's cells may have bound since: a constant that is bound anew is the same object as before."""
    found: set[str] = set()
    for cell in namespace.get("In", ())[kept.cells : -1]:
        with contextlib.suppress(SyntaxError):
            binds = needs_of(cell, {}).binds
            found |= kept.names.keys() if binds is None else binds
    return found


def _is_of_notebook(value: Any) -> bool:
    return isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"


# ---------------------------------------------------------------- who holds what


def _node(region: int) -> int:
    """Return what memory is called among ids of objects."""
    return -1 - region


class _Web:
    """Who holds what, of all that is in some objects; by ids.

    Attributes:
        holders: of each object and each region of memory.
    """

    def __init__(self, roots: list[Any], paths: Paths, stretches: dict[int, Stretch]) -> None:
        self.holders: dict[int, list[int]] = {id(value): [] for value in roots if not is_atom(value)}
        self._parts: dict[int, list[int]] = {}
        self._places = MemoryTable(stretches, ()).places()
        waiting = [value for value in roots if not is_atom(value)]
        alive: list[Any] = []  # so that no id is given twice
        while waiting:
            value = waiting.pop()
            alive.append(value)
            found = [part for _, part in paths.parts(value)]
            memory = value if type(value) is DeviceMemory else memory_of(value)
            self._parts[id(value)] = [*map(id, found), *(self.regions(memory) if memory else ())]
            waiting += {id(part): part for part in found if id(part) not in self.holders}.values()
            for node in self._parts[id(value)]:
                self.holders.setdefault(node, []).append(id(value))

    def regions(self, memory: DeviceMemory) -> set[int]:
        """Return the regions that have some of a memory."""
        return {_node(region) for region in overlapping(self._places, memory.address, memory.nbytes)}

    def holding(self, nodes: set[int]) -> set[int]:
        """Return objects, and all that hold them."""
        found, waiting = set(nodes), [*nodes]
        while waiting:
            new = [holder for holder in self.holders.get(waiting.pop(), ()) if holder not in found]
            found.update(new)
            waiting += new
        return found

    def reached(self, roots: list[Any], but: Container[int], seen: set[int]) -> set[int]:
        """Return what is in some objects, but for what goes by a name, or was seen, and what is in that."""
        found = {id(value) for value in roots} - seen
        waiting = [*found]
        while waiting:
            parts = self._parts.get(waiting.pop(), ())
            new = {part for part in parts if part not in but and part not in found and part not in seen}
            found |= new
            waiting += new
        seen |= found
        return found

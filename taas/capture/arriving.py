"""A rank's side: names out of a payload before the cell, and what has to be known to send back what changes."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.capture.applying import NOTHING, Applied, apply_answer
from taas.capture.changes import Notes
from taas.capture.checksums import MemorySnapshot
from taas.capture.code_by_value import classes_told_again
from taas.capture.libraries import join_devices_at_first_step
from taas.capture.loggers import go_to_ends
from taas.capture.memory import MemoryTable, Span, Stretch, changed_parts, find_place, merged, view_of
from taas.capture.modules import among_names, data_of_modules, loaded_as, put_into_modules
from taas.capture.of_ipython import dress
from taas.capture.payload import Payload, numbers_in
from taas.capture.pickling import Pickler, Table, no_collection
from taas.capture.process_state import ProcessState
from taas.capture.reader import memory_of
from taas.capture.reading import ATOMS
from taas.capture.returning import Packing
from taas.errors import CaptureError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_UNCHANGEABLE = (*ATOMS, range, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class Arrival:
    """The captured names in a rank, and what has to be known to send back what changes.

    Attributes:
        names: names that arrived.
        left_behind: names that the cell may need and that could not travel, each with its reason.
        memory: where tensors and arrays are.
        table: the objects that travelled, by number, but for those that the notebook keeps nowhere.
        returned: names that come back; None for all.
        cell_numbers: ``In[n]`` of the cells that functions are from, by file.
        all_in_host_memory: whether no CUDA device has any of the memory, there or here.
        held: names that an earlier cell left here, and that hold still.
        wanted: what the last answer was asked for, by ids of objects; None for all.
        withheld: what of it did not come, as it belongs to objects of which a part was refused.
        untold: names that the cell rebound, which nobody asked for.
    """

    wanted: dict[int, Any] | None = None
    withheld: dict[int, Any] = {}  # noqa: RUF012  it is replaced, not changed
    _answered: tuple[Collection[int], Collection[int]] = (), ()
    """Regions that the last answer was asked for, and those that were withheld."""
    untold: Collection[str] = ()

    def __init__(
        self, fd: int, namespace: dict[str, Any], *, device: str | None, before: Arrival | None = None
    ) -> None:
        self._fd = os.dup(fd)
        self.payload = Payload(self._fd)
        preface = self.payload.preface
        held = preface["held"]
        self._owed: dict[int, Sequence[Span]] = {}
        self._snapshot: MemorySnapshot | None = before._snapshot if before is not None else None
        self._untold_before: Arrival | None = None
        self.table, known = Table(namespace), dict[int, Stretch]()
        if before is not None:
            self.table = before.table.cut(numbers_in(held["numbers"]))
            there = before.memory.stretches  # other ranks than 0 have no memory of answers
            known = {number: there[number] for number in held["regions"] if number in there}
            if before.wanted is not None or before.withheld:
                self._owed = before.changed_memory({n for n in known if not before.is_asked(n)})
                self._untold_before = before
            before.close()
        self.memory: MemoryTable = self.payload.mapped(device, known)
        self.next_region = self.payload.next_region
        self.names = self.payload.header.names
        self.held: list[str] = held["names"]
        self.left_behind: dict[str, str] = preface["left behind"]
        self.project: str = preface["project"]
        self.returned: set[str] | None = None if preface["returned"] is None else set(preface["returned"])
        self.state = ProcessState(preface["process state"], device)
        self.cell_numbers: dict[str, int] = {}
        devices = {region.device for region in self.payload.header.regions}
        devices |= {stretch.device for stretch in self.memory.stretches.values()}
        self.all_in_host_memory = device is None and devices <= {"cpu"}
        self._namespace = namespace

    def load(self) -> None:
        """Bind the names.

        Raises:
            CaptureError: an object cannot be rebuilt here.
        """
        namespace, preface = self._namespace, self.payload.preface
        data = data_of_modules(self.project)
        deleted: list[str] = preface["held"]["deleted"]
        for name in deleted:
            namespace.pop(name, None)
        for name, read in self.payload.parts(self.memory, self.table):
            try:
                _, namespace[name] = read()
            except Exception as error:
                raise CaptureError(
                    f"{name!r} cannot be rebuilt in the ranks: {type(error).__name__}: {error}. Ranks import the "
                    f"project's modules as their files are now; if one changed since the notebook imported it, "
                    f"reload it there and make {name!r} again."
                ) from error
        for number in preface["nobodys"]:
            self.table.objects.pop(number, None)
        put_into_modules(namespace, {name: data[name] for name in deleted if name in data})

    def dress(self, shell: InteractiveShell) -> None:
        """Tell a rank's shell the numbers of earlier cells, for tracebacks, and what they imported from the future."""
        preface = self.payload.preface
        shell.compile.flags |= preface["future"]
        shell.compile._filename_map.update(preface["cells"])
        self.cell_numbers = shell.compile._filename_map
        dress(shell, self._namespace, preface["history"], preface["extensions"])
        self.names = tuple(name for name in self.names if not name.startswith("%"))

    def mark(self) -> None:
        """Take the state that changes are found against, right before the cell runs."""
        told = numbers_in(self.payload.preface["held"]["numbers"])
        with no_collection():
            self.notes = Notes(self.table.objects, self.table.rows, self._namespace, self.project, told=told)
        self.names_before = {
            **self._namespace,
            **data_of_modules(self.project),
            **loaded_as(self.project),
        }
        self.state.mark()
        new = dict(self.payload.numbered())
        known = {n: here for n, here in self.memory.stretches.items() if n not in new}
        self._snapshot = MemorySnapshot(known, self._snapshot)
        before, self._untold_before = self._untold_before, None
        if before is not None:
            self.notes.go_on(before.notes, [n for n, v in self.table.objects.items() if not before.told(v)])
            for name in before.untold:
                self.names_before.pop(name, None)
            self.names_before |= {n: v for n, v in before.names_before.items() if n in before.untold}

    def is_asked(self, number: int) -> bool:
        """Tell whether the memory of a region was asked for, and came."""
        asked, withheld = self._answered
        return (self.wanted is None or number in asked) and number not in withheld

    def told(self, value: Any) -> bool:
        """Tell whether the notebook was told of changes of an object."""
        return (self.wanted is None or id(value) in self.wanted) and id(value) not in self.withheld

    def pack_answer(self, namespace: dict[str, Any], value: Any = NOTHING, *, last: bool = True) -> int:
        """Write what the cell changed into a sealed memfd; a rank with a GPU has waited for it before.

        Args:
            namespace: the rank's names after the cell.
            value: the last expression's value.
            last: no other answer is to be written that counts in its place.

        Returns:
            The descriptor, which the caller owns.
        """
        with no_collection(), among_names(namespace, self.project):
            return Packing(self, namespace).write(value, last=last)

    def patches(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yield what changed of the memory that the notebook knows: region, start and bytes."""
        self._answered = self._regions(self.wanted or {}), self._regions(self.withheld)
        asked = {n for n in self.memory.stretches if self.is_asked(n)}
        for number, spans in self.changed_memory(asked).items():
            address, host = self.memory.stretches[number].in_host_memory()
            for start, end in spans:
                yield number, start, view_of(address + start, end - start, host)

    def _regions(self, objects: dict[int, Any]) -> set[int]:
        """Return the regions that objects look into."""
        places, found = self.memory.places(), set()
        for value in objects.values():
            with suppress(Exception):  # what is sharded has none
                memory = memory_of(value)
                place = memory and find_place(places, memory.address, memory.nbytes)
                found |= {place[0]} if place else set()
        return found

    def changed_memory(self, numbers: Collection[int]) -> dict[int, Sequence[Span]]:
        """Return which parts of some regions the notebook does not have as they are here."""
        found: dict[int, Sequence[Span]] = {}
        changed = self._snapshot.changed(numbers) if self._snapshot is not None else {}
        for number, spans in changed.items():
            found[number] = merged([*self._owed.get(number, ()), *spans])
        original = self.payload.mapped(None).stretches
        for number in original.keys() & numbers:
            here, there = self.memory.stretches[number], original[number].address
            address, host = here.in_host_memory()
            found[number] = [*changed_parts(address, there, here.spans, private=not host)]
        return found

    def learn(self, pickler: Pickler, replaced: Iterable[int], *, last: bool) -> None:
        """Note what the notebook knows once it has the ``last`` answer; what was made anew has a new number."""
        if not last:
            return
        for number in replaced:
            del self.table.objects[number]
        self.table.learn(pickler.table)
        new = pickler.sent.stretches
        self.memory.stretches.update(new)
        self.next_region += len(new)

    def close(self) -> None:
        """Give up the payload's descriptor; no answer can be packed afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def arrive(
    fd: int,
    namespace: dict[str, Any],
    *,
    device: str | None,
    project: Path | None = None,
    before: Arrival | None = None,
) -> Arrival:
    """Unpack a payload in a rank. One whose names will be sent back has to be marked before the cell runs.

    Args:
        fd: the payload; may be closed afterwards.
        namespace: the rank's names; functions of the notebook get it as their globals.
        device: where captured CUDA tensors land, e.g. ``cuda:0``; ``cuda``: where they were; None for host memory.
        project: first entry of ``sys.path``; None for the notebook's.
        before: the arrival of this process' last cell; it is closed.

    Raises:
        VersionMismatch: versions differ; nothing was unpickled.
        CaptureError: an object cannot be rebuilt here.
    """
    arrival = Arrival(fd, namespace, device=device, before=before)
    arrival.state.put_early(str(project or arrival.project))
    arrival.payload.take_sources()
    with no_collection(), classes_told_again():
        arrival.load()
    arrival.state.put()
    go_to_ends()
    if device is not None:
        join_devices_at_first_step()
    return arrival


def rebind_answer(payload_fd: int, answer_fd: int, namespace: dict[str, Any]) -> Applied:
    """Bring a run's names into a notebook that did not start it.

    The names the cell was given are unpacked first, as in a rank, and changed as rank 0 changed them. What the
    notebook has under the same name stays if the cell could not have changed it: numbers, text, functions,
    classes, modules that the cell did not rebind.

    Args:
        payload_fd: the names the cell was given.
        answer_fd: rank 0's answer.
        namespace: the notebook's names.

    Raises:
        VersionMismatch: versions differ; nothing was unpickled.
        CaptureError: an object cannot be rebuilt here.
    """
    arrival = Arrival(payload_fd, namespace, device=None)
    for entry in (arrival.project, *arrival.payload.preface["process state"]["sys.path"]):
        if entry not in sys.path:
            sys.path.append(entry)
    arrival.payload.take_sources()
    before = {name: namespace[name] for name in arrival.names if name in namespace}
    try:
        with no_collection():
            arrival.load()
        with among_names(namespace, arrival.project):
            applied = apply_answer(answer_fd, namespace, arrival.table, arrival.memory.stretches)
    except BaseException:
        for name in arrival.names:
            namespace.pop(name, None)
        namespace.update(before)
        raise
    finally:
        arrival.close()
    for name, value in before.items():
        if name not in applied.rebound and isinstance(namespace.get(name), _UNCHANGEABLE):
            namespace[name] = value
    gone = set(applied.deleted)
    brought = [n for n in arrival.names if n not in gone and namespace.get(n) is not before.get(n)]
    applied.rebound = list(dict.fromkeys([*applied.rebound, *brought]))
    return applied

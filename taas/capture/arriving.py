"""A rank's side: names out of a payload before the cell, and the answer after it."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.capture.answering import CellChanges, OwnData
from taas.capture.applying import NOTHING, Applied, apply_answer
from taas.capture.building import Builder
from taas.capture.cells import MAGIC, cell_numbers, dress
from taas.capture.heap import NAMESPACE, Heap, no_collection
from taas.capture.holders import all_holders, go_to_ends, holders, loaded_as, set_apart
from taas.capture.libraries import join_devices_at_first_step
from taas.capture.memory import MemoryTable, SentMemory, Stretch, view_of
from taas.capture.payload import Payload
from taas.capture.process_state import ProcessState
from taas.capture.reader import Reader
from taas.capture.reading import ATOMS
from taas.capture.snapshot import MemorySnapshot
from taas.errors import CaptureError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_UNCHANGEABLE = (*ATOMS, range, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class Arrival:
    """The captured names in a rank, and what has to be known to send back what changes.

    Attributes:
        left_behind: names that the cell may need and that could not travel, each with its reason.
        memory: where tensors and arrays are.
        heap: the objects that travelled, by number, with the states that they came with.
        known: how many numbers the notebook knows.
        returned: names that come back; None for all.
        cell_numbers: ``In[n]`` of the cells that functions are from, by file.
        held: names that an earlier cell left here, and that hold still.
        names_before, places_before, specs_before: what was bound right before the cell, and what a reload makes anew.
        own_before: what modules held of this process' own.
    """

    names_before: dict[str, Any]
    places_before: dict[str, Any]
    specs_before: dict[str, Any]
    own_before: OwnData

    def __init__(
        self, fd: int, namespace: dict[str, Any], *, device: str | None, before: Arrival | None = None
    ) -> None:
        self._fd = os.dup(fd)
        self.payload = Payload(self._fd)
        self.contents = contents = self.payload.contents
        self._namespace = namespace
        set_apart(contents["apart"])
        self._snapshot: MemorySnapshot | None = before._snapshot if before is not None else None
        known = dict[int, Stretch]()
        held = contents["held"]
        self.heap = Heap(Reader(namespace, project=contents["project"]), [namespace])
        if before is not None:
            there = before.memory.stretches  # other ranks than 0 have no memory of answers
            known = {number: there[number] for number in held["regions"] if number in there}
            self.heap.go_on(before.heap, held["numbers"], contents["first"])
            before.close()
        self.heap.learn({}, {}, contents["first"], ())
        self.known = contents["first"] + len(contents["states"])
        self.memory: MemoryTable = self.payload.mapped(device, known)
        self.next_region = self.payload.next_region
        self.held: list[str] = held["names"]
        self.left_behind: dict[str, str] = contents["left behind"]
        self.project: str = contents["project"]
        self.returned: set[str] | None = None if contents["returned"] is None else set(contents["returned"])
        self.state = ProcessState(contents["process state"], device)
        self.cell_numbers: dict[str, int] = {}
        self._magics: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names that arrived."""
        return self.payload.header.names

    def load(self) -> None:
        """Bind the names.

        Raises:
            CaptureError: an object cannot be rebuilt here.
        """
        namespace, contents, first = self._namespace, self.contents, self.contents["first"]
        for name in contents["held"]["deleted"]:
            namespace.pop(name, None)
        states = dict(enumerate(contents["states"], first))
        made = dict(enumerate(self.heap.objects))
        builder = Builder(states, made, self.memory, namespace)
        for name, n in contents["roots"].items():
            namespace[name] = self._built(builder, name, n)
        beside = {name: self._built(builder, name, n) for name, n in contents["places"].items()}
        self._magics = {name: value for name, value in beside.items() if name.startswith(MAGIC)}
        self.heap.learn(made, states, self.known, contents["fresh"])

    def _built(self, builder: Builder, name: str, n: int) -> Any:
        try:
            return builder.build(n)
        except Exception as error:
            raise CaptureError(
                f"{name!r} cannot be rebuilt in the ranks: {type(error).__name__}: {error}. Ranks import the "
                f"project's modules as their files are now; if one changed since the notebook imported it, "
                f"reload it there and make {name!r} again."
            ) from error

    def dress(self, shell: InteractiveShell) -> None:
        """Tell a rank's shell the numbers of earlier cells, for tracebacks, and what they imported from the future."""
        contents = self.contents
        shell.compile.flags |= contents["future"]
        self.cell_numbers = cell_numbers(shell)
        self.cell_numbers.update(contents["cells"])
        dress(shell, self._namespace, contents["history"], contents["extensions"], self._magics)

    def mark(self) -> None:
        """Take what changes are found against, right before the cell runs."""
        with no_collection():
            self.heap.mark()
        self.names_before = {**self._namespace}
        self.places_before, self.specs_before = holders(self.project), loaded_as(self.project)
        with no_collection():
            self.own_before = OwnData(self.heap, Reader(self._namespace, project=self.project))
        self.state.mark()
        self._snapshot = MemorySnapshot(self.memory.stretches, self._snapshot)

    def pack_answer(self, namespace: dict[str, Any], value: Any = NOTHING, *, last: bool = True) -> int:
        """Write what the cell changed into a sealed memfd; a rank with a GPU has waited for it before.

        Args:
            namespace: the rank's names after the cell.
            value: the last expression's value.
            last: no other answer is to be written that counts in its place.

        Returns:
            The descriptor, which the caller owns.
        """
        with no_collection():
            return CellChanges(self, namespace, value).write(last=last)

    def patches(self, reached: set[int] | None) -> Iterator[tuple[int, int, memoryview]]:
        """Yield what changed of the memory that the notebook knows: region, start and bytes.

        Args:
            reached: the objects whose memory was asked for, by number; None for all.
        """
        asked = {*self.memory.stretches}
        if reached is not None:
            asked &= self.memory.regions_of(self.heap.memories_among(reached).values())
        for number, spans in self._snapshot.changed(asked).items() if self._snapshot is not None else ():
            if not spans:
                continue
            address, host = self.memory.stretches[number].in_host_memory()
            for start, end in spans:
                yield number, start, view_of(address + start, end - start, host)

    def learn(self, sent: SentMemory) -> None:
        """Note what memory the notebook knows once it has the last answer."""
        self.memory.stretches.update(sent.stretches)
        self.next_region += len(sent.stretches)

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
    with no_collection():
        arrival.load()
    arrival.state.put()
    go_to_ends()
    if device is not None:
        join_devices_at_first_step()
    return arrival


def unpack(fd: int, namespace: dict[str, Any], project: Path, kind: type) -> list[Any]:
    """Unpack a payload in a process that sends nothing back and has no GPU: what cannot be rebuilt there is left out.

    Args:
        fd: the payload; may be closed afterwards.
        namespace: gets the names.
        project: first entry of ``sys.path``.
        kind: the class of the objects that are asked for.

    Returns:
        These, in the order in which they were captured.

    Raises:
        VersionMismatch: versions differ; nothing was unpickled.
        CaptureError: one of these cannot be rebuilt here.
    """
    payload = Payload(fd)
    contents = payload.contents
    state = ProcessState(contents["process state"], None)
    state.put_early(str(project))
    payload.take_sources()
    states = dict(enumerate(contents["states"], contents["first"]))
    builder = Builder(states, {NAMESPACE: namespace}, payload.mapped(None), namespace, tolerant=True)
    with no_collection():
        for name, n in contents["roots"].items():
            value = builder.build(n)
            if n not in builder.lost:
                namespace[name] = value
        for name, n in contents["places"].items():
            if not name.startswith(MAGIC):
                builder.build(n)
    state.put()
    go_to_ends()
    for n, loss in builder.lost.items():
        if states[n][2] and builder.made.get(states[n][2][0]) is kind:
            raise CaptureError(f"{loss.what} cannot be rebuilt on a data VM: {loss.reason}")
    return [builder.made[n] for n in sorted(builder.made) if type(builder.made[n]) is kind]


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
    set_apart(all_holders())
    for entry in (arrival.project, *arrival.contents["process state"]["sys.path"]):
        if entry not in sys.path:
            sys.path.append(entry)
    arrival.payload.take_sources()
    before = {name: namespace[name] for name in arrival.names if name in namespace}
    try:
        with no_collection():
            arrival.load()
        applied = apply_answer(answer_fd, namespace, arrival.heap, arrival.memory.stretches)
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

"""Unpack variables in a rank, and record what ``answering`` needs to send changes back."""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.capture.cells import cell_numbers, keys_without_a_name, prepare_shell, users_names
from taas.capture.describe.flat import LeftOut
from taas.capture.describe.holders import (
    all_holders,
    go_to_ends,
    holders,
    left_out,
    loaded_as,
    set_apart,
)
from taas.capture.describe.libraries import join_devices_at_first_step
from taas.capture.describe.memory import MemorySnapshot, MemoryTable, Stretch, view_of
from taas.capture.describe.process_bound import Place, settle
from taas.capture.describe.process_bound_libraries import wrap_again
from taas.capture.describe.process_own import tell_again
from taas.capture.describe.reader import Reader
from taas.capture.describe.reading import ATOMS
from taas.capture.heap.building import Builder
from taas.capture.heap.heap import Heap, no_collection
from taas.capture.heap.payload import Payload
from taas.capture.moves.applying import Applied, apply_answer
from taas.capture.settings.import_draws import last_imported, put_back_draws_of
from taas.capture.settings.process_state import ProcessState
from taas.capture.settings.setup_cells import SetupCell, run_setup_cells
from taas.errors import CaptureError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_UNCHANGEABLE = (
    *ATOMS,
    range,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
)


class Arrival:
    """The captured variables in a rank, and what is needed to send changes back."""

    def __init__(
        self,
        fd: int,
        namespace: dict[str, Any],
        *,
        device: str | None,
        before: Arrival | None = None,
        place: Place | None = None,
    ) -> None:
        self._fd = os.dup(fd)
        self.payload = Payload(self._fd)
        self.contents = contents = self.payload.contents
        self._namespace = namespace
        set_apart(contents["apart"])
        self._marked: MemorySnapshot | None = None  # memory right before the cell
        # memory as in the last answer, and so in the notebook: whatever a thread has written to it
        # since is sent with the next answer
        self._answered: MemorySnapshot | None = before._answered if before is not None else None
        known = dict[int, Stretch]()
        held = contents["held"]
        self._goes_on = before is not None
        self.heap = Heap(Reader(namespace, project=contents["project"]), [namespace], math.inf)
        if before is not None:
            there = before.memory.stretches  # only rank 0 has the memory of answers
            known = {number: there[number] for number in held["regions"] if number in there}
            self.heap.go_on(before.heap, held["numbers"], contents["first"])
            before.close()
        self.heap.learn({}, {}, contents["first"])
        self.known = contents["first"] + len(contents["states"])
        self.memory: MemoryTable = self.payload.map_memory(device, known)
        self.next_region = self.payload.next_region
        self.held: list[str] = held["names"]
        self.project: str = contents["project"]
        self.returned: set[str] | None = (
            None if contents["returned"] is None else set(contents["returned"])
        )
        self.state = ProcessState(contents["process state"], device)
        self.place = place
        self.cell_numbers: dict[str, int] = {}
        self._beside: dict[str, Any] = {}
        self._of_setup: dict[str, Any] = before._of_setup if before is not None else {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the variables that arrived."""
        return self.payload.header.names

    @property
    def left_behind(self) -> dict[str, str]:
        """For each variable that was not sent: the reason."""
        return self.contents["left behind"]  # type: ignore[no-any-return]

    def run_setup_cells(self) -> None:
        """Run the setup cells that are new to this process.

        Raises :class:`CaptureError` if one of them fails.
        """
        cells = [SetupCell._make(cell) for cell in self.contents["setup"]]
        before = {**self._namespace} if cells else self._namespace
        run_setup_cells(cells, self._namespace, self.contents["future"])
        bound = {
            name: value
            for name, value in self._namespace.items()
            if before.get(name, self) is not value
        }
        self._of_setup.update(bound)

    def is_of_setup(self, name: str, value: Any) -> bool:
        """Tell whether a setup cell bound this value here; the notebook has its own value."""
        return self._of_setup.get(name, self) is value

    def load(self, *, for_data: bool = False) -> Builder:
        """Bind the variables; raise :class:`CaptureError` if an object cannot be rebuilt here.

        ``for_data``: bind the variables of a data process, which has no GPU, and leave out objects
        that cannot be rebuilt.
        """
        namespace, contents, first = self._namespace, self.contents, self.contents["first"]
        deleted = contents["held"]["deleted"]
        if deleted is None:
            deleted = users_names(namespace) if self._goes_on else ()
        for name in deleted:
            namespace.pop(name, None)
        states = dict(enumerate(contents["states"], first))
        made = dict(enumerate(self.heap.objects))
        builder = Builder(states, made, self.memory, namespace, tolerant=for_data)
        roots = (contents["for data"] if for_data else {}) or contents["roots"]
        for name, n in roots.items():
            value = self._build(builder, name, n)
            if n not in builder.lost:
                namespace[name] = value
        self._beside = {
            name: self._build(builder, name, n) for name, n in contents["places"].items()
        }
        whole = (
            {n: value for n, value in made.items() if n not in builder.lost}
            if builder.lost
            else made
        )
        self.heap.learn(whole, states, self.known)
        return builder

    def bind(self, names: list[str], value: Any) -> None:
        """Bind variables to a value that no payload contains."""
        self._namespace.update(dict.fromkeys(names, value))

    def _build(self, builder: Builder, name: str, n: int) -> Any:
        try:
            return builder.build(n)
        except Exception as error:
            raise CaptureError(
                f"{name!r} cannot be rebuilt in the ranks: {type(error).__name__}: {error}. Ranks"
                " import the project's modules as their files are now; if one changed since the"
                f" notebook imported it, reload it there and make {name!r} again."
            ) from error

    def prepare_shell(self, shell: InteractiveShell) -> None:
        """Give a rank's shell the numbers of earlier cells and their ``__future__`` imports.

        Tracebacks show these numbers.
        """
        contents = self.contents
        shell.compile.flags |= contents["future"]
        self.cell_numbers = cell_numbers(shell)
        self.cell_numbers.update(contents["cells"])
        own = {*self.names, *self.held}
        prepare_shell(
            shell, self._namespace, contents["history"], contents["extensions"], self._beside, own
        )

    def mark(self) -> None:
        """Record the state right before the cell, with which ``pack_answer`` compares."""
        with no_collection():
            left_out.clear()
            tell_again()
            self.heap.describe_as_here()
            self.left_before: dict[str, LeftOut] = self.heap.left
            self.known_before = len(self.heap.objects)
            self.names_before = {**self._namespace}
            self.keys_before = keys_without_a_name(self._namespace)
            self.places_before, self.specs_before = holders(self.project), loaded_as(self.project)
        self.last_module_before = last_imported()
        self.state.mark()
        self._marked = MemorySnapshot(self.memory.stretches, self._answered)
        self._answered = None  # it would keep alive memory that the notebook has released

    def patches(self, reached: set[int] | None) -> Iterator[tuple[int, int, memoryview]]:
        """Yield region, start and bytes of each changed part of the notebook's memory.

        ``reached`` are the objects whose memory is wanted; None means all objects.
        """
        if self._marked is None:  # :meth:`mark` is called in rank 0 only
            return
        asked = self.memory.stretches
        if reached is not None:
            regions = self.memory.regions_of(self.heap.memories_among(reached).values())
            asked = {n: stretch for n, stretch in asked.items() if n in regions}
        self._answered = MemorySnapshot(asked)
        for number, spans in self._answered.changed_since(self._marked).items():
            if not spans:
                continue
            address, host = self.memory.stretches[number].in_host_memory()
            for start, end in spans:
                yield number, start, view_of(address + start, end - start, host)

    def close(self) -> None:
        """Close the payload's descriptor; no answer can be packed afterwards."""
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
    place: Place | None = None,
) -> Arrival:
    """Unpack a payload in a rank.

    A rank that will send variables back calls :meth:`Arrival.mark` before the cell.

    Args:
        fd: the payload, a sealed memfd.
        namespace: the rank's namespace, in which the variables are bound.
        device: the device for CUDA tensors. ``cuda``: each keeps its device number. None: host
            memory.
        project: the project's folder in this process; None if it is the same as in the notebook.
        before: the arrival of this process's last cell; this call closes it.
        place: which rank this is.

    Raises:
        VersionMismatch: the versions differ; raised before anything is unpickled.
        CaptureError: an object cannot be rebuilt here.
    """
    arrival = Arrival(fd, namespace, device=device, before=before, place=place)
    _load_with_state(arrival, project)
    if device is not None:
        join_devices_at_first_step()
    return arrival


def _load_with_state(arrival: Arrival, project: Path | None, *, for_data: bool = False) -> Builder:
    arrival.state.put_early(str(project or arrival.project))
    put_back_draws_of(arrival.contents["known modules"])
    arrival.payload.take_sources()
    arrival.run_setup_cells()
    with no_collection():
        builder = arrival.load(for_data=for_data)
    _settle(arrival, builder, without_gpu=for_data)
    arrival.state.put()
    go_to_ends()
    return builder


def _settle(arrival: Arrival, builder: Builder, *, without_gpu: bool = False) -> None:
    """Settle new objects in this process, before random states are set: settling may draw."""
    new = [builder.made[n] for n in builder.states if n in builder.made and n not in builder.lost]
    shares = [
        builder.made[n]
        for n in arrival.contents["shares"]
        if n in builder.made and n not in builder.lost
    ]
    try:
        wrapped = arrival.contents["wrapped"]
        settle(new, shares, arrival.place, without_gpu=without_gpu, wrapped=wrapped)
        if arrival.place is not None and not without_gpu:
            # in the same order in all ranks: wrapping is collective
            for by, n, names in arrival.contents["again"]:
                arrival.bind(names, wrap_again(builder.made[by], builder.made[n]))
    except Exception as error:
        raise CaptureError(
            "what a library keeps of its process cannot be found out again in the ranks:"
            f" {type(error).__name__}: {error}. Make such objects (an Accelerator, a Trainer, a"
            " Fabric) in this cell."
        ) from error


def unpack(fd: int, namespace: dict[str, Any], project: Path, kind: type) -> list[Any]:
    """Unpack a payload in a data process: no GPU, no answer; leave out variables that fail.

    Returns the objects of a ``kind`` in the order in which they were captured.

    Raises:
        VersionMismatch: the versions differ; raised before anything is unpickled.
        CaptureError: one of the returned objects cannot be rebuilt here.
    """
    arrival = Arrival(fd, namespace, device=None)
    builder = _load_with_state(arrival, project, for_data=True)
    arrival.close()
    for n, loss in builder.lost.items():
        children = builder.states[n][2]
        if children and builder.made.get(children[0]) is kind:
            raise CaptureError(f"{loss.what} cannot be rebuilt on a data VM: {loss.reason}")
    return [builder.made[n] for n in sorted(builder.made) if type(builder.made[n]) is kind]


def rebind_answer(payload_fd: int, answer_fd: int, namespace: dict[str, Any]) -> Applied:
    """Restore a run's variables in a notebook that did not start it; raises as :func:`arrive` does.

    The variables that the cell was given are first unpacked, as in a rank, and then changed as rank
    0 changed them. The notebook keeps its own value of a variable if the cell cannot have changed
    the value in place: a number, string, function, class or module.
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
            _settle(arrival, arrival.load())
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

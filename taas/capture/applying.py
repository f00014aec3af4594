"""Rank 0's answer into a notebook: objects changed in place, names rebound."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from taas.capture.ahead import MissingModule, bound, stand_ins
from taas.capture.contents.kinds import Kinds
from taas.capture.culprit import path_to
from taas.capture.ipython_names import is_of_ipython
from taas.capture.memory import Block, Piece, SentMemory, read_at, view_of
from taas.capture.payload import (
    Patch,
    PayloadHeader,
    ReturnedMemory,
    check_versions,
    peek,
    read_pickle,
    read_preface,
)
from taas.capture.pickling import StreamReader, Unpickler
from taas.capture.quiet import no_collection
from taas.capture.salvaging import Salvager
from taas.capture.surroundings import Surroundings, not_brought
from taas.capture.tensors import join_devices
from taas.wording import first_line

__all__ = ["NOTHING", "Applied", "OwnMemory", "apply_answer"]


class _Nothing:
    """There was no value, or it could not travel."""

    def __repr__(self) -> str:
        return "<nothing>"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


@dataclass
class Applied:
    """What an answer did.

    Attributes:
        rebound: names that are new or have a new object.
        deleted: names that the cell deleted.
        changed: how many objects were changed in place.
        lost: what could not be brought back, a line each.
        value: the last expression's value, or :data:`NOTHING`.
        cells: file names of the cells whose functions came, with their numbers ``In[n]``.
    """

    rebound: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    changed: int = 0
    lost: list[str] = field(default_factory=list)
    value: Any = NOTHING
    cells: dict[str, int] = field(default_factory=dict)


class OwnMemory:
    """The notebook's own memory, which a payload was written from."""

    def __init__(self, sent: SentMemory) -> None:
        self._sent = sent
        self._storages: dict[Piece, Any] = {}

    def _owner(self, piece: Piece) -> tuple[Block, int]:
        base = self._sent.address(piece.region)
        for block in self._sent.members(piece.region):
            start = piece.start - (block.address - base)
            if start >= 0 and start + piece.nbytes <= block.nbytes:
                return block, start
        raise LookupError(f"{piece} is no memory of the notebook")

    def on_device(self) -> bool:
        """Tell whether the notebook has any of it on a CUDA device."""
        return any(block.device != "cpu" for block in self._sent.blocks)

    def storage(self, *where: int) -> Any:
        """Return the notebook's storage, or one over a part of the notebook's memory."""
        from taas.capture.tensors import storage_over

        piece = Piece(*where)
        block, start = self._owner(piece)
        if hasattr(block.owner, "untyped") and start == 0 and piece.nbytes == block.nbytes:
            return block.owner
        known = self._storages.get(piece)
        if known is None:
            known = self._storages[piece] = storage_over(self.buffer(*where))
        return known

    def buffer(self, *where: int) -> memoryview:
        """Return writable memory, which keeps its owner alive."""
        piece = Piece(*where)
        block, start = self._owner(piece)
        return _bytes_of_owner(block)[start : start + piece.nbytes]

    def patch(self, patch: Patch, fd: int) -> str | None:
        """Write changed bytes into the notebook's memory; return why not, or None."""
        base = self._sent.address(patch.region)
        members = self._sent.members(patch.region)
        first = members[0]
        if first.device != "cpu":
            return _patch_device(first, patch, fd)
        for block in members:
            if block.locate() != block.address:
                return "memory of the notebook was replaced while the run went on"
        read_at(fd, view_of(base + patch.start, patch.nbytes), patch.offset)
        for block in members:
            _note_change(block)
        return None


def _bytes_of_owner(block: Block) -> memoryview:
    """Return a view of a block's memory that keeps its owner alive."""
    import numpy as np

    return np.asarray(_Exporter(block)).data


class _Exporter:
    """Memory with an owner, in the form NumPy takes: it holds this object, which holds the owner."""

    def __init__(self, block: Block) -> None:
        self._owner = block.owner
        self.__array_interface__ = {
            "data": (block.address, False),
            "shape": (block.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _patch_device(block: Block, patch: Patch, fd: int) -> str | None:
    try:
        _write_to_device(block, patch, fd)
    except RuntimeError as error:  # its CUDA context is broken, or it has no room
        return f"new values of tensors that the notebook has on {block.device} ({first_line(error)})"
    return None


def _write_to_device(block: Block, patch: Patch, fd: int) -> None:
    import torch

    data = bytearray(patch.nbytes)
    read_at(fd, memoryview(data), patch.offset)
    whole = torch.empty(0, dtype=torch.uint8, device=block.owner.device).set_(block.owner)
    whole[patch.start : patch.start + patch.nbytes].copy_(torch.frombuffer(data, dtype=torch.uint8))
    _note_change(block)


def _note_change(block: Block) -> None:
    """Tell autograd that tensors changed in place, as an operation would have."""
    if block.tensors:
        import torch

        for tensor in block.tensors:
            torch.autograd.graph.increment_version(tensor)


class _Memory:
    """Memory for an answer's unpickler: what is known is the notebook's, the rest is new."""

    def __init__(self, known: OwnMemory, new: ReturnedMemory) -> None:
        self._known, self._new = known, new

    def storage(self, *where: int) -> Any:
        return self._new.storage(*where) if len(where) == 1 else self._known.storage(*where)

    def buffer(self, *where: int) -> memoryview:
        return self._new.buffer(*where) if len(where) == 1 else self._known.buffer(*where)


def _new_memory(fd: int) -> ReturnedMemory:
    """Return the memory of an answer; CUDA storages stay on CUDA where the notebook has it."""
    if all(region.device == "cpu" for region in peek(fd).regions):
        return ReturnedMemory(fd, None)
    import torch

    if not torch.cuda.is_available():
        return ReturnedMemory(fd, None)
    devices = torch.cuda.device_count()
    return ReturnedMemory(fd, lambda name: name if int(name.partition(":")[2] or 0) < devices else "cuda:0")


def apply_answer(
    fd: int, namespace: dict[str, Any], objects: Callable[[], list[Any]], known: OwnMemory
) -> Applied:
    """Load an answer and do what it says.

    Everything is loaded before anything is changed.

    Args:
        fd: the answer.
        namespace: where names are rebound.
        objects: gives the objects that travelled, by number.
        known: the memory that travelled.
    """
    with no_collection():
        return _apply(fd, namespace, objects, known)


def _apply(fd: int, namespace: dict[str, Any], objects: Callable[[], list[Any]], known: OwnMemory) -> Applied:
    header = peek(fd)
    check_versions(header)
    preface = read_preface(fd)
    seeds = objects() if header.stream else []
    applied = Applied(lost=list(preface["lost"]))
    new = _new_memory(fd)
    source = read_pickle(fd), seeds, len(seeds), _Memory(known, new), new.buffers()
    with bound(stand_ins(preface["ahead"], namespace), namespace):
        try:
            loaded = _Loaded(Unpickler(*source), header, preface)
        except Exception:  # whatever a user's __setstate__ raises
            salvager = Salvager(*source)
            loaded = _Loaded(salvager, header, preface)
            loaded.drop_what_is_lost(salvager, namespace, seeds, applied)
    names, applied.value = loaded.names, loaded.value
    for patch in header.patches:
        why = known.patch(patch, fd)
        if why is not None and why not in applied.lost:
            applied.lost.append(why)
    _put_contents(loaded.contents, seeds, applied)
    if known.on_device() or any(region.device != "cpu" for region in header.regions):
        _join_devices([*seeds, *names.values()], applied)
    applied.lost += new.refused()
    for name, value in names.items():
        if isinstance(value, MissingModule):
            applied.lost.append(f"{name}: {value.reason}")
            continue
        namespace[name] = value
        applied.rebound.append(name)
    for name in preface["deleted"]:
        namespace.pop(name, None)
        applied.deleted.append(name)
    if preface["surroundings"] is not None:
        _take_surroundings(preface["surroundings"], applied)
    for file, (size, lines) in preface["sources"].items():
        linecache.cache.setdefault(file, (size, None, lines, file))
    applied.cells = preface["cells"]
    applied.changed += len({patch.region for patch in header.patches})
    return applied


class _Loaded:
    """What stands in an answer's stream."""

    def __init__(self, reader: StreamReader, header: PayloadHeader, preface: dict[str, Any]) -> None:
        load: Callable[[], Any] = reader.load  # type: ignore[attr-defined]
        self.names: dict[str, Any] = dict(load() for _ in header.names)
        self.value: Any = load() if preface["value"] else NOTHING
        self.contents: list[tuple[int, Any]] = [load() for _ in range(preface["contents"])]

    def drop_what_is_lost(
        self, salvager: Salvager, namespace: dict[str, Any], seeds: list[Any], applied: Applied
    ) -> None:
        """Keep what is whole, and tell the rest."""

        def whole(value: Any, what: Callable[[], str]) -> bool:
            why = salvager.why_lost(value, namespace)
            if why is not None:
                applied.lost.append(f"{what()}: {why}")
            return why is None

        def contents_of(number: int) -> str:
            visible = {name: value for name, value in namespace.items() if not is_of_ipython(name)}
            return f"new contents of {path_to(seeds[number], visible)}"

        self.names = {
            name: value for name, value in self.names.items() if whole(value, functools.partial(str, name))
        }
        if not whole(self.value, lambda: "the cell's last value"):
            self.value = NOTHING
        self.contents = [
            (number, message)
            for number, message in self.contents
            if whole(message, functools.partial(contents_of, number))
        ]


def _join_devices(objects: list[Any], applied: Applied) -> None:
    try:
        join_devices(objects)
    except RuntimeError as error:  # a full GPU
        applied.lost.append(
            f"new state beside parameters on the GPU, which is elsewhere ({first_line(error)})"
        )


def _take_surroundings(changes: dict[str, Any], applied: Applied) -> None:
    try:
        Surroundings.apply(changes)
    except Exception as error:  # an earlier cell may have replaced whatever is set
        applied.lost.append(not_brought(error))


def _put_contents(contents: list[tuple[int, Any]], seeds: list[Any], applied: Applied) -> None:
    kinds = Kinds(lambda _: None)
    for number, message in contents:
        value = seeds[number]
        kind = kinds.of(type(value))
        assert kind is not None, type(value)
        try:
            kind.put(value, message)
        except Exception as error:  # a user's __setstate__ may raise anything
            applied.lost.append(
                f"a {type(value).__qualname__} of the notebook refused its new contents: {error}"
            )
        else:
            applied.changed += 1

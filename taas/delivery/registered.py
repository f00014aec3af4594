"""How registered loaders travel: their parts to the data side, a stand-in to the ranks, their generators' states back.

Imports no torch: a loader brings it.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgspec

from taas.errors import HeaderError


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered loader."""

    name: str  # what it goes by in --units and in the live view
    loader: Any
    variable: str | None = None  # the one that holds it, if any: by this one finds out whether a cell uses it


# ── to the data side ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class LoaderParts:
    """A registered loader on the data side: how it fetches; nothing of its own machinery."""

    dataset: Any  # map-style or iterable; of a registered iterable that is no DataLoader, that iterable
    index_sampler: Any = None  # what DataLoader would iterate: its batch sampler, or its sampler
    auto_collation: bool = False  # whether the index sampler yields batches of indices
    batch_size: int | None = None
    drop_last: bool = False
    collate_fn: Any = None
    worker_init_fn: Any = None
    num_workers: int = 0
    persistent_workers: bool = False
    generator: Any = None
    streams: int = 0  # 0 for a map-style dataset; else over how many workers an iterable one is spread
    plain: bool = False  # it is no DataLoader: its elements are delivered as they are

    def iterable_length(self) -> int | None:
        """Elements an iterable dataset says it has; None if it does not say."""
        if not hasattr(self.dataset, "__len__"):
            return None
        length = len(self.dataset)
        if self.auto_collation and self.batch_size:
            length = length // self.batch_size if self.drop_last else -(-length // self.batch_size)
        return length


Loaders = list[tuple[str, LoaderParts]]
"""Name and parts of each registered loader of a run."""

_TAKEN = (
    "batch_size", "drop_last", "collate_fn", "worker_init_fn", "num_workers", "persistent_workers", "generator",
)  # fmt: skip


def take_apart(loader: Any) -> LoaderParts:
    """Return a loader's parts."""
    if not hasattr(loader, "dataset") or not hasattr(loader, "_index_sampler"):
        return LoaderParts(dataset=loader, index_sampler=(), streams=1, plain=True)
    iterable = loader._dataset_kind != 0
    return LoaderParts(
        dataset=loader.dataset,
        index_sampler=() if iterable else loader._index_sampler,
        auto_collation=loader._auto_collation,
        streams=max(1, loader.num_workers) if iterable else 0,
        **{name: getattr(loader, name) for name in _TAKEN},
    )


def loaders_in_use(
    loaders: Sequence[Registration], used: tuple[str, ...]
) -> tuple[list[Registration], list[str]]:
    """Return the registered loaders that a cell names, and a line for the user for each of the others.

    Raises:
        HeaderError: it names none of them.
    """
    mine = [loader for loader in loaders if loader.variable in used]
    if loaders and not mine:
        raise HeaderError(
            "--cpus, and the cell uses no registered DataLoader: allowed is with one; leave --cpus out"
        )
    unused = [loader.name for loader in loaders if loader not in mine]
    return mine, [f"{name} is registered, and this cell does not use it: not run" for name in unused]


def pack_registered(
    loaders: Iterable[Registration], rngs: dict[str, Any], write: Callable[[bytes | memoryview], Any]
) -> int:
    """Write the payload for planner and data workers; return its bytes.

    With the loaders travel the states of the notebook's generators: the order is planned from there.
    """
    parts = [(entry.name, take_apart(entry.loader)) for entry in loaders]
    return write_payload({"rngs": rngs, "loaders": parts}, write)


# ── to the ranks ──────────────────────────────────────────────────────────────────────────────────────

_delivering: dict[int, Registration] = {}


@contextlib.contextmanager
def delivering(loaders: Iterable[Registration]) -> Iterator[None]:
    """While a cell with data workers is captured: these loaders travel as their ranks' DeliveredLoader."""
    _delivering.update({id(entry.loader): entry for entry in loaders})
    try:
        yield
    finally:
        _delivering.clear()


def delivers(cls: type) -> bool:
    """Whether a loader of this type is being delivered to the run that is captured."""
    return any(type(entry.loader) is cls for entry in _delivering.values())


_KEPT = (
    "dataset", "batch_size", "drop_last", "num_workers", "pin_memory", "pin_memory_device", "timeout", "prefetch_factor",
    "persistent_workers", "worker_init_fn", "collate_fn", "in_order", "_dataset_kind",
)  # fmt: skip


def reduce_registered(loader: Any) -> tuple[Any, ...] | None:
    """Return how a registered loader travels to a rank (a ``__reduce__`` tuple); None for anything else.

    The dataset goes along by the caller's own pickler: ``loader.dataset`` in the rank is the same object as
    the variable that holds it, and costs no copy where payloads are mapped.
    """
    entry = _delivering.get(id(loader))
    if entry is None:
        return None
    from taas.delivery.loader import DeliveredLoader  # torch, which the loader has brought

    attributes = {key: getattr(loader, key) for key in _KEPT if hasattr(loader, key)}
    attributes.setdefault("dataset", loader)
    attributes["generator"] = attributes["multiprocessing_context"] = None
    attributes["batch_sampler"] = True if getattr(loader, "batch_sampler", None) is not None else None
    return DeliveredLoader, (entry.name, attributes, _sampler_facts(loader))


def _sampler_facts(loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"drop_last": getattr(loader, "drop_last", False), "epoch": 0}
    facts["batch_size"] = getattr(loader, "batch_size", None)
    for holder in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        for key in ("epoch", "seed", "shuffle"):
            value = getattr(holder, key, None)
            if isinstance(value, int):
                facts[key] = value
    return facts


# ── back to the notebook ──────────────────────────────────────────────────────────────────────────────


_read_states = msgspec.msgpack.Decoder(dict[str, dict[str, bytes | int]]).decode


def apply_final(states: bytes, loaders: Iterable[Registration]) -> None:
    """Set the loaders' own generators to where the run's last iteration leaves them.

    ``states`` is what the coordinator's ``Final`` holds; empty changes nothing. Nothing is unpickled.
    """
    known = {entry.name: entry.loader for entry in loaders}
    for name, values in _read_states(states).items() if states else ():
        for path, value in values.items():
            if name in known:
                _set(known[name], path, value)


def _set(loader: Any, path: str, value: Any) -> None:
    if path == "epoch":
        holder: Any
        for holder in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(value)
        return
    target = loader
    for part in path.removesuffix("!state").split("."):
        target = getattr(target, "_index_sampler" if part == "index_sampler" else part, None)
    if target is not None:
        import torch  # the loader's

        target.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


# ── in one file ───────────────────────────────────────────────────────────────────────────────────────
#
# Pickled once, mapped by every process that needs them. Arrays and tensors lie in the file beside the pickle,
# page-aligned, and are mapped private: a data VM's workers and the planner read the same pages, and who writes gets a
# copy of the page alone. The file: 8 bytes magic, 8 bytes number of pieces, 8 bytes length of each; then the pieces, the
# pickle first, then its buffers, each at the next page.

_MAGIC = b"taasdlv2"


class CannotTravel(Exception):
    """An object that pickle would accept but that is worthless elsewhere, in words."""


def _storage_of(memory: Any, dtype: Any) -> Any:
    import torch  # who has none of it has no tensors

    storage = torch.from_numpy(memory).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class PayloadPickler(cloudpickle.Pickler):
    """cloudpickle with the memory of CPU tensors out of band, refusing what is worthless on another machine."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._torch = sys.modules.get("torch")  # who has none of it has no tensors
        self._memory: dict[tuple[int, int], Any] = {}
        """By address and size, so that tensors go on sharing it."""

    @classmethod
    def into_nothing(cls) -> PayloadPickler:
        """Return one that only finds out whether an object can travel."""
        return cls(SimpleNamespace(write=len), lambda _: None)

    def reducer_override(self, obj: Any) -> Any:
        """Refuse or rule; else as cloudpickle does."""
        if isinstance(obj, io.IOBase):
            raise CannotTravel(f"an open file ({getattr(obj, 'name', 'no name')})")
        torch = self._torch
        if torch is None:
            return super().reducer_override(obj)
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            raise CannotTravel(f"a tensor on {obj.device}: data workers have no GPU")
        if isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            return _storage_of, (self._memory_of(torch, obj._untyped_storage), obj.dtype)
        return super().reducer_override(obj)

    def _memory_of(self, torch: Any, storage: Any) -> Any:
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._memory:
            raw = torch.empty(0, dtype=torch.uint8)
            self._memory[key] = raw.set_(storage, 0, (storage.nbytes(),), (1,)).numpy()
        return self._memory[key]


def write_payload(obj: Any, write: Callable[[bytes | memoryview], Any]) -> int:
    """Write the file's bytes in order; return how many."""
    buffers: list[memoryview] = []
    file = io.BytesIO()
    PayloadPickler(file, lambda buffer: buffers.append(buffer.raw())).dump(obj)
    pieces = [file.getbuffer(), *buffers]
    header = b"".join(n.to_bytes(8, "little") for n in (len(pieces), *(len(piece) for piece in pieces)))
    write(_MAGIC + header)
    written = len(_MAGIC) + len(header)
    for piece in pieces:
        start = _aligned(written)
        write(bytes(start - written))
        write(piece)
        written = start + len(piece)
    return written


def load_payload(path: str) -> Any:
    """Map the file and unpickle what it holds. The caller vouches for who wrote it."""
    with Path(path).open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE))
    if view[:8] != _MAGIC:
        raise ValueError(f"{path} does not hold packed loaders")
    (count,) = view[8:16].cast("Q")
    end, pieces = 16 + 8 * count, []
    for length in view[16:end].cast("Q"):
        start = _aligned(end)
        end = start + length
        pieces.append(view[start:end])
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _aligned(offset: int) -> int:
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE

"""Registered loaders in one file: pickled once, mapped by every process that needs them.

Arrays and tensors lie in the file beside the pickle, page-aligned, and are mapped private: a data VM's
workers and the planner read the same pages, and who writes gets a copy of the page alone. Imports no torch.

File: 8 bytes magic, 8 bytes length of the table, table (msgpack: offset and length of the pickle and of each
buffer), pickle, buffers.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

__all__ = ["CannotTravel", "PayloadPickler", "dump_payload", "load_payload", "measure", "write_payload"]

_MAGIC = b"taasdlv1"
_ALIGN = mmap.PAGESIZE


class CannotTravel(Exception):
    """An object that pickle would accept but that is worthless elsewhere; ``what`` says so in words."""

    def __init__(self, obj: Any, what: str) -> None:
        super().__init__(what)
        self.obj, self.what = obj, what


class _Storage:
    """One tensor storage; tensors that share it go on sharing it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _Storage.of_buffer, (pickle.PickleBuffer(self.tensor.numpy()),)

    @staticmethod
    def of_buffer(buffer: Any) -> Any:
        import torch

        if memoryview(buffer).nbytes == 0:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor_on(storage: Any, dtype: Any, offset: int, size: Any, stride: Any, grad: bool) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, offset, size, stride)
    return tensor.requires_grad_(grad)


class PayloadPickler(cloudpickle.Pickler):
    """cloudpickle with dense CPU tensors out of band, refusing what is worthless on another machine."""

    def __init__(self, file: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._torch = sys.modules.get("torch")
        self._storages: dict[tuple[int, int], _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Refuse or rule; else as cloudpickle does."""
        if isinstance(obj, io.IOBase):
            raise CannotTravel(obj, f"an open file ({getattr(obj, 'name', 'no name')})")
        torch = self._torch
        if torch is not None and isinstance(obj, torch.Tensor):
            if obj.device.type != "cpu" and obj.device.type != "meta":
                raise CannotTravel(obj, f"a tensor on {obj.device}: data workers have no GPU")
            if type(obj) is torch.Tensor and self._is_plain(torch, obj):
                return self._reduce_tensor(torch, obj)
        return super().reducer_override(obj)

    @staticmethod
    def _is_plain(torch: Any, obj: Any) -> bool:
        return bool(
            obj.layout is torch.strided
            and obj.device.type == "cpu"
            and not obj.is_quantized
            and not obj.is_conj()
            and not obj.is_neg()
            and obj.is_leaf
            and not getattr(obj, "__dict__", None)
        )

    def _reduce_tensor(self, torch: Any, obj: Any) -> tuple[Any, ...]:
        storage = obj.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        holder = self._storages.get(key) if storage.nbytes() else None
        if holder is None:
            raw = torch.empty(0, dtype=torch.uint8)
            raw.set_(storage, 0, (storage.nbytes(),), (1,))
            holder = self._storages[key] = _Storage(raw)
        place = (obj.storage_offset(), tuple(obj.size()), obj.stride(), obj.requires_grad)
        return _tensor_on, (holder, obj.dtype, *place)


def dump_payload(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Return the pickle and its buffers, which still alias ``obj``'s memory."""
    buffers: list[memoryview] = []
    file = io.BytesIO()
    pickler = PayloadPickler(file, lambda buffer: buffers.append(buffer.raw()))
    pickler.dump(obj)
    return file.getvalue(), buffers


def measure(obj: Any) -> int:
    """Pickle into nothing; return the bytes ``obj`` would take.

    Raises:
        CannotTravel, Exception: ``obj`` cannot be pickled, or is worthless elsewhere.
    """
    total = 0

    class Counter:
        def write(self, data: Any) -> int:
            nonlocal total
            total += len(data)
            return len(data)

    def count(buffer: pickle.PickleBuffer) -> None:
        nonlocal total
        total += buffer.raw().nbytes

    PayloadPickler(Counter(), count).dump(obj)
    return total


def write_payload(obj: Any, write: Callable[[bytes | memoryview], Any]) -> int:
    """Write the file's bytes in order; return how many."""
    stream, buffers = dump_payload(obj)
    pieces: list[bytes | memoryview] = [stream, *buffers]
    table = b""
    start = 0
    for _ in range(2):  # the table's own length moves what it describes; integers there have a fixed width
        start = _aligned(16 + len(table)) if table else 1 << 40
        entries, offset = [], start
        for piece in pieces:
            entries.append((offset, len(piece)))
            offset = _aligned(offset + len(piece))
        table = b"".join(o.to_bytes(8, "little") + n.to_bytes(8, "little") for o, n in entries)
    written = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal written
        write(data)
        written += len(data)

    put(_MAGIC + len(table).to_bytes(8, "little") + table)
    for (offset, _), piece in zip(entries, pieces, strict=True):
        put(bytes(offset - written))
        put(piece)
    return written


def load_payload(path: str) -> Any:
    """Map the file and unpickle what it holds. The caller vouches for who wrote it."""
    with Path(path).open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
    if mapping[:8] != _MAGIC:
        raise msgspec.DecodeError(f"{path} does not hold packed loaders")
    length = int.from_bytes(mapping[8:16], "little")
    numbers = memoryview(mapping)[16 : 16 + length].cast("Q")
    view = memoryview(mapping)
    pieces = [view[numbers[i] : numbers[i] + numbers[i + 1]] for i in range(0, len(numbers), 2)]
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN

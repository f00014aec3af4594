"""Batches as bytes: a small pickle, and one region of raw memory for tensors and arrays.

A worker's ``default_collate`` stacks tensors directly into the region. Other data (from a user's
own collate function, NumPy arrays) is copied into it once. The region is a slot of a rank's slab,
or a buffer that is sent as one frame.
"""

from __future__ import annotations

import ctypes
import io
import operator
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from taas.delivery.slab import slot_size

_ALIGN = 64
_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_SIZES = [dtype.itemsize for dtype in _DTYPES]


class RawRegion:
    """The memory in which one batch is made: a bump allocator over a writable buffer.

    ``needed`` grows past ``capacity`` when something did not fit; the batch then needs a larger
    region.
    """

    def __init__(self, buffer: memoryview, *, slot: bool = False, address: int = 0) -> None:
        self.buffer, self.capacity, self.slot = buffer, buffer.nbytes, slot
        self.used = 0
        self.needed = 0
        self.address = address or (
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if self.capacity else 0
        )

    @classmethod
    def of_size(cls, nbytes: int) -> RawRegion:
        """Return a region with its own buffer, which is not zeroed."""
        return cls(np.empty(nbytes, np.uint8).data)

    def is_held(self) -> bool:
        """Return whether a tensor that was stacked here is still referenced.

        A collate function may cache tensors.
        """
        # This object has one reference, the call another, and each such tensor's storage one more.
        return sys.getrefcount(self.buffer) > 2

    def take(self, nbytes: int) -> int | None:
        """Return the offset of fresh bytes, or None if they do not fit."""
        offset = -(-self.used // _ALIGN) * _ALIGN
        self.needed = max(self.needed, -(-self.needed // _ALIGN) * _ALIGN + nbytes)
        if offset + nbytes > self.capacity:
            return None
        self.used = offset + nbytes
        return offset

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous tensor over bytes taken before."""
        return torch.frombuffer(self.buffer, dtype=dtype, count=prod(shape), offset=offset).view(
            shape
        )


# ── collate ───────────────────────────────────────────────────────────────────────────────────────

_current: RawRegion | None = None
_dtype_of = operator.attrgetter("dtype")
_needs_grad = operator.attrgetter("requires_grad")


def _stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors as ``default_collate`` does, into the current region if there is one.

    Without a region this is a plain stack, never in shared memory.
    """
    first = batch[0]
    if (
        _current is not None
        and set(map(type, batch)) == {torch.Tensor}
        and first.layout is torch.strided
        and not first.is_nested
        and first.dtype in _CODES
        and len(set(map(_dtype_of, batch))) == 1
        and not any(map(_needs_grad, batch))
    ):
        shape = (len(batch), *first.shape)
        offset = _current.take(first.dtype.itemsize * prod(shape))
        if offset is not None and prod(shape):
            return torch.stack(batch, 0, out=_current.tensor(offset, first.dtype, shape))
    if first.is_nested or first.layout is not torch.strided:
        plain: torch.Tensor = torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return plain
    return torch.stack(batch, 0)


def install_collate() -> None:
    """Let ``default_collate`` stack into the current region, even inside a user's own collate."""
    torch_collate.default_collate_fn_map[torch.Tensor] = _stack


@contextmanager
def stacking_into(region: RawRegion | None) -> Iterator[None]:
    """Let ``default_collate`` use ``region`` inside."""
    global _current
    _current = region
    try:
        yield
    finally:
        _current = None


# ── encode ────────────────────────────────────────────────────────────────────────────────────────


class _Encoder(pickle.Pickler):
    """Pickles a batch; tensors and arrays become references into the region.

    Data that does not fit is left out but counted, so that ``region.needed`` is enough for all of
    it.
    """

    def __init__(self, file: io.BytesIO, region: RawRegion) -> None:
        super().__init__(file, protocol=5)
        self._region = region
        self.fits = True

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            return self._tensor(obj)
        if (
            kind is np.ndarray
            and obj.nbytes
            and obj.dtype.kind in "biufcmMSU"
            and obj.dtype.isnative
        ):
            return self._array(obj)
        if isinstance(obj, type) and obj.__module__ == "__main__":
            return _notebook_class, (obj.__qualname__, cloudpickle.dumps(obj))
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        code = _CODES.get(tensor.dtype)
        if (
            code is None
            or tensor.layout is not torch.strided
            or not tensor.is_cpu
            or tensor.requires_grad
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor.is_nested
        ):
            return NotImplemented
        shape, region = tuple(tensor.shape), self._region
        nbytes = _SIZES[code] * prod(shape)
        if not tensor.is_contiguous():
            return self._strided(tensor, code, shape, nbytes)
        if not nbytes:
            return _tensor, (0, code, shape)
        source = tensor.data_ptr()
        offset = source - region.address
        if not 0 <= offset < region.capacity:
            offset = self._take(nbytes)
            if self.fits:
                ctypes.memmove(region.address + offset, source, nbytes)
        return _tensor, (offset, code, shape)

    def _strided(self, tensor: torch.Tensor, code: int, shape: tuple[int, ...], nbytes: int) -> Any:
        """Keep the strides of a dense tensor with another dimension order (channels last).

        Other tensors become contiguous.
        """
        order = _dense_order(tensor)
        offset = self._take(nbytes)
        source = tensor if order is None else tensor.permute(order)
        if self.fits and nbytes:
            self._region.tensor(offset, tensor.dtype, tuple(source.shape)).copy_(source)
        strides = () if order is None else (tensor.stride(),)
        return _tensor, (offset, code, shape, *strides)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        offset = self._take(array.nbytes)
        if self.fits:
            target = np.frombuffer(self._region.buffer, array.dtype, array.size, offset)
            target.reshape(array.shape, order="F" if fortran else "C")[...] = array
        return _array, (offset, array.dtype.str, array.shape, fortran)

    def _take(self, nbytes: int) -> int:
        offset = self._region.take(nbytes)
        if offset is None:
            self.fits, offset = False, 0
        return offset


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions from slowest to fastest; None if the tensor has holes or overlaps."""
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    expected = 1
    for d in reversed(order):
        if tensor.size(d) != 1 and tensor.stride(d) != expected:
            return None
        expected *= tensor.size(d)
    return order


def encode(element: Any, region: RawRegion) -> bytes | None:
    """Return the pickle, or None if the region is too small.

    cloudpickle pickles objects that ``pickle`` cannot.
    """
    file = io.BytesIO()
    used, needed = region.used, region.needed
    encoder = _Encoder(file, region)
    try:
        encoder.dump(element)
    except (pickle.PicklingError, AttributeError, TypeError):
        region.used, region.needed = used, needed
        by_value: bytes = cloudpickle.dumps(element)
        return by_value
    return file.getvalue() if encoder.fits else None


class PackedElement(NamedTuple):
    """A batch in the form in which it is sent: its pickle, and its memory."""

    stream: bytes
    memory: np.ndarray[Any, Any]


def pack_element(element: Any, region: RawRegion) -> tuple[RawRegion, bytes]:
    """Return the pickle, and the region with its memory: this one, or a larger new one."""
    while (stream := encode(element, region)) is None:
        region = RawRegion.of_size(slot_size(max(region.needed, 2 * region.capacity)))
    return region, stream


# ── decode ────────────────────────────────────────────────────────────────────────────────────────


# ``exporter``: the raw memory of the batch that this thread unpickles
_memory = threading.local()


def _tensor(offset: int, code: int, shape: tuple[int, ...], strides: Any = None) -> torch.Tensor:
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=_DTYPES[code])
    flat = torch.frombuffer(_memory.exporter, dtype=_DTYPES[code], count=count, offset=offset)
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _array(offset: int, dtype: str, shape: tuple[int, ...], fortran: bool) -> Any:
    flat = np.frombuffer(_memory.exporter, np.dtype(dtype), prod(shape), offset)
    return flat.reshape(shape, order="F" if fortran else "C")


_classes: dict[str, Any] = {}


def _notebook_class(qualname: str, pickled: bytes) -> Any:
    """Return the rank's own class of that name, so that ``isinstance`` holds, or the sent one."""
    found: Any = sys.modules.get("__main__")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    if qualname not in _classes:
        _classes[qualname] = cloudpickle.loads(pickled)
    return _classes[qualname]


def decode(stream: Any, exporter: Any) -> Any:
    """Rebuild a batch over ``exporter``'s memory, which it keeps alive.

    It unpickles, so the caller has authenticated ``stream``.
    """
    _memory.exporter = exporter
    try:
        return pickle.loads(stream)
    finally:
        _memory.exporter = None
        # otherwise torch keeps a list of them until the next torch.load
        torch._utils._validate_loaded_sparse_tensors()

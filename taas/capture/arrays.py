"""NumPy arrays in a pickle: views of memory that travels beside it, as tensors are.

pickle's own protocol 5 sends each array's memory separately, so that views no longer share it. Here an
array is (memory of the root of its views, dtype, shape, strides, offset).
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from taas.capture.memory import Block

if TYPE_CHECKING:
    import numpy as np

    from taas.capture.pickling import Pickler

__all__ = ["address_of_readonly", "block_of", "reduce_array"]


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI (https://docs.python.org/3/c-api/buffer.html)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of_readonly(view: memoryview) -> int:
    """Return the address of a buffer that ctypes' ``from_buffer`` refuses because it is read-only."""
    raw = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    address = raw.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))
    return address


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _reach(array: Any) -> tuple[int, int]:
    """Return the first and the end byte of an array, relative to its first element."""
    if not array.size:
        return 0, 0
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + array.itemsize


def _root(array: Any) -> Any:
    while type(array.base) is type(array):
        array = array.base
    return array


def block_of(root: Any, address: int, nbytes: int) -> Block:
    """Return the block that the root of some views covers."""
    return Block(address, nbytes, "cpu", root, lambda: _address(root) + _reach(root)[0])


def reduce_array(pickler: Pickler, array: np.ndarray[Any, Any]) -> Any:
    """Reduce an array of plain values; arrays of objects take NumPy's own way."""
    if array.dtype.hasobject:
        return NotImplemented
    root = _root(array)
    torch = sys.modules.get("torch")
    low, high = _reach(array)
    if torch is not None and type(root.base) is torch.Tensor and root.base.device.type == "cpu":
        storage = root.base.untyped_storage()
        handle, start = pickler.array_memory_of(storage), storage.data_ptr()
    else:
        first, end = _reach(root)
        start = _address(root) + first
        handle = pickler.array_handle(root, start, end - first)
    offset = _address(array) - start
    pickler.use(handle, offset + low, offset + high)
    return _make_array, (handle, array.dtype, array.shape, array.strides, offset, array.flags.writeable)


def _make_array(
    memory: memoryview,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    writeable: bool,
) -> np.ndarray[Any, Any]:
    import numpy as np

    if not memory.nbytes:
        return np.empty(shape, dtype)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, offset, strides)
    if not writeable:
        array.flags.writeable = False
    return array

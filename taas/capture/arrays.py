"""NumPy arrays: views of memory that travels beside the pickle, as tensors are; arrays of objects are containers.

pickle's own protocol 5 sends each array's memory separately, so that views no longer share it. Here an array is
(memory of the root of its views, dtype, shape, strides, offset), whatever its class. The memory of objects cannot
be addressed: there the root of the views is a container, and a view is a view of it; one of some records of others is a copy, as in a pickle. So it is with the memory of a file
(``np.memmap``): its root travels as the file's name, its place in it and its mode, and none of its bytes does.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas.capture.memory import MemoryRange, memory_of_storage
from taas.capture.reading import Reading, read_insides, set_insides
from taas.capture.tensors import is_tensor
from taas.rank_storage import is_closed


def is_array(value: Any) -> bool:
    """Tell whether a value is an array, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and hasattr(numpy, "ndarray") and isinstance(value, numpy.ndarray)


def array_reader(cls: Any) -> Callable[[Any], Reading | None] | None:
    """Return what reads arrays of a class, or None: it is none, or has a protocol of its own."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "ndarray"):
        return None
    if issubclass(cls, numpy.dtype):
        return read_dtype
    if not issubclass(cls, numpy.ndarray):
        return None
    masked = sys.modules.get("numpy.ma")
    known = [numpy.ndarray, *([masked.MaskedArray] if masked is not None else [])]
    keeps = any(cls.__reduce__ is k.__reduce__ and cls.__setstate__ is k.__setstate__ for k in known)
    return _read_array if keeps else None


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _reach(array: Any) -> tuple[int, int]:
    """Return the first and the end byte of an array, relative to its first element."""
    if not array.size:
        return 0, 0
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + array.itemsize


def _bounds(array: Any) -> tuple[int, int]:
    """Return the address and length of the memory that an array looks into."""
    low, end = _reach(array)
    return _address(array) + low, end - low


def _root(array: Any) -> Any:
    """Return the array whose memory others look into, through the stand-ins that ``as_strided`` leaves."""
    while True:
        base = array.base
        if hasattr(base, "__array_interface__") and not is_array(base):
            base = getattr(base, "base", None)
        if not is_array(base):
            return array
        array = base


def _buffer_of(root: Any) -> Any:
    """Return the memory that came for an array, if it looks into such; it may be more than the array uses."""
    raw = root.base.obj if type(root.base) is memoryview else root.base
    return raw if isinstance(raw, ctypes.Array) and hasattr(raw, "owner") else None


def _memory_of(array: Any, root: Any) -> MemoryRange | None:
    """Return the memory that an array looks into: that of a tensor, or of the root of its views; None without any."""
    low, end = _reach(array)
    if not root.nbytes:
        return None
    if is_tensor(root.base) and root.base.device.type == "cpu":
        memory = memory_of_storage(root.base.untyped_storage())
    elif (buffer := _buffer_of(root)) is not None:
        memory = MemoryRange(ctypes.addressof(buffer), ctypes.sizeof(buffer), buffer)
    else:
        start, nbytes = _bounds(root)
        memory = MemoryRange(start, nbytes, root, lambda: _bounds(root)[0])
    shift = _address(array) - memory.address
    memory.spans.append((shift + low, shift + end))
    return memory


def _read_array(array: Any) -> Reading | None:
    root = _root(array)
    of_file, of_objects = _is_of_file(root), array.dtype.hasobject
    if root is array and (of_file or of_objects):
        return _read_file(array) if of_file else _read_objects(array)
    if of_objects and array.dtype != object:
        return None  # some records of others: a copy, as pickle makes it
    memory = root if of_file or of_objects else _memory_of(array, root)
    start = _address(array) if memory is None else _address(root) if memory is root else memory.address
    view = (type(array), memory, array.dtype, array.shape, array.strides, _address(array) - start)
    return Reading(_make_array, view, *_state(array))


def read_dtype(dtype: Any) -> Reading | None:
    """Read a dtype that its name says by that: so it is the one that NumPy itself has."""
    import numpy as np

    by_name = dtype.metadata is None and dtype.names is None and np.dtype(dtype.str) is dtype
    return Reading(np.dtype, (dtype.str,)) if by_name else None


def read_copy(array: Any) -> Reading | None:
    """Read an array by a copy of what is in it; one that holds objects not at all."""
    return None if array.dtype.hasobject else Reading(pickle.loads, (pickle.dumps(array, 5),))


def _state(array: Any) -> tuple[Callable[[Any, Any], None] | None, Any, tuple[str, ...]]:
    if not type(array).__dictoffset__ and array.flags.writeable:
        return _set_array, None, ()
    attributes, slots = read_insides(array)
    if attributes and "_mmap" in attributes:  # a memmap's, which is its process' own
        attributes = {name: item for name, item in attributes.items() if name != "_mmap"}
    return _set_array, (attributes, slots, array.flags.writeable), (".", ".", ".flags.writeable")


def _make_array(cls: Any, memory: Any, dtype: Any, shape: Any, strides: Any, offset: int) -> Any:
    """Make a view of memory, or of another array."""
    import numpy as np

    if dtype.hasobject:
        return np.asarray(_ObjectView(memory, shape, strides, offset)).view(cls)
    if memory is None:
        return np.ndarray.__new__(cls, shape, dtype)
    if isinstance(memory, MemoryRange):
        return np.ndarray.__new__(cls, shape, dtype, memory.as_buffer(), offset, strides)
    whole = memory if memory.flags.c_contiguous else memory.T
    made = np.ndarray.__new__(cls, shape, dtype, whole, offset, strides)
    if isinstance(made, np.memmap):
        vars(made)["_mmap"] = memory._mmap
    return made


class _ObjectView:
    """What NumPy makes a view of an array of objects from, since their memory cannot be given as a buffer."""

    def __init__(self, base: Any, shape: Any, strides: Any, offset: int) -> None:
        self.base = base
        where = {"data": (_address(base) + offset, False), "shape": shape, "strides": strides}
        self.__array_interface__ = {"version": 3, "typestr": "|O", **where}


def _set_array(array: Any, state: tuple[Any, ...] | None) -> None:
    attributes, slots, writeable = state or (None, {}, True)
    if "_mmap" in getattr(array, "__dict__", ()):
        attributes = {**(attributes or {}), "_mmap": array.__dict__["_mmap"]}
    set_insides(array, (attributes, slots))
    if array.flags.writeable != writeable:
        array.flags.writeable = writeable


# ---------------------------------------------------------------- memory of files


def _is_of_file(root: Any) -> bool:
    """Tell whether an array's memory is a file's: not a private copy of it (mode ``c``), nor one of a file without a name."""
    mapped = isinstance(root, sys.modules["numpy"].memmap) and isinstance(root.base, mmap.mmap)
    return mapped and root.mode != "c" and root.filename is not None and Path(root.filename).exists()


def _read_file(root: Any) -> Reading:
    mode = root.mode.replace("w", "r")  # ``w+`` would empty it
    order = "C" if root.flags.c_contiguous else "F"
    where = (str(root.filename), root.dtype, mode, root.offset, root.shape, order)
    return Reading(_open_file, (type(root), *where), *_state(root))


def _open_file(cls: Any, file: str, dtype: Any, mode: str, offset: int, shape: Any, order: str) -> Any:
    """Map a file; what a rank writes that must not write to it is its own."""
    return cls(file, dtype, "c" if mode != "r" and is_closed(file) else mode, offset, shape, order)


# ---------------------------------------------------------------- arrays of objects


def _read_objects(array: Any) -> Reading:
    import numpy as np

    plain = array.view(np.ndarray)
    items = tuple(np.ndarray.__reduce__(plain)[2][4])
    state = (items, *(_state(array)[1] or (None, {}, True)))
    arguments = (type(array), plain.shape, plain.dtype, "F" if plain.flags.fnc else "C")
    return Reading(_make_objects, arguments, _set_objects, state, ("[]", ".", ".", ".flags.writeable"))


def _make_objects(cls: Any, shape: tuple[int, ...], dtype: Any, order: str) -> Any:
    return sys.modules["numpy"].ndarray.__new__(cls, shape, dtype, order=order)


def _set_objects(array: Any, state: tuple[Any, ...]) -> None:
    """Put objects into an array that others may be looking into, which its own ``__setstate__`` would leave behind."""
    import numpy as np

    items, *rest = state
    plain = array.view(np.ndarray)
    other: Any = np.empty(0, plain.dtype)
    other.__setstate__((1, plain.shape, plain.dtype, plain.flags.fnc, list(items)))
    plain.flags.writeable = True
    np.copyto(plain, other)
    _set_array(array, tuple(rest))

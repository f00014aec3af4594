"""NumPy arrays: views of memory that travels beside the pickle, as tensors are; arrays of objects are containers.

pickle's own protocol 5 sends each array's memory separately, so that views no longer share it. Here an array is
(memory of the root of its views, dtype, shape, strides, offset), whatever its class. The memory of objects cannot
be addressed: there the root of the views is a container, and a view is a view of it. So it is with the memory of a file
(``np.memmap``): its root travels as the file's name, its place in it and its mode, and none of its bytes does.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas.capture.memory import DeviceMemory
from taas.capture.reading import Reading, read_insides, set_insides
from taas.capture.tensors import is_tensor, memory_of_storage
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
        if type(base).__name__ == "DummyArray":
            base = base.base
        if not is_array(base):
            return array
        array = base


def _buffer_of(root: Any) -> Any:
    """Return the memory that came for an array, if it looks into such; it may be more than the array uses."""
    owner = root.base.obj if type(root.base) is memoryview else None
    return owner if hasattr(owner, "owner") else None


def memory_of_array(array: Any) -> DeviceMemory:
    """Return the memory that an array looks into: that of a tensor, or of the root of its views."""
    root = _root(array)
    low, end = _reach(array)
    if is_tensor(root.base) and root.base.device.type == "cpu":
        memory = memory_of_storage(root.base.untyped_storage(), opener="buffer")
    elif (buffer := _buffer_of(root)) is not None:
        start = ctypes.addressof(buffer)
        memory = DeviceMemory("buffer", start, ctypes.sizeof(buffer), buffer, lambda: start)
    else:
        start, nbytes = _bounds(root)
        memory = DeviceMemory("buffer", start, nbytes, root, lambda: _bounds(root)[0])
    shift = _address(array) - memory.address
    memory.spans.append((shift + low, shift + end))
    return memory


def _read_array(array: Any) -> Reading | None:
    if array.dtype.hasobject:
        return _read_objects(array)
    root = _root(array)
    if _is_of_file(root):
        return _read_of_file(array, root)
    memory = memory_of_array(array)
    offset = _address(array) - memory.address
    arguments = (type(array), memory, array.dtype, array.shape, array.strides, offset)
    return Reading(_make_array, arguments, *_state(array))


def read_dtype(dtype: Any) -> Reading | None:
    """Read a dtype that its name says by that: so it is the one that NumPy itself has."""
    import numpy as np

    by_name = dtype.metadata is None and dtype.names is None and np.dtype(dtype.str) is dtype
    return Reading(np.dtype, (dtype.str,)) if by_name else None


def read_copy(array: Any) -> Reading | None:
    """Read an array by a copy of what is in it; one that holds objects not at all."""
    if array.dtype.hasobject:
        return None
    return Reading(_make_copy, (type(array), array.dtype, array.shape, array.tobytes()))


def _make_copy(cls: Any, dtype: Any, shape: Any, data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(bytearray(data), dtype).reshape(shape).view(cls)


def _state(array: Any) -> tuple[Callable[[Any, Any], None] | None, Any, tuple[str, ...]]:
    if not type(array).__dictoffset__ and array.flags.writeable:
        return _set_array, None, ()
    attributes, slots = read_insides(array)
    if attributes and "_mmap" in attributes:  # a memmap's, which is its process' own
        attributes = {name: item for name, item in attributes.items() if name != "_mmap"}
    return _set_array, (attributes, slots, array.flags.writeable), (".", ".", ".flags.writeable")


def _make_array(cls: Any, memory: memoryview, dtype: Any, shape: Any, strides: Any, offset: int) -> Any:
    import numpy as np

    where = (memory, offset, strides) if memory.nbytes else ()
    return np.ndarray.__new__(cls, shape, dtype, *where)


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


def _read_of_file(array: Any, root: Any) -> Reading:
    setter, state, labels = _state(array)
    if array is not root:
        view = (type(array), root, array.dtype, array.shape, array.strides, _address(array) - _address(root))
        return Reading(_make_view_of_file, view, setter, state, labels)
    mode, order = (
        root.mode.replace("w", "r"),
        "C" if root.flags.c_contiguous else "F",
    )  # ``w+`` would empty it
    where = (str(root.filename), root.dtype, mode, root.offset, root.shape, order)
    return Reading(_open_file, (type(root), *where), setter, state, labels)


def _open_file(cls: Any, file: str, dtype: Any, mode: str, offset: int, shape: Any, order: str) -> Any:
    """Map a file; what a rank writes that must not write to it is its own."""
    return cls(file, dtype, "c" if mode != "r" and is_closed(file) else mode, offset, shape, order)


def _make_view_of_file(cls: Any, root: Any, dtype: Any, shape: Any, strides: Any, offset: int) -> Any:
    import numpy as np

    whole = root if root.flags.c_contiguous else root.T
    made = np.ndarray.__new__(cls, shape, dtype, whole, offset, strides)
    if isinstance(made, np.memmap):
        vars(made)["_mmap"] = root._mmap
    return made


# ---------------------------------------------------------------- arrays of objects


def _read_objects(array: Any) -> Reading | None:
    import numpy as np

    root = _root(array)
    setter, state, labels = _state(array)
    if root is array:
        plain = array.view(np.ndarray)
        items = tuple(np.ndarray.__reduce__(plain)[2][4])
        arguments = (type(array), plain.shape, plain.dtype, plain.flags.fnc)
        state = (items, *(state or (None, {}, True)))
        return Reading(_make_objects, arguments, _set_objects, state, ("[]", ".", ".", ".flags.writeable"))
    offset = _address(array) - _address(root)
    same = (array.shape, array.strides) == (root.shape, root.strides)
    fields = root.dtype.fields if same and root.dtype.fields else {}
    field = next((name for name, part in fields.items() if part[:2] == (array.dtype, offset)), None)
    whole = root.flags.c_contiguous or root.flags.f_contiguous
    if field is None and (array.dtype != root.dtype or not whole):
        return None
    view = (type(array), root, field, array.shape, array.strides, offset)
    return Reading(_make_view, view, setter, state, labels)


def _make_objects(cls: Any, shape: tuple[int, ...], dtype: Any, fortran: bool) -> Any:
    import numpy as np

    return np.ndarray.__new__(cls, shape, dtype, order="F" if fortran else "C")


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


def _make_view(cls: Any, root: Any, field: str | None, shape: Any, strides: Any, offset: int) -> Any:
    import numpy as np

    plain = root.view(np.ndarray)
    if field is not None:
        return plain[field].view(cls)
    flat = plain.reshape(-1, order="A")
    first = offset // plain.itemsize
    return np.lib.stride_tricks.as_strided(flat[first:], shape, strides).view(cls)

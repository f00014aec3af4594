"""What is in an object, and how that is written: what comparing, finding and naming have in common."""

from __future__ import annotations

import builtins
import hashlib
import marshal
import reprlib
import sys
import types
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

from taas.capture.arrays import is_array
from taas.capture.containers import items_of
from taas.capture.memory import DeviceMemory
from taas.capture.reader import Reader, from_module, stays
from taas.capture.reading import ATOMS, Reading, set_by_protocol
from taas.capture.tensors import is_sharded, is_tensor, refuse_flat_shard, span_of, storage_of
from taas.delivery.registered import delivers

_MANY = 100
_SOME = 1 << 12
_METHODS = (types.MethodType, types.BuiltinFunctionType)
_SHALLOW = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, weakref.ref)

Parts = Iterable[tuple[str, Any]]


class Glance(NamedTuple):
    """An object at a glance.

    Attributes:
        what: tells it from others but for its parts, the same in all processes; comparable.
        parts: how each is written behind the object, and the part itself.
        asked: whether the object itself was asked, by its own protocol.
        named: whether it goes by its name, and so is the same wherever it is met.
    """

    what: tuple[Any, ...]
    parts: Parts = ()
    asked: bool = False
    named: bool = False


def digest(data: Any) -> int:
    """Return a short number for bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def labelled(label: str, part: Any, known: Container[int] = ()) -> Parts:
    """Take a part of a state apart, as its label says (docs of :class:`~taas.capture.reading.Reading`)."""
    if part is None and label in (".", "[]", "{}"):
        return ()
    if label == "[]":
        return ((f"[{number}]", item) for number, item in enumerate(part))
    if label == "{}":
        return _pairs(part)
    if label == ".":
        names: Any = part.items() if type(part) is dict and id(part) not in known else part
        pairs = isinstance(names, (tuple, type({}.items())))
        if pairs and all(type(pair) is tuple and len(pair) == 2 for pair in names):
            return ((f".{name}", item) for name, item in sorted(names, key=lambda pair: str(pair[0])))
        return ((" state", part),)
    return ((label, part),)


def _pairs(items: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    half = len(items) // 2
    for key, item in zip(items[:half], items[half:], strict=True):
        written = reprlib.repr(key) if type(key) in ATOMS else f"a {type(key).__qualname__}"
        if type(key) not in (str, int):
            yield f" key {written}", key
        yield f"[{written}]", item


class Looker:
    """Looks at objects: those that are ``known`` by their ids, for themselves.

    Args:
        sample: how much of memory is looked at: all, ``some`` or ``none`` of it.
        into_classes: whether classes of the notebook are looked into.
    """

    def __init__(
        self, reader: Reader, known: Container[int] = (), *, sample: str = "all", into_classes: bool = False
    ) -> None:
        self.reader, self._known, self._sample, self._into_classes = reader, known, sample, into_classes

    def look(self, value: Any) -> Glance:
        """Return what an object is at a glance.

        Raises:
            Exception: whatever its own protocol raises.
        """
        cls = type(value)
        name = cls.__qualname__
        known = self._of_known_type(value)
        if known is not None:
            return known
        of_method = getattr(value, "__self__", None) if isinstance(value, _METHODS) else None
        for name_of_stream, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            # of another class in ranks, and so are its methods; IPython puts a function in the place of one
            if stream is not None and (stream is value or stream is of_method or value is _own_write(stream)):
                return Glance((name_of_stream,), named=True)
        if isinstance(value, _SHALLOW) or stays(cls) or delivers(cls):
            return Glance((getattr(value, "__name__", name),), self._of_class(value))
        content = self._content(value)
        reading = self.reader.read(value)
        if reading is None:
            named = getattr(value, "__name__", None)  # a rehearsal's functions are of another class
            named = (named,) if named else (name, repr(value) if cls.__module__ == "torch" else "")
            return Glance(named, named=True)
        named = reading.constructor is from_module
        if named or not (
            reading.arguments or reading.state or content
        ):  # there, it may be the one that a module has
            return Glance((name,), named=named)
        made = getattr(reading.constructor, "__qualname__", "")
        parts = self._parts(value, reading, arguments=content is None)
        return Glance((name, made, content), parts, reading.setter is set_by_protocol)

    def _of_known_type(self, value: Any) -> Glance | None:
        """Look at a plain value, memory or a builtin container; None for anything else."""
        cls = type(value)
        name = cls.__qualname__
        if cls in ATOMS:
            return Glance((name, repr(value) if cls in (float, complex) else value))
        if cls is DeviceMemory:
            return Glance((name, value.nbytes, value.address if self._sample == "all" else 0))
        if cls in (list, tuple):
            if len(value) >= _MANY and {*map(type, value)} <= ATOMS:
                return Glance((name, digest(marshal.dumps(value, 2))))
            return Glance((name, len(value)), labelled("[]", value))
        if cls is dict:
            if value is vars(builtins):
                return Glance((name, builtins.__name__))
            return Glance((name, len(value)), _pairs(items_of(value)))
        if cls in (set, frozenset):
            items = sorted(repr(item) for item in value if type(item) in ATOMS)
            others = [(f"[{n}]", item) for n, item in enumerate(value) if type(item) not in ATOMS]
            return Glance((name, len(value), *items), others if self._into_classes else ())
        return None

    def _parts(self, value: Any, reading: Reading, *, arguments: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield f" closure variable {name}", cell
        elif arguments:
            for number, item in enumerate(reading.arguments):
                yield "" if isinstance(item, type) else f" argument {number}", item
        for label, part in zip(reading.labels, reading.state or (), strict=False):
            if label != "." or self._sample == "all" or not _drops_state(type(value)):
                yield from labelled(label, part, self._known)

    def _of_class(self, value: Any) -> Parts:
        if not (self._into_classes and isinstance(value, type) and value.__module__ == "__main__"):
            return ()
        slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
        named = [(f".{n}", item) for n, item in vars(value).items() if n[:2] != "__"]
        own = [entry for entry in named if not isinstance(entry[1], slots)]
        return [*own, *(("", base) for base in value.__bases__)]

    # ------------------------------------------------------------ memory

    def _content(self, value: Any) -> Any:
        """Return what tells memory from other memory, or None: the object looks into none."""
        if is_array(value) and not value.dtype.hasobject:
            what = value.dtype.str, value.shape
            if self._sample == "none":
                return what
            step = max(1, value.size // _SOME)
            some = value if self._sample == "all" else sys.modules["numpy"].asarray(value).flat[::step]
            return *what, digest(_bytes_of(some))
        if is_tensor(value) and not is_sharded(type(value)):
            torch = sys.modules["torch"]
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                return self._content_of_tensor(value)
        if self._sample == "all" and type(value).__name__ == "UntypedStorage":
            return digest(bytes(value))
        return None

    def _content_of_tensor(self, tensor: Any) -> Any:
        storage = storage_of(tensor)
        if storage is None:  # its own protocol tells
            return None if self._sample == "all" else str(tensor.dtype)
        what = str(tensor.dtype), tuple(tensor.shape)
        if self._sample == "all":
            refuse_flat_shard(tensor)
        plain = tensor.device.type == "cpu" and tensor.is_contiguous()
        plain = plain and not tensor.is_conj() and not tensor.is_neg()
        empty = span_of(tensor)[1] > storage.nbytes()  # libraries free storages under tensors (FSDP)
        if empty or self._sample == "none" or (self._sample == "some" and not plain):
            return what
        some = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        some = some if self._sample == "all" else some[:_SOME]
        return *what, digest(some.view(sys.modules["torch"].uint8).numpy().tobytes())


def _own_write(stream: Any) -> Any:
    return getattr(stream, "__dict__", {}).get("write", stream)


def _drops_state(cls: Any) -> bool:
    """Tell whether a library's class may take less of its state than pickle gives it (scikit-learn's Bunch: nothing).

    It says nothing of its state, but how it is put back.
    """
    says_nothing = getattr(cls, "__getstate__", None) is getattr(object, "__getstate__", None)
    return cls.__module__ != "__main__" and hasattr(cls, "__setstate__") and says_nothing


def _bytes_of(array: Any) -> bytes:
    """Return the bytes of an array's values: what lies between the fields of a record is nobody's, and is not copied."""
    fields = array.dtype.names
    return b"".join(_bytes_of(array[name]) for name in fields) if fields else array.tobytes()

"""Who reads what: one rule for all objects, and the kinds that need another word, each with its reason; ways through objects."""

from __future__ import annotations

import contextlib
import copyreg
import enum
import linecache
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from taas.capture.code_by_value import (
    READERS,
    dispatch_table,
    goes_by_name,
    names_of,
    read_class,
    read_function,
    read_of_module,
)
from taas.capture.holders import reader_of_holders, reader_of_module
from taas.capture.libraries import library_reader
from taas.capture.reading import (
    ATOMS,
    FILES,
    Reading,
    container_reader,
    find,
    is_only_python,
    itself,
    keeps_pickling_of_object,
    keeps_state_of_object,
    module_named,
    read_exception,
    read_file,
    read_plain,
    read_proxy,
    read_reduced,
    read_reference,
)
from taas.capture.tensors import (
    array_reader,
    is_array,
    is_sharded,
    is_tensor,
    tensor_reader,
)
from taas.delivery.registered import delivers, reduce_registered

_ReaderOf = Callable[[Any], Reading | None]


class Reader:
    """Reads objects of a notebook, or of a rank; modules of the ``project`` hold data, wrappers are read as their modules to ``unwrap``.

    It notes what it met so far: the code of the notebook's ``functions``; ``names`` that each of them, and of its classes, uses and
    is found by; ``modules`` that something was found in; ``holders``, which are modules with data, loggers and formatters.
    """

    def __init__(self, namespace: dict[str, Any], *, project: str = "", unwrap: bool = False) -> None:
        self.namespace, self._project, self._unwrap = namespace, project, unwrap
        self.functions: list[types.CodeType] = []
        self.names: list[set[str]] = []
        self.modules: set[str] = set()
        self.holders: list[Any] = []
        self._table = {**copyreg.dispatch_table, **dispatch_table()}
        self._held: dict[str, dict[int, str]] = {}
        self._asked: set[type] = set()
        self._readers: dict[type, _ReaderOf | None] = {
            types.FunctionType: self._function,
            **dict.fromkeys(FILES, read_file),
            **dict.fromkeys(weakref.ProxyTypes, read_proxy),
            types.MethodType: self._method,
            **READERS,
            **dict.fromkeys((*ATOMS, types.BuiltinFunctionType, types.CodeType)),
        }

    def reader_of(self, cls: type) -> _ReaderOf | None:
        """Return what reads objects of a class; None where they go by their names."""
        if cls not in self._readers:
            self._readers[cls] = self._reader_for(cls)
        return self._readers[cls]

    def asks(self, cls: type) -> bool:
        """Tell whether objects of a class are read by a protocol of their own."""
        self.reader_of(cls)
        return cls in self._asked

    def sources(self) -> dict[str, tuple[int, list[str]]]:
        """Return the text of the cells that the functions met so far were defined in."""
        names = {code.co_filename for code in self.functions}
        entries = {name: linecache.cache.get(name, ()) for name in names}
        # IPython's; files have a time
        return {
            n: (entry[0], entry[2]) for n, entry in entries.items() if len(entry) == 4 and entry[1] is None
        }

    def read(self, value: Any) -> Reading | None:
        """Return what an object consists of; None: it goes by its name, or is plain. Raises whatever its own protocol does."""
        reader = self.reader_of(type(value))
        return None if reader is None else reader(value)

    def _reader_for(self, cls: Any) -> _ReaderOf | None:
        if issubclass(cls, type):
            return self._class
        if issubclass(cls, types.ModuleType):
            return self._module
        if (holder := reader_of_holders(cls)) is not None:
            return lambda value: self._holder(value, holder(value))
        if getattr(cls, "__taas_stays__", False):
            return self._by_protocol
        if delivers(cls):
            return lambda value: read_reduced(value, reduce_registered(value) or value.__reduce_ex__(4))
        if self._unwrap and is_wrapper(cls):
            return lambda wrapper: Reading(itself, (wrapper.module,))
        with_memory = tensor_reader(cls) or array_reader(cls)
        if with_memory is not None:
            return lambda value: with_memory(value) or self._by_protocol(value)
        return self._reader_by_rule(cls)

    def _reader_by_rule(self, cls: Any) -> _ReaderOf:
        reader = self._reader_of_object(cls)
        if reader == self._by_protocol:
            self._asked.add(cls)
        module = cls.__module__
        if module not in sys.modules or module in ("__main__", "builtins") or issubclass(cls, enum.Enum):
            return reader

        def read(value: Any) -> Reading | None:
            """Read what its class' own module holds (``dataclasses.MISSING``) by its name there: there is only one."""
            if module not in self._held:
                self._held[module] = self._held_by(module)
            name = self._held[module].get(id(value))
            return reader(value) if name is None else Reading(find, (module, name))

        return read

    def _reader_of_object(self, cls: Any) -> _ReaderOf:
        if cls in self._table:
            return self._by_protocol
        reader = container_reader(cls) or library_reader(cls, answers=self._unwrap)
        if reader is not None:
            return reader
        if issubclass(cls, BaseException) and not isinstance(cls.__reduce__, types.FunctionType):
            return read_exception
        if issubclass(cls, weakref.ref):
            return read_reference
        new_takes_arguments = hasattr(cls, "__getnewargs__") or hasattr(cls, "__getnewargs_ex__")
        is_plain = (keeps_state_of_object(cls) and is_only_python(cls)) or _leaves_out(cls)
        rule = keeps_pickling_of_object(cls) and is_plain and not new_takes_arguments
        return read_plain if rule else self._by_protocol

    def _method(self, method: Any) -> Reading | None:
        """Read a bound method; that of an output stream is the stream's own where it arrives, which has another class."""
        if any(method.__self__ is stream for stream in (sys.stdout, sys.stderr)):
            return Reading(getattr, (method.__self__, method.__name__))
        return self._by_protocol(method)

    def _by_protocol(self, value: Any) -> Reading | None:
        reducer = self._table.get(type(value))
        return read_reduced(value, reducer(value) if reducer is not None else value.__reduce_ex__(4))

    def _held_by(self, module: str) -> dict[int, str]:
        loaded = sys.modules[module]
        file = getattr(loaded, "__file__", None) or ""
        if self._project and file.startswith(self._project + "/") and "site-packages" not in Path(file).parts:
            return {}  # its data are the notebook's
        held = [*vars(loaded).items()]
        return {id(value): name for name, value in held if getattr(type(value), "__module__", "") == module}

    def _module(self, module: types.ModuleType) -> Reading | None:
        self.modules.add(module.__name__)
        if module_named(module.__name__) is not module:
            return self._by_protocol(module)
        return self._holder(module, reader_of_module(module, self._project))

    def _holder(self, value: Any, reading: Reading | None) -> Reading | None:
        if reading is not None and reading.state is not None and not isinstance(value, logging.Handler):
            self.holders.append(value)
        return reading

    def _class(self, cls: type) -> Reading | None:
        self.modules.add(cls.__module__)
        reading = read_class(cls)
        if reading is not None and cls.__module__ == "__main__":
            self.names.append(names_of(cls))
        return reading

    def _function(self, function: types.FunctionType) -> Reading | None:
        if function.__globals__ is self.namespace:
            self.functions.append(function.__code__)
            self.names.append(names_of(function))
        elif "__name__" in function.__globals__:  # else it is a dict that ``exec`` was given
            self.modules.add(function.__globals__["__name__"])
            reading = read_of_module(function)
            if reading is not None or goes_by_name(function):
                return reading
        return read_function(function, function.__globals__)


def stays(cls: type) -> bool:
    """Tell whether objects of a class stand in a rank for the notebook's own, which stay there as they are."""
    return getattr(cls, "__taas_stays__", False) or cls.__qualname__ == "BlockValuesRefs"


def is_as_sent(value: Any) -> bool:
    """Tell whether a tensor or an array is read here as where it came from; of other dtypes NumPy makes copies."""
    if is_array(value):
        return bool(value.dtype.isbuiltin == 1)
    return is_tensor(value) and value.device.type == "cpu"


def is_wrapper(cls: type) -> bool:
    """Tell whether objects of a class are wrappers around the module that comes back in their place."""
    if getattr(cls, "__taas_unwrap__", False):
        return True
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and issubclass(cls, (parallel.DistributedDataParallel, parallel.DataParallel))


def holds_shards(value: Any) -> bool:
    """Tell whether this is a model whose parameters are sharded over the ranks."""
    torch = sys.modules.get("torch")
    is_model = torch is not None and isinstance(value, torch.nn.Module)
    return is_model and any(is_sharded(type(part)) for part in value.parameters())


def _leaves_out(cls: Any) -> bool:
    """Tell whether torch's own protocol refuses what it made (parametrized modules), or forgets what it copied (wrapped hooks)."""
    made = getattr(cls.__getstate__, "__module__", "") == "torch.nn.utils.parametrize"
    return made or (cls.__module__, cls.__qualname__) == ("torch.nn.modules.module", "_WrappedHook")


# ---------------------------------------------------------------- ways through objects


def ways_through(reader: Reader, roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all objects in some, breadth first and each once, and how they are written: ``trainer.callbacks[2].conn``."""
    waiting, seen = deque(roots.items()), dict[int, Any]()
    while waiting:
        path, value = waiting.popleft()
        if id(value) not in seen:
            seen[id(value)] = value
            yield path, value
            with contextlib.suppress(Exception):  # whatever its own protocol raises: no way leads through it
                parts = list(_parts(reader, value))
                waiting += ((path + label, part) for label, part in parts if type(part) not in ATOMS)


def _parts(reader: Reader, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple, set, frozenset):
        yield from ((f"[{n}]", part) for n, part in enumerate(value))
    elif type(value) is dict:
        yield from _entries(value.keys(), value.values())
    elif isinstance(value, type) and value.__module__ == "__main__":
        yield from ((f".{name}", part) for name, part in vars(value).items() if name[:2] != "__")
        yield from (("", base) for base in value.__bases__)
    elif (reading := reader.read(value)) is not None:
        yield from _of_reading(value, reading)


def _entries(keys: Iterable[Any], items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for key, item in zip(keys, items, strict=True):
        written = repr(key)[:40] if type(key) in ATOMS else f"a {type(key).__qualname__}"
        yield f" key {written}", key
        yield f"[{written}]", item


def _of_reading(value: Any, reading: Reading) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" closure variable {name}", cell) for name, cell in closure)
    else:
        for n, item in enumerate(reading.arguments):
            yield ("" if isinstance(item, (type, tuple)) else f" argument {n}"), item
    for label, part in zip(reading.labels, reading.state or (), strict=False):
        yield from _of_part(label, part)


def _of_part(label: str, part: Any) -> Iterator[tuple[str, Any]]:
    if label == "." and type(part) is dict:
        yield from ((f".{name}", item) for name, item in part.items())
    elif label == "[]":
        yield from ((f"[{n}]", item) for n, item in enumerate(part or ()))
    elif label == "{}":
        half = len(part or ()) // 2
        yield from _entries((part or ())[:half], (part or ())[half:])
    else:
        yield " state" if label == "." else label, part

"""Choose the reader for each class: one rule for all, and exceptions with their reasons."""

from __future__ import annotations

import copyreg
import enum
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas.base.import_hooks import attribute_of, attributes_of, loaded
from taas.base.stand_ins import may_have_stand_in, reduced
from taas.capture.describe.code_by_value import (
    READERS,
    dispatch_table,
    goes_by_name,
    read_class,
    read_function,
    read_of_module,
)
from taas.capture.describe.holders import reader_of_holders, reader_of_module
from taas.capture.describe.libraries import library_reader
from taas.capture.describe.process_bound import with_shared
from taas.capture.describe.process_bound_libraries import bound_reader
from taas.capture.describe.process_own import is_of_process, refuse
from taas.capture.describe.reading import (
    ATOMS,
    FILES,
    VIEWS,
    MissingModule,
    Reading,
    attribute_of_class,
    container_reader,
    find,
    import_or_stand_in,
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
    read_view,
)
from taas.capture.describe.tensors import (
    array_reader,
    is_array,
    is_sharded,
    is_tensor,
    tensor_reader,
)

_ReaderOf = Callable[[Any], Reading | None]


class Reader:
    """Reads objects of a notebook or of a rank.

    Modules of the ``project`` are read with their data. With ``unwrap``, a wrapper is read as the
    module that it wraps. ``modules`` collects the modules in which objects were found by name.
    """

    def __init__(
        self, namespace: dict[str, Any], *, project: str = "", unwrap: bool = False
    ) -> None:
        self.namespace, self._project, self._unwrap = namespace, project, unwrap
        self.modules: set[str] = set()
        self._table = {**copyreg.dispatch_table, **dispatch_table()}
        self._asked: set[type] = set()
        self._held: dict[str, dict[int, str]] = {}
        self._readers: dict[type, _ReaderOf | None] = {
            types.FunctionType: self._function,
            **dict.fromkeys(FILES, read_file),
            **dict.fromkeys(weakref.ProxyTypes, read_proxy),
            **dict.fromkeys((*VIEWS, types.MappingProxyType), read_view),
            types.MethodType: self._method,
            **READERS,
            **dict.fromkeys((*ATOMS, types.BuiltinFunctionType, types.CodeType)),
        }

    def reader_of(self, cls: type) -> _ReaderOf | None:
        """Return the reader for objects of a class; None if they are sent by name."""
        if cls not in self._readers:
            self._readers[cls] = self._reader_for(cls)
        return self._readers[cls]

    def asks(self, cls: type) -> bool:
        """Tell whether objects of a class are read by their own protocol."""
        self.reader_of(cls)
        return cls in self._asked

    def _reader_for(self, cls: Any) -> _ReaderOf | None:
        if issubclass(cls, type):
            return self._class
        if issubclass(cls, types.ModuleType):
            return self._module
        if is_of_process(cls):
            return refuse
        if (holder := reader_of_holders(cls)) is not None:
            return holder
        if attribute_of_class(cls, "__taas_stays__"):
            return self._by_protocol
        if may_have_stand_in(cls):
            return lambda value: read_reduced(value, reduced(value))
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
        reader = with_shared(cls, reader, self._is_of_project)
        module = cls.__module__
        if (
            module not in sys.modules
            or module in ("__main__", "builtins")
            or issubclass(cls, enum.Enum)
        ):
            return reader

        def read(value: Any) -> Reading | None:
            """Read an object by name if its class's module has it (``torch.default_generator``).

            Such an object exists once in each process.
            """
            if module not in self._held:
                self._held[module] = self._held_by(module)
            name = self._held[module].get(id(value))
            return reader(value) if name is None else Reading(find, (module, name))

        return read

    def _is_of_project(self, module: str) -> bool:
        """Tell whether a module is the project's, so that its data belong to the notebook."""
        file = attribute_of(module, "__file__") or ""
        below = bool(self._project) and file.startswith(self._project + "/")
        return below and "site-packages" not in Path(file).parts

    def _held_by(self, module: str) -> dict[int, str]:
        if self._is_of_project(module):
            return {}
        there = attributes_of(sys.modules[module])
        return {
            id(value): name
            for name, value in [*there.items()]
            if getattr(type(value), "__module__", "") == module and isinstance(name, str)
        }

    def _reader_of_object(self, cls: Any) -> _ReaderOf:
        if cls in self._table:
            return self._by_protocol
        reader = (
            bound_reader(cls) or container_reader(cls) or library_reader(cls, answers=self._unwrap)
        )
        if reader is not None:
            return reader
        if issubclass(cls, BaseException) and not isinstance(cls.__reduce__, types.FunctionType):
            return read_exception
        if issubclass(cls, weakref.ref):
            return read_reference
        new_takes_arguments = any(
            attribute_of_class(cls, name) is not None
            for name in ("__getnewargs__", "__getnewargs_ex__")
        )
        is_plain = (keeps_state_of_object(cls) and is_only_python(cls)) or _leaves_out(cls)
        rule = keeps_pickling_of_object(cls) and is_plain and not new_takes_arguments
        return read_plain if rule else self._by_protocol

    def _method(self, method: Any) -> Reading | None:
        """Read a bound method; a method of an output stream becomes that of the receiver's stream.

        The receiver's stream has another class.
        """
        if any(method.__self__ is stream for stream in (sys.stdout, sys.stderr)):
            return Reading(getattr, (method.__self__, method.__name__))
        return self._by_protocol(method)

    def _by_protocol(self, value: Any) -> Reading | None:
        reducer = self._table.get(type(value))
        return read_reduced(
            value, reducer(value) if reducer is not None else value.__reduce_ex__(4)
        )

    def _module(self, module: types.ModuleType) -> Reading | None:
        self.modules.add(module.__name__)
        if isinstance(module, MissingModule):  # the notebook has the module itself
            return Reading(import_or_stand_in, (module.__name__,))
        if module_named(module.__name__) is not module:
            return self._by_protocol(module)
        return reader_of_module(module, self._project)

    def _class(self, cls: type) -> Reading | None:
        self.modules.add(cls.__module__)
        return read_class(cls)

    def _function(self, function: types.FunctionType) -> Reading | None:
        # not for functions whose globals are a dict that was passed to ``exec``
        if function.__globals__ is not self.namespace and "__name__" in function.__globals__:
            self.modules.add(function.__globals__["__name__"])
            reading = read_of_module(function)
            if reading is not None or goes_by_name(function):
                return reading
        return read_function(function, function.__globals__)


def stays(cls: type) -> bool:
    """Tell whether objects of a class only stand for the notebook's own, which stay there."""
    return bool(attribute_of_class(cls, "__taas_stays__")) or cls.__qualname__ == "BlockValuesRefs"


def is_as_sent(value: Any) -> bool:
    """Tell whether a tensor or array reads the same here as at the sender.

    NumPy copies arrays of other dtypes.
    """
    if is_array(value):
        return bool(value.dtype.isbuiltin == 1)
    return is_tensor(value) and value.device.type == "cpu"


def is_wrapper(cls: type) -> bool:
    """Tell whether a class wraps modules; the wrapped module is sent back in its place."""
    if attribute_of_class(cls, "__taas_unwrap__"):
        return True
    parallel = loaded("torch.nn.parallel")
    return parallel is not None and issubclass(
        cls, (parallel.DistributedDataParallel, parallel.DataParallel)
    )


def holds_shards(value: Any) -> bool:
    """Tell whether an object is a model whose parameters are sharded over the ranks."""
    torch = loaded("torch")
    is_model = torch is not None and isinstance(value, torch.nn.Module)
    return is_model and any(is_sharded(type(part)) for part in value.parameters())


def _leaves_out(cls: Any) -> bool:
    """Tell whether torch's own protocol refuses objects (parametrized) or drops parts (hooks)."""
    made = getattr(cls.__getstate__, "__module__", "") == "torch.nn.utils.parametrize"
    return made or (cls.__module__, cls.__qualname__) == ("torch.nn.modules.module", "_WrappedHook")

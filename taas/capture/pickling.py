"""One conversation in two pickles: the payload to the ranks, and rank 0's answer to it.

A pickler numbers the objects it meets (its *memo*), and the unpickler of that stream gives the same object
the same number. So after the payload both sides hold an exact table of the objects that travelled. The
answer's pickler and unpickler start with that table in their memos: an object that came from the notebook
is then named by its number and becomes, there, the very object it came from. No object needs a hook for
this, so that containers of plain values pickle at C's speed.
"""

from __future__ import annotations

import copyreg
import functools
import io
import linecache
import pickle
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from taas.capture import arrays, tensors
from taas.capture.ahead import import_or_stand_in
from taas.capture.code_by_value import (
    BasePickler,
    dispatch_table,
    global_names,
    reduce_cached,
    reduce_cached_property,
    reduce_cell,
    reduce_class,
    reduce_function,
    reduce_new_type,
)
from taas.capture.memory import Block, Resident, SentMemory, address_of

__all__ = ["MemorySource", "Pickler", "StreamReader", "Unpickler"]

Memo = dict[int, tuple[int, Any]]
Reducer = Callable[[Any], Any]
_UNKNOWN = object()


class MemorySource(Protocol):
    """Where an unpickler finds the memory of tensors and arrays.

    Both methods take either the number of a block in the file that is read, or the region, start and length
    of memory that travelled before.
    """

    def storage(self, *where: int) -> Any:
        """Return a torch storage."""

    def buffer(self, *where: int) -> memoryview:
        """Return writable memory."""


class _Handle:
    """Stands in a pickle for a storage, or for the memory of arrays; one for each block."""

    __slots__ = ("opener", "owner", "where")

    def __init__(self, opener: Callable[..., Any], where: tuple[int, ...], owner: Any) -> None:
        self.opener, self.where, self.owner = opener, where, owner

    def __reduce__(self) -> tuple[Any, ...]:
        return self.opener, self.where


def _storage(*where: int) -> Any:
    raise pickle.UnpicklingError(f"{where}: memory is opened by taas' own Unpickler only")


def _buffer(*where: int) -> memoryview:
    raise pickle.UnpicklingError(f"{where}: memory is opened by taas' own Unpickler only")


def _itself(value: Any) -> Any:
    return value


def _is_wrapper(cls: type) -> bool:
    if getattr(cls, "__taas_unwrap__", False):
        return True
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and issubclass(cls, (parallel.DistributedDataParallel, parallel.DataParallel))


def _refuse_file(file: io.TextIOWrapper) -> Any:
    if file in (sys.stdout, sys.stderr):
        return NotImplemented
    raise pickle.PicklingError(f"{file.name!r} is an open file")


class Pickler(BasePickler):
    """Writes objects of a notebook, or of a rank, one after the other, into one stream.

    Attributes:
        sent: the memory they live in.
        wanted: names that the functions of the notebook met so far use.
        codes: their code.
        detached: how many tensors had to leave a graph behind.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        *,
        seeds: Sequence[Any] | None = None,
        resident: Resident | None = None,
        unwrap: bool = False,
    ) -> None:
        """Start a stream.

        Args:
            namespace: the globals of the notebook's functions.
            seeds: what the receiver's memo holds, in its order; the namespace alone for a payload.
            resident: memory that the receiver knows.
            unwrap: send the module in place of a parallel wrapper.
        """
        self.stream = io.BytesIO()
        self.dispatch_table = {**copyreg.dispatch_table, **dispatch_table()}
        super().__init__(self.stream, protocol=5, buffer_callback=self._take_buffer)
        self.namespace = namespace
        self.sent = SentMemory()
        self.wanted: set[str] = set()
        self.codes: list[types.CodeType] = []
        self.detached = 0
        self.buffers: list[int] = []
        self._resident = resident
        self._unwrap = unwrap
        self._handles: dict[Any, _Handle] = {}
        self._reducers: dict[type, Reducer | None] = {
            types.FunctionType: self._function,
            types.CellType: reduce_cell,
            types.ModuleType: self._module,
            functools._lru_cache_wrapper: reduce_cached,
            functools.cached_property: reduce_cached_property,
            typing.NewType: reduce_new_type,
            io.TextIOWrapper: _refuse_file,
        }
        self._seed([namespace] if seeds is None else seeds)

    def _seed(self, seeds: Sequence[Any]) -> None:
        memo: Memo = {}
        self._fillers = []
        for number, value in enumerate(seeds):
            if id(value) in memo:  # two numbers for one object: the table still has to be as long
                value = object()
                self._fillers.append(value)
            memo[id(value)] = (number, value)
        self.memo = memo

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> None:
        view = buffer.raw()
        address = address_of(view) if not view.readonly and view.nbytes else arrays.address_of_readonly(view)
        block = Block(address, view.nbytes, "cpu", (buffer, view), lambda: address, [(0, view.nbytes)])
        self.buffers.append(self.sent.add(block))

    # ------------------------------------------------------------ reducers

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for whatever is no plain value."""
        cls = type(value)
        reducer = self._reducers.get(cls, _UNKNOWN)
        if reducer is _UNKNOWN:
            reducer = self._reducers[cls] = self._reducer_for(cls)
        return NotImplemented if reducer is None else reducer(value)  # type: ignore[operator]

    def _reducer_for(self, cls: type) -> Reducer | None:
        if issubclass(cls, type):
            return reduce_class
        registry = sys.modules.get("taas.dataloader_registry")
        if registry is not None and registry.delivers(cls):
            return lambda value: registry.reduce_registered(value) or NotImplemented
        if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "UntypedStorage"):
            if cls in (torch.Tensor, torch.nn.Parameter):
                return functools.partial(tensors.reduce_tensor, self)
            if cls is torch.UntypedStorage:
                return functools.partial(tensors.reduce_storage, self)
            if cls is torch.TypedStorage:
                return tensors.reduce_typed_storage
            if tensors.is_plain_optimizer(cls):
                return tensors.reduce_optimizer
            if tensors.is_plain_scheduler(cls):
                return tensors.reduce_scheduler
        if (numpy := sys.modules.get("numpy")) is not None and cls is getattr(numpy, "ndarray", None):
            return functools.partial(arrays.reduce_array, self)
        if self._unwrap and _is_wrapper(cls):
            return lambda wrapper: (_itself, (wrapper.module,))
        return None

    def _module(self, module: types.ModuleType) -> Any:
        known = sys.modules.get(module.__name__)
        return (import_or_stand_in, (module.__name__,)) if known is module else NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        if function.__globals__ is not self.namespace:
            return self._function_reduce(function)
        self.wanted |= global_names(function.__code__)
        self.codes.append(function.__code__)
        return reduce_function(function, self.namespace)

    # ------------------------------------------------------------ memory

    def storage_handle(self, storage: Any) -> _Handle:
        """Return the stand-in for a torch storage."""
        handle = self._handles.get(storage._cdata)
        if handle is None:
            piece = self._resident.find(storage.data_ptr(), storage.nbytes()) if self._resident else None
            if piece is not None:
                where: tuple[int, ...] = (piece.region, piece.start, piece.nbytes)
            else:
                where = (self.sent.add(tensors.block_of(storage)),)
            handle = self._handles[storage._cdata] = _Handle(_storage, where, storage)
        return handle

    def array_handle(self, root: Any, address: int, nbytes: int) -> _Handle:
        """Return the stand-in for the memory that the root of some array views covers."""
        handle = self._handles.get(("array", id(root)))
        if handle is None:
            piece = self._resident.find(address, nbytes) if self._resident else None
            if piece is not None:
                where: tuple[int, ...] = (piece.region, piece.start, piece.nbytes)
            else:
                where = (self.sent.add(arrays.block_of(root, address, nbytes)),)
            handle = self._handles["array", id(root)] = _Handle(_buffer, where, root)
        return handle

    def array_memory_of(self, storage: Any) -> _Handle:
        """Return the stand-in for the memory of arrays that look into a torch storage."""
        known = self.storage_handle(storage)
        handle = self._handles.get(("memory", storage._cdata))
        if handle is None:
            handle = self._handles["memory", storage._cdata] = _Handle(_buffer, known.where, storage)
        return handle

    def use(self, handle: _Handle, start: int, end: int, tensor: Any = None) -> None:
        """Note that the bytes from ``start`` to ``end`` of a handle's memory are used."""
        if len(handle.where) > 1:
            return
        block = self.sent.blocks[handle.where[0]]
        if end > start:
            block.spans.append((start, end))
        if tensor is not None:
            block.tensors.append(tensor)

    # ------------------------------------------------------------ what was written

    def sources(self) -> dict[str, tuple[int, list[str]]]:
        """Return the text of the cells that the functions met so far were defined in."""
        found = {}
        for name in {code.co_filename for code in self.codes}:
            entry = linecache.cache.get(name)
            if entry is not None and len(entry) == 4 and entry[1] is None:  # IPython's; files have a time
                found[name] = (entry[0], entry[2])
        return found

    def checkpoint(self) -> tuple[Any, int, int]:
        """Return what :meth:`roll_back` needs; slow, for use after a first failure only."""
        return self.memo.copy(), self.stream.tell(), len(self.sent.blocks)

    def roll_back(self, checkpoint: tuple[Any, int, int]) -> None:
        """Forget what was written since ``checkpoint``."""
        self.memo, position, blocks = checkpoint
        self.stream.seek(position)
        self.stream.truncate()
        del self.sent.blocks[blocks:]
        self.buffers = [number for number in self.buffers if number < blocks]
        self._handles = {k: h for k, h in self._handles.items() if len(h.where) > 1 or h.where[0] < blocks}


class StreamReader:
    """What reads such a stream, besides one of Python's unpicklers.

    Args:
        stream: what the pickler wrote.
        seeds: the objects that the pickler's seeds are here.
        memory: where tensors and arrays find their memory.
        buffers: other memory, in the order of the pickler's ``buffers``.
    """

    def __init__(
        self,
        stream: bytes,
        seeds: Iterable[Any],
        count: int,
        memory: MemorySource,
        buffers: Iterable[Any] = (),
    ) -> None:
        # The memo of CPython's unpickler cannot be assigned (the assignment empties it), so the stream
        # begins with one that loads the seeds: for each None, BINPERSID, MEMOIZE, POP.
        prelude = b"\x80\x05" + b"NQ\x940" * count + b"N."
        super().__init__(io.BytesIO(prelude + stream), buffers=buffers)  # type: ignore[call-arg]
        self._seeds: Iterator[Any] = iter(seeds)
        self._openers = {"_storage": memory.storage, "_buffer": memory.buffer}
        self.load()  # type: ignore[attr-defined]

    def persistent_load(self, pid: Any) -> Any:
        """Return the next seed."""
        del pid
        return next(self._seeds)

    def find_class(self, module: str, name: str) -> Any:
        """Find what the stream names; memory is opened here."""
        if module == __name__ and name in self._openers:
            return self._openers[name]
        return super().find_class(module, name)  # type: ignore[misc]


class Unpickler(StreamReader, pickle.Unpickler):
    """Reads such a stream."""

"""One numbered heap: the objects that are sent, their flat states, and what has changed.

The heap also records which objects both sides have.

The payload consists of the states of a heap. An object has changed if its states before and after a
cell differ. :meth:`Heap.change` determines whether it can change in place; :meth:`Heap.held_back`
determines which objects keep their old state if a part is refused. The states' children show which
objects refer to which. :func:`culprit_of` describes a value in a separate heap, in order to find
the part that cannot be sent, and the reason.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import marshal
import math
import pickle
import types
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from taas.base.import_hooks import attributes_of
from taas.capture.describe.flat import FlatStates, How, LeftAttribute, LeftOut, OfReading, State
from taas.capture.describe.holders import Left, holder_kinds, left_out, parts_of_holder
from taas.capture.describe.memory import MemoryRange, Span
from taas.capture.describe.process_own import holds, is_of_process, leave_out, left_attributes
from taas.capture.describe.reader import Reader, is_as_sent, stays
from taas.capture.describe.reading import ATOMS, attribute_of_class, read_insides
from taas.capture.describe.tensors import is_tensor

NAMESPACE = 0
"""The number of the notebook's namespace."""

CONSTANT = frozenset({"atom", "code", "global", "memory", "name", "same", "tuple", "frozenset"})
"""Kinds of objects that cannot change."""


def is_constant(value: Any, state: State | None) -> bool:
    """Tell whether an object itself cannot change, even if the objects to which it refers can.

    Strings and tuples are constant; so are objects that are sent by name, and objects that consist
    of a constructor and its arguments and have no state: ``torch.float32``, a device, a date. An
    iterator and an ``array.array`` have the same form, but an iterator advances and an
    ``array.array`` can change. An ``array.array`` has no hash.
    """
    if state is None or state[0] in CONSTANT:
        return True
    if state[0] != "reading" or type(value).__hash__ is None:
        return False
    if attribute_of_class(type(value), "__next__") is not None:
        return False
    said = _content_of(state)
    _, setter, changer = said.by
    return not said.state and setter is None and changer is None


def _content_of(state: State) -> OfReading:
    """Return the content of a blob of the kind ``reading``."""
    return OfReading._make(marshal.loads(state[1]))  # noqa: S302  this process has written it


_CONTAINERS = frozenset({"list", "tuple", "dict", "OrderedDict", "set", "frozenset"})
_HOME = ("__main__", "builtins")
_ON_DEVICE = b"cuda:"
"""These bytes are in the state of a tensor that was on a GPU when it was read."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector: it takes half a second for 100,000 new objects."""
    _before_pauses.append(gc.isenabled())
    gc.disable()
    try:
        yield
    finally:
        if _before_pauses.pop():
            gc.enable()


_before_pauses: list[bool] = []
"""For each open pause, outermost first: whether the collector was enabled before it."""


def is_collecting() -> bool:
    """Tell whether the garbage collector is enabled, not counting pauses by taas."""
    return _before_pauses[0] if _before_pauses else gc.isenabled()


def set_collecting(wanted: bool) -> None:
    """Enable or disable the garbage collector; in a pause by taas, from the end of the pause on."""
    if _before_pauses:
        _before_pauses[0] = wanted
    elif wanted:
        gc.enable()
    else:
        gc.disable()


_NO_BLOB = marshal.dumps(None, 2)
NO_STATE: State = "", b"", ()
"""Stands for None."""


class Heap(FlatStates):
    """The objects of a notebook, or of a rank, by number, and their states ``before``.

    ``before`` is filled only while a heap is compared with its earlier states.
    """

    # ----------------------------------------------------------------- contents

    def size(self, numbers: Iterable[int]) -> int:
        """Return approximately how many bytes some objects take when written: states and memory."""
        found = 0
        for n in numbers:
            kind, blob, children = self.states[n] or NO_STATE
            found += len(blob) + 8 * len(children)
            if kind == "memory":
                found += sum(high - low for low, high in self.objects[n].spans[:1])
        return found

    def codes(self) -> list[types.CodeType]:
        """Return the code of the notebook's functions."""
        functions = [value for value in self.objects if isinstance(value, types.FunctionType)]
        return [one.__code__ for one in functions if one.__globals__ is self.reader.namespace]

    def sources(self) -> dict[str, tuple[int, list[str]]]:
        """Return the source of the cells in which the functions were defined."""
        entries = {
            code.co_filename: linecache.cache.get(code.co_filename, ()) for code in self.codes()
        }
        # only IPython's cells: the entries of files have a time
        return {
            n: (entry[0], entry[2])
            for n, entry in entries.items()
            if len(entry) == 4 and entry[1] is None
        }

    def early(self, n: int) -> int:
        """Return a sort key for the order in which variables are bound.

        Modules and plain values come first. Functions, classes and other objects follow, in this
        order, because methods of the latter may use all the others.
        """
        value = self.objects[n]
        kinds: tuple[Any, ...] = (types.ModuleType, *ATOMS), types.FunctionType, type
        return next((at for at, kind in enumerate(kinds) if isinstance(value, kind)), len(kinds))

    # ------------------------------------------------------------ at the receiver

    def learn(self, made: dict[int, Any], states: dict[int, State], length: int) -> None:
        """Record the objects that were built from states; ``length`` numbers are in use."""
        for n in range(len(self.objects), length):
            known = n in states and n in made
            self.objects.append(made[n] if known else None)
            self.states.append(states[n] if known else None)
            if not known:
                continue
            kind = states[n][0]
            if kind == "memory":
                self.memories[made[n].address, made[n].nbytes] = n
            elif (
                _has_identity(kind, made[n]) and (m := self.number.setdefault(id(made[n]), n)) != n
            ):
                self.states[n] = ("same", _NO_BLOB, (m,))  # it exists here: a class, a dtype

    def describe_as_here(self) -> None:
        """Describe again the objects that this side reads differently from the sender.

        These are tensors on other devices, and functions whose globals are this namespace.

        An object with its own protocol is described again if it may store a copy of an argument:
        only this side has the copy, under a number that only this side knows. A module of which a
        part stays behind is described again, too.
        """
        staying = {cls for cls in {*map(type, self.objects)} if stays(cls)}
        for n, value in enumerate(self.objects):
            if n == NAMESPACE or value is None or type(value) in staying:
                continue
            if self._is_other_here(value, self.states[n]):
                self.describe_again(n)
        self.walk()
        self.leave_out()

    def _is_other_here(self, value: Any, state: State | None) -> bool:
        if isinstance(value, types.ModuleType):
            return self.number.get(id(Left)) in (state or NO_STATE)[2]
        # in the notebook: made on a GPU in the rank, and in host memory here
        from_device = state is not None and is_tensor(value) and _ON_DEVICE in state[1]
        if state is None or state[0] != "reading" or (is_as_sent(value) and not from_device):
            return state is None
        asks = self.reader.asks(type(value))
        return not asks or (not is_tensor(value) and any(map(self._may_change, state[2])))

    def _may_change(self, n: int) -> bool:
        state, is_code = self.states[n], isinstance(self.objects[n], (*_CODE, type(None)))
        return state is None or not (is_code or state[0] in CONSTANT)

    def describe_after(
        self, numbers: Iterable[int], reader: Reader, collected: float = math.inf
    ) -> None:
        """Describe some objects in their present state; ``before`` keeps their earlier states."""
        self.reader, self.collected = reader, collected
        self.before = self.states.copy()
        self.failed = {n: error for n, error in self.failed.items() if self.states[n] is None}
        for n in numbers:
            before = self.before[n]
            if self.objects[n] is not None and before is not None and before[0] not in CONSTANT:
                self.describe_again(n)
        self.walk()

    def unreadable(self, numbers: Iterable[int]) -> dict[int, Exception]:
        """Return the objects that their own protocol fails to describe now, with the errors."""
        length = len(self.objects)
        asked = [n for n in numbers if self.reader.asks(type(self.objects[n]))]
        self.describe_after(asked, self.reader)
        failed = {n: self.failed[n] for n in asked if n in self.failed}
        self.take_back(length)
        return failed

    def renumber(self, n: int) -> int:
        """Give an object another number, because the other side recreates it."""
        m = self.number[id(self.objects[n])] = len(self.objects)
        self.objects.append(self.objects[n])
        self.states.append(self.states[n])
        return m

    def end_after(
        self, known: int, sent: Container[int], anew: Iterable[int], held_back: Iterable[int]
    ) -> None:
        """After an answer was sent, forget the objects that the other side does not have.

        These are the numbers from ``known`` on that were not sent, and the old numbers of objects
        that are recreated.
        """
        for n in held_back:
            if n < known:
                self.states[n] = self.before[n]
        self.forget({n for n in range(known, len(self.objects)) if n not in sent})
        for n in anew:
            self.objects[n] = self.states[n] = None
        self.before, self.failed = [], {}

    def memory_ranges(self, numbers: Collection[int]) -> list[MemoryRange]:
        """Return the memory ranges among some objects."""
        return [self.objects[n] for n in self.memories_among(numbers)]

    def memories_among(self, numbers: Collection[int]) -> dict[int, Span]:
        """Return address and length of the memory ranges among some objects, by number."""
        return {n: memory for memory, n in self.memories.items() if n in numbers}

    def go_on(self, before: Heap, held: Iterable[int], length: int) -> None:
        """Take over from an earlier heap the objects that are still valid."""
        held = {n for n in held if n < len(before.objects)}
        taken = range(len(self.objects), min(length, len(before.objects)))
        self.objects += [before.objects[n] if n in held else None for n in taken]
        self.states += [before.states[n] for n in taken]
        self.know(held)

    def know(self, numbers: Iterable[int]) -> None:
        """Register the numbers of some objects, which both sides have under these numbers."""
        for n in numbers:
            value, state = self.objects[n], self.states[n]
            if isinstance(value, MemoryRange):
                self.memories[value.address, value.nbytes] = n
            elif state is not None and _has_identity(state[0], value):
                self.number[id(value)] = n

    def take_back(self, length: int, anew: Iterable[int] = ()) -> None:
        """Restore the heap to its state before :meth:`describe_after`.

        Numbers from ``length`` on are forgotten; objects in ``anew`` get their old numbers back.
        """
        self.states[:length] = self.before[:length]
        self.back_to(length)
        self.number |= {id(self.objects[n]): n for n in anew}
        self.before, self.failed = [], {}

    # ------------------------------------------------------------ comparing

    def is_same(self, n: int) -> bool:
        """Tell whether an object is the same as before."""
        before, now = self.before[n], self.states[n]
        if before is None or now is None or before[:2] != now[:2]:
            return before is now
        return before[2] == now[2] or self._are_same(before[2], now[2])

    def _are_same(self, before: Iterable[int], now: Iterable[int]) -> bool:
        return [*map(self._meant, before)] == [*map(self._meant, now)]

    def _state_before(self, n: int) -> State | None:
        return self.before[n] if n < len(self.before) else self.states[n]

    def _meant(self, n: int) -> int:
        """Return the number of the object that the other side has in an object's place."""
        state = self._state_before(n)
        return self._meant(state[2][0]) if state is not None and state[0] == "same" else n

    def change(self, before: State | None, now: State | None) -> How:
        """Return how an object in the state ``before`` can get to its state ``now``."""
        assert before is not None and now is not None
        if before[0] == now[0] and now[0] in ("list", "dict", "OrderedDict", "set", "object"):
            return How.IN_PLACE
        if now[0] == "object" and before[0] == "reading":
            return How.IN_PLACE  # its class has changed
        if now[0] != "reading":
            return How.ANEW
        said = _content_of(now)
        if before[0] == "reading":
            was = _content_of(before)
            made_of = before[2][: was.made_of], now[2][: said.made_of]
            made_alike = (was.by, was.arguments) == (said.by, said.arguments)
            if made_alike and self._are_same(*made_of):
                return How.IN_PLACE
        has_changer = said.by[2] is not None
        return How.IN_PLACE_WITH_ARGUMENTS if has_changer else How.ANEW

    def reached(
        self,
        roots: Iterable[int],
        but: Container[int] = (),
        states: list[State | None] | None = None,
    ) -> set[int]:
        """Return the numbers of objects and of everything they reach, except those in ``but``.

        ``states`` determine which object refers to which; by default, the present states.
        """
        states = self.states if states is None else states
        found: set[int] = set()
        new = set(roots)
        while new:  # level by level: set operations are three times as fast as a loop
            if but:
                new = {n for n in new if n not in but}
            found |= new
            known = [states[n] for n in new if n < len(states)]
            new = set(chain.from_iterable(state[2] for state in known if state is not None))
            new -= found
        return found

    def holding(
        self, numbers: Iterable[int], among: Iterable[int], last: Container[int] = ()
    ) -> set[int]:
        """Return objects and all that refer to them, directly or not; do not go beyond ``last``."""
        holders = self.holders(among)
        found, waiting = set(numbers), [*numbers]
        while waiting:
            new = [n for n in holders.get(waiting.pop(), ()) if n not in found]
            found.update(new)
            waiting += [n for n in new if n not in last]
        return found

    def holders(self, among: Iterable[int]) -> dict[int, list[int]]:
        """Return, for each object, which of the objects ``among`` refer to it."""
        holders: dict[int, list[int]] = {}
        for n in among:
            for child in (self.states[n] or NO_STATE)[2]:
                holders.setdefault(child, []).append(n)
        return holders

    def shortest_path(
        self, wanted: Container[int], roots: Mapping[str, int]
    ) -> tuple[str, int] | None:
        """Return the shortest path to one of the wanted objects, and its number.

        A path reads like ``trainer.callbacks[2].conn``.
        """
        above: dict[int, int | str] = {n: name for name, n in roots.items()}
        waiting = deque(dict.fromkeys(roots.values()))
        while waiting and waiting[0] not in wanted:
            n = waiting.popleft()
            new = [child for child in (self.states[n] or NO_STATE)[2] if child not in above]
            above |= dict.fromkeys(new, n)
            waiting += dict.fromkeys(new)
        if not waiting:
            return None
        way = [n := waiting[0]]
        while isinstance(holder := above[n], int):
            way.append(n := holder)
        path, holder = holder, self.objects[way.pop()]
        while way:
            part = self.objects[way.pop()]
            label = _label(holder, part)
            if label or not isinstance(part, (tuple, types.CellType)):  # those belong to a protocol
                path, holder = path + label, part
        return path, waiting[0]

    def leave_out(self, first: int = 0, roots: Mapping[str, int] | None = None) -> bool:
        """Leave out the parts, from number ``first`` on, that cannot be sent; tell if any were.

        A part is left out only if its holder can do without it.
        """
        of_holders = self._leave_out_of_holders(first)
        return self._leave_out_attributes(first, roots or {}) or of_holders

    def _leave_out_attributes(self, first: int, roots: Mapping[str, int]) -> bool:
        """Leave out attributes that belong to their process, or contain such an object.

        From each such object, climb through containers to the object that has it as an attribute.
        An object that refers to it in another way (a hook with a closure) cannot do without it.
        """
        reasons = {
            n: type(self.objects[n]).__qualname__
            for n in self.failed
            if n >= first and is_of_process(type(self.objects[n]))
        }
        if not reasons:
            return False
        holders = self.holders(range(first, len(self.objects)))
        changed: set[int] = set()
        waiting = [*reasons]
        while waiting:
            part = waiting.pop()
            for n in holders.get(part, ()):
                names = self._attributes_with(n, part)
                new = [name for name in names if (id(self.objects[n]), name) not in left_attributes]
                for name in new:
                    self._leave_out_attribute(n, name, reasons[part], roots)
                    changed.add(n)
                if n not in reasons and (self.states[n] or NO_STATE)[0] in _CONTAINERS:
                    reasons[n] = reasons[part]
                    waiting.append(n)
        for n in changed:
            self.failed.pop(n, None)
            self.describe_again(n)
        self.walk()
        return bool(changed)

    def _attributes_with(self, n: int, part: int) -> list[str]:
        """Return the attributes of an instance that are an object, or a container with it."""
        holder, wanted = self.objects[n], self.objects[part]
        if (self.states[n] or NO_STATE)[0] not in ("object", "reading") or isinstance(
            holder, _CODE
        ):
            return []
        attributes = attributes_of(holder)
        return [name for name, item in attributes.items() if holds(item, lambda one: one is wanted)]

    def _leave_out_attribute(self, n: int, name: str, kind: str, roots: Mapping[str, int]) -> None:
        holder = self.objects[n]
        part = attributes_of(holder)[name]
        way = self.shortest_path((n,), roots)
        path = way[0] if way and way[0] else f"a {type(holder).__qualname__}"
        leave_out(holder, name)
        self.parted.append(LeftAttribute(f"{path}.{name}", name, kind, holder, part))

    def _leave_out_of_holders(self, first: int) -> bool:
        """Leave out the parts of modules, loggers and formatters that cannot be sent.

        This includes data of a module that contain code which cannot be found by name in its
        module.
        """
        new = range(first, len(self.objects))
        kinds = {
            cls for cls in {*map(type, self.objects[first:])} if issubclass(cls, holder_kinds())
        }
        holders = {
            n for n in new if type(self.objects[n]) in kinds and _has_told_state(self.states[n])
        }
        if not holders:
            return False
        code = {n for n in new if isinstance(self.objects[n], (types.FunctionType, type))}
        own = {n for n in code if self.objects[n].__module__ in _HOME}
        bad = {n for n in code - own if _has_told_state(self.states[n])}
        bad.update(n for n in self.failed if n >= first)
        if not bad:
            return False
        found = False
        for n in holders & self.holding(bad, new, holders):
            holder = self.objects[n]
            by_name = bad if isinstance(holder, types.ModuleType) else set[int]()
            for path, part in parts_of_holder(holder):
                error = self._error_in([self.number.get(id(part), n)], holders, own, by_name)
                if error is not None:
                    found = True
                    left_out[id(part)] = part
                    self.left[path] = LeftOut(holder, part, error)
            self.describe_again(n)
        self.walk()
        return found

    def _error_in(
        self, root: list[int], holders: set[int], own: set[int], by_name: set[int]
    ) -> Exception | None:
        """Return why a part of a module, a logger or a formatter cannot be sent; else None.

        A class of the notebook is sent with all its attributes: a named tuple has methods from
        ``collections``.
        """
        error = next(
            (self.failed[m] for m in self.reached(root, holders) if m in self.failed), None
        )
        if error is not None or by_name.isdisjoint(self.reached(root, holders | own)):
            return error
        return pickle.PicklingError("it is code without a name")

    def held_back(self, refused: set[int], roots: Iterable[int]) -> set[int]:
        """Return what keeps its old state if some objects are refused.

        These are the refused objects, and the instances around them. Such an instance keeps its old
        state together with everything in it, except what variables reach in another way. Containers
        change if they can.
        """
        around = (
            self.holding(refused, range(NAMESPACE + 1, len(self.objects))) if refused else set()
        )
        owners = [n for n in around if (self.states[n] or NO_STATE)[0] in ("object", "reading")]
        whole = self.reached(n for n in roots if n not in around)
        return (self.reached(owners) | self.reached(owners, states=self.before)) - whole | refused

    def only_among(self, numbers: set[int], states: Iterable[State | None]) -> set[int]:
        """Return the numbers of memory that only some objects use; ``states`` are those of all."""
        known = {n: state for n, state in enumerate(states) if state is not None}
        inside = {c for n in numbers if n in known for c in (n, *known[n][2])}
        others = {c for n, state in known.items() if n not in numbers for c in state[2]}
        return {n for n in inside - others if n in known and known[n][0] == "memory"}


def _has_identity(kind: str, value: Any) -> bool:
    """Tell whether identity matters for an object; among plain values, it does for None only."""
    if kind == "atom":
        return value is None or type(value) is types.CodeType
    # "same": another object takes its place here, which has its own number
    return kind not in (
        "memory",
        "same",
    )


def _has_told_state(state: State | None) -> bool:
    if state is None or state[0] != "reading":
        return False
    return _content_of(state).is_attributes is not None


# ------------------------------------------------------------ objects that cannot be sent


_MEMBERS = ("__defaults__", "__kwdefaults__", "__self__")
_ADVICE = {
    "generator": "make it inside the cell, or a list of it before",
    "coroutine": "await it before the cell, or inside it",
    "memoryview": "make it inside the cell, from what it looks into",
    **dict.fromkeys(
        ("TextIOWrapper", "BufferedReader", "BufferedWriter"), "open it inside the cell"
    ),
    **dict.fromkeys(("Connection", "socket"), "connect inside the cell"),
    **dict.fromkeys(
        ("_MultiProcessingDataLoaderIter", "_SingleProcessDataLoaderIter"),
        "pass the DataLoader and call iter() inside the cell",
    ),
    **dict.fromkeys(
        ("ProcessGroup", "DeviceMesh", "Work", "TCPStore", "Stream", "Event"),
        "make it inside the cell",
    ),
}
_OTHER_ADVICE = (
    "make it inside the cell, or give the class that holds it a __getstate__ that leaves it out"
)


_FEW = 3


class Culprit(NamedTuple):
    """The innermost object that cannot be pickled, with its path (``a.inner['conn'][1]``)."""

    path: str
    kind: str
    reason: str
    advice: str


def culprit_of(
    name: str, value: Any, reader: Reader, *, without_gpu: bool = False
) -> Culprit | None:
    """Return the part of an object that cannot be sent, with the shortest path; None if all can.

    ``name`` is the first part of the path. ``without_gpu``: the object is sent to a process without
    a GPU.
    """
    heap = Heap(reader, [reader.namespace])
    root = heap.enter(value)
    heap.walk()
    for memory in heap.memory_ranges(range(len(heap.objects))) if without_gpu else ():
        for tensor in memory.tensors if memory.device != "cpu" else ():
            heap.failed[heap.enter(tensor)] = ValueError(
                f"on {tensor.device}, and data workers have no GPU"
            )
    if not heap.failed:
        return None
    path, n = heap.shortest_path(heap.failed, {name: root}) or (name, min(heap.failed))
    error, cls = heap.failed[n], type(heap.objects[n])
    own = cls.__module__ in ("builtins", "__main__")
    kind = cls.__qualname__ if own else f"{cls.__module__}.{cls.__qualname__}"
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Culprit(path, kind, reason, _ADVICE.get(cls.__name__, _OTHER_ADVICE))


def summarize_attributes(parted: list[LeftAttribute]) -> list[str]:
    """Describe some attributes, in one line for each kind of value that they have."""
    kinds: dict[str, list[str]] = {}
    for one in parted:
        kinds.setdefault(one.kind, []).append(one.path)
    found = []
    for kind, paths in kinds.items():
        more = f" and {len(paths) - _FEW} more" if paths[_FEW:] else ""
        found.append(f"{', '.join(paths[:_FEW])}{more} ({kind})")
    return found


def _label(holder: Any, part: Any) -> str:
    """Return the code that accesses a part of its holder; empty if only a protocol knows."""
    if isinstance(holder, types.FunctionType):
        closure = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        named = {f" closure variable {name}": cell for name, cell in closure}
    elif isinstance(holder, dict):
        named = {}
        for key, item in dict.items(holder):
            written = repr(key)[:40] if type(key) in ATOMS else f"a {type(key).__qualname__}"
            named |= {f" key {written}": key, f"[{written}]": item}
    else:
        items = holder if isinstance(holder, (list, tuple, set, frozenset, deque)) else ()
        named = {f"[{n}]": item for n, item in enumerate(items)}
    attributes, slots = read_insides(holder, *_MEMBERS)
    named |= {f".{name}": item for name, item in {**(attributes or {}), **slots}.items()}
    return next((label for label, item in named.items() if item is part), "")

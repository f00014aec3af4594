"""What belongs to a process, or to a rank of a run, and does not arrive elsewhere as rank 0's.

**State of the process.** An instance whose ``__dict__`` *is* a dict of its class (the Borg pattern:
accelerate's ``PartialState``) stands for what its process is. Where it arrives it is tied to the
dict that the class has there. Settings in it travel; what the process has found out about itself
(``process_bound_libraries`` lists it) does not.

**Shares.** An object that says that it is rank 0 of N (a ``DistributedSampler``, accelerate's
``BatchSamplerShard``) becomes the receiving rank's, in a run of N ranks. In a run of another size,
and in the notebook, it stays rank 0's. What says so may be a sampler or a loader, wherever it was
made, or any object that rank 0 has sent: ``args.rank``.

**Wrappers.** ``DistributedDataParallel`` is taken off on the way to the notebook. The notebook
remembers from what, as a later cell that trains the module without it would not synchronise
gradients.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

from taas.capture import process_bound_libraries as libraries
from taas.capture.code_by_value import global_names, words_in
from taas.capture.reading import Reading
from taas.import_hooks import loaded

_ReaderOf = Callable[[Any], Reading | None]


class Place(NamedTuple):
    """Which process of its run this one is."""

    rank: int
    size: int


# ---------------------------------------------------------------- state of the process


@functools.cache
def _dicts_of(cls: Any) -> tuple[tuple[type, str], ...]:
    """Return where a class holds dicts: by which base, and under which name."""
    found = []
    for base in cls.__mro__:
        names = (name for name, value in vars(base).items() if type(value) is dict)
        found += [(base, name) for name in names if not name.startswith("__")]
    return tuple(found)


def with_shared(cls: type, reader: _ReaderOf, is_of_project: Callable[[str], bool]) -> _ReaderOf:
    """Return what reads objects of a class, those that share a dict of the class included.

    Data of the notebook's classes, and of the project's, travel by themselves, dicts among them.
    """
    if not cls.__dictoffset__:
        return reader
    dicts = _dicts_of(cls)
    dicts = tuple((b, n) for b, n in dicts if b.__module__ != "__main__" and not is_of_project(b.__module__))
    if not dicts:
        return reader

    def read(value: Any) -> Reading | None:
        own = value.__dict__
        for base, name in dicts:
            if vars(base).get(name) is own:
                return _read_shared(value, base, name)
        return reader(value)

    return read


def _read_shared(value: Any, base: type, name: str) -> Reading:
    found_out = libraries.found_out_by(type(value))
    told = {key: item for key, item in value.__dict__.items() if key not in found_out}
    return Reading(_tie, (type(value), base, name), _set_shared, (told, libraries.needed_beside(value)))


def _tie(cls: type, base: type, name: str) -> Any:
    """Make an instance on the dict that its class has in this process."""
    made: Any = object.__new__(cls)
    object.__setattr__(made, "__dict__", vars(base)[name])
    return made


def _set_shared(value: Any, state: tuple[dict[str, Any], Any]) -> None:
    """Put settings into the dict of a class.

    Where the process has found out nothing yet, they wait until it has.
    """
    found_out = libraries.found_out_by(type(value))
    shared = value.__dict__
    if found_out and found_out.isdisjoint(shared):
        libraries.settings_waiting[type(value)] = state[0]
        return
    own = {key: shared[key] for key in found_out & shared.keys()}
    shared.clear()
    shared.update({**state[0], **own})


def settle(
    values: Collection[Any], shares: Iterable[Any] = (), place: Place | None = None, **how: bool
) -> None:
    """Let objects that have come find out which process this is; make ``shares`` of rank 0 this rank's.

    ``how`` is explained in :func:`process_bound_libraries.settle`.
    """
    libraries.settle(values, place.size if place else None, **how)
    if place:
        take_share(shares, place)


# ---------------------------------------------------------------- shares

_PAIRS = (
    ("rank", "num_replicas"),
    ("rank", "world_size"),
    ("process_index", "num_processes"),
    ("data_parallel_rank", "data_parallel_size"),
    ("shard_id", "num_shards"),
)
"""Attributes that say of which rank an object is, and of how many; also with underscores before both."""
_SHARES_BY_NAME = re.compile(r"Sampler|Shard|Distributed|DataLoader|DL$")

_from_ranks: dict[int, weakref.ref[Any]] = {}
"""In a notebook: what rank 0 sent that says that it is rank 0's, by its id."""


def pair_of(value: Any) -> tuple[str, int, int] | None:
    """Return which attribute says of which rank an object is, that rank, and of how many.

    None where no attribute says so.
    """
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        return None
    for pair in _PAIRS:
        for rank, size in (pair, ("_" + pair[0], "_" + pair[1])):
            number, of = attributes.get(rank), attributes.get(size)
            if type(number) is int and type(of) is int and 0 <= number < of and of > 1:
                return rank, number, of
    return None


@functools.cache
def _are_shares(cls: Any) -> bool:
    """Tell whether objects of a class are what divides data among ranks."""
    data = loaded("torch.utils.data")
    divides = data is not None and issubclass(cls, (data.Sampler, data.IterableDataset))
    return bool(divides or _SHARES_BY_NAME.search(cls.__qualname__)) and cls.__dictoffset__ != 0


def shares_among(values: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield what among some objects of a notebook is one rank's, which rank's, and of how many."""
    for value in values:
        known = _from_ranks.get(id(value)) if _from_ranks else None
        cls: Any = type(value)
        if (known is not None and known() is value) or _are_shares(cls):
            found = pair_of(value)
            if found is not None:
                yield value, *found[1:]


def remember_shares(values: Iterable[Any], size: int) -> None:
    """In a notebook: note which of the objects that came from ``size`` ranks say that they are rank 0's."""
    for number in [number for number, known in _from_ranks.items() if known() is None]:
        del _from_ranks[number]
    for value in values:
        found = pair_of(value)
        if found is not None and found[1:] == (0, size) and type(value).__weakrefoffset__:
            _from_ranks[id(value)] = weakref.ref(value)


def take_share(values: Iterable[Any], place: Place) -> None:
    """In a rank: make the shares of rank 0 that have come this rank's, if they are of as many ranks."""
    for value in values:
        found = pair_of(value)
        if found is not None and found[1:] == (0, place.size):
            value.__dict__[found[0]] = place.rank


# ---------------------------------------------------------------- wrappers that were taken off


class Unwrapped(NamedTuple):
    """A module without its wrapper, and what that was; its owner is None under a name, or in a container."""

    owner: weakref.ref[Any] | None
    module: weakref.ref[Any]
    wrapper: str


_unwrapped: dict[tuple[int, int], Unwrapped] = {}
_CONTAINERS = (list, tuple, dict, OrderedDict, set, frozenset, deque, types.CellType)
WRAPS = frozenset({
    "DistributedDataParallel", "DDP", "DataParallel", "FullyShardedDataParallel", "FSDP", "fully_shard", "replicate",
    "parallelize_module", "distribute_module", "prepare", "prepare_model",
})  # fmt: skip
"""Code with any of these names wraps a module."""


def is_container(value: Any) -> bool:
    """Tell whether an object only holds others: what it is in counts, and not itself."""
    return isinstance(value, _CONTAINERS)


def remember_unwrapped(found: Iterable[tuple[Any, Any, str]]) -> None:
    """In a notebook: note owners (None: none), modules, and the wrappers that these had in the ranks."""
    for key in [key for key, one in _unwrapped.items() if one.module() is None]:
        del _unwrapped[key]
    for owner, module, wrapper in found:
        if not type(module).__weakrefoffset__ or (owner is not None and not type(owner).__weakrefoffset__):
            continue
        held = None if owner is None else weakref.ref(owner)
        _unwrapped[id(owner), id(module)] = Unwrapped(held, weakref.ref(module), wrapper)


def unwrapped_among(ids: Collection[int]) -> Iterator[tuple[Any, str]]:
    """Yield what among objects, by their ids, lacks a wrapper that it had in ranks, and which wrapper."""
    for (owner, module), one in _unwrapped.items():
        held = one.module if one.owner is None else one.owner
        if (
            (module if one.owner is None else owner) in ids
            and held() is not None
            and one.module() is not None
        ):
            yield held(), one.wrapper


def words_that_run(words: Iterable[str], codes: Iterable[types.CodeType]) -> set[str]:
    """Return the words of code that runs, with those of functions and methods that it names, and so on.

    A class's ``__init__`` runs where the class is named; other special methods are called unnamed.
    """
    found, waiting = {*words}, [*codes]
    runs = True
    while runs:
        runs = False
        for code in [*waiting]:
            name = code.co_name
            if name == "__init__":
                name = code.co_qualname.split(".")[-2:][0]
            if name in found or name.startswith(("__", "<")):
                waiting.remove(code)
                found |= words_in(code)
                runs = True
    return found


def surely_read(sure: Collection[str], roots: dict[str, int], heap: Any, words: Collection[str]) -> set[str]:
    """Return the names that a cell surely needs, with what functions under them read.

    ``words`` are those of the code that runs: functions and methods that it does not name are not asked.
    """
    found, waiting = {*sure}, [*sure]
    for name in waiting:  # grows
        if name not in roots:
            continue
        objects = [heap.objects[n] for n in heap.reached([roots[name]])]
        functions = [one for one in objects if isinstance(one, types.FunctionType) and one.__name__ in words]
        for function in functions:
            if function.__globals__ is heap.reader.namespace:
                new = global_names(function.__code__) - found
                found |= new
                waiting += new
    return found


def wraps(words: Collection[str], namespace: dict[str, Any]) -> bool:
    """Tell whether code with these words wraps modules: it names what does, also by another name."""
    meant = {getattr(namespace.get(word), "__name__", "") for word in words}
    return not WRAPS.isdisjoint(words) or not WRAPS.isdisjoint(meant) or libraries.wraps(words)


# ---------------------------------------------------------------- before a cell starts


class Fit(NamedTuple):
    """How what travels fits a run."""

    lines: list[str]  # for the user
    useless: dict[str, str]  # what has a part with which ranks can do nothing, by name: which part, and why
    wraps: bool  # modules are wrapped again, by the cell or by an object that it has


def fit_of(
    heap: Any, roots: dict[str, int], delivered: Container[int], size: int, words: Collection[str]
) -> Fit:
    """Say what of a notebook's objects, under some names, does not fit a run of ``size`` ranks.

    ``delivered`` are the ids of loaders of which data processes take care; ``words`` those of the
    code that runs.
    """
    reached = heap.reached(roots.values())
    opaque = {n for n in reached if id(heap.objects[n]) in delivered or libraries.renews(heap.objects[n])}
    inside = heap.reached(roots.values(), opaque)
    wrapped = wraps(words, heap.reader.namespace)
    fit = Fit([], {}, wrapped or any(libraries.renews(heap.objects[n]) for n in opaque))
    here = f"this cell has {size} ranks" if size > 1 else "this cell has one process"

    for n in inside | opaque:
        reason = libraries.misfit(heap.objects[n], size, words)
        if reason is not None:
            why, advice = reason
            for name in _names_with({n}, heap, roots):
                path, _ = heap.way_to({n}, {name: roots[name]})
                fit.useless[name] = f"{path} {why}, and {here}: {advice} in this cell."
        elif size > 1 and libraries.is_lone_trainer(heap.objects[n]):
            path, _ = heap.way_to({n}, roots)
            fit.lines.append(
                f"{path} is a Trainer for one process, and {here}: each works alone with it. Make it in this cell."
            )

    of_others: dict[int, set[int]] = {}
    for value, _, of in shares_among(heap.objects[n] for n in inside):
        if of != size:
            of_others.setdefault(of, set()).add(heap.number[id(value)])
    for of, numbers in of_others.items():
        names = [name for name in _names_with(numbers, heap, roots, opaque) if name not in fit.useless]
        if names:
            is_one = len(names) == 1
            fit.lines.append(
                f"{', '.join(names)} {'is' if is_one else 'are'} rank 0's share of {of}, and {here}: make "
                f"{'it' if is_one else 'them'} in this cell."
            )
    if size > 1 and not wrapped:
        fit.lines.extend(_without_wrapper(heap, roots, inside))
    return fit


def _names_with(numbers: set[int], heap: Any, roots: dict[str, int], but: Container[int] = ()) -> list[str]:
    """Return the names under which any of some objects is."""
    return [name for name, n in roots.items() if not numbers.isdisjoint({n} | heap.reached([n], but))]


def _without_wrapper(heap: Any, roots: dict[str, int], inside: set[int]) -> Iterator[str]:
    """Yield a line for each wrapper that is missing."""
    ids = {id(heap.objects[n]) for n in inside}
    missing = [
        (value, f"came back without its {wrapper}: wrap it again in this cell, or use --keep.")
        for value, wrapper in unwrapped_among(ids)
    ]
    missing += [
        (model, "was prepared by accelerate for one process: call prepare again in this cell to train it.")
        for model in libraries.prepared_models([heap.objects[n] for n in inside])
    ]
    for value, why in missing:
        found = heap.way_to({heap.number[id(value)]}, roots)
        if found is not None:
            yield f"{found[0]} {why}"

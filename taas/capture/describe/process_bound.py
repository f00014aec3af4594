"""Objects that depend on a process, or on a rank of a run, and are adapted at the receiver.

**Process state.** An instance whose ``__dict__`` *is* a dict of its class (the Borg pattern, as in
accelerate's ``PartialState``) describes its process. At the receiver, the instance is tied to the
class's dict there. Settings in the dict are sent; facts that the process has determined about
itself are not (``process_bound_libraries`` lists them).

**Shares.** An object whose attributes say that it belongs to rank 0 of N (a ``DistributedSampler``,
accelerate's ``BatchSamplerShard``) is changed to the receiving rank in a run of N ranks. In a run
of another size, and in the notebook, it stays rank 0's. This applies to samplers and loaders,
wherever they were made, and to any object that rank 0 has sent, such as ``args`` with
``args.rank``.

**Wrappers.** ``DistributedDataParallel`` is removed from models that are sent to the notebook. The
notebook remembers these modules, because a later cell that trains one of them without its wrapper
would not synchronise gradients.
"""

from __future__ import annotations

import ast
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

from taas.base.import_hooks import attributes_of, loaded
from taas.capture.cells import python_of
from taas.capture.describe import process_bound_libraries as libraries
from taas.capture.describe.code_by_value import global_names, words_in
from taas.capture.describe.reading import Reading, once_per_class

_ReaderOf = Callable[[Any], Reading | None]


class Place(NamedTuple):
    """The rank of this process, and the size of its run."""

    rank: int
    size: int


# ---------------------------------------------------------------- state of the process


@once_per_class
def _dicts_of(cls: Any) -> tuple[tuple[type, str], ...]:
    """Return the dicts that are attributes of a class: the base that defines each, and its name."""
    found = []
    for base in cls.__mro__:
        names = (name for name, value in vars(base).items() if type(value) is dict)
        found += [(base, name) for name in names if not name.startswith("__")]
    return tuple(found)


def with_shared(cls: type, reader: _ReaderOf, is_of_project: Callable[[str], bool]) -> _ReaderOf:
    """Return the reader for objects of a class, including objects that share a dict of the class.

    Data of the notebook's and the project's classes, including dicts, are sent with the classes.
    """
    if not cls.__dictoffset__:
        return reader
    dicts = _dicts_of(cls)
    dicts = tuple(
        (b, n) for b, n in dicts if b.__module__ != "__main__" and not is_of_project(b.__module__)
    )
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
    return Reading(
        _tie, (type(value), base, name), _set_shared, (told, libraries.needed_beside(value))
    )


def _tie(cls: type, base: type, name: str) -> Any:
    """Make an instance on the dict that its class has in this process."""
    made: Any = object.__new__(cls)
    object.__setattr__(made, "__dict__", vars(base)[name])
    return made


def _set_shared(value: Any, state: tuple[dict[str, Any], Any]) -> None:
    """Put settings into the dict of a class.

    The settings are deferred until the process has determined the facts about itself.
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
    """Settle objects in this process, and make rank 0's ``shares`` this rank's.

    :func:`process_bound_libraries.settle` explains ``how``.
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
"""Pairs of attributes that give the rank to which an object belongs, and the number of ranks; also
with an underscore before both names.
"""
_PAIRS_WRITTEN = tuple((mark + rank, mark + size) for rank, size in _PAIRS for mark in ("", "_"))
_SAY_RANK = frozenset(rank for rank, _ in _PAIRS_WRITTEN)
_SHARES_BY_NAME = re.compile(r"Sampler|Shard|Distributed|DataLoader|DL$")

_from_ranks: dict[int, weakref.ref[Any]] = {}
"""In a notebook: objects from rank 0 whose attributes say that they belong to rank 0, by id."""


def pair_of(value: Any) -> tuple[str, int, int] | None:
    """Return the attribute in which an object stores its rank, that rank, and the world size.

    Return None if there is no such attribute.
    """
    attributes = attributes_of(value)
    if type(attributes) is not dict or _SAY_RANK.isdisjoint(attributes):
        return None
    for rank, size in _PAIRS_WRITTEN:
        number, of = attributes.get(rank), attributes.get(size)
        if type(number) is int and type(of) is int and 0 <= number < of and of > 1:
            return rank, number, of
    return None


@once_per_class
def _are_shares(cls: Any) -> bool:
    """Tell whether objects of a class divide data among ranks."""
    data = loaded("torch.utils.data")
    divides = data is not None and issubclass(cls, (data.Sampler, data.IterableDataset))
    return bool(divides or _SHARES_BY_NAME.search(cls.__qualname__)) and cls.__dictoffset__ != 0


def shares_among(values: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield the objects that are one rank's share, with that rank and the world size."""
    asked: dict[type, bool] = {}  # a notebook may have a million objects, of few classes
    for value in values:
        known = _from_ranks.get(id(value)) if _from_ranks else None
        cls = type(value)
        if cls not in asked:
            asked[cls] = _are_shares(cls)
        if (known is not None and known() is value) or asked[cls]:
            found = pair_of(value)
            if found is not None:
                yield value, *found[1:]


def remember_shares(values: Iterable[Any], size: int) -> None:
    """Record, in a notebook, the objects from ``size`` ranks that belong to rank 0."""
    for number in [number for number, known in _from_ranks.items() if known() is None]:
        del _from_ranks[number]
    for value in values:
        found = pair_of(value)
        if found is not None and found[1:] == (0, size) and type(value).__weakrefoffset__:
            _from_ranks[id(value)] = weakref.ref(value)


def named_shares(
    names: Iterable[str], namespace: dict[str, Any], heap: Any, size: int
) -> list[str]:
    """Return the notebook's variables that are loaders and samplers with rank 0's share.

    ``size`` is the world size of these shares.
    """
    found = []
    for name in names:
        n = heap.number.get(id(namespace.get(name)))
        cls: Any = object if n is None else type(heap.objects[n])
        if not _are_shares(cls):
            continue
        inside = (heap.objects[m] for m in heap.reached([n]))
        if any(rank == 0 and of == size for _, rank, of in shares_among(inside)):
            found.append(name)
    return found


def take_share(values: Iterable[Any], place: Place) -> None:
    """In a rank, make rank 0's shares this rank's, if they are from a run of the same size."""
    for value in values:
        found = pair_of(value)
        if found is not None and found[1:] == (0, place.size):
            value.__dict__[found[0]] = place.rank


# ---------------------------------------------------------------- wrappers that were removed


class Unwrapped(NamedTuple):
    """A module that was sent back without its wrapper.

    The module has no owner if a variable or a container refers to it.
    """

    owner: weakref.ref[Any] | None
    module: weakref.ref[Any]
    wrapper: str


_unwrapped: dict[tuple[int, int], Unwrapped] = {}
_named: dict[str, weakref.ref[Any]] = {}
"""Variables in which ranks had a wrapper, each with the module that it wrapped."""
_CONTAINERS = (list, tuple, dict, OrderedDict, set, frozenset, deque, types.CellType)
WRAPS = frozenset({
    "DistributedDataParallel", "DDP", "DataParallel", "FullyShardedDataParallel", "FSDP",
    "fully_shard", "replicate", "parallelize_module", "distribute_module", "prepare",
    "prepare_model",
})  # fmt: skip
"""Code that contains any of these names wraps a module."""


def is_container(value: Any) -> bool:
    """Tell whether an object is just a container, so that only its items matter."""
    return isinstance(value, _CONTAINERS)


def remember_unwrapped(found: Iterable[tuple[Any, Any, str]], named: dict[str, Any]) -> None:
    """Record, in a notebook, the modules received without a wrapper: (owner, module, wrapper).

    The owner is None for a module in a variable or in a container. ``named`` contains, by variable,
    the modules that had a wrapper in the ranks.
    """
    for name, module in named.items():
        if type(module).__weakrefoffset__:
            _named[name] = weakref.ref(module)
    for key in [key for key, one in _unwrapped.items() if one.module() is None]:
        del _unwrapped[key]
    for owner, module, wrapper in found:
        if not type(module).__weakrefoffset__ or (
            owner is not None and not type(owner).__weakrefoffset__
        ):
            continue
        held = None if owner is None else weakref.ref(owner)
        _unwrapped[id(owner), id(module)] = Unwrapped(held, weakref.ref(module), wrapper)


def unwrapped_among(ids: Collection[int]) -> Iterator[tuple[Any, str]]:
    """Yield the objects, among some ids, that lack the wrapper they had in the ranks, and which."""
    for (owner, module), one in _unwrapped.items():
        held = one.module if one.owner is None else one.owner
        if (
            (module if one.owner is None else owner) in ids
            and held() is not None
            and one.module() is not None
        ):
            yield held(), one.wrapper


def words_that_run(words: Iterable[str], codes: Iterable[types.CodeType]) -> set[str]:
    """Return the words of all functions and methods that code with these words can reach.

    The ``__init__`` of a class runs if the code mentions the class; Python calls other special
    methods although the code does not mention them.
    """
    by_name: dict[str, list[types.CodeType]] = {}
    for code in codes:
        name = code.co_name
        if name == "__init__":
            name = code.co_qualname.split(".")[-2:][0]
        by_name.setdefault(name, []).append(code)
    unnamed = [name for name in by_name if name.startswith(("__", "<"))]
    found, waiting = set[str](), [*words, *unnamed]
    while waiting:
        for code in by_name.pop(waiting.pop(), ()):
            new = words_in(code) - found
            found |= new
            waiting += new
    return found


def names_surely_needed(
    sure: Collection[str], roots: dict[str, int], heap: Any, words: Collection[str]
) -> set[str]:
    """Return the variables that a cell surely needs, with those that their functions read.

    ``words`` are those of the code that runs. A function or method that this code does not mention
    is not followed.
    """
    found, waiting = {*sure}, [*sure]
    for name in waiting:  # the loop appends to it
        if name not in roots:
            continue
        objects = [heap.objects[n] for n in heap.reached([roots[name]])]
        functions = [
            one for one in objects if isinstance(one, types.FunctionType) and one.__name__ in words
        ]
        for function in functions:
            if function.__globals__ is heap.reader.namespace:
                new = global_names(function.__code__) - found
                found |= new
                waiting += new
    return found


class Wrapping:
    """The modules that code wraps: those that its wrapping calls mention, or any if unclear.

    ``words_of_functions`` are the words of the functions that the cell may call.
    """

    def __init__(
        self, cell: str, words_of_functions: Collection[str], namespace: dict[str, Any]
    ) -> None:
        self._namespace = namespace
        tree = ast.parse(python_of(cell))
        words = {*words_of_functions}.union(*(_words_of_node(node) for node in ast.walk(tree)))
        self.any = self._is_wrapping(words)
        calls = _calls_outside_functions(tree)
        wrapping = [call for call in calls if self._is_wrapping(_words_of_node(call.func))]
        said = {id(node) for call in wrapping for node in ast.walk(call.func)}
        elsewhere = (_words_of_node(node) for node in ast.walk(tree) if id(node) not in said)
        self._of_any = self.any and self._is_wrapping({*words_of_functions}.union(*elsewhere))
        self._mentioned = {
            word
            for call in wrapping
            for part in _given_to(call)
            for word in self._words_meant(part)
        }
        self._follow(tree)

    def may_wrap(self, name: str) -> bool:
        """Tell whether the code may wrap the value of a variable."""
        return self._of_any or name in self._mentioned

    def _is_wrapping(self, words: Collection[str]) -> bool:
        values: list[Any] = [self._namespace.get(word) for word in words]
        # Only these types: any other object may run code when its attribute is read.
        kinds = (type, types.FunctionType)
        meant = {value.__name__ for value in values if issubclass(type(value), kinds)}
        return not WRAPS.isdisjoint(words) or not WRAPS.isdisjoint(meant) or libraries.wraps(words)

    def _words_meant(self, node: ast.AST) -> set[str]:
        """Return the names in an expression, and those that the notebook's functions in it read."""
        found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        waiting = [*found]
        for word in waiting:  # the loop appends to it
            value = self._namespace.get(word)
            if isinstance(value, types.FunctionType) and value.__globals__ is self._namespace:
                new = global_names(value.__code__) - found
                found |= new
                waiting += new
        return found

    def _follow(self, tree: ast.Module) -> None:
        """Add the variables in the mentioned variables' values, as far as the cell shows them."""
        bound = [binding for node in ast.walk(tree) if (binding := _binding(node)) is not None]
        held = [(self._words_meant(target), self._words_meant(value)) for target, value in bound]
        grown = True
        while grown:
            before = len(self._mentioned)
            for names, words in held:
                if not names.isdisjoint(self._mentioned):
                    self._mentioned |= words
            grown = len(self._mentioned) > before


def _words_of_node(node: ast.AST) -> set[str]:
    """Return the name of a node; for ``nn.parallel.DDP``, the last part."""
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return {word}
    return set()


def _calls_outside_functions(tree: ast.Module) -> list[ast.Call]:
    """Return a cell's calls outside functions; the arguments of other calls are not known."""
    found, waiting = list[ast.Call](), list[ast.AST]([tree])
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        found += [node] if isinstance(node, ast.Call) else []
        waiting += ast.iter_child_nodes(node)
    return found


def _given_to(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _binding(node: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """Return the target to which a statement or expression assigns, and what the value mentions."""
    match node:
        case ast.Assign(value=value):
            return ast.Tuple(node.targets), value
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.AugAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
            | ast.For(target=target, iter=value)
            | ast.comprehension(target=target, iter=value)
            | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
        ):
            return target, value
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target)) as call):  # nets.append(net)
            return target, ast.Tuple(_given_to(call))
    return None


# ---------------------------------------------------------------- before a cell starts


class Again(NamedTuple):
    """A module that an object of its library wraps again: both numbers, and the variables."""

    by: int
    module: int
    names: list[str]


class Fit(NamedTuple):
    """How the objects that are sent fit a run."""

    lines: list[str]  # for the user
    # by variable, a part that ranks cannot use, and why
    useless: dict[str, str]
    wraps: bool  # the cell, or an object that it has, wraps modules again
    again: list[Again]  # modules that are wrapped again before the cell runs


class _Travelling(NamedTuple):
    """The objects that are sent to the ranks, as :func:`fit_of` examines them."""

    heap: Any
    roots: dict[str, int]  # the numbers of variables
    asked: set[int]  # objects of libraries that may not fit
    # Delivered loaders, and objects that recreate their loaders and models or only list them.
    # Objects that are reached only through these are not examined.
    opaque: set[int]
    inside: set[int]  # all other objects that the variables reach

    def objects(self) -> Iterator[Any]:
        """Yield the objects in ``inside``."""
        return (self.heap.objects[n] for n in self.inside)

    def names_with(self, numbers: set[int]) -> list[str]:
        """Return the variables that reach any of some objects, except through ``opaque`` ones."""
        return _names_with(numbers, self.heap, self.roots, self.opaque)


def fit_of(
    heap: Any,
    roots: dict[str, int],
    delivered: Container[int],
    size: int,
    words: Collection[str],
    wrapping: Wrapping,
    *,
    keep: bool,
) -> Fit:
    """Determine which of a notebook's objects do not fit a run of ``size`` ranks.

    ``delivered`` are the ids of loaders that data processes serve. ``words`` are those of the code
    that runs, and ``wrapping`` says which modules it wraps. ``keep``: the ranks are kept after the
    cell, so no line recommends ``--keep``.
    """
    reached = heap.reached(roots.values())
    kinds = libraries.kinds_asked({type(heap.objects[n]) for n in reached})
    asked = {n for n in reached if type(heap.objects[n]) in kinds}
    renewing = {n for n in asked if libraries.renews(heap.objects[n])}
    opaque = renewing | {n for n in reached if id(heap.objects[n]) in delivered}
    inside = heap.reached(roots.values(), opaque) if opaque else reached
    found = _Travelling(heap, roots, asked, opaque, inside)
    fit = Fit([], {}, wrapping.any or bool(renewing), [])
    _add_misfits(fit, found, size, words)
    _add_shares(fit, found, size)
    if size > 1:
        # A cell that does not call ``backward`` may use methods that a wrapper hides.
        _add_unwrapped(fit, found, wrapping, trains="backward" in words, keep=keep)
    return fit


def _cell_with(size: int) -> str:
    return f"this cell has {size} ranks" if size > 1 else "this cell has one process"


def _add_misfits(fit: Fit, found: _Travelling, size: int, words: Collection[str]) -> None:
    """Add the objects of libraries that are useless in such a run, or would work in isolation."""
    heap, roots, here = found.heap, found.roots, _cell_with(size)
    for n in sorted(found.asked & (found.inside | found.opaque)):
        reason = libraries.misfit(heap.objects[n], size, words)
        if reason is not None:
            why, advice = reason
            for name in _names_with({n}, heap, roots):
                path, _ = heap.shortest_path({n}, {name: roots[name]})
                fit.useless[name] = f"{path} {why}, and {here}: {advice} in this cell."
        elif size > 1 and libraries.is_lone_trainer(heap.objects[n]):
            path, _ = heap.shortest_path({n}, roots)
            fit.lines.append(
                f"{path} is a Trainer for one process, and {here}: each works alone with it. Make"
                " it in this cell."
            )


def _add_shares(fit: Fit, found: _Travelling, size: int) -> None:
    """Add a line for the variables that have a rank's share of data from a run of another size.

    There is one line for each such size. Variables that are useless anyway are not included.
    """
    of_others: dict[int, set[int]] = {}
    for value, _, of in shares_among(found.objects()):
        if of != size:
            of_others.setdefault(of, set()).add(found.heap.number[id(value)])
    for of, numbers in of_others.items():
        names = [name for name in found.names_with(numbers) if name not in fit.useless]
        if names:
            is_one = len(names) == 1
            fit.lines.append(
                f"{', '.join(names)} {'is' if is_one else 'are'} rank 0's share of {of}, and"
                f" {_cell_with(size)}: make {'it' if is_one else 'them'} in this cell."
            )


def _add_unwrapped(
    fit: Fit, found: _Travelling, wrapping: Wrapping, *, trains: bool, keep: bool
) -> None:
    """Add the models that lack their wrapper: to be wrapped again, useless, or worth a line.

    If the cell ``trains``, a model that an Accelerator has prepared would be trained separately in
    each rank. Its Accelerator wraps it again; if it cannot, the model is useless.
    """
    known = _known_by_accelerators(found)
    if trains:
        fit.again.extend(_wrapped_again(found, known, wrapping))
    done = {one.module for one in fit.again}
    for n, path, why in _without_wrapper(found, wrapping, keep=keep):
        if n in done:
            continue
        if n in known and trains:
            fit.useless.update(dict.fromkeys(found.names_with({n}), f"{path} {why}"))
        else:
            fit.lines.append(f"{path} {why}")


def _known_by_accelerators(found: _Travelling) -> dict[int, int]:
    """Return the models that an Accelerator has prepared, each with its Accelerator, by number."""
    known = {}
    for by in sorted(found.opaque):
        for model in libraries.models_of(found.heap.objects[by]):
            n = found.heap.number.get(id(model))
            if n in found.inside:
                known[n] = by
    return known


def _wrapped_again(
    found: _Travelling, known: dict[int, int], wrapping: Wrapping
) -> Iterator[Again]:
    """Yield the models that their Accelerator can safely wrap again.

    These are models to which only variables refer, and these variables had the wrapper. (Optimizers
    refer to a model's parameters, which a wrapper does not change.)
    """
    heap, roots = found.heap, found.roots
    for n, by in known.items():
        model = heap.objects[n]
        one = _unwrapped.get((id(None), id(model)))
        if one is None or one.wrapper != "DistributedDataParallel":
            continue
        others = found.inside - heap.reached([n])
        is_held = any(n in (heap.states[m] or ((), (), ()))[2] for m in others)
        names = [
            name
            for name in roots
            if roots[name] == n and name in _named and _named[name]() is model
        ]
        if names and not is_held and not any(map(wrapping.may_wrap, names)):
            yield Again(by, n, names)


def _names_with(
    numbers: set[int], heap: Any, roots: dict[str, int], but: Container[int] = ()
) -> list[str]:
    """Return the variables that reach any of some objects."""
    return [
        name for name, n in roots.items() if not numbers.isdisjoint({n} | heap.reached([n], but))
    ]


def _without_wrapper(
    found: _Travelling, wrapping: Wrapping, *, keep: bool
) -> Iterator[tuple[int, str, str]]:
    """Yield each module that lacks a wrapper which the code does not give it.

    Each entry has the module's number, its path, and what to do.
    """
    heap = found.heap
    ids = {id(value) for value in found.objects()}
    advice = "and these ranks keep it wrapped" if keep else "or use --keep"
    missing = [
        (value, f"came back without its {wrapper}: wrap it again in this cell, {advice}.")
        for value, wrapper in unwrapped_among(ids)
    ]
    prepared = (
        "was prepared by accelerate for one process: call prepare again in this cell to train it."
    )
    missing += [(model, prepared) for model in libraries.prepared_models([*found.objects()])]
    for value, why in missing:
        n = heap.number[id(value)]
        way = heap.shortest_path({n}, found.roots)
        if way is not None and not any(map(wrapping.may_wrap, found.names_with({n}))):
            yield n, way[0], why

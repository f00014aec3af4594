"""``taas.register`` and what is registered. Imports no torch: it belongs to the kernel's ``import taas``.

What is registered is looked at once, at once: it must be iterable and it must survive the way to another
machine. What cannot is refused with the path to it. At a run's start the loaders that the cell names are
packed into one file for the data side, and go to the ranks as ``DeliveredLoader`` in their variable.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from taas.errors import RegistrationError

__all__ = [
    "Registration",
    "apply_final",
    "delivering",
    "delivers",
    "pack_registered",
    "reduce_registered",
    "register",
    "registered",
    "unregister",
]


@dataclass(frozen=True, slots=True)
class Registration:
    """One registered loader.

    Attributes:
        name: what it goes by in ``--units`` and in the live view.
        loader: the loader itself.
        variable: the variable that holds it, by which one finds out whether a cell uses it; None if none does.
    """

    name: str
    loader: Any
    variable: str | None = None


_registry: dict[int, tuple[Any, str | None]] = {}
_delivering: dict[int, str] = {}


def register(loader: Any, name: str | None = None) -> Any:
    """Have data workers make this loader's elements in every run with ``--cpus``.

    Args:
        loader: a DataLoader, or any iterable that begins anew each time it is iterated.
        name: what ``--units NAME=…`` and the live view call it; otherwise the variable that holds it.

    Returns:
        The loader itself.

    Raises:
        RegistrationError: it is registered already, it is not iterable, it cannot travel, or the name cannot be used.
    """
    if id(loader) in _registry:
        known = _registry[id(loader)][1] or _variable_of(loader) or "this loader"
        raise RegistrationError(
            f"{known} is registered already. Register a loader once; taas.unregister(loader) undoes it"
        )
    if name is not None:
        _check_name(name)
    _check_iterable(loader)
    _check_travels(loader, name or _variable_of(loader) or "loader")
    _registry[id(loader)] = (loader, name)
    return loader


def unregister(loader: Any) -> None:
    """Undo ``register``.

    Raises:
        RegistrationError: it is not registered.
    """
    if _registry.pop(id(loader), None) is None:
        raise RegistrationError(
            "this loader is not registered. If its variable was assigned anew since, the old object is: "
            "taas.unregister() takes that one"
        )


def registered(namespace: Mapping[str, Any] | None = None) -> list[Registration]:
    """Return what is registered, in that order; names are those the loaders have in ``namespace`` now."""
    named: list[Registration] = []
    taken = {name for _, name in _registry.values() if name is not None}
    for number, (loader, given) in enumerate(_registry.values()):
        variable = _variable_of(loader, namespace)
        free = (f"loader_{count}" for count in itertools.count(number))
        name = given or next(name for name in itertools.chain([variable], free) if name and name not in taken)
        taken.add(name)
        named.append(Registration(name, loader, variable))
    return named


def _variable_of(loader: Any, namespace: Mapping[str, Any] | None = None) -> str | None:
    if namespace is None:
        namespace = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    for variable, value in list(namespace.items()):
        if value is loader and not variable.startswith("_"):
            return variable
    return None


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────


def _check_name(name: Any) -> None:
    """Two loaders of one name would be one to the run; and the name is typed in ``--units``."""
    if not isinstance(name, str):
        raise RegistrationError(
            f"a {type(name).__qualname__} is no name for a loader. Register each loader by itself: "
            "taas.register(train), then taas.register(valid)"
        )
    if not name.isidentifier():
        raise RegistrationError(f"{name!r} cannot be typed in --units. Choose a name= such as 'train'")
    if any(name == entry.name for entry in registered()):
        raise RegistrationError(f"another loader is registered as '{name}'. Choose a different name=")


def _check_iterable(loader: Any) -> None:
    if not hasattr(type(loader), "__iter__"):
        raise RegistrationError(
            f"a {type(loader).__qualname__} cannot be iterated. Register the DataLoader, not its dataset or sampler"
        )
    if iter_is_self(loader):
        raise RegistrationError(
            f"a {type(loader).__qualname__} is an iterator: it yields once and cannot begin anew on a data worker. "
            "Register the DataLoader (or the iterable) that it came from"
        )


def iter_is_self(loader: Any) -> bool:
    """Whether this is an iterator: asked of its type, so that nothing is begun."""
    return hasattr(type(loader), "__next__")


def _check_travels(loader: Any, name: str) -> None:
    from taas.delivery.parts import take_apart
    from taas.delivery.payload import measure

    parts = take_apart(loader)
    try:
        measure(parts)
    except Exception as error:
        path, culprit, reason = _find_culprit(parts, error)
        shown = f"{name}{path.removeprefix('.') and path}"
        raise RegistrationError(
            f"{shown} cannot travel to a data worker: it is {_describe(culprit, reason)}. "
            "Make it where it is used (in __getitem__, or in worker_init_fn), or leave it out by __getstate__"
        ) from error


def _describe(culprit: Any, reason: str) -> str:
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    return reason or f"a {kind}, which cannot be pickled"


def _find_culprit(obj: Any, error: Exception) -> tuple[str, Any, str]:
    """Return attribute path, object and reason: the innermost thing that does not travel by itself."""
    from taas.delivery.payload import CannotTravel, measure

    path, seen = "", {id(obj)}
    while True:
        for step, child in _children(obj):
            if id(child) in seen:
                continue
            try:
                measure(child)
            except Exception as inner:
                seen.add(id(child))
                path, obj, error = path + step, child, inner
                break
        else:
            if isinstance(error, CannotTravel):
                return path, error.obj, error.what
            return path, obj, ""


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in list(obj.items()))
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"[{at}]", value) for at, value in enumerate(obj))
    elif callable(obj) and getattr(obj, "__closure__", None):
        names = obj.__code__.co_freevars
        cells = (cell.cell_contents for cell in obj.__closure__)
        yield from ((f".<{name}>", value) for name, value in zip(names, cells, strict=True))
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict) and not isinstance(obj, type):
        yield from ((f".{key}", value) for key, value in state.items())
    for slot in getattr(type(obj), "__slots__", ()):
        if isinstance(slot, str) and hasattr(obj, slot):
            yield f".{slot}", getattr(obj, slot)


# ── a run's start and end ─────────────────────────────────────────────────────────────────────────────


def pack_registered(loaders: Iterable[Registration], write: Callable[[bytes | memoryview], Any]) -> int:
    """Write the payload for planner and data workers; return its bytes.

    With the loaders travel the states of the notebook's generators: the order is planned from there.
    """
    from taas.delivery.parts import take_apart
    from taas.delivery.payload import write_payload

    content = {
        "rngs": _generator_states(),
        "loaders": [(entry.name, take_apart(entry.loader)) for entry in loaders],
    }
    return write_payload(content, write)


def _generator_states() -> tuple[Any, Any, Any]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (
        None if torch is None else torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


@contextlib.contextmanager
def delivering(loaders: Iterable[Registration]) -> Iterator[None]:
    """While a cell with data workers is captured: these loaders travel as their ranks' DeliveredLoader."""
    _delivering.update({id(entry.loader): entry.name for entry in loaders})
    try:
        yield
    finally:
        _delivering.clear()


def delivers(cls: type) -> bool:
    """Whether a loader of this type is being delivered to the run that is captured."""
    return any(type(_registry[number][0]) is cls for number in _delivering if number in _registry)


def reduce_registered(obj: Any) -> tuple[Any, ...] | None:
    """Return how a registered loader travels to a rank (a ``__reduce__`` tuple); None for anything else.

    The dataset goes along by the caller's own pickler: ``loader.dataset`` in the rank is the same object as
    the variable that holds it, and costs no copy where payloads are mapped.
    """
    name = _delivering.get(id(obj))
    if name is None:
        return None
    from taas.delivery import loader as _  # noqa: F401 - so that the reduce below pickles by reference

    kept = ("dataset", "batch_size", "drop_last", "num_workers", "pin_memory", "pin_memory_device", "timeout",
            "prefetch_factor", "persistent_workers", "worker_init_fn", "collate_fn", "in_order", "_dataset_kind")  # fmt: skip
    attributes = {key: getattr(obj, key) for key in kept if hasattr(obj, key)}
    attributes.setdefault("dataset", obj)
    attributes["generator"] = None
    attributes["batch_sampler"] = True if getattr(obj, "batch_sampler", None) is not None else None
    attributes["multiprocessing_context"] = None
    return sys.modules["taas.delivery.loader"].rebuild_loader, (name, attributes, _sampler_facts(obj))


def _sampler_facts(loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"drop_last": getattr(loader, "drop_last", False), "epoch": 0}
    facts["batch_size"] = getattr(loader, "batch_size", None)
    for holder in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        for key in ("epoch", "seed", "shuffle"):
            value = getattr(holder, key, None)
            if isinstance(value, int):
                facts[key] = value
    return facts


def apply_final(states: bytes, loaders: Iterable[Registration]) -> None:
    """Set the loaders' own generators to where the run's last iteration leaves them.

    ``states`` is what the coordinator's Final report holds; empty changes nothing.
    """
    if not states:
        return
    known = {entry.name: entry.loader for entry in loaders}
    for name, values in pickle.loads(states).items():
        for path, value in values.items():
            if name in known:
                _set(known[name], path, value)


def _set(loader: Any, path: str, value: Any) -> None:
    holders = [loader]
    if path == "epoch":
        holders = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
        for holder in holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(value)
        return
    target = loader
    for part in path.removesuffix("!state").split("."):
        target = getattr(target, "_index_sampler" if part == "index_sampler" else part, None)
    if target is not None:
        target.set_state(value)

"""What belongs to its process: process groups, iterators of DataLoaders, streams.

Another process can do nothing with it, so it never travels. An object that has it as an attribute,
or in a container there, does, without that attribute: a trained model must not be lost with a
process group. Where the object is there already, it keeps its own.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from taas.import_hooks import attributes_of

_DISTRIBUTED = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")
_KINDS = {
    *(
        (module, name)
        for module in _DISTRIBUTED
        for name in ("ProcessGroup", "Backend", "Work", "Store")
    ),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    *(
        (module, name)
        for module in ("torch", "torch.cuda", "torch.cuda.streams")
        for name in ("Stream", "Event")
    ),
    *((module, "CUDAGraph") for module in ("torch.cuda", "torch.cuda.graphs")),
}
_DEEPEST = 4
"""Containers in containers that are looked into."""

_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset)},
}
"""What iterates over a container: the built-in method, since a subclass may do anything in its own.
"""

left_attributes: dict[tuple[int, str], Callable[[], Any]] = {}
"""The attributes that are left out, by their object's id and their name: what returns that object.
"""


def is_of_process(cls: type) -> bool:
    """Tell whether objects of a class belong to the process that made them."""
    return any((base.__module__, base.__qualname__) in _KINDS for base in cls.__mro__)


def refuse(value: Any) -> NoReturn:
    """Raise what says that an object belongs to its process."""
    raise pickle.PicklingError(f"a {type(value).__qualname__} belongs to the process that made it")


def holds(part: Any, is_wanted: Callable[[Any], bool], deepest: int = _DEEPEST) -> bool:
    """Tell whether something is what is wanted, or a container with that in it."""
    if is_wanted(part):
        return True
    kind = next((kind for kind in _ITEMS if issubclass(type(part), kind)), None)
    if not deepest or kind is None:
        return False
    return any(holds(item, is_wanted, deepest - 1) for item in [*_ITEMS[kind](part)])


def leave_out(holder: Any, name: str) -> None:
    """Leave out an attribute of an object, as long as the object lives.

    The object is not kept alive for it: with it would live a DataLoader's workers. Its class may
    not allow weak references; then the object lives until :func:`tell_again`.
    """
    key = id(holder), name
    if type(holder).__weakrefoffset__:
        # The key goes before another object can have the same id.
        left_attributes[key] = weakref.ref(holder, lambda _: left_attributes.pop(key, None))
    else:
        left_attributes[key] = lambda: holder


def tell_again(but: Collection[Any] = ()) -> None:
    """Leave out no attribute any more, except of the objects in ``but``."""
    if not left_attributes:
        return
    ids = {*map(id, but)}
    for key in [*left_attributes]:
        if key[0] not in ids:
            left_attributes.pop(key, None)  # its object may have ended meanwhile, and taken it out


def tell_what_changed() -> None:
    """Leave out no attribute any more that has got a value which does not belong to the process."""
    for (number, name), holder in [*left_attributes.items()]:
        if not holds(attributes_of(holder()).get(name), lambda one: is_of_process(type(one))):
            left_attributes.pop((number, name), None)


def names_told(holder: Any, attributes: Iterable[str]) -> list[str]:
    """Return the names of an object's attributes, without those that are left out."""
    if not left_attributes:
        return [*attributes]
    return [name for name in attributes if (id(holder), name) not in left_attributes]


def keep_own(holder: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that an object keeps when it is told its others: its process's."""
    kept = {}
    for name, part in attributes_of(holder).items():
        if name in told:
            continue
        if (id(holder), name) in left_attributes or holds(
            part, lambda one: is_of_process(type(one))
        ):
            kept[name] = part
            leave_out(holder, name)
    return kept

"""What belongs to the process that made it: process groups, what they are made of, iterators of DataLoaders, streams.

Another process can do nothing with it, so it never travels. An object that has it as an attribute,
or in a container there, does, without that attribute: a trained model must not be lost with a
process group. Where the object is there already, it keeps its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

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

left_attributes: dict[tuple[int, str], tuple[Any, Any]] = {}
"""The attributes that were left out since the last capture, by their object's id and their name:
that object, and what it has there.
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
    if not deepest or not isinstance(part, (list, tuple, set, frozenset, dict)):
        return False
    items = part.values() if isinstance(part, dict) else part
    return any(holds(item, is_wanted, deepest - 1) for item in [*items])


def names_told(holder: Any, attributes: Iterable[str]) -> list[str]:
    """Return the names of an object's attributes, without those that are left out."""
    if not left_attributes:
        return [*attributes]
    return [name for name in attributes if (id(holder), name) not in left_attributes]


def keep_own(holder: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object that belong to this process, and that it keeps where it is told of its others."""
    kept = {}
    for name, part in getattr(holder, "__dict__", {}).items():
        if name in told:
            continue
        if (id(holder), name) in left_attributes or holds(
            part, lambda one: is_of_process(type(one))
        ):
            kept[name] = part
            left_attributes[id(holder), name] = holder, part
    return kept

"""Objects that belong to their process: process groups, iterators of DataLoaders, streams.

Another process cannot use such objects, so they are never sent. An object that has one of them as
an attribute, or in a container in an attribute, is sent without that attribute: a trained model
must not be lost because of a process group. If the object already exists at the receiver, it keeps
the attribute that it has there.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from taas.base.import_hooks import attributes_of

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
"""How many levels of nested containers are searched."""

_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset)},
}
"""For each type of container: how to iterate over it. These are methods of the built-in classes,
because a subclass's methods may run any code.
"""

left_attributes: dict[tuple[int, str], Callable[[], Any]] = {}
"""The attributes that are left out, by object id and name; the value is a function that returns the
object.
"""


def is_of_process(cls: type) -> bool:
    """Tell whether objects of a class belong to the process that made them."""
    return any((base.__module__, base.__qualname__) in _KINDS for base in cls.__mro__)


def refuse(value: Any) -> NoReturn:
    """Raise the error that an object belongs to its process."""
    raise pickle.PicklingError(f"a {type(value).__qualname__} belongs to the process that made it")


def holds(part: Any, is_wanted: Callable[[Any], bool], deepest: int = _DEEPEST) -> bool:
    """Tell whether a value is wanted, or is a container with a wanted value in it."""
    if is_wanted(part):
        return True
    kind = next((kind for kind in _ITEMS if issubclass(type(part), kind)), None)
    if not deepest or kind is None:
        return False
    return any(holds(item, is_wanted, deepest - 1) for item in [*_ITEMS[kind](part)])


def leave_out(holder: Any, name: str) -> None:
    """Leave out an attribute of an object, as long as the object lives.

    This does not keep the object alive: otherwise a DataLoader's workers would live on. If its
    class does not support weak references, the object lives until :func:`tell_again`.
    """
    key = id(holder), name
    if type(holder).__weakrefoffset__:
        # The key is removed before another object can get the same id.
        left_attributes[key] = weakref.ref(holder, lambda _: left_attributes.pop(key, None))
    else:
        left_attributes[key] = lambda: holder


def tell_again(but: Collection[Any] = ()) -> None:
    """Stop leaving out attributes, except those of the objects in ``but``."""
    if not left_attributes:
        return
    ids = {*map(id, but)}
    for key in [*left_attributes]:
        if key[0] not in ids:
            left_attributes.pop(key, None)  # an object that was freed has removed its key


def tell_what_changed() -> None:
    """Stop leaving out the attributes whose new value does not belong to the process."""
    for (number, name), holder in [*left_attributes.items()]:
        if not holds(attributes_of(holder()).get(name), lambda one: is_of_process(type(one))):
            left_attributes.pop((number, name), None)


def names_told(holder: Any, attributes: Iterable[str]) -> list[str]:
    """Return the names of an object's attributes, without those that are left out."""
    if not left_attributes:
        return [*attributes]
    return [name for name in attributes if (id(holder), name) not in left_attributes]


def keep_own(holder: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the process's own attributes, which stay when ``told`` replaces the others."""
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

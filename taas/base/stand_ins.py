"""Objects that travel as another object while one cell is captured.

A registered loader is such an object where data workers make its elements: ranks get a loader that
receives them. Who captures the cell says so (:func:`standing_in`); how objects are read asks here,
and knows nothing of delivery.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """An object of the notebook, and what travels for it.

    ``reduce`` returns the ``__reduce__`` tuple of the object that stands in. It is called when the
    object is read, and may import what that needs.
    """

    object: Any
    reduce: Callable[[], tuple[Any, ...]]


_stand_ins: dict[int, StandIn] = {}
"""By the id of the object, while it is held here."""


@contextlib.contextmanager
def standing_in(stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """Let these objects travel as what stands in for them, until the context ends."""
    _stand_ins.update({id(one.object): one for one in stand_ins})
    try:
        yield
    finally:
        _stand_ins.clear()


def objects_with_stand_in() -> list[Any]:
    """Return the objects of the notebook for which another one travels now."""
    return [one.object for one in _stand_ins.values()]


def may_have_stand_in(cls: type) -> bool:
    """Return whether an object of exactly this class has a stand-in now."""
    return any(type(one.object) is cls for one in _stand_ins.values())


def reduced(value: Any) -> tuple[Any, ...]:
    """Return the ``__reduce__`` tuple of what stands in for an object, else the object's own."""
    stand_in = _stand_ins.get(id(value))
    return stand_in.reduce() if stand_in is not None else value.__reduce_ex__(4)

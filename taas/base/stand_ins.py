"""Objects that are replaced by another object, their *stand-in*, while one cell is captured.

A registered loader is such an object if data workers make its batches: ranks get a loader that
receives the batches. The code that captures a cell registers these objects (:func:`standing_in`);
the code that reads objects looks them up here, and does not depend on the delivery package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """An object of the notebook, and its stand-in.

    ``reduce`` returns the ``__reduce__`` tuple of the stand-in. It is called when the object is
    read, and may import modules that the stand-in needs.
    """

    object: Any
    reduce: Callable[[], tuple[Any, ...]]


_stand_ins: dict[int, StandIn] = {}
"""By the id of the object, which is referenced here meanwhile."""


@contextlib.contextmanager
def standing_in(stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """Replace these objects by their stand-ins in captures, until the context ends."""
    _stand_ins.update({id(one.object): one for one in stand_ins})
    try:
        yield
    finally:
        _stand_ins.clear()


def objects_with_stand_in() -> list[Any]:
    """Return the objects of the notebook that have a stand-in at present."""
    return [one.object for one in _stand_ins.values()]


def may_have_stand_in(cls: type) -> bool:
    """Return whether an object of exactly this class has a stand-in at present."""
    return any(type(one.object) is cls for one in _stand_ins.values())


def reduced(value: Any) -> tuple[Any, ...]:
    """Return the ``__reduce__`` tuple of an object's stand-in, or else the object's own."""
    stand_in = _stand_ins.get(id(value))
    return stand_in.reduce() if stand_in is not None else value.__reduce_ex__(4)

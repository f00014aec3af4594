"""What every kind of object can do with its contents."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def same_items(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Tell whether two sequences consist of the same objects, as far as the shorter one goes."""
    return all(map(operator.is_, first, second))


class CannotChangeError(Exception):
    """An object changed in a way that cannot be repeated in place in another process."""


class Kind:
    """How to take, compare and put the contents of one kind of object."""

    def take(self, value: Any) -> Any:
        """Return the contents: a value that may be pickled, sharing the objects inside."""
        raise NotImplementedError

    def same(self, before: Any, after: Any) -> bool:
        """Tell whether two contents are the same, by identity."""
        raise NotImplementedError

    def message(self, value: Any, before: Any, after: Any) -> Any:
        """Return what :meth:`put` needs to go from ``before`` to ``after``.

        Raises:
            CannotChangeError: there is no way in place.
        """
        del value, before
        return after

    def put(self, value: Any, contents: Any) -> None:
        """Give ``value`` these contents.

        Raises:
            Exception: whatever the object raises that doesn't accept them.
        """
        raise NotImplementedError

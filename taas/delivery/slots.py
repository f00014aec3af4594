"""Room in a slab: first fit, lowest offset first, so that a consumer that keeps up touches few pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

__all__ = ["PAGE", "SlotTable", "slot_size"]

PAGE = 4096


def slot_size(nbytes: int) -> int:
    """Round up to a whole page, at most an eighth above: few different sizes, so freed room fits again."""
    step = max(PAGE, (1 << max(nbytes - 1, 1).bit_length()) // 16)
    return max(PAGE, -(-nbytes // step) * step)


class SlotTable:
    """Free extents of one slab, sorted by offset, merged with their neighbours.

    The slab's memory is reserved as it is first needed: ``reserve(upto)`` returns how many bytes from the
    start are safe to touch. What cannot be reserved is not part of the slab.
    """

    def __init__(self, size: int, reserve: Callable[[int], int] | None = None) -> None:
        self.size = size
        self._reserve = reserve
        self._reserved = size if reserve is None else 0
        self._starts: list[int] = [0] if size else []
        self._lengths: dict[int, int] = {0: size} if size else {}

    @property
    def free(self) -> int:
        """Bytes free in all, in one piece or not."""
        return sum(self._lengths.values())

    def take(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` free bytes, or None."""
        for start in self._starts:
            length = self._lengths[start]
            if length < nbytes:
                continue
            if start + nbytes > self._reserved and not self._grow(start + nbytes):
                return None
            self._remove(start)
            if length > nbytes:
                self._insert(start + nbytes, length - nbytes)
            return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take back what ``take`` gave."""
        at = bisect_left(self._starts, offset)
        if at < len(self._starts) and offset + nbytes == self._starts[at]:
            following = self._starts[at]
            nbytes += self._lengths[following]
            self._remove(following)
        if at > 0:
            before = self._starts[at - 1]
            if before + self._lengths[before] == offset:
                self._lengths[before] += nbytes
                return
        self._insert(offset, nbytes)

    def _grow(self, upto: int) -> bool:
        assert self._reserve is not None
        self._reserved = self._reserve(upto)
        if self._reserved >= upto:
            return True
        self._cut(self._reserved)
        return False

    def _cut(self, size: int) -> None:
        """Forget free room from ``size`` on: it could not be reserved."""
        for start in list(self._starts):
            end = start + self._lengths[start]
            if end > size:
                self._remove(start)
                if start < size:
                    self._insert(start, size - start)
        self.size = size

    def _insert(self, start: int, length: int) -> None:
        self._starts.insert(bisect_left(self._starts, start), start)
        self._lengths[start] = length

    def _remove(self, start: int) -> None:
        del self._starts[bisect_left(self._starts, start)]
        del self._lengths[start]

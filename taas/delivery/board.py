"""What a data worker is on, in memory that its keeper still reads when the worker is dead."""

from __future__ import annotations

__all__ = ["BOARD_BYTES", "NOTHING_AHEAD", "Board"]

_WORDS = 4
BOARD_BYTES = 8 * _WORDS
NOTHING_AHEAD = (-1, -1, -1)


class Board:
    """The attempt a worker is on, and the element of a stream that it makes ahead of any attempt."""

    __slots__ = ("_words",)

    def __init__(self, memory: memoryview) -> None:
        """``memory``: ``BOARD_BYTES`` that both processes have mapped."""
        self._words = memory.cast("q")

    def clear(self) -> None:
        """Nobody works here yet."""
        self.attempt, self.ahead = -1, NOTHING_AHEAD

    @property
    def attempt(self) -> int:
        """The attempt, -1 for none."""
        return self._words[0]

    @attempt.setter
    def attempt(self, attempt: int) -> None:
        self._words[0] = attempt

    @property
    def ahead(self) -> tuple[int, int, int]:
        """Plan, stream and position of what is made ahead; ``NOTHING_AHEAD``."""
        return self._words[1], self._words[2], self._words[3]

    @ahead.setter
    def ahead(self, place: tuple[int, int, int]) -> None:
        self._words[1], self._words[2], self._words[3] = place

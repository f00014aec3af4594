"""The positions of ranks as they are reported: frames, ranks, and groups of equal stacks."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from taas.base.wording import ranks_in_words


class Frame(NamedTuple):
    """One frame of a rank's main thread.

    ``cell`` is the number n if the file is the cell ``In[n]``.
    """

    file: str
    line: int
    function: str
    cell: int | None = None


class RankSeen(NamedTuple):
    """A rank as its agent sees it.

    Attributes:
        status: the status as in psutil (``sleeping``, ``running``, ``stopped``, …), or ``gone``.
        cpu: the processor time that it has used, in seconds.
        written: the number of bytes of output that it has written.
        frames: its frames, innermost first; None if it was not asked or did not reply.
        collective: the collective in which it waits, in the words of torch's flight recorder.
    """

    rank: int
    pid: int
    status: str
    cpu: float
    written: int
    frames: tuple[Frame, ...] | None = None
    collective: str = ""


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks at the same position in their code, with their stack, the innermost line last.

    ``odd`` is whether they differ from the other ranks.
    """

    ranks: tuple[int, ...]
    where: str
    odd: bool = False
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        mark = "   <- differs" if self.odd else ""
        return f"{ranks_in_words(self.ranks)}: {self.where}{mark}"


class Trouble(msgspec.Struct, frozen=True):
    """What is wrong with a run that has not ended, in one line, and where its ranks are."""

    headline: str
    places: tuple[StackGroup, ...] = ()

"""What a cell changed: compare the states of all objects after it with their states before it.

Each of three steps needs the one before:

1. :func:`compare` finds the objects whose states differ, and whether each changes in place or has
   to be made anew.
2. :func:`renumber` gives a new number to each object that is made anew. An object that holds it has
   other contents by that, or is made anew as well.
3. :func:`refuse` finds the objects that stay as they were because a part of them cannot travel.

In a :class:`~taas.capture.heap.heap.Heap`, ``known`` is how many numbers the notebook knows.
Numbers up to ``described`` existed right before the cell; some of these parts only this process
knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from taas.capture.describe.flat import How
from taas.capture.heap.heap import NAMESPACE, NO_STATE, Heap

_WHOLE = frozenset({"tuple", "frozenset"})
"""Kinds of objects that cannot change in place: other contents make another object."""


@dataclass
class Diff:
    """How the objects that were there before a cell differ after it."""

    changed: dict[int, How] = field(default_factory=dict)  # objects that change in place, by number
    anew: list[int] = field(default_factory=list)  # objects that cannot, and are made anew
    new_numbers: dict[int, int] = field(default_factory=dict)  # of those, by their old numbers

    def roots_now(self, roots: dict[str, int]) -> dict[str, int]:
        """Return the numbers that the objects under these names have now."""
        return {name: self.new_numbers.get(n, n) for name, n in roots.items()}


def compare(heap: Heap, known: int, described: int) -> Diff:
    """Return which objects differ from what they were before the cell.

    An object that does not differ keeps its state from before: that state has the numbers that
    both sides know.
    """
    diff = Diff()
    for n in range(NAMESPACE + 1, described):
        before, now = heap.before[n], heap.states[n]
        if now is before or before is None or n in heap.failed:
            continue
        is_held_by_module = now is not None and now[0] == "global"
        if is_held_by_module or heap.is_same(n):
            heap.states[n] = before
            continue
        how = heap.change(before, now) if n < known else How.ANEW
        if how is How.ANEW:
            diff.anew.append(n)
        else:
            diff.changed[n] = how
    return diff


def renumber(heap: Heap, diff: Diff, known: int, described: int) -> None:
    """Give new numbers to objects made anew, and new contents or numbers to their holders.

    This goes upwards: from the objects that are made anew to their holders, from those of the
    holders that are made anew themselves to their holders, and so on. An object keeps its state
    under its old number; under the new number it is a holder like any other.
    """
    if not diff.anew:
        return
    holders = heap.holders(range(len(heap.states)))

    def make_anew(n: int) -> None:
        number = diff.new_numbers[n] = heap.renumber(n)
        for child in (heap.states[number] or NO_STATE)[2]:
            holders.setdefault(child, []).append(number)

    for n in diff.anew:
        make_anew(n)
    below = diff.anew
    while below:
        around = {holder for n in below for holder in holders.get(n, ())}
        below = []
        for n in sorted(around - diff.new_numbers.keys()):
            how = _change_of_holder(heap, diff, n, known, described)
            if how is How.ANEW:
                make_anew(n)
                diff.changed.pop(n, None)
                below.append(n)
            elif how is not None and diff.changed.get(n) is not How.IN_PLACE_WITH_ARGUMENTS:
                diff.changed[n] = how


def _change_of_holder(heap: Heap, diff: Diff, n: int, known: int, described: int) -> How | None:
    """Put new numbers into the state of an object; return how that changes it.

    Return None for an object that is new since the cell began: no earlier state exists.
    """
    before = heap.states[n]
    assert before is not None  # it holds an object
    children = tuple(diff.new_numbers.get(child, child) for child in before[2])
    heap.states[n] = now = (*before[:2], children)
    if n >= described:
        return None
    if before[0] in _WHOLE or n >= known:
        return How.ANEW
    return heap.change(before, now)


class Refusal(NamedTuple):
    """The objects that do not come back because they, or a part of them, cannot travel."""

    new: set[int]  # refused objects that the notebook does not know, and the objects that hold them
    held_back: set[int]  # objects that stay as they were


def refuse(heap: Heap, diff: Diff, known: int, roots: Iterable[int]) -> Refusal:
    """Return what stays as it was because objects of the heap failed; names hold the ``roots``."""
    new = set[int]()
    if heap.failed:
        new = heap.holding(heap.failed, range(known, len(heap.objects)))
    holding_new = {n for n in diff.changed if not new.isdisjoint((heap.states[n] or NO_STATE)[2])}
    refused = holding_new | new
    return Refusal(new, heap.held_back(refused, roots))

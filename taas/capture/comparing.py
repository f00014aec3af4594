"""What a cell changed: the states of all objects after it, compared with their states before it.

Three steps, each of which needs the one before:

1. :func:`compare` finds the objects whose states differ, and how each gets to its new state: in
   place, or by a new object.
2. :func:`renumber` gives a new number to each object that is made anew. Whoever holds it has other
   contents by that, or is made anew as well.
3. :func:`refuse` finds what has to stay as it was, since a part of it cannot travel.

For :class:`~taas.capture.heap.Heap`, ``known`` is how many numbers the notebook knows; numbers up
to ``described`` were there right before the cell, among them parts that only this process knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from taas.capture.flat import How
from taas.capture.heap import NAMESPACE, NO_STATE, Heap

_WHOLE = frozenset({"tuple", "frozenset"})
"""Kinds of objects that other contents make other objects."""


@dataclass
class Diff:
    """How the objects that were there before a cell differ after it."""

    changed: dict[int, How] = field(default_factory=dict)  # what changes in place, by number
    anew: list[int] = field(default_factory=list)  # what cannot, and is made anew
    new_numbers: dict[int, int] = field(default_factory=dict)  # of all that is, by the old ones

    def roots_now(self, roots: dict[str, int]) -> dict[str, int]:
        """Return the numbers that some objects under names have now."""
        return {name: self.new_numbers.get(n, n) for name, n in roots.items()}


def compare(heap: Heap, known: int, described: int) -> Diff:
    """Return which objects differ from what they were before the cell.

    The state of an object that does not differ is its state before: by the numbers that both sides
    know.
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
    """Give what is made anew new numbers, and what holds it new contents or new numbers, too.

    This goes upwards: first what holds the objects that are made anew, then what holds those of
    the holders that are made anew themselves, and so on. An object keeps its state under its old
    number; under the new one it is a holder as any other.
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

    None: it is new since the cell began, so there is nothing that it could be changed from.
    """
    before = heap.states[n]
    assert before is not None  # it holds something
    children = tuple(diff.new_numbers.get(child, child) for child in before[2])
    heap.states[n] = now = (*before[:2], children)
    if n >= described:
        return None
    if before[0] in _WHOLE or n >= known:
        return How.ANEW
    return heap.change(before, now)


class Refusal(NamedTuple):
    """What does not come back, since it cannot travel or a part of it cannot."""

    new: set[int]  # of what the notebook does not know: these, and what holds them
    held_back: set[int]  # what stays as it was


def refuse(heap: Heap, diff: Diff, known: int, roots: Iterable[int]) -> Refusal:
    """Return what stays as it was, for what of the heap has failed; names hold the ``roots``."""
    new = set[int]()
    if heap.failed:
        new = heap.holding(heap.failed, range(known, len(heap.objects)))
    holding_new = {n for n in diff.changed if not new.isdisjoint((heap.states[n] or NO_STATE)[2])}
    refused = holding_new | new
    return Refusal(new, heap.held_back(refused, roots))

"""Find what a cell changed: compare the states of all objects before and after the cell.

Each of the three steps depends on the step before:

1. :func:`compare` finds the objects whose states differ, and whether each of them changes in place
   or has to be recreated.
2. :func:`renumber` gives a new number to each object that is recreated. An object that refers to it
   (a *holder*) therefore has new contents, or must be recreated, too.
3. :func:`refuse` finds the objects that keep their old state because a part of them cannot be sent.

In a :class:`~taas.capture.heap.heap.Heap`, the first ``known`` numbers are those that the notebook
has. The objects with the first ``described`` numbers existed right before the cell; some of them
are parts that only this process has.
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
    """How the objects that existed before a cell differ after it."""

    changed: dict[int, How] = field(default_factory=dict)  # objects that change in place, by number
    anew: list[int] = field(default_factory=list)  # objects that cannot, and are recreated
    new_numbers: dict[int, int] = field(default_factory=dict)  # of those, by their old numbers

    def roots_now(self, roots: dict[str, int]) -> dict[str, int]:
        """Return the present numbers of the objects under these names."""
        return {name: self.new_numbers.get(n, n) for name, n in roots.items()}


def compare(heap: Heap, known: int, described: int) -> Diff:
    """Return which objects differ from what they were before the cell.

    An object that does not differ keeps its state from before, which contains the numbers that both
    sides have.
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
    """Give new numbers to recreated objects, and new contents or numbers to their holders.

    This proceeds upwards: from the recreated objects to their holders, from those holders that are
    recreated themselves to their holders, and so on. An object keeps its state under its old
    number; under its new number, it is a holder like any other.
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
    """Put new numbers into the state of an object; return how that changes the object.

    Return None for an object that was created since the cell began: it has no earlier state.
    """
    before = heap.states[n]
    assert before is not None  # it refers to an object
    children = tuple(diff.new_numbers.get(child, child) for child in before[2])
    heap.states[n] = now = (*before[:2], children)
    if n >= described:
        return None
    if before[0] in _WHOLE or n >= known:
        return How.ANEW
    return heap.change(before, now)


class Refusal(NamedTuple):
    """The objects that are not sent back because they, or a part of them, cannot be sent."""

    new: set[int]  # refused objects that the notebook does not have, and their holders
    held_back: set[int]  # objects that keep their old state


def refuse(heap: Heap, diff: Diff, known: int, roots: Iterable[int]) -> Refusal:
    """Return what keeps its old state because objects failed.

    ``roots`` are those of variables and places.
    """
    new = set[int]()
    if heap.failed:
        new = heap.holding(heap.failed, range(known, len(heap.objects)))
    holding_new = {n for n in diff.changed if not new.isdisjoint((heap.states[n] or NO_STATE)[2])}
    refused = holding_new | new
    return Refusal(new, heap.held_back(refused, roots))

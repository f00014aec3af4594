"""Keep imports in ranks from drawing random numbers that the notebook would not draw again.

A rank is a new process. It imports again what the notebook imported cells ago, and some libraries
draw at import (``rich`` picks an emoji; a project's module creates a layer). A plain cell would not
draw again, so the rank restores the random states after such an import. A module that is new to
both notebook and rank draws, as it would in a plain cell. The notebook also takes into account the
modules that ranks imported in earlier cells: without the headers, it would have imported them
itself.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator

from taas.base.import_hooks import around_imports_of_known
from taas.capture.settings.random_states import set_generators, states_of_generators

_by_ranks: set[str] = set()
"""In a notebook's kernel: the modules that ranks of its cells have imported."""


def known_modules() -> str:
    """Return the names of the modules imported by the notebook or its ranks, one per line."""
    return "\n".join(_by_ranks.union(sys.modules))


def note_imported(names: Iterable[str]) -> None:
    """Record, in a notebook, the modules that a cell imported in rank 0."""
    _by_ranks.update(names)


def put_back_draws_of(known: str) -> None:
    """Let the first import of each ``known`` module (:func:`known_modules`) draw nothing."""
    around_imports_of_known(set(known.split("\n")), drawing_nothing)


def last_imported() -> str:
    """Return the name of the module that was imported last."""
    return next(reversed(sys.modules))


def imported_after(last: str) -> list[str]:
    """Return the modules that were imported after the module ``last``.

    Earlier ones are not examined (see ``imported_since``). All of this runs in C, so no other
    thread can import anything meanwhile, which would end the iteration with an error.
    """
    return list(itertools.takewhile(last.__ne__, reversed(sys.modules)))


_puts_back = False


@contextlib.contextmanager
def drawing_nothing() -> Iterator[None]:
    """Restore the main thread's random states at the end; a nested call does nothing.

    In another thread, this does nothing, because it would undo draws that the main thread makes
    meanwhile.
    """
    global _puts_back
    if _puts_back or threading.current_thread() is not threading.main_thread():
        yield
        return
    _puts_back = True
    states = states_of_generators(cuda=False)
    try:
        yield
    finally:
        _puts_back = False
        set_generators(states, cuda=False)

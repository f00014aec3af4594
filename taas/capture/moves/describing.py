"""Describe what is sent to the ranks: the variables that a cell needs, unless the ranks have them.

Two facts become known only while variables are described. First, functions and classes in the
values use other variables, which the cell then needs, too. Second, an object that is sent may also
be part of a variable that is still valid in the ranks; then that variable has to be sent, too.
:func:`describe` finds both.
"""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from taas.base.stand_ins import objects_with_stand_in
from taas.capture.cells import is_of_ipython, keys_without_a_name, users_names
from taas.capture.describe.code_by_value import global_names, words_in
from taas.capture.describe.holders import holders, left_out, modules_reached
from taas.capture.describe.process_own import tell_again
from taas.capture.describe.reader import Reader
from taas.capture.heap.heap import Heap, culprit_of
from taas.capture.moves.kept import Held
from taas.capture.moves.names import ANY, Needs, names_used_by
from taas.errors import CaptureError

LARGE = 256 << 20
"""A variable with more bytes than this is announced. All variables that the cell might mean,
because it computes names, are limited to this size in total.
"""
_NO_NAMES = frozenset[str]()


class Asked(NamedTuple):
    """What a cell needs: variables, other values and modules."""

    needs: Needs
    places: dict[str, Any]  # values that it uses without a variable: magics, values of cells
    imports: Sequence[str]  # the submodules that it imports
    edited: dict[str, types.ModuleType]  # edited modules of the project, which are kept separate
    for_data: bool  # data processes unpack the payload, too


def describe(asked: Asked, held: Held, namespace: dict[str, Any], project: str) -> Described:
    """Describe what is sent; repeat until no variable in ``held`` shares objects with it.

    Raises :class:`CaptureError` if a surely needed variable cannot be sent.
    """
    while True:
        described = Described(asked, held, namespace, project)
        if not held.let_go(described.heap):
            return described


class Described:
    """The variables and places sent for one cell, in a heap that continues the ranks' heap."""

    def __init__(self, asked: Asked, held: Held, namespace: dict[str, Any], project: str) -> None:
        self.needs, self.imports, self.edited = asked.needs, asked.imports, asked.edited
        self.held, self.namespace, self.project = held, namespace, project
        first = len(held.objects)
        self.heap = Heap(Reader(namespace, project=project), [namespace], first)
        self.heap.go_on(held.kept.heap, (), first)
        self.heap.named = held.named
        self.roots: dict[str, int] = {}  # the numbers of variables
        self.places: dict[str, int] = {}  # the numbers of values without a variable
        self.only_for_data: dict[str, int] = {}  # variables that only data processes bind
        # variables whose value in data processes differs from the cell's
        self.bound_by_cell: list[str] = []
        # variables that the notebook lacks, and that the cell may bind
        self.missing_for_data: list[str] = []
        self.sizes: dict[str, int] = {}  # in bytes, by variable
        self.left_behind: dict[str, str] = {}  # by variable, why it stays in the notebook
        self.detached: list[str] = []  # variables with tensors that lose their graph
        self.without: list[str] = []  # why places stay in the notebook
        self.too_large: list[str] = []  # variables that the cell might mean, and that are too large
        self._pack(asked.places, for_data=asked.for_data)

    def _pack(self, places: dict[str, Any], *, for_data: bool) -> None:
        """Describe the variables, and those that functions and classes in their values use."""
        left_out.clear()
        tell_again(but=self.held.objects)
        needs, namespace = self.needs, self.namespace
        bound = {**dict.fromkeys(sorted(needs.maybe), _NO_NAMES), **needs.bound}
        held = self.held.names
        waiting = [*bound]
        while waiting:
            name = waiting.pop(0)
            if not (name in self.roots or name in held or name in self.left_behind):
                error = self._add(name, namespace[name], self.roots)
                if error is not None:
                    why = self.left_behind[name] = self.why(name, namespace[name], error)
                    if name in needs.sure:
                        raise CaptureError(
                            f"the cell needs {name!r}: {why} Nothing was started."
                        ) from error
            for used in sorted(self._used_by(name) - bound[name]):
                if used.startswith(ANY):
                    needs.built = needs.built or used.removeprefix(ANY)
                    needs.others |= users_names(namespace).keys() - bound[name]
                elif used in namespace and not is_of_ipython(used, namespace[used]):
                    before = bound.get(used)
                    bound[used] = bound[name] & bound.get(used, bound[name])
                    waiting += [used] if bound[used] != before else []
        if for_data:
            self._pack_for_data()
        self._add_places(places)
        self._add_others(needs.others - bound.keys(), self.roots)
        if needs.built:
            self.too_large += keys_without_a_name(namespace)

    def _add_others(self, names: Collection[str], roots: dict[str, int]) -> None:
        """Describe variables that the cell might mean, as long as they are small."""
        room = LARGE
        for name in sorted(names):
            if self._add(name, self.namespace[name], roots, room) is not None:
                self.too_large.append(name)
            room -= self.sizes.get(name, 0)

    def _used_by(self, name: str) -> set[str]:
        """Return the variables that functions and classes in a variable's value use."""
        if name in self.roots:
            return self._used_in([self.roots[name]])
        kept = self.held.kept.heap
        inside = self.held.inside.get(name, set())
        return names_used_by([kept.objects[n] for n in inside], self.namespace)

    def _used_in(self, numbers: Iterable[int]) -> set[str]:
        """Return the variables that functions and classes in some objects use."""
        inside = self.heap.reached(numbers)
        return names_used_by([self.heap.objects[n] for n in inside], self.namespace)

    def _pack_for_data(self) -> None:
        """Describe, for data processes, the variables that the code of delivered loaders uses.

        Data processes do not run the cell. A variable that the cell binds before it reads it is not
        sent to the ranks, but a data process needs it all the same, and gets the notebook's present
        value.
        """
        namespace = self.namespace
        number = self.heap.number
        found = [number[id(one)] for one in objects_with_stand_in() if id(one) in number]
        waiting = sorted(self._used_in(found))
        used, others = set[str](), set[str]()
        for name in waiting:  # the loop appends to it
            if name.startswith(ANY):
                self.needs.built = self.needs.built or name.removeprefix(ANY)
                others |= users_names(namespace).keys()
                continue
            if name in used or name not in namespace or is_of_ipython(name, namespace[name]):
                continue
            used.add(name)
            n = self._add_for_data(name)
            if n is not None:
                found.append(n)
                waiting += sorted(self._used_in([n]) - used)
        self._add_others(others - self.roots.keys() - self.only_for_data.keys(), self.only_for_data)
        self._note_bound_by_cell(found)

    def _add_for_data(self, name: str) -> int | None:
        """Describe a variable for data processes; return its number, or None if it stays behind."""
        if name not in self.roots and name not in self.left_behind:
            value = self.namespace[name]
            error = self._add(name, value, self.only_for_data)
            if error is not None:
                self.left_behind[name] = self.why(name, value, error)
        return self.roots.get(name, self.only_for_data.get(name))

    def _note_bound_by_cell(self, used: list[int]) -> None:
        """Record the variables that the loaders' code reads and the cell binds, except modules.

        A module that the cell imports again is the same module.

        ``used`` are the numbers of the loaders, and of the objects that their code uses. Words in
        strings do not count here: any of them may be a name, but few are.
        """
        namespace, binds = self.namespace, self.needs.binds
        objects = [self.heap.objects[n] for n in self.heap.reached(used)]
        functions = [value for value in objects if isinstance(value, types.FunctionType)]
        codes = [function.__code__ for function in functions if function.__globals__ is namespace]
        read = set[str]().union(*map(global_names, codes))
        # If the code does not show what it binds (a star import, ``exec``), only the variables that
        # it certainly binds are known.
        bound = read & (self.only_for_data.keys() if binds is None else binds)
        self.bound_by_cell = sorted(
            name
            for name in bound & namespace.keys()
            if not isinstance(namespace[name], types.ModuleType)
        )
        missing = (read if binds is None else bound) - namespace.keys()
        self.missing_for_data = sorted(name for name in missing if not hasattr(builtins, name))

    def _add_places(self, places: dict[str, Any]) -> None:
        """Describe ``places``, loggers, formatters, and the project's modules in use."""
        held = self.held
        while new := {
            name: value
            for name, value in (places | holders(self.project, self.modules_reached())).items()
            if name not in self.places and name not in self.left_behind and name not in held.places
        }:
            for name, value in new.items():
                error = self._add(name, value, self.places)
                if error is not None:
                    self.left_behind[name] = self.why(name, value, error)
                    self.without.append(self.left_behind[name])

    def modules_reached(self) -> set[str]:
        """Return the project's modules that the cell uses, directly or through what is sent."""
        reader = self.heap.reader
        words = self.needs.words.union(*map(words_in, self.heap.codes()))
        return modules_reached(words, {*reader.modules, *self.imports}, self.project)

    def _add(
        self, name: str, value: Any, roots: dict[str, int], limit: float = math.inf
    ) -> Exception | None:
        heap = self.heap
        length = len(heap.objects)
        n = heap.enter(value)
        heap.walk()
        while heap.leave_out(length, {name: n}):
            heap.back_to(length)
            n = heap.enter(value)
            heap.walk()
        error = next(iter(heap.failed.values()), None)
        nbytes = heap.size(range(length, len(heap.objects)))
        if error is None and nbytes > limit:
            error = CaptureError(f"it has more than {limit:,} bytes")
        if error is not None:
            heap.back_to(length)
        else:
            roots[name] = n
            self.sizes[name] = nbytes
            if roots is not self.places:
                new = heap.memory_ranges(range(length, len(heap.objects)))
                self.detached += [name] * any(
                    not t.is_leaf for memory in new for t in memory.tensors
                )
        return error

    def why(self, name: str, value: Any, error: Exception) -> str:
        """Return why a variable cannot be sent, with the part that is the cause, and what to do."""
        found = culprit_of(name, value, Reader(self.namespace, project=self.project))
        if found is None:
            return f"{name!r} cannot travel to the ranks: {type(error).__name__}: {error}."
        inside = "" if found.path == name else f" cannot travel to the ranks, because {found.path}"
        return (
            f"{name!r}{inside} is a {found.kind}, which cannot be pickled ({found.reason});"
            f" {found.advice}."
        )

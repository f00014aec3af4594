"""The notebook's side: names into a payload for the ranks."""

from __future__ import annotations
import __future__

import builtins
import contextlib
import math
import os
import sys
import types
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.capture import process_state
from taas.capture.applying import Applied, apply_answer
from taas.capture.cells import (
    cell_numbers,
    history_of,
    imported_by,
    is_of_ipython,
    keys_without_a_name,
    magics_used,
    modules_used,
    typed_cells,
    users_names,
    values_of_cells,
)
from taas.capture.code_by_value import global_names, words_in
from taas.capture.heap import (
    NAMESPACE,
    Heap,
    culprit_of,
    few_words_of,
    is_constant,
    no_collection,
)
from taas.capture.holders import (
    edited_modules,
    go_to_ends,
    holders,
    left_out,
    loaded_as,
    modules_reached,
    set_apart,
)
from taas.capture.import_draws import known_modules
from taas.capture.libraries import wait_for_devices
from taas.capture.memory import MemorySnapshot, MemoryTable, SentMemory, Stretch, overlapping
from taas.capture.names import ANY, Needs, names_used_by, needs_of
from taas.capture.payload import NoRoom, check_room, write_file
from taas.capture.process_bound import (
    Again,
    Wrapping,
    fit_of,
    shares_among,
    surely_read,
    words_that_run,
)
from taas.capture.process_own import tell_again, tell_what_changed
from taas.capture.rank_values import rank_values, remember_rank_values
from taas.capture.reader import Reader
from taas.capture.reading import ATOMS
from taas.capture.setup_cells import setup_cells
from taas.delivery.registered import loaders_delivered
from taas.errors import CaptureError, HeaderError
from taas.import_hooks import AUTORELOAD, attributes_of, loaded, note_files
from taas.wording import first_line, shown, size_in_words

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LARGE = 256 << 20
"""A name with more bytes than this is announced; all names that are only perhaps meant have no more
together.
"""

_NO_NAMES = frozenset[str]()
_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
"""What ``from __future__ import …`` of an earlier cell means for all later ones."""


class Capture:
    """The captured names of one cell. A context manager; closing it closes the memfd.

    Names that the ranks still hold are not in it.

    Raises :class:`CaptureError` where a surely needed name cannot be pickled.
    """

    fd = -1
    nbytes = 0
    _applied: Applied | None = None

    def __init__(
        self,
        namespace: dict[str, Any],
        needs: Needs,
        project: str,
        held: Held,
        places: dict[str, Any],
        imports: Sequence[str],
        edited: dict[str, types.ModuleType],
        *,
        for_data: bool,
    ) -> None:
        self._needs, self._held, self._namespace, self._project = needs, held, namespace, project
        self._imports, self._edited, self._loaded = imports, edited, loaded_as(project)
        first = len(held.objects)
        self.heap = Heap(Reader(namespace, project=project), [namespace], first)
        self.heap.go_on(held.kept.heap, (), first)
        self.heap.named = held.named
        self._roots: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._only_for_data: dict[str, int] = {}  # names that only data processes bind
        self._bound_by_cell: list[
            str
        ] = []  # names that data processes have otherwise than the cell
        self._missing_for_data: list[
            str
        ] = []  # names that the notebook lacks, and the cell may bind
        self._sizes: dict[str, int] = {}
        self.left_behind: dict[str, str] = {}
        self._detached: list[str] = []
        self._without: list[str] = []
        self._too_large: list[str] = []
        self._unfit: list[str] = []
        self._run_of = "", 1  # the cell, and how many ranks run it
        self._wraps = False
        self._again: list[Again] = []  # models that their library wraps again
        self._pack(places, for_data=for_data)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the payload's memory back; an answer can still be applied."""
        if self.fd >= 0:
            go_to_ends()
            os.close(self.fd)
            self.fd = -1

    @property
    def held_bytes(self) -> int:
        """Memory of arrays, tensors and texts in the names, which the notebook's objects hold."""
        return sum(self._sizes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it."""
        return tuple(self._roots)

    def apply(self, answer_fd: int) -> Applied:
        """Do to the notebook what the cell did to rank 0; the descriptor stays open.

        Objects change in place, names are rebound.
        """
        set_apart(self._edited)
        self._applied = apply_answer(
            answer_fd, self._namespace, self.heap, self._memory, self._loaded
        )
        cell, size = self._run_of
        if size > 1:
            remember_rank_values(cell, self._namespace)
        return self._applied

    def kept(self) -> Kept:
        """Return what ranks that stay hold, for the next capture. Call it after :meth:`apply`."""
        namespace, project, held, applied = (
            self._namespace,
            self._project,
            self._held,
            self._applied,
        )
        if applied is None:
            return Kept(namespace, names=dict.fromkeys({*self.names, *held.names}, _UNSURE))
        with no_collection():
            names = {name: namespace.get(name, _NONE) for name in applied.there}
            own = {*applied.own, *(held.kept.own - {*self.names, *applied.rebound})} & names.keys()
            own |= {name for name, value in names.items() if value is _NONE}
            there = {*self._places, *held.places, *applied.places}
            places = {name: value for name, value in holders(project).items() if name in there}
            return Kept(namespace, project, names, own, places, self.heap, applied, held.kept)

    def _pack(self, places: dict[str, Any], *, for_data: bool) -> None:
        """Describe the names, and the names that functions and classes in their values use."""
        left_out.clear()
        tell_again(but=self._held.objects)
        needs, namespace = self._needs, self._namespace
        bound = {**dict.fromkeys(sorted(needs.maybe), _NO_NAMES), **needs.bound}
        waiting = [*bound]
        while waiting:
            name = waiting.pop(0)
            if not ({name} & (self._roots.keys() | self._held.names | self.left_behind.keys())):
                error = self._add(name, namespace[name], self._roots)
                if error is not None:
                    why = self.left_behind[name] = self._why(name, namespace[name], error)
                    if name in needs.sure:
                        raise CaptureError(
                            f"the cell needs {name!r}: {why} Nothing was started."
                        ) from error
            for used in sorted(self._used_by(name) - bound[name]):
                if used.startswith(ANY):
                    needs.built = needs.built or used.removeprefix(ANY)
                    needs.others |= users_names(namespace).keys() - bound[name]
                elif used in namespace and not is_of_ipython(used, namespace[used]):
                    before, bound[used] = (
                        bound.get(used),
                        bound[name] & bound.get(used, bound[name]),
                    )
                    waiting += [used] if bound[used] != before else []
        if for_data:
            self._pack_for_data()
        self._add_places(places)
        self._add_others(needs.others - bound.keys(), self._roots)
        if needs.built:
            self._too_large += keys_without_a_name(namespace)

    def _add_others(self, names: Collection[str], roots: dict[str, int]) -> None:
        """Describe names that are only perhaps meant, as far as they are small."""
        room = LARGE
        for name in sorted(names):
            if self._add(name, self._namespace[name], roots, room) is not None:
                self._too_large.append(name)
            room -= self._sizes.get(name, 0)

    def _used_by(self, name: str) -> set[str]:
        """Return the names that functions and classes in a name's value use."""
        if name in self._roots:
            return self._used_in([self._roots[name]])
        kept = self._held.kept.heap
        inside = self._held.inside.get(name, set())
        return names_used_by([kept.objects[n] for n in inside], self._namespace)

    def _used_in(self, numbers: Iterable[int]) -> set[str]:
        """Return the names that functions and classes in some objects use."""
        inside = self.heap.reached(numbers)
        return names_used_by([self.heap.objects[n] for n in inside], self._namespace)

    def _pack_for_data(self) -> None:
        """Describe the names that the code of delivered loaders uses, for data processes.

        Data processes do not run the cell.

        A name that the cell binds before it is read does not travel to the ranks. A data process
        needs it all the same, and has it as the notebook has it now.
        """
        namespace = self._namespace
        number = self.heap.number
        found = [number[id(one)] for one in loaders_delivered() if id(one) in number]
        waiting = sorted(self._used_in(found))
        used, others = set[str](), set[str]()
        for name in waiting:  # grows
            if name.startswith(ANY):
                self._needs.built = self._needs.built or name.removeprefix(ANY)
                others |= users_names(namespace).keys()
                continue
            if name in used or name not in namespace or is_of_ipython(name, namespace[name]):
                continue
            used.add(name)
            n = self._add_for_data(name)
            if n is not None:
                found.append(n)
                waiting += sorted(self._used_in([n]) - used)
        self._add_others(
            others - self._roots.keys() - self._only_for_data.keys(), self._only_for_data
        )
        self._note_bound_by_cell(found)

    def _add_for_data(self, name: str) -> int | None:
        """Describe a name for data processes; return its number, or None if it stays behind."""
        if name not in self._roots and name not in self.left_behind:
            value = self._namespace[name]
            error = self._add(name, value, self._only_for_data)
            if error is not None:
                self.left_behind[name] = self._why(name, value, error)
        return self._roots.get(name, self._only_for_data.get(name))

    def _note_bound_by_cell(self, used: list[int]) -> None:
        """Note the names that the loaders' code reads and the cell binds, except modules.

        A module that the cell imports again is the same one.

        ``used`` are the numbers of the loaders, and of what their code uses. Words of texts do not
        count here: each of them may be a name, but seldom is one.
        """
        namespace, binds = self._namespace, self._needs.binds
        objects = [self.heap.objects[n] for n in self.heap.reached(used)]
        functions = [value for value in objects if isinstance(value, types.FunctionType)]
        codes = [function.__code__ for function in functions if function.__globals__ is namespace]
        read = set[str]().union(*map(global_names, codes))
        # Where the code does not say what it binds (a star, ``exec``), only this is known: what it
        # surely binds.
        bound = read & (self._only_for_data.keys() if binds is None else binds)
        self._bound_by_cell = sorted(
            name
            for name in bound & namespace.keys()
            if not isinstance(namespace[name], types.ModuleType)
        )
        missing = (read if binds is None else bound) - namespace.keys()
        self._missing_for_data = sorted(name for name in missing if not hasattr(builtins, name))

    def _add_places(self, places: dict[str, Any]) -> None:
        """Describe the holders of data: loggers, formatters, and modules of the project in use."""
        held = self._held
        while new := {
            name: value
            for name, value in (places | holders(self._project, self._reached())).items()
            if name not in self._places and name not in self.left_behind and name not in held.places
        }:
            for name, value in new.items():
                error = self._add(name, value, self._places)
                if error is not None:
                    self.left_behind[name] = self._why(name, value, error)
                    self._without.append(self.left_behind[name])

    def _reached(self) -> set[str]:
        reader = self.heap.reader
        words = self._needs.words.union(*map(words_in, self.heap.codes()))
        return modules_reached(words, {*reader.modules, *self._imports}, self._project)

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
            self._sizes[name] = nbytes
            if roots is not self._places:
                new = heap.memory_ranges(range(length, len(heap.objects)))
                self._detached += [name] * any(
                    not t.is_leaf for memory in new for t in memory.tensors
                )
        return error

    def check_fit(self, cell: str, size: int, *, keep: bool) -> None:
        """Note what of the names does not fit a run of ``size`` ranks; ``keep``: these stay.

        Raises :class:`CaptureError` for what is surely needed, and of no use in these ranks.
        """
        self._run_of = cell, size
        codes = [code for name in self._reached() for code in _codes_of_module(name)]
        of_functions = words_that_run(self._needs.words, [*self.heap.codes(), *codes])
        words = self._needs.words | of_functions
        wrapping = Wrapping(cell, of_functions, self._namespace)
        meant = self._roots.keys() - self._needs.others
        roots = {name: n for name, n in self._roots.items() if name in meant}
        delivered = {id(loader) for loader in loaders_delivered()}
        fit = fit_of(self.heap, roots, delivered, size, words, wrapping, keep=keep)
        if fit.useless:
            sure = surely_read(self._needs.sure, self._roots, self.heap, words)
            for why in (why for name, why in fit.useless.items() if name in sure):
                raise CaptureError(f"{why} Nothing was started.")
        self._unfit += dict.fromkeys(fit.useless.values())
        self._unfit += fit.lines
        self._wraps = fit.wraps
        self._again = [one for one in fit.again if self._travels_whole(one)]
        of_rank = [name for name in rank_values(self._namespace, _names_bound_by) if name in roots]
        of_rank = [name for name in of_rank if not self._has_share(roots[name])]
        if of_rank and size > 1:
            advice = "and each of these ranks keeps its own" if keep else "or use --keep"
            self._unfit.append(
                f"{', '.join(of_rank)}: rank 0's, in every rank. Make"
                f" {'it' if len(of_rank) == 1 else 'them'} in this cell, {advice}."
            )

    def _travels_whole(self, one: Again) -> bool:
        """Tell whether ranks that stay have no part of what is wrapped again."""
        return min(one.by, one.module) >= len(self._held.objects)

    def _has_share(self, root: int) -> bool:
        """Tell whether an object has a part that says itself of which rank it is."""
        objects = self.heap.objects
        return any(True for _ in shares_among(objects[n] for n in self.heap.reached([root])))

    def write(self, shell: InteractiveShell | None, **contents: Any) -> None:
        """Write the names, and what ranks need beside them, into a sealed memfd.

        Raises :class:`CaptureError` where there is no memory for it.
        """
        check_room(self._sizes)
        heap, reader = self.heap, self.heap.reader
        files, setup = cell_numbers(shell), setup_cells()
        sources = heap.sources()
        packages = {module.partition(".")[0] for module in reader.modules}
        first = len(self._held.objects)
        contents |= {
            "project": self._project,
            "apart": [*self._edited],
            "process state": process_state.of_notebook(),
            "cells": {
                **{cell.file: cell.number for cell in setup},
                **{file: files[file] for file in sources if file in files},
            },
            "sources": sources,
            "history": history_of(shell),
            "imports": modules_used(packages),
            "imports of the cell": self._imports,
            "known modules": known_modules(),
            "setup": [tuple(cell) for cell in setup],
            "left behind": self.left_behind,
            "roots": self._in_order_of_binding(self._roots),
            "for data": self._names_for_data(),
            "places": self._places,
            "wrapped": self._wraps,
            "again": [tuple(one) for one in self._again],
            "shares": [heap.number[id(value)] for value, *_ in shares_among(heap.objects[first:])],
            "first": first,
            "states": heap.states[first:],
            "held": self._held.told(self._roots),
        }
        new = heap.memory_ranges(range(first, len(heap.objects)))
        memory = SentMemory(new, first=self._held.kept.next_region)
        try:
            self.fd, self.nbytes = write_file(memory, self._roots, contents)
        except NoRoom as error:
            size = size_in_words(sum(self._sizes.values()))
            raise CaptureError(
                f"the names of this cell have {size}: {error}. Nothing was started."
            ) from error
        heap.named, heap.objects[:first] = {}, self._held.objects
        heap.know(contents["held"]["numbers"])
        self._memory = {**self._held.memory(), **memory.stretches}
        # Ranks do not build what only data processes bind: in their answers these objects have no
        # number.
        of_ranks = heap.reached([*self._roots.values(), *self._places.values()])
        heap.forget(heap.reached(self._only_for_data.values()) - of_ranks)

    def _in_order_of_binding(self, roots: dict[str, int]) -> dict[str, int]:
        return dict(sorted(roots.items(), key=lambda root: self.heap.early(root[1])))

    def _names_for_data(self) -> dict[str, int]:
        """Return what data processes bind; none, where that is what the ranks bind."""
        only = self._only_for_data
        return self._in_order_of_binding(self._roots | only) if only else {}

    def _why(self, name: str, value: Any, error: Exception) -> str:
        found = culprit_of(name, value, Reader(self._namespace, project=self._project))
        if found is None:
            return f"{name!r} cannot travel to the ranks: {type(error).__name__}: {error}."
        inside = "" if found.path == name else f" cannot travel to the ranks, because {found.path}"
        return (
            f"{name!r}{inside} is a {found.kind}, which cannot be pickled ({found.reason});"
            f" {found.advice}."
        )

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        found = [
            f"{name} is {size_in_words(size)}; it is written to shared memory once for all ranks of"
            " a machine."
            for name, size in self._sizes.items()
            if size > LARGE
        ]
        left = {
            path: one
            for path, one in self.heap.left.items()
            if not isinstance(one.holder, types.ModuleType)
        }
        without = [
            *self._without,
            *(self._why(path, one.part, one.error) for path, one in left.items()),
        ]
        found += [f"{why} The ranks do without it." for why in without]
        parted = [one for one in self.heap.parted if id(one.holder) in self.heap.number]
        found += [
            f"{told}: each process has its own, so the ranks do without."
            for told in few_words_of(parted)
        ]
        found += self._unfit
        if unwrapped := sorted(self._held.kept.wrapped & self._roots.keys()):
            found.append(
                f"{', '.join(unwrapped)}: changed in the notebook since the last cell, or shares"
                " objects with what did. So it travels anew, without the parallel wrapper or the"
                " sharding that it had in the ranks; wrap it again before it is trained."
            )
        edited = [
            n for module in self._edited.values() if (n := module.__name__) in self._reached()
        ]
        if edited:
            found.append(
                f"{', '.join(edited)}: edited since this notebook imported it. The ranks run the"
                " file as it is now, the notebook what it imported, each with data of its own;"
                f" importlib.reload({edited[0]}) in a cell of its own takes the file here, too."
            )
        if self._detached:
            names = ", ".join(self._detached)
            found.append(f"{names}: tensors travel without the graph they were computed in.")
        found += self.notices_of_data
        if self._needs.built:
            few = f"{', '.join(self._too_large[:5])}{' …' if self._too_large[5:] else ''}"
            some = f" but {few} (large, or not to be pickled)" if self._too_large else ""
            found.append(
                f"the cell makes the names that it looks up ({self._needs.built}), so all of the"
                f" notebook's travel{some}. Where it names what it needs, only that does."
            )
        return found

    @property
    def notices_of_data(self) -> list[str]:
        """Say where data workers have something else under a name than the cell, or nothing."""
        found = []
        if self._bound_by_cell:
            found.append(
                f"data workers have {', '.join(self._bound_by_cell)} as the notebook has it now,"
                " not as this cell binds it: the code of a registered loader uses it. Bind it in"
                " an earlier cell."
            )
        if self._missing_for_data:
            found.append(
                f"data workers lack {', '.join(self._missing_for_data)}, which the code of a"
                " registered loader uses and only this cell binds. Bind it in an earlier cell:"
                " they have what the notebook has when the cell starts."
            )
        return found


def capture(
    cell: str,
    namespace: dict[str, Any],
    shell: InteractiveShell | None,
    *,
    project: Path,
    returned: Sequence[str] | None = None,
    kept: Kept | None = None,
    anew: Iterable[Any] = (),
    for_data: bool = False,
    size: int = 1,
    keep: bool = False,
) -> Capture:
    """Capture the names that a cell needs, for a run of ``size`` ranks, which may stay: ``keep``.

    ``returned`` names come back; None for all that changed. ``kept`` is what the ranks hold; what
    is in ``anew`` travels all the same. ``for_data``: data processes unpack it, too, and find in it
    all that the loaders that are being delivered need. Raises :class:`CaptureError` where a surely
    needed name cannot be pickled or memory is short, :class:`SyntaxError`, and :class:`HeaderError`
    for a returned name that there cannot be.
    """
    with no_collection():
        future = shell.compile.flags & _FUTURE if shell is not None else 0
        needs = needs_of(cell, namespace)
        names_of_values, values = values_of_cells(needs.words, namespace)
        needs.maybe |= names_of_values
        kept = kept or Kept(namespace, project=str(project))
        if AUTORELOAD in sys.modules:  # it reloads right before a cell
            note_files()
        edited = {
            n: module for n, module in edited_modules(str(project)).items() if n not in kept.places
        }
        set_apart(edited)
        held = Held(kept, namespace, anew)
        _check_returned(needs, namespace, {*(returned or ())} - held.names)
        _wait_for_devices()
        magics, extensions = magics_used(needs.words, shell)
        known = magics | values, list(imported_by(cell)), edited
        captured = Capture(namespace, needs, str(project), held, *known, for_data=for_data)
        while held.let_go(captured.heap):  # what travels has parts of them
            captured = Capture(namespace, needs, str(project), held, *known, for_data=for_data)
        captured.check_fit(cell, size, keep=keep)
        told = None if returned is None else list(returned)
        captured.write(shell, future=future, extensions=extensions, returned=told)
        return captured


def _names_bound_by(cell: str) -> set[str] | None:
    """Return the names that a cell may bind; None if any may be."""
    return needs_of(cell, {}).binds


def _codes_of_module(name: str) -> list[types.CodeType]:
    """Return the codes of the functions, and methods, of a module."""
    held = [*attributes_of(loaded(name)).values()]
    methods = [
        vars(value) for value in held if isinstance(value, type) and value.__module__ == name
    ]
    held += [value for method in methods for value in method.values()]
    return [value.__code__ for value in held if isinstance(value, types.FunctionType)]


def _check_returned(needs: Needs, namespace: dict[str, Any], returned: Iterable[str]) -> None:
    """Refuse a ``--return`` name that neither the notebook has nor the cell makes."""
    unknown = [name for name in returned if name not in namespace]
    if needs.binds is None or not unknown:
        return
    functions = [value for value in namespace.values() if isinstance(value, types.FunctionType)]
    made = needs.binds.union(
        *(global_names(function.__code__) for function in functions)
    )  # ``global name``
    for name in unknown:
        if name not in made:
            raise HeaderError(
                f"--return {shown(name)}, which neither the notebook has nor the cell makes:"
                " correct it, or leave it out"
            )


def _wait_for_devices() -> None:
    """Wait for the GPU work of earlier cells, before memory is read.

    If some of it failed, nothing there can be trusted: raise :class:`CaptureError`.
    """
    try:
        wait_for_devices()
    except RuntimeError as error:
        raise CaptureError(
            f"an earlier cell's work on the GPU has failed ({first_line(error)}), and its tensors"
            " cannot be trusted. Nothing was started; restart the kernel."
        ) from error


# ---------------------------------------------------------------- what kept ranks hold
#
# After a cell both sides know the same objects under the same numbers: what travelled, and what
# came back. The next payload goes on behind them. It names nothing by an older number, since other
# ranks than 0 do not know the numbers of an answer; an object that a name of the ranks is bound to
# goes by this name.

_NONE = object()
"""What the notebook has where it lacks a name."""
_UNSURE = object()
"""What it would have to have under a name of which nobody is sure what the ranks have."""


class Kept:
    """What the ranks hold after a cell: the names, places, and the notebook's objects for them.

    ``own`` are names under which the ranks have something else: what could not come back.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        project: str = "",
        names: dict[str, Any] | None = None,
        own: Collection[str] = (),
        places: dict[str, Any] | None = None,
        heap: Heap | None = None,
        applied: Applied | None = None,
        before: Kept | None = None,
    ) -> None:
        applied = applied or Applied()
        self.is_known = names is not None  # else ranks may hold what nobody here knows of
        self.names, self.cells, self.project = names or {}, len(typed_cells()), project
        self.own, self.wrapped, self.places = (
            frozenset(own),
            frozenset(applied.wrapped),
            places or {},
        )
        self.all = {**self.places, **self.names}
        self.heap = heap or Heap(Reader(namespace), [namespace])
        self.heap.reader, self.heap.named = Reader(namespace, project=project), {}
        self.heap.describe_as_here()
        self.heap.failed, self.heap.parted = {}, []
        self.next_region = applied.next_region
        reached = self.heap.reached(n for _, n in self.roots())
        self.heap.forget({*range(NAMESPACE + 1, len(self.heap.objects))} - reached)
        # by number: what cannot be described here, so nobody can tell later whether it has changed
        self.unreadable = self.heap.unreadable(reached - {NAMESPACE})
        self._unreadable_before = before.unreadable_ids if before else set[int]()
        used = MemoryTable(applied.memory, ()).regions_of(
            self.heap.memories_among(reached).values()
        )
        self.stretches = {n: stretch for n, stretch in applied.memory.items() if n in used}
        self.snapshot: MemorySnapshot = MemorySnapshot(
            self.stretches, before.snapshot if before else None
        )

    @property
    def unreadable_ids(self) -> set[int]:
        """The ids of what cannot be compared."""
        return {id(self.heap.objects[n]) for n in self.unreadable}

    @property
    def notices(self) -> list[str]:
        """Lines for the user: what the ranks keep, whatever the notebook does to it."""
        roots, found = dict(self.roots()), []
        for n, error in self.unreadable.items():
            way = self.heap.way_to({n}, roots)
            if way is not None and id(self.heap.objects[n]) not in self._unreadable_before:
                why = f"{type(error).__name__}: {first_line(error)}"
                found.append(
                    f"{way[0]} came, but its class cannot say here what is in it ({why}). The ranks"
                    " keep theirs: change it in cells with --keep, not in the notebook."
                )
        return found

    def roots(self) -> list[tuple[str, int]]:
        """Return the names and places that have a number: those that travelled there or back."""
        number = self.heap.number
        return [
            (name, number[id(value)]) for name, value in self.all.items() if id(value) in number
        ]


class Held:
    """The names and places of the ranks that still hold for one cell.

    One holds if the notebook has neither rebound it nor changed what is in it.

    A name that does not hold travels, if the cell needs it; else it is deleted in the ranks. Nor
    does what is to travel ``anew``.
    """

    def __init__(self, kept: Kept, namespace: dict[str, Any], anew: Iterable[Any] = ()) -> None:
        self.kept = kept
        never = {id(value) for value in anew}
        here = {**namespace, **(holders(kept.project) if kept.places else {})}
        bound = {name for name in _bound_since(kept) if type(kept.names.get(name)) in ATOMS}
        self._holds = {
            name
            for name, value in kept.all.items()
            if here.get(name, _NONE) is value and name not in bound and id(value) not in never
        }
        self.inside = {
            name: kept.heap.reached([n]) for name, n in kept.roots() if name in self._holds
        }
        self._where = MemoryTable(kept.stretches, ()).places()
        memories = kept.heap.memories_among(self._numbers).items()
        self._regions = {n: {*overlapping(self._where, *memory)} for n, memory in memories}
        self._let_go(
            self._changed() | {n for v in never if (n := kept.heap.number.get(v)) is not None}
        )

    @property
    def names(self) -> set[str]:
        """The names that hold."""
        return self._holds & self.kept.names.keys()

    @property
    def places(self) -> set[str]:
        """The modules, loggers and formatters that do."""
        return self._holds & self.kept.places.keys()

    @property
    def named(self) -> dict[int, str]:
        """What goes by a name of the ranks, by its id."""
        kept, names = self.kept, self.names - self.kept.own
        by_wrapped = sorted(names, key=lambda name: name not in kept.wrapped)
        return {
            id(kept.names[name]): name for name in by_wrapped if type(kept.names[name]) not in ATOMS
        }

    @property
    def _numbers(self) -> set[int]:
        return set().union(*self.inside.values())

    def _changed(self) -> set[int]:
        """Return the numbers of what is another now than after the last cell."""
        kept, heap, numbers = self.kept, self.kept.heap, self._numbers
        length = len(heap.objects)
        tell_what_changed()
        try:
            heap.describe_after(numbers, heap.reader)
            asked = numbers - kept.unreadable.keys()
            found = {n for n in asked if n in heap.failed or not heap.is_same(n)}
        finally:  # also after an interrupt: the next cell compares with the same
            heap.take_back(length)
        changed = kept.snapshot.changed(kept.stretches)
        return found | self._looking_into({n for n in kept.stretches if changed.get(n, True)})

    def _looking_into(self, regions: set[int]) -> set[int]:
        return {n for n, own in self._regions.items() if not own.isdisjoint(regions)}

    def _let_go(self, dirty: set[int]) -> bool:
        gone = {name for name, inside in self.inside.items() if not inside.isdisjoint(dirty)}
        self._holds -= gone
        self.inside = {name: inside for name, inside in self.inside.items() if name not in gone}
        return bool(gone)

    def let_go(self, heap: Heap) -> bool:
        """Let names go that have parts in what travels; tell whether there are any."""
        kept, numbers = self.kept.heap, self._numbers
        ids = {
            id(kept.objects[n]): n
            for n in numbers
            if not is_constant(
                kept.objects[n], kept.states[n]
            )  # all tensors have torch.float32 in common
        }
        shared, regions = set[int](), set[int]()
        for n in range(len(kept.objects), len(heap.objects)):
            kind, value = (heap.states[n] or ("",))[0], heap.objects[n]
            if kind == "memory":
                regions |= {*overlapping(self._where, value.address, value.nbytes)}
            elif kind not in ("", "name") and id(value) in ids:
                shared.add(ids[id(value)])
        return self._let_go(shared | (self._looking_into(regions) & numbers))

    @property
    def objects(self) -> list[Any]:
        """What both sides know already, by number: what is not held is left out."""
        known = self._numbers | {NAMESPACE}
        return [value if n in known else None for n, value in enumerate(self.kept.heap.objects)]

    def memory(self) -> dict[int, Stretch]:
        """Return the memory that is held, by region."""
        used = set().union(*(self._regions.get(n, ()) for n in self._numbers))
        return {n: stretch for n, stretch in self.kept.stretches.items() if n in used}

    def told(self, sent: Collection[str]) -> dict[str, Any]:
        """Return what the ranks are told: what holds, and which names they delete.

        Where the notebook does not know what they hold, they delete all names: after an interrupt
        while a cell was captured, or while what came back was unpacked.
        """
        deleted = sorted(self.kept.names.keys() - self.names - {*sent})
        return {
            "names": sorted(self.names),
            "deleted": deleted if self.kept.is_known else None,
            "numbers": sorted(self._numbers),
            "regions": [*self.memory()],
        }


def _bound_since(kept: Kept) -> set[str]:
    """Return what the notebook's cells have bound since, as far as their code says it.

    Only of constants that is asked: one that is bound anew is the same object as before, if it has
    the same value. Where the code does not say what it binds (a magic, ``exec``), a constant with
    the value that the notebook had is taken to be the one that it was: each rank keeps its own, as
    ``rank``, which else would become rank 0's.
    """
    found: set[str] = set()
    for cell in typed_cells()[kept.cells : -1]:
        with contextlib.suppress(SyntaxError):
            found |= _names_bound_by(cell) or set()
    return found

"""The notebook's side: pack variables into a payload for the ranks."""

from __future__ import annotations
import __future__

import os
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.base.import_hooks import AUTORELOAD, attributes_of, loaded, note_files
from taas.base.stand_ins import objects_with_stand_in
from taas.base.wording import first_line, shown, size_in_words
from taas.capture.cells import (
    cell_numbers,
    history_of,
    imported_by,
    magics_used,
    modules_used,
    values_of_cells,
)
from taas.capture.describe.code_by_value import global_names
from taas.capture.describe.holders import edited_modules, go_to_ends, holders, loaded_as, set_apart
from taas.capture.describe.libraries import wait_for_devices
from taas.capture.describe.memory import SentMemory
from taas.capture.describe.process_bound import (
    Again,
    Wrapping,
    fit_of,
    names_surely_needed,
    shares_among,
    words_that_run,
)
from taas.capture.heap.heap import no_collection, summarize_attributes
from taas.capture.heap.payload import NoRoom, check_room, write_file
from taas.capture.moves.applying import Applied, apply_answer
from taas.capture.moves.describing import LARGE, Asked, Described, describe
from taas.capture.moves.kept import NONE, UNSURE, Held, Kept
from taas.capture.moves.names import Needs, needs_of
from taas.capture.moves.rank_values import rank_values, remember_rank_values
from taas.capture.settings import process_state
from taas.capture.settings.import_draws import known_modules
from taas.capture.settings.setup_cells import setup_cells
from taas.errors import CaptureError, HeaderError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
"""The compiler flags that a cell's ``from __future__ import …`` sets for all later cells."""


class Capture:
    """The captured variables of one cell; a context manager that closes the memfd.

    Variables that are still valid in the ranks are not included.
    """

    fd = -1
    nbytes = 0
    _applied: Applied | None = None

    def __init__(self, described: Described) -> None:
        self.heap, self._described, self._held = described.heap, described, described.held
        self._loaded = loaded_as(described.project)
        self._unfit: list[str] = []
        self._run_of = "", 1  # the cell, and the number of ranks that run it
        self._wraps = False
        self._again: list[Again] = []  # models whose library wraps them again

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the payload's memory; an answer can still be applied."""
        if self.fd >= 0:
            go_to_ends()
            os.close(self.fd)
            self.fd = -1

    @property
    def held_bytes(self) -> int:
        """Bytes of arrays, tensors and strings in the variables; the notebook owns this memory."""
        return sum(self._described.sizes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the variables in the payload."""
        return tuple(self._described.roots)

    def apply(self, answer_fd: int) -> Applied:
        """Change the notebook as the cell changed rank 0; the descriptor stays open.

        Objects are changed in place; variables are rebound.
        """
        set_apart(self._described.edited)
        self._applied = apply_answer(
            answer_fd, self._described.namespace, self.heap, self._memory, self._loaded
        )
        cell, size = self._run_of
        if size > 1:
            remember_rank_values(cell, self._described.namespace)
        return self._applied

    def kept(self) -> Kept:
        """Return what kept ranks have, for the next capture; call this after :meth:`apply`."""
        namespace, project = self._described.namespace, self._described.project
        held, applied = self._held, self._applied
        if applied is None:
            return Kept(namespace, names=dict.fromkeys({*self.names, *held.names}, UNSURE))
        with no_collection():
            names = {name: namespace.get(name, NONE) for name in applied.there}
            own = {*applied.own, *(held.kept.own - {*self.names, *applied.rebound})} & names.keys()
            own |= {name for name, value in names.items() if value is NONE}
            there = {*self._described.places, *held.places, *applied.places}
            places = {name: value for name, value in holders(project).items() if name in there}
            return Kept(namespace, project, names, own, places, self.heap, applied, held.kept)

    def check_fit(self, cell: str, size: int, *, keep: bool) -> None:
        """Record which variables do not fit a run of ``size`` ranks; ``keep``: the ranks are kept.

        Raises :class:`CaptureError` for an object that the cell surely needs and these ranks cannot
        use.
        """
        self._run_of = cell, size
        described, needs = self._described, self._described.needs
        modules = described.modules_reached()
        codes = [code for name in modules for code in _codes_of_module(name)]
        of_functions = words_that_run(needs.words, [*self.heap.codes(), *codes])
        words = needs.words | of_functions
        wrapping = Wrapping(cell, of_functions, described.namespace)
        roots = {name: n for name, n in described.roots.items() if name not in needs.others}
        delivered = {id(loader) for loader in objects_with_stand_in()}
        fit = fit_of(self.heap, roots, delivered, size, words, wrapping, keep=keep)
        if fit.useless:
            sure = names_surely_needed(needs.sure, described.roots, self.heap, words)
            needed = [why for name, why in fit.useless.items() if name in sure]
            if needed:
                raise CaptureError(f"{needed[0]} Nothing was started.")
        self._unfit += dict.fromkeys(fit.useless.values())
        self._unfit += fit.lines
        self._wraps = fit.wraps
        self._again = [one for one in fit.again if self._travels_whole(one)]
        known = rank_values(described.namespace)
        of_rank = [name for name in known if name in roots and not self._has_share(roots[name])]
        if of_rank and size > 1:
            advice = "and each of these ranks keeps its own" if keep else "or use --keep"
            self._unfit.append(
                f"{', '.join(of_rank)}: rank 0's, in every rank. Make"
                f" {'it' if len(of_rank) == 1 else 'them'} in this cell, {advice}."
            )

    def _travels_whole(self, one: Again) -> bool:
        """Tell whether kept ranks have no part of a model that is to be wrapped again."""
        return min(one.by, one.module) >= len(self._held.objects)

    def _has_share(self, root: int) -> bool:
        """Tell whether an object has a part that determines the rank to which it belongs."""
        objects = self.heap.objects
        return any(True for _ in shares_among(objects[n] for n in self.heap.reached([root])))

    def write(self, shell: InteractiveShell | None, **contents: Any) -> None:
        """Write the variables, and everything else that ranks need, into a sealed memfd.

        Raises :class:`CaptureError` if there is not enough memory.
        """
        check_room(self._described.sizes)
        heap = self.heap
        first = len(self._held.objects)  # lower numbers belong to what the ranks already have
        contents |= self._contents(shell, first)
        new = heap.memory_ranges(range(first, len(heap.objects)))
        memory = SentMemory(new, first=self._held.kept.next_region)
        try:
            self.fd, self.nbytes = write_file(memory, self._described.roots, contents)
        except NoRoom as error:
            size = size_in_words(sum(self._described.sizes.values()))
            raise CaptureError(
                f"the names of this cell have {size}: {error}. Nothing was started."
            ) from error
        heap.named, heap.objects[:first] = {}, self._held.objects
        heap.know(contents["held"]["numbers"])
        self._memory = {**self._held.memory(), **memory.stretches}
        self._forget_what_only_data_processes_bind()

    def _forget_what_only_data_processes_bind(self) -> None:
        """Remove the numbers of these objects: ranks do not build them, answers do not use them."""
        described, heap = self._described, self.heap
        if described.only_for_data:
            of_ranks = heap.reached([*described.roots.values(), *described.places.values()])
            heap.forget(heap.reached(described.only_for_data.values()) - of_ranks)

    def _contents(self, shell: InteractiveShell | None, first: int) -> dict[str, Any]:
        """Return the payload's contents except memory; ranks lack the numbers from ``first`` on."""
        heap = self.heap
        files, setup = cell_numbers(shell), setup_cells()
        sources = heap.sources()
        packages = {module.partition(".")[0] for module in heap.reader.modules}
        return {
            "project": self._described.project,
            "apart": [*self._described.edited],
            "process state": process_state.of_notebook(),
            "cells": {
                **{cell.file: cell.number for cell in setup},
                **{file: files[file] for file in sources if file in files},
            },
            "sources": sources,
            "history": history_of(shell),
            "imports": modules_used(packages),
            "imports of the cell": self._described.imports,
            "known modules": known_modules(),
            "setup": [tuple(cell) for cell in setup],
            "left behind": self._described.left_behind,
            "roots": self._in_order_of_binding(self._described.roots),
            "for data": self._names_for_data(),
            "places": self._described.places,
            "wrapped": self._wraps,
            "again": [tuple(one) for one in self._again],
            "shares": [heap.number[id(value)] for value, *_ in shares_among(heap.objects[first:])],
            "first": first,
            "states": heap.states[first:],
            "held": self._held.message_to_ranks(self._described.roots),
        }

    def _in_order_of_binding(self, roots: dict[str, int]) -> dict[str, int]:
        return dict(sorted(roots.items(), key=lambda root: self.heap.early(root[1])))

    def _names_for_data(self) -> dict[str, int]:
        """Return the variables that data processes bind; empty if the ranks bind the same ones."""
        only = self._described.only_for_data
        return self._in_order_of_binding(self._described.roots | only) if only else {}

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        return [
            *self._notices_of_large(),
            *self._notices_of_left_behind(),
            *self._unfit,
            *self._notices_of_unwrapped(),
            *self._notices_of_edited(),
            *self._notices_of_detached(),
            *self.notices_of_data,
            *self._notices_of_built(),
        ]

    def _notices_of_large(self) -> list[str]:
        return [
            f"{name} is {size_in_words(size)}; it is written to shared memory once for all ranks of"
            " a machine."
            for name, size in self._described.sizes.items()
            if size > LARGE
        ]

    def _notices_of_left_behind(self) -> list[str]:
        """Return lines about the places and parts of variables that stay in the notebook."""
        described = self._described
        without = [*described.without]
        for path, one in self.heap.left.items():
            if not isinstance(one.holder, types.ModuleType):
                without.append(described.why(path, one.part, one.error))
        parted = [one for one in self.heap.parted if id(one.holder) in self.heap.number]
        return [
            *(f"{why} The ranks do without it." for why in without),
            *(
                f"{told}: each process has its own, so the ranks do without."
                for told in summarize_attributes(parted)
            ),
        ]

    def _notices_of_unwrapped(self) -> list[str]:
        unwrapped = sorted(self._held.kept.wrapped & self._described.roots.keys())
        if not unwrapped:
            return []
        return [
            f"{', '.join(unwrapped)}: changed in the notebook since the last cell, or shares"
            " objects with what did. So it travels anew, without the parallel wrapper or the"
            " sharding that it had in the ranks; wrap it again before it is trained."
        ]

    def _notices_of_edited(self) -> list[str]:
        reached = self._described.modules_reached()
        modules = self._described.edited.values()
        edited = [module.__name__ for module in modules if module.__name__ in reached]
        if not edited:
            return []
        return [
            f"{', '.join(edited)}: edited since this notebook imported it. The ranks run the"
            " file as it is now, the notebook what it imported, each with data of its own;"
            f" importlib.reload({edited[0]}) in a cell of its own takes the file here, too."
        ]

    def _notices_of_detached(self) -> list[str]:
        names = ", ".join(self._described.detached)
        return (
            [f"{names}: tensors travel without the graph they were computed in."] if names else []
        )

    def _notices_of_built(self) -> list[str]:
        built, large = self._described.needs.built, self._described.too_large
        if not built:
            return []
        few = ", ".join(large[:5]) + (" …" if large[5:] else "")
        some = f" but {few} (large, or not to be pickled)" if large else ""
        return [
            f"the cell makes the names that it looks up ({built}), so all of the notebook's"
            f" travel{some}. Where it names what it needs, only that does."
        ]

    @property
    def notices_of_data(self) -> list[str]:
        """Lines about variables whose value in data workers differs from the cell's."""
        found, described = [], self._described
        if described.bound_by_cell:
            found.append(
                f"data workers have {', '.join(described.bound_by_cell)} as the notebook has it"
                " now, not as this cell binds it: the code of a registered loader uses it. Bind it"
                " in an earlier cell."
            )
        if described.missing_for_data:
            found.append(
                f"data workers lack {', '.join(described.missing_for_data)}, which the code of a"
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
    """Capture the variables that a cell needs.

    Args:
        cell: the text as typed.
        namespace: the notebook's namespace.
        shell: the notebook's shell, for history and magics.
        project: the project's folder.
        returned: the variables to send back; None for all that changed.
        kept: what the kept ranks have.
        anew: objects that are sent even if the ranks have them.
        for_data: whether data processes unpack the payload, too, and must find in it all that the
            delivered loaders need.
        size: how many ranks run the cell.
        keep: whether the ranks are kept after the cell.

    Raises:
        CaptureError: a surely needed variable cannot be pickled, or memory is short.
        SyntaxError: the cell is not Python.
        HeaderError: a variable in ``returned`` cannot exist.
    """
    with no_collection():
        future = shell.compile.flags & _FUTURE if shell is not None else 0
        needs = needs_of(cell, namespace)
        names_of_values, values = values_of_cells(needs.words, namespace)
        needs.maybe |= names_of_values
        kept = kept or Kept(namespace, project=str(project))
        if AUTORELOAD in sys.modules:  # autoreload reloads modules right before a cell
            note_files()
        edited = {
            n: module for n, module in edited_modules(str(project)).items() if n not in kept.places
        }
        set_apart(edited)
        held = Held(kept, namespace, anew)
        _check_returned(needs, namespace, {*(returned or ())} - held.names)
        _wait_for_devices()
        magics, extensions = magics_used(needs.words, shell)
        imports = list(imported_by(cell))
        asked = Asked(needs, magics | values, imports, edited, for_data)
        captured = Capture(describe(asked, held, namespace, str(project)))
        captured.check_fit(cell, size, keep=keep)
        told = None if returned is None else list(returned)
        captured.write(shell, future=future, extensions=extensions, returned=told)
        return captured


def _codes_of_module(name: str) -> list[types.CodeType]:
    """Return the code objects of a module's functions and methods."""
    held = [*attributes_of(loaded(name)).values()]
    methods = [
        vars(value) for value in held if isinstance(value, type) and value.__module__ == name
    ]
    held += [value for method in methods for value in method.values()]
    return [value.__code__ for value in held if isinstance(value, types.FunctionType)]


def _check_returned(needs: Needs, namespace: dict[str, Any], returned: Iterable[str]) -> None:
    """Reject a ``--return`` name that the notebook does not have and the cell does not bind."""
    unknown = [name for name in returned if name not in namespace]
    if needs.binds is None or not unknown:
        return
    functions = [value for value in namespace.values() if isinstance(value, types.FunctionType)]
    # a function of the notebook may bind the variable through ``global name``
    made = needs.binds.union(*(global_names(function.__code__) for function in functions))
    for name in unknown:
        if name not in made:
            raise HeaderError(
                f"--return {shown(name)}, which neither the notebook has nor the cell makes:"
                " correct it, or leave it out"
            )


def _wait_for_devices() -> None:
    """Wait for the GPU work of earlier cells before memory is read.

    If any of it failed, no data on the GPU can be trusted: raise :class:`CaptureError`.
    """
    try:
        wait_for_devices()
    except RuntimeError as error:
        raise CaptureError(
            f"an earlier cell's work on the GPU has failed ({first_line(error)}), and its tensors"
            " cannot be trusted. Nothing was started; restart the kernel."
        ) from error

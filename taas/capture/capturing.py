"""The notebook's side: names into a payload for the ranks."""

from __future__ import annotations
import __future__

import functools
import operator
import os
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.capture import process_state
from taas.capture.applying import Applied, apply_answer
from taas.capture.cells import (
    cell_numbers,
    extensions_with,
    history_of,
    imported_by,
    is_of_ipython,
    magics_used,
    modules_used,
    users_names,
    values_of_cells,
)
from taas.capture.code_by_value import global_names, words_in
from taas.capture.heap import Heap, LeftOut, TooLarge, culprit_of, no_collection, table_of
from taas.capture.holders import (
    edited_modules,
    go_to_ends,
    holders,
    left_out,
    loaded_as,
    modules_reached,
    set_apart,
)
from taas.capture.kept import Held, Kept
from taas.capture.libraries import wait_for_devices
from taas.capture.memory import SentMemory
from taas.capture.names import Needs, needs_of
from taas.capture.payload import check_room, write_file
from taas.capture.reader import Reader
from taas.errors import CaptureError, HeaderError
from taas.wording import first_line, nearest, shown, size_in_words

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LARGE = 256 << 20
"""A name with more bytes than this is announced; all names that are only perhaps meant have no more together."""

_CODE = (types.ModuleType, types.FunctionType, type)
"""It travels first: what it uses does, too."""
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
"""What ``from __future__ import …`` of an earlier cell means for all later ones."""


class Capture:
    """The names that a cell needs, but for those that are held. A context manager; closing it closes the memfd.

    Attributes:
        fd: sealed memfd with the payload.
        nbytes: its length.
        sizes: bytes of each name in it.
        left_behind: possibly needed names that cannot travel, each with its reason.

    Raises:
        CaptureError: a surely needed name cannot be pickled.
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
    ) -> None:
        self._needs, self._held, self._namespace, self._project = needs, held, namespace, project
        self._imports = imports
        self.heap = Heap(
            Reader(namespace, project=project), [namespace], SentMemory(regions=held.next_region)
        )
        self.heap.go_on(held.kept.heap, (), len(held.objects))
        self.heap.named = held.named
        self._roots: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.left_behind: dict[str, str] = {}
        self._detached: list[str] = []
        self._without: list[str] = []
        self._too_large: list[str] = []
        self._edited = edited
        self._loaded = loaded_as(project)
        self._pack(places)

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
    def names(self) -> tuple[str, ...]:
        """The names in it."""
        return tuple(self.sizes)

    def apply(self, answer_fd: int) -> Applied:
        """Do to the notebook what the cell did to rank 0: objects in place, names rebound.

        Args:
            answer_fd: what :meth:`Arrival.pack_answer` wrote; stays open.
        """
        set_apart(self._edited)
        self._applied = apply_answer(answer_fd, self._namespace, self.heap, self._memory, self._loaded)
        return self._applied

    def kept(self) -> Kept:
        """Return what the ranks hold after the cell, if they stay: for the next capture, once the answer is applied."""
        if self._applied is None:
            return Kept.unsure(self._namespace, {*self.names, *self._held.names})
        with no_collection():
            known = self._held, self.names, self._places, self.heap, self._applied
            return Kept.after(self._namespace, self._project, *known)

    # ------------------------------------------------------------ packing

    def _pack(self, places: dict[str, Any]) -> None:
        """Describe the names, with those that their functions turn out to use, and those of their classes."""
        left_out.clear()
        needs, namespace, reader = self._needs, self._namespace, self.heap.reader
        waiting = sorted((needs.sure | needs.maybe) - self._held.names)
        met = {*waiting, *self._held.names}
        while waiting:
            waiting.sort(key=lambda name: not isinstance(namespace[name], _CODE))
            name = waiting.pop(0)
            met_before = len(reader.names)
            error = self._add(name, namespace[name], self._roots)
            if error is not None:
                self.left_behind[name] = self._why(name, namespace[name], error)
                if name in needs.sure:
                    raise CaptureError(
                        f"the cell needs {name!r}: {self.left_behind[name]} Nothing was started."
                    ) from error
                continue
            used = set().union(*reader.names[met_before:]) - met - needs.settled
            new = [n for n in sorted(used) if n in namespace and not is_of_ipython(n, namespace[n])]
            waiting += new
            met.update(new)
        self._add_places(places)
        room = LARGE
        for name in sorted(needs.others - met):
            if self._add(name, namespace[name], self._roots, limit=room) is not None:
                self._too_large.append(name)
            room -= self.sizes.get(name, 0)

    def _add_places(self, places: dict[str, Any]) -> None:
        """Describe what holds something of the notebook: of the project's modules, those that something is found in."""
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
        words = self._needs.words.union(*map(words_in, reader.functions))
        return modules_reached(words, {*reader.modules, *self._imports}, self._project)

    def _add(
        self,
        name: str,
        value: Any,
        roots: dict[str, int],
        *,
        limit: int | None = None,
    ) -> Exception | None:
        """Describe a value; nothing of it is left where it cannot travel."""
        heap = self.heap
        length, pieces = len(heap.objects), len(heap.sent)
        roots[name] = heap.enter(value)
        heap.walk()
        if left := heap.leave_out(length):
            self._without += [why for part in left if (why := self._why_left_out(part))]
            heap.back_to(length)
            heap.sent.forget(pieces)
            return self._add(name, value, roots, limit=limit)
        error = next(iter(heap.failed.values()), None)
        nbytes = heap.size(range(length, len(heap.objects)))
        if error is None and limit is not None and nbytes > limit:
            error = TooLarge(f"it has more than {limit:,} bytes")
        if error is not None:
            heap.back_to(length)
            heap.sent.forget(pieces)
            del roots[name]
        elif roots is self._roots:
            self.sizes[name] = nbytes
            self._detached += [name] * heap.sent.is_detached(pieces)
        return error

    def write(self, shell: InteractiveShell | None, **contents: Any) -> None:
        """Write them into a file, with what the ranks have to know beside them, and of what they hold.

        Raises:
            CaptureError: there is no memory for it.
        """
        check_room(self.sizes)
        heap, reader = self.heap, self.heap.reader
        files = cell_numbers(shell)
        sources = reader.sources()
        words = {*self._needs.words}.union(*map(words_in, reader.functions))
        modules = [
            v.__name__ for name in self.sizes if isinstance(v := self._namespace.get(name), types.ModuleType)
        ]
        packages = {module.partition(".")[0] for module in reader.modules}
        first = len(self._held.objects)
        contents |= {
            "project": self._project,
            "apart": [*self._edited],
            "process state": process_state.of_notebook(),
            "cells": {file: files[file] for file in sources if file in files},
            "sources": sources,
            "history": history_of(shell),
            "imports": modules_used(modules, words, packages, self._namespace),
            "imports of the cell": self._imports,
            "left behind": self.left_behind,
            "roots": dict(sorted(self._roots.items(), key=lambda root: heap.early(root[1]))),
            "places": self._places,
            "first": first,
            "states": heap.states[first:],
            "fresh": heap.fresh,
            "held": self._held.told(self.sizes),
        }
        self.fd, self.nbytes = write_file(heap.sent, self.sizes, contents)
        heap.named, heap.objects[:first] = {}, self._held.objects
        heap.know(contents["held"]["numbers"])
        self._memory = {**self._held.memory(), **heap.sent.stretches}

    def _why(self, name: str, value: Any, error: Exception) -> str:
        reader = Reader(self._namespace, project=self._project)
        found = culprit_of(name, value, table_of(value, self._namespace, reader))
        if found is None:
            return f"{name!r} cannot travel to the ranks: {type(error).__name__}: {error}."
        inside = "" if found.path == name else f" cannot travel to the ranks, because {found.path}"
        return (
            f"{name!r}{inside} is a {found.kind}, which cannot be pickled ({found.reason}); {found.advice}."
        )

    def _why_left_out(self, left: LeftOut) -> str:
        """Say why a part stays behind; the data of a module are its own in ranks, but for what was merely too large."""
        if isinstance(left.holder, types.ModuleType) and not isinstance(left.error, TooLarge):
            return ""
        return self._why(left.path, left.part, left.error)

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        found = [
            f"{name} is {size_in_words(size)}; it is written to shared memory once for all ranks of a machine."
            for name, size in self.sizes.items()
            if size > LARGE
        ]
        found += [f"{why} The ranks do without it." for why in self._without]
        if unwrapped := self._held.unwrapped(self.sizes):
            found.append(
                f"{', '.join(unwrapped)}: changed in the notebook since the last cell, or shares objects with what did. So it "
                "travels anew, without the parallel wrapper or the sharding that it had in the ranks; wrap it again before "
                "it is trained."
            )
        edited = [n for module in self._edited.values() if (n := module.__name__) in self._reached()]
        if edited:
            found.append(
                f"{', '.join(edited)}: edited since this notebook imported it. The ranks run the file as it is now, the "
                f"notebook what it imported, each with data of its own; importlib.reload({edited[0]}) in a cell of its own takes the file here, too."
            )
        if self._detached:
            names = ", ".join(self._detached)
            found.append(f"{names}: tensors travel without the graph they were computed in.")
        if self._needs.built:
            few = f"{', '.join(self._too_large[:5])}{' …' if self._too_large[5:] else ''}"
            some = f" but {few} (large, or not to be pickled)" if self._too_large else ""
            found.append(
                f"the cell makes the names that it looks up ({self._needs.built}), so all of the notebook's travel{some}. "
                "Where it names what it needs, only that does."
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
) -> Capture:
    """Capture the names that a cell needs.

    Args:
        cell: the body as typed.
        namespace: the notebook's names.
        shell: whose cells' numbers tracebacks show.
        project: the folder ranks run in.
        returned: names that come back; None for all that changed, () for nothing.
        kept: what the ranks hold, where they have run cells before.
        anew: objects that travel whenever the cell needs them, whatever the ranks hold.

    Raises:
        CaptureError: a surely needed name cannot be pickled, or there is no memory for the names.
        HeaderError: a name that is to come back neither is there nor can be made by the cell.
        SyntaxError: the cell is wrong.
    """
    with no_collection():
        future = shell.compile.flags & _FUTURE if shell is not None else 0
        needs = needs_of(cell, namespace)
        needs.maybe |= values_of_cells(needs.words, namespace)
        kept = kept or Kept(namespace, project=str(project))
        edited = {n: module for n, module in edited_modules(str(project)).items() if n not in kept.places}
        set_apart(edited)
        held = Held(kept, namespace, anew)
        _check_returned(needs, namespace, {*(returned or ())} - held.names)
        _wait_for_devices()
        magics = magics_used(needs.words, namespace, shell)
        known = magics, list(imported_by(cell)), edited
        captured = Capture(namespace, needs, str(project), held, *known)
        while held.let_go(captured.heap):  # what travels has parts of them
            captured = Capture(namespace, needs, str(project), held, *known)
        told = None if returned is None else list(returned)
        extensions = extensions_with(needs.words, shell)
        captured.write(shell, future=future, extensions=extensions, returned=told)
        return captured


def _check_returned(needs: Needs, namespace: dict[str, Any], returned: Iterable[str]) -> None:
    """Refuse ``--return`` with a name that cannot come back: the notebook has none such, and the cell makes none."""
    unknown = [name for name in returned if name not in namespace]
    if needs.binds is None or not unknown:
        return
    functions = [value for value in namespace.values() if isinstance(value, types.FunctionType)]
    made = needs.binds.union(*(global_names(function.__code__) for function in functions))  # ``global name``
    for name in unknown:
        if name not in made:
            near = nearest(name, (*needs.binds, *users_names(namespace)), 0.6)
            step = f"type --return {near}" if near else "correct it, or leave it out"
            raise HeaderError(
                f"--return {shown(name)}, which neither the notebook has nor the cell makes: allowed are names that "
                f"one of them does; {step}"
            )


def _wait_for_devices() -> None:
    """Let what earlier cells asked of the GPU be done before memory is read.

    Raises:
        CaptureError: some of it failed, so nothing that was computed there can be trusted.
    """
    try:
        wait_for_devices()
    except RuntimeError as error:
        raise CaptureError(
            f"an earlier cell's work on the GPU has failed ({first_line(error)}), and its tensors cannot be trusted. "
            "Nothing was started; restart the kernel."
        ) from error

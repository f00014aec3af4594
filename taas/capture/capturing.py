"""The notebook's side: names into a payload for the ranks, rank 0's answer into the notebook's objects."""

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
from taas.capture.code_by_value import global_names, words_in
from taas.capture.kept import Held, Kept
from taas.capture.libraries import wait_for_devices
from taas.capture.loggers import go_to_ends
from taas.capture.losing import Paths
from taas.capture.memory import SentMemory
from taas.capture.modules import (
    among_names,
    edited_modules,
    imported_by,
    module_of,
    modules_reached,
    modules_used,
)
from taas.capture.names import Needs, needs_of
from taas.capture.of_ipython import history_of, is_of_ipython, magics_among_names, values_of_cells
from taas.capture.payload import check_room, packed_numbers, write_file
from taas.capture.pickling import NAMESPACE, Pickler, no_collection
from taas.capture.places import place_of
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

    def __init__(self, namespace: dict[str, Any], needs: Needs, project: str, held: Held) -> None:
        self._needs, self._held = needs, held
        self._namespace, self._project = namespace, project
        self._pickler = Pickler(
            namespace,
            project=project,
            table=held.new_table(),
            known={id(namespace): NAMESPACE},
            sent=SentMemory(regions=held.next_region),
            held=held,
        )
        self.sizes: dict[str, int] = {}
        self.left_behind: dict[str, str] = {}
        self._detached: list[str] = []
        self._too_large: list[str] = []
        self._edited: Sequence[str] = ()
        self._pack()

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
        go_to_ends()
        with among_names(self._namespace, self._project):
            self._applied = apply_answer(answer_fd, self._namespace, self._table, self._memory)
            return self._applied

    def kept(self) -> Kept:
        """Return what the ranks hold after the cell, if they stay: for the next capture, once the answer is applied."""
        if self._applied is None:
            return Kept.unsure(self._namespace, {*self.names, *self._held.names})
        with among_names(self._namespace, self._project), no_collection():
            return Kept.after(self._namespace, self._project, self._held, self.names, self._applied)

    # ------------------------------------------------------------ packing

    def _pack(self) -> None:
        """Write the names, with those that their functions turn out to use, and those of their classes."""
        needs, namespace = self._needs, self._namespace
        waiting = sorted((needs.sure | needs.maybe) - self._held.names)
        met = {*waiting, *self._held.names}
        while waiting:
            waiting.sort(key=lambda name: not isinstance(namespace[name], _CODE))
            name = waiting.pop(0)
            met_before = len(self._pickler.reader.names)
            error = self._add(name)
            if error is not None:
                self.left_behind[name] = self._why(name, error)
                continue
            used = sorted(self._pickler.wanted(met_before) - met - needs.settled)
            new = [name for name in used if name in namespace and not is_of_ipython(name, namespace[name])]
            waiting += new
            met.update(new)
        reached: set[str] = set()
        while new_modules := self._modules_reached() - reached:  # what is in their data reaches others
            reached |= new_modules
            for name in sorted(namespace.keys() - met):
                if module_of(name) in new_modules:
                    self._add(name, limit=LARGE, by_name=True)  # else the ranks' module has its own
        room = LARGE
        for name in sorted(needs.others - met):
            if self._add(name, limit=room) is not None:
                self._too_large.append(name)
            room -= self.sizes.get(name, 0)

    def _modules_reached(self) -> set[str]:
        reader = self._pickler.reader
        words = self._needs.words.union(*map(words_in, reader.functions))
        known = map(module_of, self._held.outdated())  # the ranks have older data of them
        return modules_reached(words, reader.modules.union(known), self._project)

    def _add(self, name: str, **options: Any) -> Exception | None:
        pickler = self._pickler
        before, pieces, detached = pickler.stream.tell(), len(pickler.sent), pickler.detached
        error = pickler.add((name, self._namespace[name]), **options)
        if error is None:
            self.sizes[name] = pickler.stream.tell() - before + pickler.sent.size(pieces)
            self._detached += [name] * (pickler.detached > detached)
        return error

    def shared(self) -> set[int]:
        """Return what of the names that are held stands in these, too, by ids."""
        return self._pickler.shared

    def write(self, cell: str, shell: InteractiveShell | None, **preface: Any) -> None:
        """Write them into a file, with what the ranks have to know beside them, and of what they hold.

        Raises:
            CaptureError: there is no memory for it.
        """
        check_room(self.sizes)
        pickler, (held, memory) = self._pickler, self._held.known()
        self._edited = () if held else edited_modules(self._project, self._modules_reached())
        del self._pickler
        last = self._held.new_table()
        new = {n: v for n, v in pickler.table.objects.items() if n >= last.next or n <= last.next_leaf}
        anew = {id(value) for value in new.values()} if held else ()  # a tuple, code: by its new number alone
        numbers = {number for number, value in held.items() if id(value) not in anew}
        files = getattr(getattr(shell, "compile", None), "_filename_map", {})
        preface |= {
            "project": self._project,
            "process state": process_state.of_notebook(),
            "cells": {file: files[file] for file in pickler.sources() if file in files},
            "history": history_of(shell),
            "imports": modules_used(self.sizes, self._needs.words, pickler, self._namespace),
            "imports of the cell": list(imported_by(cell)),
            "left behind": self.left_behind,
            "nobodys": pickler.nobodys,
            "held": {
                "names": sorted(self._held.names),
                "deleted": self._held.deleted(self.sizes),
                "numbers": packed_numbers(numbers),
                "regions": list(memory),
            },
        }
        self.fd, self.nbytes = write_file(pickler, self.sizes, preface)
        self._table = pickler.table.cut(new.keys() | numbers)
        self._memory = {**memory, **pickler.sent.stretches}

    def _why(self, name: str, error: Exception) -> str:
        """Say why a name cannot travel, or raise it as a CaptureError: it is surely needed."""
        found = Paths(self._namespace).culprit(
            name, self._namespace[name], lambda part: Pickler(self._namespace).add((part,))
        )
        text = f"{name!r} cannot travel to the ranks: {type(error).__name__}: {error}"
        if found is not None:
            inside = "" if found.path == name else f" cannot travel to the ranks, because {found.path}"
            text = f"{name!r}{inside} is a {found.kind}, which cannot be pickled ({found.reason}); {found.advice}."
        if name in self._needs.sure:
            raise CaptureError(f"the cell needs {name!r}: {text} Nothing was started.") from error
        return text

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        found = [
            f"{name} is {size_in_words(size)}; it is written to shared memory once for all ranks of a machine."
            for name, size in self.sizes.items()
            if size > LARGE
        ]
        found += [
            f"{why} {place.without}"
            for name, why in self.left_behind.items()
            if (place := place_of(name)) is not None
        ]
        if unwrapped := self._held.unwrapped(self.sizes):
            found.append(
                f"{', '.join(unwrapped)}: changed in the notebook since the last cell, or shares objects with what did. So it "
                "travels anew, without the parallel wrapper or the sharding that it had in the ranks; wrap it again before "
                "it is trained."
            )
        if self._edited:
            found.append(
                f"{', '.join(self._edited)}: edited since this notebook imported it. The ranks run the file as it is now, the "
                f"notebook what it imported; importlib.reload({self._edited[0]}) in a cell of its own takes the file here, too."
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
    seed_names: Iterable[str] = (),
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
        seed_names: names that travel whatever the cell reads.
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
        with (
            among_names(namespace, str(project)),
            magics_among_names(needs.words, namespace, shell) as extensions,
        ):
            held = Held(kept or Kept(namespace), namespace, anew)
            _check_returned(needs, namespace, {*(returned or ())} - held.names)
            needs.sure |= {name for name in seed_names if name in namespace}
            needs.maybe |= {name for name in namespace if name.startswith("%") or place_of(name)}
            _wait_for_devices()
            captured = Capture(namespace, needs, str(project), held)
            while held.let_go(captured.shared()):  # what travels has parts of them
                captured = Capture(namespace, needs, str(project), held)
            told = None if returned is None else list(returned)
            captured.write(cell, shell, future=future, extensions=extensions, returned=told)
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
            visible = [known for known, value in namespace.items() if not is_of_ipython(known, value)]
            near = nearest(name, (*needs.binds, *visible), 0.6)
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

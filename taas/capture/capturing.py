"""The notebook's side: names into a payload for the ranks, rank 0's answer into the notebook's objects."""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import operator
import os
import re
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from taas.capture.ahead import ahead_of, in_order
from taas.capture.applying import Applied, OwnMemory, apply_answer
from taas.capture.culprit import find_culprit
from taas.capture.ipython_names import is_of_ipython
from taas.capture.names import Needs, needs_of
from taas.capture.payload import write_file
from taas.capture.pickling import Pickler
from taas.capture.quiet import no_collection
from taas.capture.surroundings import Surroundings
from taas.capture.tensors import wait_for_devices
from taas.capture.texts import magic_of
from taas.errors import CaptureError
from taas.wording import first_line

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["LARGE", "Capture", "capture"]

LARGE = 256 << 20
"""A name with more bytes than this is announced."""

_CHECKED_FROM = 32 << 20
_CGROUP = Path("/sys/fs/cgroup")


@dataclass
class _Packed:
    """What one pass over the names gave."""

    pickler: Pickler
    names: list[str] = field(default_factory=list)
    left_behind: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    detached: list[str] = field(default_factory=list)


_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
)
"""What ``from __future__ import …`` of an earlier cell means for all later ones."""

_TAAS_CELL = "get_ipython().run_cell_magic('taas', "
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)


class _FirstFailureError(Exception):
    """A name cannot be pickled: start again, carefully, as the pickler's memo is spoilt."""


class Capture:
    """The captured names of a cell. A context manager; closing it closes the memfd.

    Attributes:
        fd: sealed memfd with the payload.
        nbytes: its length.
        names: names in it.
        left_behind: possibly needed names that cannot travel, each with its reason.
        notices: lines for the user.
    """

    def __init__(self, packed: _Packed, fd: int, nbytes: int, namespace: dict[str, Any]) -> None:
        self.fd, self.nbytes = fd, nbytes
        self.names = tuple(packed.names)
        self.left_behind = packed.left_behind
        self.notices = _notices(packed)
        self._namespace = namespace
        self._pickler = packed.pickler

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the payload's memory back; an answer can still be applied."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def apply(self, answer_fd: int) -> Applied:
        """Do to the notebook what the cell did to rank 0: objects in place, names rebound.

        Args:
            answer_fd: what :meth:`Arrival.pack_answer` wrote; stays open.
        """
        return apply_answer(answer_fd, self._namespace, self._objects, OwnMemory(self._pickler.sent))

    def _objects(self) -> list[Any]:
        """Return the objects that travelled, by number."""
        memo = self._pickler.memo.copy()
        objects: list[Any] = [None] * len(memo)
        for number, value in memo.values():
            objects[number] = value
        return objects


def capture(
    cell: str,
    namespace: dict[str, Any],
    shell: InteractiveShell | None,
    *,
    project: Path,
    returned: Sequence[str] | None = None,
    seed_names: Iterable[str] = (),
) -> Capture:
    """Capture the names that a cell needs.

    Args:
        cell: the body as typed.
        namespace: the notebook's names.
        shell: whose cells' numbers tracebacks show.
        project: the folder ranks run in.
        returned: names that come back; None for all that changed, () for nothing.
        seed_names: names that travel whatever the cell reads.

    Raises:
        CaptureError: a surely needed name cannot be pickled, or there is no memory for the names.
        SyntaxError: the cell is wrong.
    """
    with no_collection():
        return _capture(needs_of(cell, namespace), namespace, shell, project, returned, seed_names)


def _capture(
    needs: Needs,
    namespace: dict[str, Any],
    shell: InteractiveShell | None,
    project: Path,
    returned: Sequence[str] | None,
    seed_names: Iterable[str],
) -> Capture:
    needs.sure |= {name for name in seed_names if name in namespace}
    _wait_for_devices()
    try:
        packed = _pack(namespace, needs, careful=False)
    except _FirstFailureError:
        packed = _pack(namespace, needs, careful=True)
    pickler = packed.pickler
    preface = {
        "project": str(project),
        "surroundings": Surroundings.of_notebook(),
        "sources": pickler.sources(),
        "ahead": ahead_of(packed.names, namespace),
        "cells": _cell_numbers(pickler, shell),
        "future": getattr(getattr(shell, "compile", None), "flags", 0) & _FUTURE,
        "submodules": [
            *_submodules(packed, needs.words, namespace),
            *_imported_modules(packed, namespace.get("In", ())),
        ],
        "left behind": packed.left_behind,
        "returned": None if returned is None else list(returned),
    }
    _check_memory(sum(packed.sizes.values()), packed.sizes)
    fd, nbytes = write_file(pickler, tuple(packed.names), preface)
    pickler.sent.drop_staged()
    return Capture(packed, fd, nbytes, namespace)


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


def _pack(namespace: dict[str, Any], needs: Needs, *, careful: bool) -> _Packed:
    packed = _Packed(Pickler(namespace))
    pickler = packed.pickler
    waiting = in_order([*sorted(needs.sure), *sorted(needs.maybe)], namespace)
    met = set(waiting)
    while waiting:
        name = waiting.pop(0)
        value = namespace[name]
        checkpoint = pickler.checkpoint() if careful else None
        before, blocks, detached = pickler.stream.tell(), len(pickler.sent.blocks), pickler.detached
        try:
            pickler.dump((name, value))
        except Exception as error:  # whatever a user's __reduce__ raises
            if checkpoint is None:
                raise _FirstFailureError from None
            pickler.roll_back(checkpoint)
            packed.left_behind[name] = _reason(name, value, namespace, error, sure=name in needs.sure)
            continue
        packed.names.append(name)
        own = sum(high - low for block in pickler.sent.blocks[blocks:] for low, high in block.spans[:1])
        packed.sizes[name] = pickler.stream.tell() - before + own
        if pickler.detached > detached:
            packed.detached.append(name)
        new = {n for n in pickler.wanted - met - needs.settled if n in namespace and not is_of_ipython(n)}
        met |= new
        waiting = in_order([*waiting, *sorted(new)], namespace)
    return packed


def _reason(name: str, value: Any, namespace: dict[str, Any], error: Exception, *, sure: bool) -> str:
    """Say why a name cannot travel.

    Raises:
        CaptureError: it is surely needed.
    """
    culprit = find_culprit(name, value, lambda: Pickler(namespace))
    if culprit is None:
        text = f"{name!r} cannot travel to the ranks: {type(error).__name__}: {error}"
    else:
        what = (
            f"{name!r}"
            if culprit.path == name
            else f"{name!r} cannot travel to the ranks, because {culprit.path}"
        )
        text = f"{what} is a {culprit.kind}, which cannot be pickled ({culprit.reason}); {culprit.advice}."
    if sure:
        raise CaptureError(f"the cell needs {name!r}: {text} Nothing was started.") from error
    return text


def _notices(packed: _Packed) -> list[str]:
    notices = [
        f"{name} is {size / 2**30:.2f} GB; it is written to shared memory once for all ranks of a machine."
        for name, size in packed.sizes.items()
        if size > LARGE
    ]
    if packed.detached:
        notices.append(
            f"{', '.join(packed.detached)}: tensors travel without the graph they were computed in."
        )
    return notices


def _cell_numbers(pickler: Pickler, shell: InteractiveShell | None) -> dict[str, int]:
    numbers: dict[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: numbers[file] for file in pickler.sources() if file in numbers}


def _submodules(packed: _Packed, words: set[str], namespace: dict[str, Any]) -> list[str]:
    """Return modules that are used as attributes of captured ones (``concurrent.futures`` of ``concurrent``)."""
    words = set(words)
    codes = list(packed.pickler.codes)
    while codes:
        code = codes.pop()
        words.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    waiting = [v.__name__ for n in packed.names if isinstance(v := namespace.get(n), types.ModuleType)]
    found: list[str] = []
    while waiting:
        parent = waiting.pop()
        if not hasattr(sys.modules.get(parent), "__path__"):
            continue
        below = [f"{parent}.{word}" for word in words if f"{parent}.{word}" in sys.modules]
        found += below
        waiting += below
    return found


def _imported_modules(packed: _Packed, cells: Sequence[str]) -> list[str]:
    """Return modules that earlier cells imported, of packages that travel by reference.

    Importing one may have changed the package's classes (``import fastai.distributed`` gives learners methods),
    and the cell may rely on it without a name of it.
    """
    stream = packed.pickler.stream.getvalue()
    found: dict[str, None] = {}
    for cell in cells:
        in_ranks = _IMPORT.findall(_body_for_ranks(cell))
        here = [module for module in _IMPORT.findall(cell) if module in sys.modules]
        for module in (*in_ranks, *here):
            if "." in module and module.partition(".")[0].encode() in stream:
                found[module] = None
    return list(found)


def _body_for_ranks(cell: str) -> str:
    """Return the body of an earlier taas cell, as IPython's history has it; empty for any other cell."""
    if not cell.startswith(_TAAS_CELL):
        return ""
    try:
        magics = [magic for node in ast.walk(ast.parse(cell)) if (magic := magic_of(node)) is not None]
    except SyntaxError:  # it was typed so, and did not run
        return ""
    return "\n".join(texts[-1] for _, texts in magics)


# ---------------------------------------------------------------- memory


def _check_memory(need: int, sizes: dict[str, int]) -> None:
    if need < _CHECKED_FROM:
        return
    free = psutil.virtual_memory().available
    limit = _cgroup_room()
    if limit is not None:
        free = min(free, limit)
    if need < free:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    parts = ", ".join(f"{name} {sizes[name] / 2**30:.2f} GB" for name in largest)
    raise CaptureError(
        f"the names of this cell need {need / 2**30:.2f} GB of shared memory and {free / 2**30:.2f} GB is free "
        f"({parts}). Delete what isn't needed, load the data inside the cell, or use a machine with more memory."
    )


def _cgroup_room() -> int | None:
    """Return the bytes this process's control groups (version 2) still allow, or None."""
    rooms = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        path = Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip().lstrip("/")
        for folder in (_CGROUP / path, *(_CGROUP / path).parents):
            with contextlib.suppress(OSError, ValueError):  # the root has no limit; "max" is no number
                limit = int((folder / "memory.max").read_text())
                rooms.append(limit - int((folder / "memory.current").read_text()))
            if folder == _CGROUP:
                break
    return min(rooms, default=None)

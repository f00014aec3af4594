"""Lets code objects be marshalled in version 2, which has no slices.

From Python 3.14 on, a constant slice (``rows[:8]``) is among the constants of the code that uses
it, also as an item of a tuple (``image[..., :3]``). Only version 5 of marshal can write slices, but
its bytes depend on reference counts (see :mod:`taas.capture.describe.flat`). So a tuple takes the
place of each slice.
"""

from __future__ import annotations

import operator
from types import CodeType
from typing import Any

_SLICE = "\0slice"
"""The first item of such a tuple; no other constant of a program begins in this way."""


def without_slices(code: CodeType) -> CodeType:
    """Return the code with a tuple in the place of each slice; without a slice, the code itself."""
    return _with_constants(code, tuple(map(_without_slice, code.co_consts)))


def with_slices(code: CodeType) -> CodeType:
    """Return the code with the slices that :func:`without_slices` replaced."""
    return _with_constants(code, tuple(map(_with_slice, code.co_consts)))


def _with_constants(code: CodeType, constants: tuple[Any, ...]) -> CodeType:
    is_same = _same_or(code.co_consts, constants) is code.co_consts
    return code if is_same else code.replace(co_consts=constants)


def _without_slice(constant: Any) -> Any:
    if isinstance(constant, slice):
        return _SLICE, constant.start, constant.stop, constant.step
    if isinstance(constant, CodeType):
        return without_slices(constant)
    if isinstance(constant, tuple):
        return _same_or(constant, tuple(map(_without_slice, constant)))
    return constant


def _with_slice(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return with_slices(constant)
    if not isinstance(constant, tuple):
        return constant
    if constant[:1] == (_SLICE,):
        return slice(*constant[1:])
    return _same_or(constant, tuple(map(_with_slice, constant)))


def _same_or(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the old tuple if the new one has the same items."""
    return old if all(map(operator.is_, old, new)) else new

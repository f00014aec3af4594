"""Which kind an object is of."""

from __future__ import annotations

import array
import collections
import copyreg
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

from taas.capture.code_by_value import dispatch_table
from taas.capture.contents._arrays import ArrayKind, OptimizerKind, TensorKind, memory_of
from taas.capture.contents._python_objects import (
    DICT,
    AttributesKind,
    BytesKind,
    CellKind,
    ContainerKind,
    DequeKind,
    FunctionKind,
    ListKind,
    SetKind,
    TypedArrayKind,
)
from taas.capture.contents._reduced import ReducedKind
from taas.capture.contents.kind import Kind
from taas.capture.tensors import is_plain_optimizer, keeps_pickling_of_object, keeps_state_of_object

__all__ = ["Kinds", "memory_of"]


class Kinds:
    """The kinds of all types met, for a table of objects that travelled.

    Args:
        number_of: the number of an object in that table, or None.
    """

    def __init__(self, number_of: Callable[[Any], int | None]) -> None:
        self._kinds: dict[type, Kind | None] = dict(_EXACT)
        self._reduced = ReducedKind(number_of)

    def of(self, cls: type) -> Kind | None:
        """Return the kind of a type's objects, or None where they never change."""
        try:
            return self._kinds[cls]
        except KeyError:
            kind = self._kinds[cls] = self._find(cls)
            return kind

    def _find(self, cls: type) -> Kind | None:
        if issubclass(cls, (type, enum.Enum, types.ModuleType)) or cls in _BY_NAME:
            return None
        if getattr(cls, "__taas_stays__", False):  # a stand-in for the notebook's own object
            return None
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and issubclass(cls, torch.Tensor):
            return TensorKind()
        if torch is not None and issubclass(cls, (torch.UntypedStorage, torch.TypedStorage)):
            return None
        if numpy is not None and cls is numpy.ndarray:
            return ArrayKind()
        for base, items in _CONTAINERS:
            if issubclass(cls, base):
                return ContainerKind(cls, items)
        if is_plain_optimizer(cls):
            return OptimizerKind(cls)
        own = (
            keeps_pickling_of_object(cls) and keeps_state_of_object(cls) and cls not in copyreg.dispatch_table
        )
        return AttributesKind(cls) if own else self._reduced


_LIST, _SET, _DEQUE = ListKind(), SetKind(), DequeKind()
_CONTAINERS: tuple[tuple[type, Kind], ...] = (
    (dict, DICT),
    (list, _LIST),
    (set, _SET),
    (collections.deque, _DEQUE),
    (bytearray, BytesKind()),
)
_BY_NAME = frozenset(dispatch_table()) - set(copyreg.dispatch_table)
_NEVER_CHANGE: tuple[type, ...] = (
    str, bytes, int, float, bool, complex, type(None), tuple, frozenset, type, range, slice,
    types.BuiltinFunctionType, types.MethodType, types.CodeType, types.ModuleType, types.GenericAlias,
)  # fmt: skip
_EXACT: dict[type, Kind | None] = {
    list: _LIST,
    dict: DICT,
    set: _SET,
    collections.deque: _DEQUE,
    bytearray: BytesKind(),
    array.array: TypedArrayKind(),
    types.CellType: CellKind(),
    types.FunctionType: FunctionKind(),
    **dict.fromkeys(_NEVER_CHANGE),
}

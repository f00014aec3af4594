"""Processes that a rank starts afresh are rehearsed as it is; forked ones inherit it.

``spawn`` and ``forkserver`` pickle the ``multiprocessing.Process`` object, its target and arguments in it. A first
entry of its state installs the rehearsal as it is unpickled, so before the dataset of a DataLoader worker is. A
child that does not import torch does not pay for it.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any

from taas.rehearsal.after_import import patch_module


class _Reinstall:
    def __init__(self, local_rank: int, device_count: int) -> None:
        self.local_rank, self.device_count = local_rank, device_count

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_in_child, (self.local_rank, self.device_count)


def _install_in_child(local_rank: int, device_count: int) -> _Reinstall:
    from taas.rehearsal import install

    patch_module("torch", lambda torch: install(local_rank, device_count))
    return _Reinstall(local_rank, device_count)


def install(local_rank: int, device_count: int) -> None:
    """Let ``multiprocessing.Process`` carry the rehearsal."""
    carried = _Reinstall(local_rank, device_count)

    def state(self: BaseProcess) -> dict[str, Any]:
        return {"_rehearsal": carried, **self.__dict__}

    BaseProcess.__getstate__ = state  # type: ignore[assignment, method-assign]

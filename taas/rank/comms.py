"""Widgets in ranks: the ends of their channels that send a rank's messages, and how they travel.

A widget has a *comm*, a channel to its model in the front end, which draws it. The messages of a
rank's widget go where displays go, and the cell passes them on as the kernel's own
(notebook/view/comms.py).

A comm that travels with its widget, either way, becomes the comm with the same id there.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import comm
from comm.base_comm import BaseComm

Publish = Callable[..., None]


class _RankComm(BaseComm):
    """A comm whose messages go out with the rank's displays.

    No reply comes while the cell runs, as in a notebook.
    """

    __qualname__ = "BaseComm"  # as the kernel's: a check of what comes back compares it
    publish: Publish

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: list[bytes] | None = None,
        **keys: Any,
    ) -> None:
        """Send one message: ``comm_open``, ``comm_msg`` or ``comm_close``."""
        self.publish(
            comm_id=self.comm_id,
            msg_type=msg_type,
            data=data or {},
            metadata=metadata or {},
            buffers=[bytes(buffer) for buffer in buffers or ()],
            keys=keys,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce_comm(self)


def open_comms_to(publish: Publish) -> None:
    """Let libraries of this process open comms, whose messages go to ``publish``."""
    _RankComm.publish = staticmethod(publish)
    comm.create_comm = _RankComm


def let_comms_travel() -> None:
    """Let pickles of this process hold the kernel's comms, with the widgets that have them."""
    try:
        from ipykernel.comm.comm import BaseComm as KernelComm
    except ImportError:  # ipykernel before 6.18 has comms of its own
        return
    copyreg.pickle(KernelComm, _reduce_comm)


def _reduce_comm(end: BaseComm) -> tuple[Any, ...]:
    callbacks = {name: vars(end)[name] for name in ("_msg_callback", "_close_callback")}
    return end_of_comm, (end.comm_id, end.target_name), callbacks


def end_of_comm(comm_id: str, target_name: str) -> BaseComm:
    """Return this process's end of a comm that is already open."""
    manager = comm.get_comm_manager()
    end = manager.comms.get(comm_id)
    if end is None:
        end = comm.create_comm(comm_id=comm_id, target_name=target_name, primary=False)
        manager.register_comm(end)
    return end

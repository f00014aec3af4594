"""Widgets in ranks: the rank's ends of their comms, and how comms are pickled.

A widget has a *comm*, a channel to its model in the front end, which draws it. The messages of a
rank's widget are sent with the rank's displays, and the cell forwards them as if they were the
kernel's own (notebook/view/comms.py).

A comm that is pickled with its widget, in either direction, becomes the comm with the same id in
the other process.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import comm
from comm.base_comm import BaseComm

Publish = Callable[..., None]


class _RankComm(BaseComm):
    """A comm whose messages are sent with the rank's displays.

    No reply arrives while the cell runs, as in a notebook.
    """

    __qualname__ = "BaseComm"  # as the kernel's: a check of returned variables compares it
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
    """Let libraries in this process open comms; their messages go to ``publish``."""
    _RankComm.publish = staticmethod(publish)
    comm.create_comm = _RankComm


def let_comms_travel() -> None:
    """Let pickles of this process contain the kernel's comms, with the widgets that use them."""
    try:
        from ipykernel.comm.comm import BaseComm as KernelComm
    except ImportError:  # ipykernel before 6.18 has its own comms
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

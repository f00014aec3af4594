"""What a rank does before it knows which rank of which run it is; spares do it while nobody waits."""

from __future__ import annotations

import io
import multiprocessing.context
import os
import signal
import sys
import tempfile
import types
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from taas.messages.ranks import Preparation, RankReady
from taas.messages.wire import pack
from taas.rank import process_names
from taas.rank.streams import Outlet


@dataclass(frozen=True)
class Readied:
    """A process that can become any rank of its notebook's.

    Attributes:
        main: its fresh ``__main__``.
        shell: the shell on it.
    """

    main: types.ModuleType
    shell: Any


def make_ready(preparation: Preparation, outlet: Outlet) -> Readied:
    """Do all that is the same in every rank of a notebook.

    Args:
        preparation: what the notebook's ranks have in common.
        outlet: where the shell will write; it may be opened later.
    """
    from taas.rank.shell import make_main, make_shell

    _forget_forkserver()
    os.environ.clear()
    os.environ.update(preparation.environ)
    os.chdir(preparation.project)
    main = make_main()
    return Readied(main, make_shell(main, outlet, colors=preparation.colors))


def wait_for_order(agent: Connection) -> bytes:
    """Say that this process is ready, and return the order that it is given.

    Raises:
        EOFError: the agent has no use for it.
    """
    agent.send_bytes(pack(RankReady()))
    order = agent.recv_bytes()
    process_names.call(process_names.OWN)
    return order


def _forget_forkserver() -> None:
    """Drop what the forkserver's machinery left in this process that a fresh Python would not have."""
    tempfile.tempdir = None
    default: Any = multiprocessing.context._default_context
    default._actual_context = None  # the cell may call set_start_method, as a script may
    default._default_context = multiprocessing.get_context(
        "fork"
    )  # also where Python's default is forkserver
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    signal.signal(signal.SIGINT, signal.default_int_handler)

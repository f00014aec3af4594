"""A rank from its first instruction to its last: a process that takes orders, and is one rank of one run with each."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from taas import adopt
from taas.rank import lifeline
from taas.rank.agent_link import AgentLink
from taas.rank.cell import failed, lost_output, run_cell, wait_for_threads, with_notices
from taas.rank.outlet import Outlet
from taas.rank.preparing import Prepared, become_rank
from taas.rank.shell import RankShell, make_ready
from taas.wire.ranks import Preparation, RankEnded, RankKept, RankStage, RankStart, preparation_of


def main(agent: socket.socket, preparation: Preparation) -> NoReturn:
    """Be a rank, once the agent orders it; called in a process forked from the forkserver.

    Args:
        agent: the connection to it.
        preparation: what to do before there is an order.
    """
    lifeline.tie_to_agent()  # before anything can hang
    lifeline.name_process(lifeline.SPARE_NAME)
    outlet = Outlet()
    status = 1
    try:
        shell = None
        with contextlib.suppress(Exception):  # it is tried again, and said, when there is an order
            shell = make_ready(preparation, outlet)
        link = AgentLink(agent)
        link.send(RankStage(stage="ready"))
        status = _Orders(shell, link, outlet).carry_out()
        outlet.flush()
    except KeyboardInterrupt:  # one that came before the cell, and not while it is prepared
        status = 130
    except (EOFError, BrokenPipeError):  # the agent is gone
        status = 1
    finally:
        # Threads that still run must not hold the rank, nor half-destroyed process groups abort it.
        os._exit(status)


_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""What keeps back what is written to it."""


class _Orders:
    """What this process is told, one cell after the other."""

    def __init__(self, shell: RankShell | None, link: AgentLink, outlet: Outlet) -> None:
        self._shell, self._link, self._outlet = shell, link, outlet
        self._rank: Prepared | None = None

    def carry_out(self) -> int:
        """Return the status to leave with."""
        ended: RankEnded | None = None
        while (order := self._link.next_order()) is not None:
            lifeline.name_process(lifeline.OWN_NAME)
            start, payload = order
            ended = self._be(start, payload)
            if self._rank is None:  # it could not become one
                break
        done = ended is None or ended.outcome == "done"
        if ended is not None:
            with _shown():  # gloo aborts now and then if the process leaves a group open
                adopt.finish(failed=not done)
            self._outlet.flush()
            if done:  # of kept ranks
                wait_for_threads(ended.rank)
        _end_as_python_does()
        return 0 if done else 1

    def _be(self, start: RankStart, payload: int) -> RankEnded:
        link, outlet = self._link, self._outlet
        outlet.open(Path(start.staged.output) / str(start.rank))
        ended = self._run(start, payload)
        outlet.flush()
        if not link.in_rank:
            _leave_as_child(ended)
        link.answer = -1 if ended.answer is None else ended.answer.fd
        link.send(with_notices(ended, lost_output(ended, outlet)))
        with _shown():
            if start.order.delivery is not None:
                from taas.delivery import loader

                loader.disconnect()
        if start.order.cell.spec.keep and self._rank is not None:
            link.send(RankKept(rank=start.rank, **self._rank.sizes()))
        return ended

    def _run(self, start: RankStart, payload: int) -> RankEnded:
        try:
            if self._rank is None:
                shell = self._shell or make_ready(preparation_of(start.order, start.staged), self._outlet)
                self._rank = become_rank(start, shell, payload)
            self._rank.take_in(start, payload)
        except KeyboardInterrupt as error:
            return failed(start.rank, error)
        except BaseException as error:
            return failed(start.rank, error, "".join(traceback.format_exception(error)).splitlines())
        finally:
            os.close(payload)
        return run_cell(start, self._rank, self._link, self._outlet)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Show an error and go on: what was broken off may not close, and the names are here until the agent has them."""
    try:
        yield
    except Exception:
        traceback.print_exc()


def _leave_as_child(ended: RankEnded) -> NoReturn:
    """End a process that the cell forked and let run on to the cell's end: it is not the rank."""
    sys.stderr.write("\n".join(ended.traceback))
    sys.stderr.flush()
    os._exit(0 if ended.outcome == "done" else 1)


def _end_as_python_does() -> None:
    """Do what the end of Python would, which this process does not come to: exit functions, flushing."""
    atexit._run_exitfuncs()
    # isinstance would ask proxies
    for file in [part for part in gc.get_objects() if issubclass(type(part), _FILES)]:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or what it writes to is
            file.flush()

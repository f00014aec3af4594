"""A rank from start to end: a process that takes orders, and is one rank with each.

What it does at its first order has an order that is part of the design: the write rule while the
process has one thread, the rehearsal before a library but torch is imported, the names before the
shell. All but the names may be done ahead of the order (rank/ready_ahead.py).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from taas import adopt, capture
from taas.base.places import no_room
from taas.capture.settings.import_draws import last_imported
from taas.errors import CaptureError
from taas.protocol.ranks import (
    GetReady,
    Preparation,
    RankEnded,
    RankImported,
    RankKept,
    RankReady,
    RankStart,
    Readiness,
    preparation_of,
)
from taas.rank import lifeline
from taas.rank.agent_link import AgentLink, Order
from taas.rank.cell import failed, lost_output, run_cell, wait_for_threads, with_notices
from taas.rank.outlet import Outlet
from taas.rank.prepared import Prepared, become_rank, own_memory
from taas.rank.ready_ahead import ReadyAhead, installed_modules, low_priority
from taas.rank.shell import RankShell, make_ready
from taas.rank.users_traceback import lines_of, users_lines_of


def main(agent: socket.socket, preparation: Preparation) -> NoReturn:
    """Be a rank, once the agent orders it; called in a process forked from the forkserver."""
    lifeline.tie_to_agent()  # before anything can hang
    lifeline.name_process(lifeline.SPARE_NAME)
    outlet, shell = Outlet(), None
    status = 1  # also where the agent is gone
    try:
        with contextlib.suppress(Exception):  # it is tried again, and said, when there is an order
            shell = make_ready(preparation, outlet)
        link = AgentLink(agent)
        status = _Orders(shell, link, outlet).carry_out()
        outlet.flush()
    finally:
        # Threads that still run must not hold the rank, nor half-destroyed process groups abort it.
        os._exit(status)


class _Orders:
    """What this process is told, one cell after the other."""

    def __init__(self, shell: RankShell | None, link: AgentLink, outlet: Outlet) -> None:
        self._shell, self._link, self._outlet = shell, link, outlet
        self._rank: Prepared | None = None
        self._ahead: ReadyAhead | None = None
        self._last_of_all = last_imported()

    def carry_out(self) -> int:
        ended: RankEnded | None = None
        while (order := self._next_order()) is not None:
            lifeline.name_process(lifeline.OWN_NAME)
            start, payload = order
            if self._ahead is not None:
                self._take_or_leave(self._ahead, start)
            try:
                ended = self._be(start, payload)
            except OSError as error:
                # its output file cannot be made, or not even its last word be sent
                ended = failed(start.rank, error, lines_of(error), no_room(error) or None)
                self._link.send(ended)
                break
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

    def _next_order(self) -> Order | None:
        while isinstance(said := self._link.next_order(), GetReady):
            unfit = self._get_ready(said)
            state = Readiness.UNFIT if unfit else Readiness.IMPORTED
            self._link.send(RankReady(state=state, nbytes=own_memory(), unfit=unfit))
            if unfit:
                os._exit(1)
        return said

    # ------------------------------------------------------------ ahead of the first order

    def _get_ready(self, told: GetReady) -> str:
        """Become the expected rank, and import; return why this process is unfit, or nothing."""
        if self._shell is None:
            return "has no shell"
        self._outlet.open_nowhere()
        try:
            self._rank = become_rank(told.start, self._shell, outlives_run=True)
            self._ahead = ReadyAhead(told, self._rank.wall)
            with low_priority():
                self._ahead.import_modules(self._shell, self._link.has_word)
            self._outlet.flush()
        except Exception as error:  # it is half made: the next run will meet it, and say so
            return f"raises {type(error).__name__}: {error}"
        return "; ".join(self._ahead.unfit)

    def _take_or_leave(self, ahead: ReadyAhead, start: RankStart) -> None:
        """Say whether this process takes the order; end if not: it cannot be another rank."""
        self._ahead = None
        fits = ahead.fits(start)
        self._link.send(RankReady(state=Readiness.TAKES if fits else Readiness.UNFIT))
        if not fits:
            os._exit(1)
        adopt.join(start.order.store)

    # ------------------------------------------------------------ an order

    def _be(self, start: RankStart, payload: int) -> RankEnded:
        link, outlet = self._link, self._outlet
        outlet.open(Path(start.staged.output) / str(start.rank))
        ended = self._run(start, payload)
        outlet.flush()
        link.last_word.say(with_notices(ended, lost_output(ended, outlet)))
        with _shown():
            if start.order.delivery is not None:
                from taas.delivery import loader

                loader.disconnect()
        if start.order.cell.spec.keep and self._rank is not None:
            link.send(RankKept(rank=start.rank, **self._rank.sizes()))
        elif ended.outcome == "done" and (modules := installed_modules(self._last_of_all)):
            link.send(RankImported(modules=modules))
        return ended

    def _run(self, start: RankStart, payload: int) -> RankEnded:
        try:
            if self._rank is None:
                shell = self._shell or make_ready(
                    preparation_of(start.order, start.staged), self._outlet
                )
                capture.check_versions(capture.peek(payload))
                self._rank = become_rank(start, shell, outlives_run=start.order.cell.spec.keep)
            self._rank.take_in(start, payload)
        except KeyboardInterrupt as error:
            return failed(start.rank, error)
        except CaptureError as error:
            return failed(start.rank, error, users_lines_of(error))
        except BaseException as error:
            return failed(start.rank, error, lines_of(error), no_room(error) or None)
        finally:
            os.close(payload)
        return run_cell(start, self._rank, self._link, self._outlet)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Show an error and go on: the agent still has to get the names from this process."""
    try:
        yield
    except Exception:
        traceback.print_exc()


def _end_as_python_does() -> None:
    """Run exit functions and flush files, as Python's own end does; this process skips that."""
    atexit._run_exitfuncs()
    keep_back = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    # isinstance would ask proxies
    for file in [part for part in gc.get_objects() if issubclass(type(part), keep_back)]:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or what it writes to is
            file.flush()

"""A rank from start to end: a process that receives jobs, and acts as one rank for each.

The order of the steps before the first cell is part of the design: the write protection is set up
while the process has one thread, the rehearsal is installed before any library other than torch is
imported, and the variables are restored after both, but before the shell is prepared for the cell.
Everything except the variables may be done before the job arrives (rank/ready_ahead.py).
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
    """Be a rank once the agent sends a job; called in a process forked from the forkserver."""
    lifeline.tie_to_agent()  # before anything can hang
    lifeline.name_process(lifeline.SPARE_NAME)
    outlet, shell = Outlet(), None
    status = 1  # including when the agent is gone
    try:
        with contextlib.suppress(Exception):  # retried, and the error reported, when there is a job
            shell = make_ready(preparation, outlet)
        link = AgentLink(agent)
        status = _Orders(shell, link, outlet).carry_out()
        outlet.flush()
    finally:
        # Running threads must not keep the rank alive, nor half-destroyed process groups abort it.
        os._exit(status)


class _Orders:
    """The jobs of this process, one cell after the other."""

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
                # Its output file cannot be created, or not even its last word can be sent.
                ended = failed(start.rank, error, lines_of(error), no_room(error) or None)
                self._link.send(ended)
                break
            if self._rank is None:  # this process could not become a rank
                break
        done = ended is None or ended.outcome == "done"
        if ended is not None:
            with _shown():  # gloo sometimes aborts if the process leaves a group open
                adopt.finish(failed=not done)
            self._outlet.flush()
            if done:  # the threads of kept ranks
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

    # ------------------------------------------------------------ before the first job

    def _get_ready(self, told: GetReady) -> str:
        """Become the expected rank and import modules; return why this process is unfit, or ""."""
        if self._shell is None:
            return "has no shell"
        self._outlet.open_nowhere()
        try:
            self._rank = become_rank(told.start, self._shell, outlives_run=True)
            self._ahead = ReadyAhead(told, self._rank.wall)
            with low_priority():
                self._ahead.import_modules(self._shell, self._link.has_word)
            self._outlet.flush()
        except Exception as error:  # half prepared: the next run will meet the error and report it
            return f"raises {type(error).__name__}: {error}"
        return "; ".join(self._ahead.unfit)

    def _take_or_leave(self, ahead: ReadyAhead, start: RankStart) -> None:
        """Report whether this process takes the job.

        If not, exit, since it cannot be another rank.
        """
        self._ahead = None
        fits = ahead.fits(start)
        self._link.send(RankReady(state=Readiness.TAKES if fits else Readiness.UNFIT))
        if not fits:
            os._exit(1)
        adopt.join(start.order.store)

    # ------------------------------------------------------------ a job

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
    """Print an error and go on: the agent still has to read the variables from this process."""
    try:
        yield
    except Exception:
        traceback.print_exc()


def _end_as_python_does() -> None:
    """Run exit functions and flush files as Python does at exit; ``os._exit`` skips both."""
    atexit._run_exitfuncs()
    keep_back = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    # isinstance would call into proxy objects
    for file in [part for part in gc.get_objects() if issubclass(type(part), keep_back)]:
        with contextlib.suppress(OSError, ValueError):  # the file, or its target, is closed
            file.flush()

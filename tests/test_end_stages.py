"""The stages in which a rank ends: ARCHITECTURE.md draws their tables, no other step is taken."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from taas.agent import rank_endings
from taas.agent.processes import ForkedProcess
from taas.agent.rank_endings import EndStage, Rank
from taas.protocol.framing import pack
from taas.protocol.ranks import RankEnded, RankRequest, RankStage, hear, socket_pair, tell
from taas.rank import last_word
from taas.rank.agent_link import AgentLink

ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"
ROW = re.compile(r"^\| `([a-z ]+)` \|.*\|([^|]*)\|$", re.MULTILINE)


@pytest.mark.parametrize("steps", [rank_endings.STEPS, last_word.STEPS], ids=["rank", "last word"])
def test_architecture_has_the_steps_of_the_code(
    steps: Mapping[enum.Enum, frozenset[enum.Enum]],
) -> None:
    """Each stage is a row there, with what may follow it."""
    section = ARCHITECTURE.read_text().partition("## How a rank ends")[2].partition("\n## ")[0]
    drawn = {stage: {*re.findall("`([a-z ]+)`", after)} for stage, after in ROW.findall(section)}
    for stage, after in steps.items():
        assert drawn[stage.value] == {one.value for one in after}


# ---------------------------------------------------------------- the end of a rank


class Sleeper(ForkedProcess):
    """A process that sleeps until a signal ends it."""

    def __init__(self) -> None:
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        with warnings.catch_warnings():
            # this process may have threads; the child execs nothing
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        super().__init__(process)

    def interrupt(self) -> None:
        self.send(signal.SIGINT)

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.recorded.kill()
        self._process.join()


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank whose process sleeps."""
    process: Any = Sleeper()
    yield Rank(0, process)
    process.close()


STEP: dict[EndStage, Callable[[Rank], None]] = {
    EndStage.LET_FAIL: Rank.let_fail,
    EndStage.INTERRUPTED: Rank.interrupt,
    EndStage.CALLED_OFF: Rank.call_off,
    EndStage.TERMINATED: Rank.terminate,
    EndStage.TO_LEAVE: Rank.expect_to_leave,
    EndStage.KILLED: Rank.kill_session,
}


@pytest.mark.parametrize("stage", STEP, ids=lambda stage: stage.value)
def test_a_rank_takes_the_steps_of_the_table_and_no_others(rank: Rank, stage: EndStage) -> None:
    """A step that is not in the table raises, and leaves the rank in its stage."""
    STEP[stage](rank)
    assert rank.stage is stage
    for to, step in STEP.items():
        if to not in rank_endings.STEPS[stage] and to is not EndStage.KILLED:
            with pytest.raises(RuntimeError, match=f"rank 0.* has no step to '{to.value}'"):
                step(rank)
            assert rank.stage is stage


def test_a_refused_step_sends_no_signal(rank: Rank) -> None:
    """A rank that is to leave by itself is not interrupted."""
    rank.expect_to_leave()
    with pytest.raises(RuntimeError):
        rank.interrupt()
    with pytest.raises(RuntimeError):
        rank.terminate()
    assert rank.process.alive
    rank.kill()
    rank.kill()  # once is enough, and twice is no error: a large process takes a while to die
    assert rank.process.exitcode in (None, -signal.SIGKILL)


# ---------------------------------------------------------------- the last word of a rank


def runs_on(count: int) -> None:
    """Run Python code for a while."""
    for _ in range(count):
        pass


def waits_in_c() -> None:
    """Wait in C code for good, which no signal ends."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


class OneCell:
    """A process that is a rank for one cell; the test is its agent."""

    def __init__(self, cell: Callable[[], None]) -> None:
        self._agent, its = socket_pair()
        self.said: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._be_rank(AgentLink(its), cell)
        its.close()

    def _be_rank(self, link: AgentLink, cell: Callable[[], None]) -> None:
        """Do what rank/entry and rank/cell do around a cell."""
        signal.alarm(100)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            link.begin_cell(lambda: _ended("interrupted"), lambda answer: None)
            link.send(RankStage(stage="begun"))
            cell()
            link.last_word.end_cell()
            link.last_word.say(_ended("done"))
            link.next_order()
        finally:
            os._exit(0)

    def tell(self, what: str) -> None:
        tell(self._agent, pack(RankRequest(what=what)))

    def hear_until(self, kind: type) -> None:
        """Hear it until it has said a message of this kind, or is gone."""
        closed = False
        while not closed and not any(isinstance(one, kind) for one in self.said):
            multiprocessing.connection.wait([self._agent])
            heard, closed = hear(self._agent)
            self.said += heard

    @property
    def last_words(self) -> list[str]:
        """The last words among what it has said."""
        return [one.outcome for one in self.said if isinstance(one, RankEnded)]

    def leave(self) -> int:
        """Let it leave, and hear all that it still says; returns its exit status."""
        self.tell("leave")
        self.hear_until(type(None))
        self._agent.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _ended(outcome: str) -> RankEnded:
    return RankEnded(rank=0, outcome=outcome, at=time.time())


@pytest.mark.parametrize(
    ("cell", "asked", "says", "status"),
    [
        (lambda: None, "notice", ["done"], 0),
        (lambda: runs_on(1 << 62), "names", ["interrupted"], 1),
        (lambda: time.sleep(600), "names", ["interrupted"], 1),
        (waits_in_c, "names", ["interrupted"], 1),
    ],
    ids=["the cell's end", "it runs Python code", "it sleeps", "it waits in C code"],
)
def test_who_says_the_last_word(
    cell: Callable[[], None], asked: str, says: list[str], status: int
) -> None:
    """The main thread at the cell's end; of a stopped cell, the thread that can."""
    rank = OneCell(cell)
    rank.hear_until(RankStage)
    rank.tell(asked)
    rank.hear_until(RankEnded)
    assert rank.leave() == status
    assert rank.last_words == says


def test_a_cell_that_is_stopped_at_its_end_has_one_last_word() -> None:
    """Whenever the question comes: the main thread, or who stops it, says it, and no second one.

    Neither waits for the other for good.
    """
    for spins in range(0, 60_000, 1_000):
        rank = OneCell(lambda: runs_on(spins))  # noqa: B023  forked at once
        rank.hear_until(RankStage)
        rank.tell("names")
        rank.hear_until(RankEnded)
        status = rank.leave()
        assert (rank.last_words, status) in ((["done"], 0), (["interrupted"], 1))

"""The kernel's side of a run, without processes: what it makes of interrupts, of errors and of late messages."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taas import launcher
from taas.capture import Applied
from taas.errors import RunLost
from taas.header import RunSpec
from taas.launcher import Foreground, start_background
from taas.messages.agents import Printed
from taas.messages.clients import Abandon, Accepted, AnswerTaken, Interrupt, RunEnded, Submit
from taas.messages.ranks import Output
from taas.messages.wire import Memory, Message


class Wire:
    """A supervisor that says this, step by step, and to which was said that.

    Args:
        steps: what is heard at each look round.
    """

    def __init__(self, *steps: list[Message]) -> None:
        self._steps = iter(steps)
        self.said: list[Message] = []
        self.alive = True

    def say(self, message: Message) -> None:
        self.said.append(message)

    def hear(self, timeout_ms: int) -> list[Message]:
        del timeout_ms
        return next(self._steps)

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """A run of one rank."""
    return Submit(
        cell="",
        execution_count=1,
        project=str(tmp_path),
        environ={},
        payload=Memory(0, 0, 0),
        spec=RunSpec(),
        gpus=(),
        device="CPU",
        colors="nocolor",
        waiting=True,
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The supervisor has an hour to say something."""
    monkeypatch.setattr(launcher, "_SILENCE_SECONDS", 3600.0)
    yield


def follow(wire: Wire, submit: Submit, interrupts: list[int]) -> RunEnded:
    return Foreground(wire, None, interrupts).follow(submit, None)  # type: ignore[arg-type]


def accepted(folder: Path, run: str = "mine") -> Accepted:
    return Accepted(run=run, folder=str(folder))


def printed(run: str, text: str) -> Printed:
    return Printed(run=run, vm=0, rank=0, size=len(text), items=(Output(kind="stdout", text=text),))


@pytest.mark.usefixtures("patient")
def test_pressing_quickly_kills_no_supervisor(submit: Submit, tmp_path: Path) -> None:
    """It has the background runs of the same kernel, too; it is at ending this one."""
    ended = RunEnded(run="mine", outcome="interrupted")
    wire = Wire([accepted(tmp_path)], [], [], [ended])
    assert follow(wire, submit, [2] * 8) == ended
    assert wire.alive
    assert Interrupt(run="mine") in wire.said


def test_a_supervisor_that_stays_silent_is_killed(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person at the keyboard gets the prompt back."""
    monkeypatch.setattr(launcher, "_SILENCE_SECONDS", -1.0)
    wire = Wire([accepted(tmp_path)], [])
    with pytest.raises(KeyboardInterrupt):
        follow(wire, submit, [2] * 4)
    assert not wire.alive


@pytest.mark.usefixtures("patient")
def test_a_background_run_that_is_interrupted_at_once_is_ended(submit: Submit, tmp_path: Path) -> None:
    """The interrupt waits for the run's name: a run that goes on unknown would be the next cell's handle."""
    wire = Wire([], [], [accepted(tmp_path)])
    with pytest.raises(KeyboardInterrupt, match="mine was interrupted before it had begun"):
        start_background(wire, submit, None, [], [2])  # type: ignore[arg-type]
    assert wire.said == [submit, Interrupt(run="mine")]


def test_a_run_whose_output_cannot_be_shown_is_ended(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would follow it any more."""

    def fail(*_: Any) -> None:
        raise ValueError("a front end that refuses it")

    monkeypatch.setattr(launcher.CellOutput, "show", fail)
    wire = Wire([accepted(tmp_path)], [printed("mine", "hello")])
    with pytest.raises(ValueError, match="refuses it"):
        follow(wire, submit, [])
    assert wire.said[-1] == Abandon(run="mine")


class _Unpacking:
    """Names whose unpacking is interrupted so many times."""

    def __init__(self, presses: int) -> None:
        self._presses = presses

    def apply(self, fd: int) -> Applied:
        del fd
        for _ in range(self._presses):
            signal.raise_signal(signal.SIGINT)
        return Applied()


class _Shell:
    compile = types.SimpleNamespace(_filename_map={})


@pytest.mark.parametrize("presses", [1, 2])
def test_unpacking_that_does_not_end_can_be_interrupted(submit: Submit, tmp_path: Path, presses: int) -> None:
    """Whoever presses a second time means it."""
    fd = os.memfd_create("answer")
    ended = RunEnded(run="mine", outcome="done", answer=Memory(os.getpid(), fd, 0))
    wire = Wire([accepted(tmp_path)], [ended])
    try:
        with launcher.interrupts_counted() as interrupts:
            foreground = Foreground(wire, _Shell(), interrupts)  # type: ignore[arg-type]
            if presses == 1:
                assert foreground.follow(submit, _Unpacking(1)) == ended  # type: ignore[arg-type]
            else:
                with pytest.raises(KeyboardInterrupt, match="while the run's names were unpacked"):
                    foreground.follow(submit, _Unpacking(2))  # type: ignore[arg-type]
    finally:
        os.close(fd)
    assert AnswerTaken(run="mine") in wire.said


def test_an_agent_that_is_killed_with_the_names_in_its_hands(submit: Submit, tmp_path: Path) -> None:
    """The cell says what was lost, not which file is missing."""
    answer = Memory(1 << 30, 3, 0)  # no such process
    wire = Wire([accepted(tmp_path)], [RunEnded(run="mine", outcome="done", answer=answer)])
    with pytest.raises(RunLost, match="agent that held the run's names was killed"):
        follow(wire, submit, [])


def test_what_comes_late_of_another_run_is_not_this_ones(
    submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its output nor its end."""
    ended = RunEnded(run="mine", outcome="done")
    late = [printed("old", "old"), RunEnded(run="old", outcome="interrupted")]
    wire = Wire([late[0], accepted(tmp_path), *late], [printed("mine", "new")], [ended])
    assert follow(wire, submit, []) == ended
    assert capsys.readouterr().out == "new"

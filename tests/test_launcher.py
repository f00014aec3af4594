"""The kernel's side of a run, without processes: what it makes of interrupts, of errors and of late messages."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taas.capture import Applied
from taas.errors import RunLost
from taas.header.options import RunSpec
from taas.notebook import foreground
from taas.notebook.cell_output import CellOutput
from taas.notebook.foreground import Foreground, Interrupts, start_background
from taas.runs.events import EVENTS, LARGEST_TEXT, RECORD
from taas.runs.records import RunRecord
from taas.wire.clients import RunRequest, RunState, Submit
from taas.wire.framing import Memory, Message
from taas.wire.ranks import Cell, Workspace


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

    def hear(self, timeout_ms: int, reader: Any = None) -> list[Message]:
        del timeout_ms, reader
        return next(self._steps, [])

    def kill(self) -> None:
        self.alive = False


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """A run of one rank."""
    return Submit(
        cell=Cell("", 1, RunSpec(), "nocolor"),
        workspace=Workspace(str(tmp_path), {}),
        payload=Memory(0, 0, 0),
        gpus=(),
        device="CPU",
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The supervisor has an hour to say something."""
    monkeypatch.setattr(foreground, "_SILENCE_SECONDS", 3600.0)
    yield


class _Shell:
    """A terminal's."""

    compile = types.SimpleNamespace(_filename_map={})
    display_pub = None


def pressed(times: int) -> Interrupts:
    """So many interrupts that came already."""
    interrupts = Interrupts()
    interrupts.count = times
    return interrupts


def follow(wire: Wire, submit: Submit, interrupts: Interrupts) -> RunState:
    return Foreground(wire, _Shell(), interrupts).follow(submit, None)  # type: ignore[arg-type]


def ended(record: RunRecord, outcome: str, answer: Memory | None = None) -> RunState:
    over = msgspec.structs.replace(record, state="over", outcome=outcome)
    return RunState(record=over, answer=answer)


def own(capsys: pytest.CaptureFixture[str]) -> str:
    """What was shown, without taas' own lines."""
    shown = capsys.readouterr().out.splitlines(True)
    return "".join(line for line in shown if not line.startswith("taas: "))


def prints(record: RunRecord, text: str) -> None:
    """Let rank 0 print something."""
    folder = record.folder / "0"
    folder.mkdir(exist_ok=True)
    with (folder / EVENTS).open("ab") as file:
        for at in range(0, len(text), LARGEST_TEXT):
            part = text[at : at + LARGEST_TEXT]
            file.write(RECORD.pack(0, len(part), 0, 0) + part.encode())


@pytest.mark.usefixtures("patient")
def test_pressing_quickly_kills_no_supervisor(submit: Submit, record: RunRecord) -> None:
    """It has the background runs of the same kernel, too; it is at ending this one."""
    end = ended(record, "interrupted")
    wire = Wire([RunState(record=record)], [], [], [end])
    assert follow(wire, submit, pressed(8)) == end
    assert wire.alive
    assert RunRequest(run="mine", what="interrupt") in wire.said


def test_a_supervisor_that_stays_silent_is_killed(
    submit: Submit, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person at the keyboard gets the prompt back."""
    monkeypatch.setattr(foreground, "_SILENCE_SECONDS", -1.0)
    wire = Wire([RunState(record=record)], [])
    with pytest.raises(KeyboardInterrupt):
        follow(wire, submit, pressed(2))
    assert not wire.alive


@pytest.mark.usefixtures("patient")
def test_a_background_run_that_is_interrupted_at_once_is_ended(submit: Submit, record: RunRecord) -> None:
    """The interrupt waits for the run's name: a run that goes on unknown would be the next cell's handle."""
    wire = Wire([], [], [RunState(record=record)])
    with pytest.raises(KeyboardInterrupt, match="mine was interrupted before it had begun"):
        start_background(wire, submit, pressed(1))  # type: ignore[arg-type]
    assert wire.said == [submit, RunRequest(run="mine", what="interrupt")]


def test_a_run_whose_output_cannot_be_shown_is_ended(
    submit: Submit, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would follow it any more."""

    def fail(*_: Any) -> None:
        raise ValueError("a front end that refuses it")

    monkeypatch.setattr(CellOutput, "show", fail)
    prints(record, "hello")
    wire = Wire([RunState(record=record)])
    with pytest.raises(ValueError, match="refuses it"):
        follow(wire, submit, pressed(0))
    assert wire.said[-1] == RunRequest(run="mine", what="let go")


class _Unpacking:
    """Names whose unpacking is interrupted so many times."""

    def __init__(self, presses: int) -> None:
        self._presses = presses

    def apply(self, fd: int) -> Applied:
        del fd
        for _ in range(self._presses):
            signal.raise_signal(signal.SIGINT)
        return Applied()


@pytest.mark.parametrize("presses", [1, 2])
def test_unpacking_that_does_not_end_can_be_interrupted(
    submit: Submit, record: RunRecord, presses: int
) -> None:
    """Whoever presses a second time means it."""
    fd = os.memfd_create("answer")
    end = ended(record, "done", Memory(os.getpid(), fd, 0))
    wire = Wire([RunState(record=record)], [end])
    try:
        with Interrupts() as interrupts:
            waiting = Foreground(wire, _Shell(), interrupts)  # type: ignore[arg-type]
            if presses == 1:
                assert waiting.follow(submit, _Unpacking(1)) == end  # type: ignore[arg-type]
            else:
                with pytest.raises(KeyboardInterrupt, match="while the run's names were unpacked"):
                    waiting.follow(submit, _Unpacking(2))  # type: ignore[arg-type]
    finally:
        os.close(fd)
    assert RunRequest(run="mine", what="let go") in wire.said


def test_an_agent_that_is_killed_with_the_names_in_its_hands(submit: Submit, record: RunRecord) -> None:
    """The cell says what was lost, not which file is missing."""
    answer = Memory(1 << 30, 3, 0)  # no such process
    wire = Wire([RunState(record=record)], [ended(record, "done", answer)])
    with pytest.raises(RunLost, match="agent that held the run's names was killed"):
        follow(wire, submit, pressed(0))


def test_what_comes_late_of_another_run_is_not_this_ones(
    submit: Submit, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end is not, and a run's output is read from its own folder."""
    late = ended(msgspec.structs.replace(record, name="old", id="aaaaaa"), "interrupted")
    end = ended(record, "done")
    prints(record, "new\n")
    wire = Wire([late, RunState(record=record), late], [], [late], [end])
    assert follow(wire, submit, pressed(0)) == end
    assert own(capsys) == "new\n"


def test_all_that_was_written_is_shown_before_the_run_counts_as_ended(
    submit: Submit, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it is much, and where the record on a full disk never said that the run is over."""
    lines = "".join(f"{number}\n" for number in range(50_000))
    for _ in range(10):
        prints(record, lines)
    assert (
        follow(Wire([RunState(record=record)], [ended(record, "done")]), submit, pressed(0)).record.outcome
        == "done"
    )
    assert own(capsys) == lines * 10


def test_an_interrupt_while_the_rest_of_the_output_is_shown_gives_the_prompt_back(
    submit: Submit, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is over; what was not shown stays in its folder, and the cell says so."""
    prints(record, "x" * (8 << 20))
    interrupts = Interrupts()

    class Pressed(Wire):
        def hear(self, timeout_ms: int, reader: Any = None) -> list[Message]:
            heard = super().hear(timeout_ms, reader)
            if not heard:
                interrupts.count += 1
            return heard

    follow(Pressed([RunState(record=record)], [ended(record, "done")]), submit, interrupts)
    shown = capsys.readouterr().out
    assert shown.count("x") < 8 << 20
    assert "the rest of its output stays in its folder; %taas logs mine shows it" in shown

"""How a run ended, as what its cell raises."""

from __future__ import annotations

import re

from taas import errors
from taas.errors import CellFailed, RunLost
from taas.runs.records import RunRecord
from taas.wording import counted, named

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def finish(record: RunRecord) -> None:
    """Raise what the run's end deserves."""
    if record.outcome == "interrupted":
        fate = "all its ranks stay" if record.kept_ranks else "all its ranks have ended"
        raise interrupted(f"{record.name} was {record.message or 'interrupted'}: {fate}; {record.names}")
    if record.outcome == "lost":
        if record.error != RunLost.__name__:  # it never began
            raise getattr(errors, record.error)(record.message)
        error = RunLost(f"{record.message}; {record.names}. The next cell starts anew.")
        error.run = record.name
        raise error
    if record.outcome == "failed":
        raise cell_failed(record)


def interrupted(fact: str) -> KeyboardInterrupt:
    """Build a KeyboardInterrupt that IPython shows as one line: where this process stood says nothing."""
    error = KeyboardInterrupt(fact)
    vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {fact}"]
    return error


def cell_failed(record: RunRecord) -> CellFailed:
    """Build the error that shows the failing rank's own traceback."""
    first = record.first
    assert first is not None
    raised = f"raised {first.etype}: {first.message}"
    how = {"raised": raised, "interrupted": raised, "exited": f"called sys.exit({first.message})"}
    fact = how.get(first.outcome, first.message)
    clue = f"{record.message} before " if record.message else ""
    others = f" {counted(record.others, 'more rank')} failed after it." if record.others else ""
    fate = "All ranks stay" if record.kept_ranks else "All ranks were ended"

    def told(fact: str) -> str:
        fact = fact.removesuffix(".")
        return f"{clue}rank {first.rank}{named('on', record.vm)} {fact}.{others} {fate}; {record.names}."

    error = CellFailed(told(fact))
    shown = _COLOURS.sub("", "\n".join(first.traceback)).rstrip()
    words, said = f"{first.etype}: {first.message}", shown[shown.rfind(f"\n{first.etype}: ") + 1 :]
    if said and words.startswith(said):
        more = words[len(said) :].lstrip(": ")
        error.below_traceback = told(f"raised the {first.etype} above{': ' if more else ''}{more}")
    error.run, error.rank, error.vm, error.others = record.name, first.rank, record.vm, record.others
    error.etype, error.traceback_lines = first.etype, first.traceback
    return error

"""How a run ended, as what its cell raises."""

from __future__ import annotations

from taas import errors
from taas.errors import CellFailed, RunLost
from taas.messages.clients import RunEnded

__all__ = ["cell_failed", "finish", "interrupted"]


def finish(ended: RunEnded) -> None:
    """Raise what the run's end deserves."""
    if ended.outcome == "interrupted":
        raise interrupted(f"{ended.run} was interrupted: all its ranks were ended; no names came back")
    if ended.outcome == "lost":
        if ended.error != RunLost.__name__:  # it never began
            raise getattr(errors, ended.error)(ended.message)
        error = RunLost(f"{ended.message}. Nothing came back; the next cell starts anew.")
        error.run = ended.run
        raise error
    if ended.outcome == "failed":
        raise cell_failed(ended)


def interrupted(fact: str) -> KeyboardInterrupt:
    """Build a KeyboardInterrupt that IPython shows as one line: where this process stood says nothing."""
    error = KeyboardInterrupt(fact)
    vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {fact}"]
    return error


def cell_failed(ended: RunEnded) -> CellFailed:
    """Build the error that shows the failing rank's own traceback."""
    first = ended.first
    assert first is not None
    raised = f"raised {first.etype}: {first.message}"
    how = {"raised": raised, "interrupted": raised, "exited": f"called sys.exit({first.message})"}
    fact = how.get(first.outcome, first.message)
    others = (
        f" {ended.others} more rank{'s' if ended.others > 1 else ''} failed after it." if ended.others else ""
    )
    left = f" {ended.message}" if ended.message else ""
    error = CellFailed(
        f"rank {first.rank} on {ended.vm} {fact.removesuffix('.')}.{left}{others} All ranks were ended; no names came back."
    )
    error.run, error.rank, error.vm, error.others = ended.run, first.rank, ended.vm, ended.others
    error.etype, error.traceback_lines = first.etype, first.traceback
    return error

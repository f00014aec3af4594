"""What is known of how a run goes, and the verdict that follows from it: who was to blame, and what became of its names."""

from __future__ import annotations

import re
import time
from functools import partial

from taas.errors import RanksGone, RunLost
from taas.header.options import RunSpec
from taas.runs.records import Verdict
from taas.supervisor.rank_jobs import RankJobs
from taas.wire import deadlines
from taas.wire.framing import Memory
from taas.wire.ranks import RankEnded
from taas.wording import named, ranks_in_words

_FAILED = ("raised", "exited", "died")


class Findings:
    """What the supervisor has found out about one start of a run.

    Args:
        spec: what was asked for.
        ranks: its ranks, which may be those of an earlier run, and the VMs that they are on.

    Attributes:
        started: the ranks that have begun the cell.
        ended: how ranks have ended, as they or their agents said.
        answer: rank 0's names, if they came.
        notices: what the cell says when it is over.
        kept: what it says then of writes of ranks other than 0.
        presses: how often a person interrupted it.
        interrupted: a person did, or its client is gone, before it had failed.
        let_go: its client takes no names of it.
        stopped: from where that was, if it was not its own cell.
        lost: which VM, and how.
        trouble: what else keeps it from going on.
        error: the class of :mod:`taas.errors` that tells of these two.
    """

    def __init__(self, spec: RunSpec, ranks: RankJobs) -> None:
        self._spec, self._ranks = spec, ranks
        self.started: set[int] = set()
        self.ended: dict[int, RankEnded] = {}
        self.answer: Memory | None = None
        self.notices: list[str] = []
        self.kept: list[str] = []
        self.presses = 0
        self.interrupted = self.let_go = False
        self.stopped = ""
        self.lost: str | None = None
        self.trouble: str | None = None
        self.error = RunLost.__name__
        self._clocks: dict[int, float] = {}
        """What the clock of a VM elsewhere is behind this process's, in seconds."""

    def take(self, ended: RankEnded) -> None:
        """Take in how the cell ended in a rank; names that are elsewhere still have to come."""
        self.ended[ended.rank] = ended
        if ended.rank == 0 and ended.answer is not None and not ended.answer.elsewhere:
            self.answer = ended.answer
        self.notices += [line for line in ended.notices if line not in self.notices]

    def measure_clock(self, rank: int, at: float) -> None:
        """Compare a rank's clock with this process's, by what the rank has just said; the quickest message tells best."""
        number = rank // self._spec.ranks_per_vm
        if 0 <= number < self._spec.vms and self._ranks.vms[number].remote:
            behind = time.monotonic() - at
            self._clocks[number] = min(self._clocks.get(number, behind), behind)

    @property
    def all_done(self) -> bool:
        """Whether the cell has ended well in every rank."""
        ended = self.ended.values()
        return len(ended) == self._spec.world_size and all(rank.outcome == "done" for rank in ended)

    @property
    def loss(self) -> str:
        """Return what was lost, if another start may go better; else empty."""
        may = not self.trouble and self.error == RunLost.__name__
        return what_was_lost(self.verdict) if may else ""

    @property
    def verdict(self) -> Verdict:
        """How the run ended.

        Kept ranks that were lost before one of them began the cell are ranks that are gone: it runs in new ones.
        """
        verdict = self._verdict()
        lost = what_was_lost(verdict) if self._ranks.continues and not self.started else ""
        if not lost or self.error != RunLost.__name__:
            return verdict
        gone = f"the ranks that this notebook kept are gone ({lost})"
        return Verdict(outcome="lost", message=gone, error=RanksGone.__name__)

    def _verdict(self) -> Verdict:
        undone = [ended for ended in self.ended.values() if ended.outcome != "done"]
        failed = [ended for ended in undone if ended.outcome in _FAILED]
        orphaned = [ended for ended in self.ended.values() if ended.outcome == "orphaned"]
        over = partial(Verdict, names=self._names_in_words())
        if self.interrupted and not (self.all_done and self.answer):
            return over(outcome="interrupted", message=self._after_interrupt(failed))
        if self.lost or self.trouble or orphaned:
            message = self.lost or self.trouble or self._forkserver_lost(orphaned[0])
            return over(outcome="lost", message=message, error=self.error)
        if undone:
            first = self._blame(failed or undone)
            others = max(0, len(failed) - 1)
            return over(
                outcome="failed",
                first=first,
                vm=self._vm_of(first.rank),
                others=others,
                message=self._left_before(first),
            )
        return Verdict(outcome="done")

    def _after_interrupt(self, failed: list[RankEnded]) -> str:
        """Say who interrupted, and what failed while the cell was finishing: what it would have saved is not."""
        own = [ended for ended in failed if ended.outcome == "raised" and not failed_in_collective(ended)]
        if not own:
            return self.stopped
        first = self._blame(own)
        return (
            f"{self.stopped or 'interrupted'}, then rank {first.rank} raised {first.etype}: {first.message}"
        )

    def _names_in_words(self) -> str:
        """Say what became of rank 0's names, of a run that is not done."""
        if self._spec.returned == ():
            return "no names came back, as --return none asks"
        if self.answer is not None:
            return "rank 0's names came back as they stood"
        ended = self.ended.get(0)
        if 0 not in self.started:
            why = ": rank 0 had not begun the cell"
        elif ended is None:
            why = ": rank 0 was lost"
        elif ended.outcome in ("died", "orphaned"):
            why = f": rank 0 was {ended.message}" if ended.message.startswith("killed") else ": rank 0 died"
        elif ended.outcome == "ended":
            why = f": rank 0 {ended.message}"
        else:
            why = ""
        return f"no names came back{why}"

    def _left_before(self, first: RankEnded) -> str:
        """Name the ranks that had ended well when a collective of the first one failed: it may have missed them."""
        if not failed_in_collective(first):
            return ""
        done = [ended for ended in self.ended.values() if ended.outcome == "done"]
        left = [ended.rank for ended in done if self._when(ended) < self._when(first)]
        return f"{ranks_in_words(left)} had ended the cell" if left else ""

    def _forkserver_lost(self, orphan: RankEnded) -> str:
        return f"the forkserver{named('of', self._vm_of(orphan.rank))} was killed; its ranks went with it"

    def _blame(self, failed: list[RankEnded]) -> RankEnded:
        """Return what failed first, among ranks that may have failed because of each other.

        The earliest wins, but for a rank that died: its peers' collectives fail at once, while its own death is
        stamped when its agent sees it.
        """
        earliest = min(failed, key=self._when)
        until = self._when(earliest) + deadlines.DEATH_IS_THE_CAUSE
        causes = [ended for ended in failed if ended.outcome == "died" and self._when(ended) <= until]
        return min(causes, key=self._when) if causes else earliest

    def _when(self, ended: RankEnded) -> float:
        """Return when a rank ended, by one clock for all VMs."""
        return ended.at + self._clocks.get(ended.rank // self._spec.ranks_per_vm, 0.0)

    def _vm_of(self, rank: int) -> str:
        return self._ranks.name(rank // self._spec.ranks_per_vm)


def what_was_lost(verdict: Verdict) -> str:
    """Say what of a run was lost; empty where nothing was."""
    if verdict.outcome == "lost":
        return verdict.message
    first = verdict.first
    if verdict.outcome == "failed" and first is not None and first.outcome == "died":
        return f"rank {first.rank}{named('on', verdict.vm)} {first.message}"
    return ""


def failed_in_collective(ended: RankEnded) -> bool:
    """Whether a rank failed where ranks wait for each other, as far as its error tells."""
    said = "\n".join(ended.traceback)
    return (
        "torch/distributed/" in said
        or re.search("gloo|nccl|ProcessGroup", ended.message, re.IGNORECASE) is not None
    )

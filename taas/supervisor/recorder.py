"""The only writer of a run's record (runs/records.py), which also holds where the run stands."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from taas.base.linux import remove_tree
from taas.base.places import ProcessMark
from taas.protocol.agents import RanksUse
from taas.protocol.clients import Submit
from taas.protocol.framing import Memory
from taas.protocol.ranks import Asking, RankKept, RankUse
from taas.protocol.records import RunRecord, Verdict
from taas.runs.records import ANSWER, LOADERS, PAYLOAD, keep, new_folder, write_record
from taas.supervisor.stages import WORDS, Stage, check_step

_RESERVE_BYTES = 64 << 10
_EXPORTED_BYTES = 64 << 20  # names of a run in the foreground are kept up to this size
_CURVE_PARTS, _MOST_LOOKS = 12, 512
_USE_SECONDS = 1.0
"""Between two records of what ranks use: each of many VMs reports on its own."""


class Recorder:
    """Writes the record of one run, and holds descriptors of the run's payloads.

    In its ``submit`` the payloads are those descriptors of this process. Its ``stage`` is where the
    run stands, over all its starts.

    Raises:
        OSError: a payload's holder is gone, or there is no room for the run's folder; nothing is
            held then.
    """

    def __init__(self, submit: Submit, kernel: ProcessMark) -> None:
        self._held: list[int] = []
        self._busy: list[tuple[float, float]] = []
        self._use: dict[int, RankUse] = {}
        self._use_written = 0.0
        self.stage = Stage.WAITING
        try:
            delivery = submit.delivery
            if delivery is not None:
                delivery = msgspec.structs.replace(delivery, payload=self._hold(delivery.payload))
            payload = self._hold(submit.payload)
            self.submit = msgspec.structs.replace(submit, payload=payload, delivery=delivery)
            name, mark = new_folder(submit.cell.spec.name)
        except OSError:
            self.close()
            raise
        self.record = RunRecord(
            name=name,
            id=mark,
            cell=submit.cell,
            project=submit.workspace.project,
            notebook=submit.notebook,
            supervisor=ProcessMark.of(os.getpid()),
            kernel=kernel,
            device=submit.device,
        )

    def _hold(self, memory: Memory) -> Memory:
        self._held.append(memory.open())
        return Memory(os.getpid(), self._held[-1], memory.nbytes)

    def begin(self, gpus: tuple[str, ...]) -> None:
        """Write down that the run exists, and which GPUs it has."""
        self.record.gpus = gpus
        with contextlib.suppress(OSError), self._reserve.open("wb") as reserve:
            os.posix_fallocate(reserve.fileno(), 0, _RESERVE_BYTES)
        self._write()

    @property
    def _reserve(self) -> Path:
        """A file that reserves room on the disk for the record's last version.

        The run may fill the disk before that is written.
        """
        return self.record.folder / "reserve"

    def _write(self) -> None:
        # on a full disk the run goes on, and its client is told of the end
        with contextlib.suppress(OSError):
            write_record(self.record)

    def move(self, stage: Stage, **changes: Any) -> None:
        """Take the run to another stage, and write that down, with what else has changed.

        Raises:
            UnknownStep: there is no such step; nothing has changed then.
        """
        check_step(self.record.name, self.stage, stage)
        self.stage = stage
        self.note(state=WORDS.get(stage, self.record.state), **changes)

    def note(self, **changes: Any) -> None:
        """Write down what has changed in the record, if anything has."""
        if any(getattr(self.record, name) != value for name, value in changes.items()):
            for name, value in changes.items():
                setattr(self.record, name, value)
            self._write()

    def take(self, said: Asking | RanksUse) -> None:
        """Write down what a rank asks, if anything, or what the ranks of a VM use."""
        if isinstance(said, Asking):
            others = [one for one in self.record.questions if one.rank != said.rank]
            self.note(questions=(*others, said) if said.number else tuple(others))
        else:
            self._use |= {one.rank: one for one in said.ranks}
            if time.monotonic() >= self._use_written + _USE_SECONDS:
                self._write_use()

    def _write_use(self) -> None:
        self._use_written = time.monotonic()
        self.note(use=tuple(self._use[rank] for rank in sorted(self._use)))
        if any(one.state == "running" for one in self._use.values()):
            self._busy.append((self._use_written, self.record.busy or 0.0))
            if len(self._busy) > _MOST_LOOKS:
                del self._busy[1::2]

    def begin_again(self, number: int, loss: str) -> None:
        """Write down that the run starts again, and what was lost.

        Files that the earlier start left do not count any more.
        """
        self.record.files.clear()
        used = f"{number} of {self.submit.cell.spec.max_restarts} restarts used"
        losses = (*self.record.losses, f"{loss}; started again ({used})")
        self.move(
            Stage.ACQUIRING, restarts=number, losses=losses, trouble=None, questions=(), use=()
        )
        self._use.clear()

    def end(
        self, verdict: Verdict, notices: tuple[str, ...], kept_ranks: tuple[RankKept, ...] | None
    ) -> None:
        """Write down how the run ended, and its ranks, if they stay."""
        self._reserve.unlink(missing_ok=True)
        self._write_use()
        self.move(
            Stage.OVER,
            **msgspec.structs.asdict(verdict),
            ended=time.time(),
            notices=notices,
            kept_ranks=kept_ranks,
            curve=self._curve(),
            trouble=None if verdict.outcome == "done" else self.record.trouble,
            questions=(),
        )

    def _curve(self) -> tuple[int, ...]:
        """Return how busy the ranks were over time, in a few steps."""
        if not self._busy:
            return ()
        begin = self._busy[0][0]
        times = [
            begin + (time.monotonic() - begin) * part / _CURVE_PARTS for part in range(_CURVE_PARTS)
        ]
        return tuple(round([share for at, share in self._busy if at <= then][-1]) for then in times)

    def keep(self, answer: Memory | None, loaders: bytes) -> tuple[str, ...]:
        """Keep what `%taas export` and, of a background run, `%taas attach` need; in any thread.

        That is rank 0's names, with the payload they refer to, and where the delivery left the
        generators of the registered loaders. Returns what went wrong.
        """
        if not self.record.background:
            if self.submit.payload.nbytes <= _EXPORTED_BYTES:
                with contextlib.suppress(OSError):  # the disk is full: it cannot be exported
                    keep(self.record, PAYLOAD, self.submit.payload.fd)
            return ()
        if loaders:
            # on a full disk the notebook's generators stay where they are
            with contextlib.suppress(OSError):
                keep(self.record, LOADERS, loaders)
        if answer is None:
            return ()
        what = "the names that the run made could not be kept"
        try:
            with os.fdopen(answer.open(), "rb") as source:
                keep(self.record, ANSWER, source.fileno())
            what = (
                "only the kernel that started the run can take its names, as what it gave could not"
                " be kept"
            )
            keep(self.record, PAYLOAD, self.submit.payload.fd)
        except OSError as error:
            return (f"{what}: {error.strerror} ({self.record.folder})",)
        return ()

    def close(self) -> None:
        """Close the descriptors of the payloads, which gives their memory back."""
        while self._held:
            os.close(self._held.pop())

    def discard(self) -> None:
        """Forget a run that was refused."""
        self.close()
        remove_tree(self.record.folder)

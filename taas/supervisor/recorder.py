"""Who writes the record of a run into the run's folder (runs/records.py), and nobody else does."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from taas.runs.places import ProcessMark
from taas.runs.records import (
    ANSWER,
    LOADERS,
    PAYLOAD,
    RunRecord,
    Verdict,
    new_folder,
    write_record,
)
from taas.runs.retention import keep
from taas.wire.agents import RanksUse
from taas.wire.clients import Submit
from taas.wire.framing import Memory
from taas.wire.ranks import Asking, RankKept, RankUse

_RESERVE_BYTES = 64 << 10
_EXPORTED_BYTES = 64 << 20
"""Names of a run in the foreground are kept up to this size."""
_CURVE_PARTS, _MOST_LOOKS = 12, 512
_USE_SECONDS = 1.0
"""Between two versions of the record for what ranks use: a run may have many VMs, and each speaks for itself."""


class Recorder:
    """Writes the record of one run, and holds the run's payload, so that the kernel may go.

    Attributes:
        submit: what was asked for, with the payloads as they are held here.
        record: as it is now.

    Raises:
        OSError: a payload's holder is gone, or there is no room for the run's folder; nothing is held then.
    """

    def __init__(self, submit: Submit, kernel: ProcessMark) -> None:
        self._held: list[int] = []
        self._busy: list[tuple[float, float]] = []
        self._use: dict[int, RankUse] = {}
        self._use_written = 0.0
        try:
            self.submit = self._holding(submit)
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
            names_nbytes=submit.payload.nbytes,
        )

    def _holding(self, submit: Submit) -> Submit:
        delivery = submit.delivery
        if delivery is not None:
            delivery = msgspec.structs.replace(delivery, payload=self._hold(delivery.payload))
        return msgspec.structs.replace(submit, payload=self._hold(submit.payload), delivery=delivery)

    def _hold(self, memory: Memory) -> Memory:
        """Open a memory of the kernel's; returns it as it is held here."""
        self._held.append(memory.open())
        return Memory(os.getpid(), self._held[-1], memory.nbytes)

    def begin(self, gpus: tuple[str, ...]) -> None:
        """Write down that the run exists, and which GPUs it has."""
        self.record.gpus = gpus
        with contextlib.suppress(OSError):
            reserve = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(reserve, 0, _RESERVE_BYTES)
            finally:
                os.close(reserve)
        self._write()

    @property
    def _reserve(self) -> Path:
        """A file that holds room on the disk for the record's last version, however full the run makes it."""
        return self.record.folder / "reserve"

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run goes on, and its client is told of the end
            write_record(self.record)

    def note(self, **changes: Any) -> None:
        """Write down what has changed in the record, if anything has."""
        if any(getattr(self.record, name) != value for name, value in changes.items()):
            for name, value in changes.items():
                setattr(self.record, name, value)
            self._write()

    def take(self, said: Asking | RanksUse) -> None:
        """Write down what a rank asks now, or that it asks nothing; or what the ranks of a VM use."""
        if isinstance(said, Asking):
            self._note_question(said)
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

    def _note_question(self, asking: Asking) -> None:
        others = [one for one in self.record.questions if one.rank != asking.rank]
        self.note(questions=(*others, asking) if asking.number else tuple(others))

    def begin_again(self, number: int, loss: str) -> None:
        """Write down that the run starts again, and what was lost; files that the earlier start left count no more."""
        self.record.files.clear()
        used = f"{number} of {self.submit.cell.spec.max_restarts} restarts used"
        losses = (*self.record.losses, f"{loss}; started again ({used})")
        self.note(state="acquiring", restarts=number, losses=losses, trouble=None, questions=(), use=())
        self._use.clear()

    def end(
        self, verdict: Verdict, notices: tuple[str, ...], kept_ranks: tuple[RankKept, ...] | None
    ) -> None:
        """Write down how the run ended.

        Args:
            verdict: how it ended.
            notices: lines for the user.
            kept_ranks: its ranks, if they stay.
        """
        self._reserve.unlink(missing_ok=True)
        self._write_use()
        end = msgspec.structs.asdict(verdict)
        now = {"state": "over", "ended": time.time(), "kept_ranks": kept_ranks}
        self.note(**end, **now, curve=self._curve(), trouble=None, questions=(), notices=notices)

    def _curve(self) -> tuple[int, ...]:
        """Return how busy the ranks were; what was seen last holds until something else was."""
        if not self._busy:
            return ()
        begin = self._busy[0][0]
        times = [begin + (time.monotonic() - begin) * part / _CURVE_PARTS for part in range(_CURVE_PARTS)]
        return tuple(round([share for at, share in self._busy if at <= then][-1]) for then in times)

    def keep(self, answer: Memory | None, loaders: bytes) -> tuple[str, ...]:
        """Keep what `%taas export` needs, and of a background run what `%taas attach` will bring; any thread may.

        Returns what went wrong.

        Args:
            answer: rank 0's names.
            loaders: where the delivery left the generators of the registered loaders.
        """
        if not self.record.background:
            if self.submit.payload.nbytes <= _EXPORTED_BYTES:
                with contextlib.suppress(OSError):  # the disk is full: it cannot be exported
                    keep(self.record, PAYLOAD, self.submit.payload.fd)
            return ()
        if loaders:
            with contextlib.suppress(OSError):  # the disk is full: the generators stay where they are
                keep(self.record, LOADERS, loaders)
        return () if answer is None else self._keep_answer(answer)

    def _keep_answer(self, answer: Memory) -> tuple[str, ...]:
        """Copy rank 0's names into the run's folder, with the payload they refer to; returns what went wrong."""
        what = "the names that the run made could not be kept"
        try:
            source = answer.open()
            try:
                keep(self.record, ANSWER, source)
            finally:
                os.close(source)
            what = (
                "only the kernel that started the run can take its names, as what it gave could not be kept"
            )
            keep(self.record, PAYLOAD, self.submit.payload.fd)
        except OSError as error:
            return (f"{what}: {error.strerror} ({self.record.folder})",)
        return ()

    def close(self) -> None:
        """Give the payloads' memory back."""
        while self._held:
            os.close(self._held.pop())

    def discard(self) -> None:
        """Forget a run that was refused."""
        self.close()
        shutil.rmtree(self.record.folder, ignore_errors=True)

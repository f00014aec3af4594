"""The only writer of a run's record (runs/records.py), which also holds the stage of the run."""

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
_EXPORTED_BYTES = 64 << 20  # variables of a foreground run are kept up to this size
_USE_SECONDS = 1.0
"""Minimum time between two records of resource usage: each VM, of many, reports separately."""


class Recorder:
    """Writes the record of one run, and holds descriptors of the run's payloads.

    In ``submit``, payloads refer to these descriptors of this process. ``stage`` is the stage of
    the run across all its starts.

    Raises:
        OSError: the process that holds a payload is gone, or there is no space for the run's
            folder; no descriptor is held then.
    """

    def __init__(self, submit: Submit, kernel: ProcessMark) -> None:
        self._held: list[int] = []
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
        """Record that the run exists, and which GPUs it has."""
        self.record.gpus = gpus
        with contextlib.suppress(OSError), self._reserve.open("wb") as reserve:
            os.posix_fallocate(reserve.fileno(), 0, _RESERVE_BYTES)
        self._write()

    @property
    def _reserve(self) -> Path:
        """A file that reserves disk space for the last version of the record.

        Otherwise the run could fill the disk before that version is written.
        """
        return self.record.folder / "reserve"

    def _write(self) -> None:
        # if the disk is full, the run continues, and its client still gets the final message
        with contextlib.suppress(OSError):
            write_record(self.record)

    def move(self, stage: Stage, **changes: Any) -> None:
        """Move the run to another stage, and record this, with any other changes.

        Raises:
            UnknownStep: there is no such transition; nothing has changed then.
        """
        check_step(self.record.name, self.stage, stage)
        self.stage = stage
        self.note(state=WORDS.get(stage, self.record.state), **changes)

    def note(self, **changes: Any) -> None:
        """Write changes to the record, if there are any."""
        if any(getattr(self.record, name) != value for name, value in changes.items()):
            for name, value in changes.items():
                setattr(self.record, name, value)
            self._write()

    def take(self, said: Asking | RanksUse) -> None:
        """Record a rank's question, or its withdrawal, or the resource usage of a VM's ranks."""
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

    def begin_again(self, number: int, loss: str) -> None:
        """Record that the run starts again, and what was lost.

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
        """Record how the run ended and, if its ranks stay, which ranks these are."""
        self._reserve.unlink(missing_ok=True)
        self._write_use()
        self.move(
            Stage.OVER,
            **msgspec.structs.asdict(verdict),
            ended=time.time(),
            notices=notices,
            kept_ranks=kept_ranks,
            trouble=None if verdict.outcome == "done" else self.record.trouble,
            questions=(),
        )

    def keep(self, answer: Memory | None, loaders: bytes) -> tuple[str, ...]:
        """Keep the files that ``%taas export`` and, for a background run, ``%taas attach`` need.

        For a background run these are rank 0's variables, the payload to which they refer, and the
        final states of the generators of registered loaders. For a foreground run it is the payload
        alone. Return what went wrong. This method may be called in any thread.
        """
        if not self.record.background:
            if self.submit.payload.nbytes <= _EXPORTED_BYTES:
                # if the disk is full, the run cannot be exported
                with contextlib.suppress(OSError):
                    keep(self.record, PAYLOAD, self.submit.payload.fd)
            return ()
        if loaders:
            # if the disk is full, the notebook's generators stay at their positions
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
        """Close the descriptors of the payloads, which releases their memory."""
        while self._held:
            os.close(self._held.pop())

    def discard(self) -> None:
        """Discard a run that was refused."""
        self.close()
        remove_tree(self.record.folder)

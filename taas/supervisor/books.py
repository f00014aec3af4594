"""What is written down of a run: all that its client is told, in the run's folder (taas/records.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from taas.header import RunSpec
from taas.messages.clients import Progressed, RunEnded, StartedAgain, StateChanged, Submit, Troubled
from taas.messages.wire import Memory, Message
from taas.records import ANSWER, LOADERS, PAYLOAD, ProcessMark, RunRecord, new_folder, write_record

_RESERVE_BYTES = 64 << 10


def shown_ranks(spec: RunSpec) -> tuple[int, ...] | None:
    """The ranks whose output the cell shows; None for all."""
    wanted = spec.output
    if isinstance(wanted, tuple):
        return wanted
    return {"0": (0,), "all": None, "none": ()}[wanted]


class Book:
    """The record of one run, and the run's payload, which is held here so that the kernel may go."""

    def __init__(self, submit: Submit, kernel: ProcessMark) -> None:
        spec = submit.spec
        self._payload = submit.payload.open()
        self.submit = msgspec.structs.replace(
            submit, payload=Memory(os.getpid(), self._payload, submit.payload.nbytes)
        )
        self._loaders = submit.delivery.payload.open() if submit.delivery is not None else -1
        if submit.delivery is not None:
            held = Memory(os.getpid(), self._loaders, submit.delivery.payload.nbytes)
            self.submit = msgspec.structs.replace(
                self.submit, delivery=msgspec.structs.replace(submit.delivery, payload=held)
            )
        name, mark = new_folder(spec.name)
        self.record = RunRecord(
            name=name,
            id=mark,
            cell=submit.cell,
            execution_count=submit.execution_count,
            project=submit.project,
            supervisor=ProcessMark.of(os.getpid()),
            kernel=kernel,
            background=not submit.waiting,
            world_size=spec.world_size,
            vms=spec.vms,
            instance=spec.instance,
            output=shown_ranks(spec),
            device=submit.device,
        )

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
        with contextlib.suppress(OSError):  # the disk is full: the run goes on, and its client is told anyway
            write_record(self.record)

    def note(self, message: Message) -> None:
        """Write down what the client is told."""
        record = self.record
        match message:
            case StateChanged():
                if message.state == "running" and record.state != "running":
                    record.began = time.time()
                record.state, record.waiting = message.state, message.detail
                record.device = message.device or record.device
            case StartedAgain():
                record.restarts = message.restarts
            case Progressed():
                record.delivered = message.delivered
            case Troubled():
                record.trouble = message.trouble
            case RunEnded():
                if record.background and message.answer is not None:
                    message = self._keep_answer(message, message.answer)
                if record.background and message.loaders:
                    with contextlib.suppress(OSError):  # the disk is full: the generators stay where they are
                        (record.folder / LOADERS).write_bytes(message.loaders)
                record.state, record.ended, record.trouble = "over", time.time(), None
                record.outcome, record.message, record.notices = (
                    message.outcome,
                    message.message,
                    message.notices,
                )
                record.first, record.vm, record.others = message.first, message.vm, message.others
                self._reserve.unlink(missing_ok=True)
            case _:
                return
        self._write()

    def _keep_answer(self, ended: RunEnded, answer: Memory) -> RunEnded:
        """Copy rank 0's names into the run's folder, with the payload they refer to."""
        try:
            with contextlib.closing(_Descriptor(answer.open())) as source:
                _copy(source.fd, answer.nbytes, str(self.record.folder / ANSWER))
            _copy(self._payload, self.submit.payload.nbytes, str(self.record.folder / PAYLOAD))
        except OSError as error:
            lost = f"the names that the run made could not be kept: {error.strerror} ({self.record.folder})"
            return msgspec.structs.replace(ended, notices=(*ended.notices, lost))
        return ended

    def close(self) -> None:
        """Give the payloads' memory back."""
        os.close(self._payload)
        if self._loaders >= 0:
            os.close(self._loaders)
            self._loaders = -1

    def discard(self) -> None:
        """Forget a run that was refused."""
        self.close()
        shutil.rmtree(self.record.folder, ignore_errors=True)


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def _copy(source: int, nbytes: int, path: str) -> None:
    """Copy a memory file to a path, which is complete once it is there."""
    partial = path + ".new"
    target = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < nbytes:
            done += os.sendfile(target, source, done, nbytes - done)
    except OSError:
        os.unlink(partial)  # noqa: PTH108  as the rest of it
        raise
    finally:
        os.close(target)
    os.replace(partial, path)  # noqa: PTH105

"""The kernel's side of a run: submit, show what comes, interrupt, take the results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from taas import attach, errors
from taas.background import RunHandle
from taas.capture import NOTHING, Capture, capture, check_syntax
from taas.catalog import DATA_VM, load_catalog
from taas.cell_output import CellOutput, say, say_lost
from taas.dataloader_registry import Registration, apply_final, delivering, pack_registered, registered
from taas.devices import visible_gpus
from taas.endings import finish, interrupted
from taas.engine_choice import check_installed, chosen
from taas.errors import HeaderError, NotEnoughDevices, RunLost, TaasError
from taas.header import RunSpec
from taas.live_view import LiveView
from taas.messages.agents import Printed, Seen
from taas.messages.clients import (
    Abandon,
    Accepted,
    AnswerTaken,
    DeliveryOrder,
    Interrupt,
    Refused,
    RunEnded,
    StartedAgain,
    Submit,
)
from taas.messages.wire import Memory, Message
from taas.records import read_record
from taas.supervised import Supervised, supervised
from taas.wording import shown

_LOOK_ROUND_MS = 50
_GIVE_UP = 4
"""So many interrupts end a run whose supervisor does not answer: it is killed, and its agents end all ranks."""
_SILENCE_SECONDS = 10.0
"""So long it does not answer then. Who presses quickly does not mean the background runs of the same supervisor."""


def launch(spec: RunSpec, cell: str, shell: Any) -> RunHandle | None:
    """Run a cell in ranks and bring the results into the shell's namespace; or start it in the background.

    Args:
        spec: the header, parsed.
        cell: text of the whole cell; its header lines are comments.
        shell: the notebook's IPython shell.

    Returns:
        For ``--background``, a handle of the run, which goes on.

    Raises:
        SyntaxError: the cell does not compile; nothing was started.
        CaptureError: a name that the cell needs cannot travel; nothing was started.
        NotEnoughDevices: fewer GPUs than ranks; nothing was started.
        CellFailed: a rank failed.
        RunLost: a process of taas was killed.
        KeyboardInterrupt: the cell was interrupted; no rank is left.
    """
    check_syntax(cell, shell, cell_number(shell))
    project = Path.cwd()
    engine = chosen(project)
    check_installed(engine)
    local = engine.kind == "local"
    gpus = visible_gpus() if local else ()
    check_devices(spec, len(gpus))
    loaders = registered(shell.user_ns) if spec.data_vms else []
    environ, unsendable = sendable_variables()
    with (
        delivering(loaders),
        capture(cell, shell.user_ns, shell, project=project, returned=spec.returned) as captured,
        packed_loaders(loaders, captured.names, spec.data_vms, local=local) as delivery,
    ):
        say(*captured.notices)
        if unsendable:
            say(f"not in the ranks, since they are not UTF-8: the variables {', '.join(unsendable)}")
        submit = Submit(
            cell=cell,
            execution_count=cell_number(shell),
            project=str(project),
            environ=environ,
            payload=Memory(os.getpid(), captured.fd, captured.nbytes),
            spec=spec,
            gpus=gpus if spec.gpus_per_rank else (),
            device=device_in_words(spec, len(gpus)) if local else f"by {engine.kind.capitalize()}",
            colors=shell.colors,
            waiting=not spec.background,
            delivery=delivery,
            changed=tuple(filter(is_utf8, changed_variables())),
            engine=engine,
        )
        with interrupts_counted() as interrupts:
            if spec.background:
                return start_background(supervised(warm=local), submit, captured, loaders, interrupts)
            ended = Foreground(supervised(warm=local), shell, interrupts).follow(submit, captured)
        apply_final(ended.loaders, loaders)
    finish(ended)
    return None


@contextmanager
def packed_loaders(
    loaders: list[Registration], used: tuple[str, ...], data_vms: int, *, local: bool
) -> Iterator[DeliveryOrder | None]:
    """Pack the registered loaders that the cell names; the others are said, and not run.

    Raises:
        HeaderError: it names none of them.
    """
    mine = [loader for loader in loaders if loader.variable in used]
    say(
        *(
            f"{loader.name} is registered, and this cell does not use it: not run"
            for loader in loaders
            if loader not in mine
        )
    )
    if loaders and not mine:
        raise HeaderError(
            "--cpus, and the cell uses no registered DataLoader: allowed is with one; leave --cpus out"
        )
    if not mine:
        yield None
        return
    fd = os.memfd_create("taas-loaders")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            nbytes = pack_registered(mine, file.write)
        catalog = load_catalog(Path.cwd())
        buffer = catalog.delivery.buffer
        vcpus = catalog.find(DATA_VM).vcpus
        yield DeliveryOrder(
            Memory(os.getpid(), fd, nbytes),
            data_workers(vcpus, data_vms) if local else vcpus,
            catalog.delivery.encrypt,
            None if buffer is None else int(buffer),
        )
    finally:
        os.close(fd)


def data_workers(vcpus: int, data_vms: int) -> int:
    """Return the data workers on each data VM of this machine, which share its processors.

    One for each processor that such a VM has, but over all VMs no more than two a processor of this machine
    (reads that wait need more than one), and at least two each.
    """
    return min(vcpus, max(2, 2 * len(os.sched_getaffinity(0)) // data_vms))


def sendable_variables() -> tuple[dict[str, str], list[str]]:
    """Return the environment that a message can carry, and the names of what is left out for good.

    What the notebook itself set travels with its names, in whatever bytes.
    """
    environ = {name: value for name, value in os.environ.items() if is_utf8(name + value)}
    changed = changed_variables()
    return environ, [ascii(name)[1:-1] for name in os.environ if name not in environ and name not in changed]


def is_utf8(text: str) -> bool:
    """Whether a text of the system's is what it should be; bytes that are not come as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def changed_variables() -> tuple[str, ...]:
    """Return the names of environment variables that this process has set, changed or removed since it began."""
    inherited = {}
    for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            inherited[os.fsdecode(name)] = os.fsdecode(value)
    names = inherited.keys() | os.environ.keys()
    return tuple(sorted(name for name in names if inherited.get(name) != os.environ.get(name)))


def cell_number(shell: Any) -> int:
    """Return the ``In[n]`` of the running cell: some releases of IPython count up before a cell runs, some after."""
    return max(len(shell.history_manager.input_hist_parsed) - 1, 1)


def check_options(spec: RunSpec) -> None:
    """Refuse what no run can do: a shared directory that is a file, options that are not built yet.

    Raises:
        HeaderError: one of them is given.
    """
    for path in spec.shared:
        if os.path.lexists(path) and not Path(path).is_dir():
            raise HeaderError(
                f"--shared {shown(path)}, which is no directory: allowed is one, there or not; type --shared checkpoints"
            )
    asked = {
        "--keep": spec.keep,
        "--post-mortem": spec.post_mortem,
    }
    for option in (name for name, given in asked.items() if given):
        raise HeaderError(
            f"{option} is not built yet in this release: allowed are the other options; leave it out"
        )


def check_devices(spec: RunSpec, present: int) -> None:
    """Refuse a run that needs more GPUs than there are, before anything starts; none at all means a rehearsal."""
    needed = spec.world_size * spec.gpus_per_rank
    if present and needed > present and not spec.rehearse:
        raise NotEnoughDevices(
            f"{needed} GPUs asked for, and this machine has {present}. Ask for {present} or fewer (--gpus auto), "
            "rehearse on CPU ranks (--rehearse), or take an engine with more machines (%taas engine ray ADDRESS)."
        )


def device_in_words(spec: RunSpec, present: int) -> str:
    """Say what the ranks of a run work on."""
    if not spec.gpus_per_rank:
        return "CPU"
    if not present or spec.rehearse:
        return f"rehearsed on CPU ({'as --rehearse asks' if present else 'no GPU here'})"
    count = spec.world_size * spec.gpus_per_rank
    return f"{count} GPU{'s' if count > 1 else ''}"


def start_background(
    supervisor: Supervised,
    submit: Submit,
    captured: Capture,
    loaders: list[Registration],
    interrupts: list[int],
) -> RunHandle:
    """Submit a run that goes on by itself.

    Raises:
        KeyboardInterrupt: it was interrupted before it had begun, and was ended.
    """
    supervisor.say(submit)
    patience = Patience(interrupts)
    while True:
        for message in supervisor.hear(_LOOK_ROUND_MS):
            if isinstance(message, Refused):
                raise getattr(errors, message.error, TaasError)(message.message)
            if isinstance(message, Accepted):
                handle = RunHandle(message.run, Path(message.folder))
                if interrupts:
                    supervisor.say(Interrupt(run=handle.name))
                    raise interrupted(f"{handle.name} was interrupted before it had begun")
                attach.keep_capture(handle.id, captured, loaders)
                return handle
        if patience.is_over:
            supervisor.kill()
            raise KeyboardInterrupt


class Patience:
    """When a person who presses interrupt again and again has waited long enough for a supervisor to say something."""

    def __init__(self, interrupts: list[int]) -> None:
        self._interrupts = interrupts
        self._silent_since: float | None = None

    def heard(self) -> None:
        """Note that it said something."""
        self._silent_since = None

    @property
    def is_over(self) -> bool:
        """Whether it has been silent for too long since the first interrupt."""
        if not self._interrupts:
            return False
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        return len(self._interrupts) >= _GIVE_UP and now > self._silent_since + _SILENCE_SECONDS


class Foreground:
    """A run whose cell waits for it."""

    def __init__(self, supervisor: Supervised, shell: Any, interrupts: list[int]) -> None:
        self._supervisor, self._shell, self._interrupts = supervisor, shell, interrupts
        self._patience = Patience(interrupts)
        self._relayed = self._restarts = 0
        self._run = ""
        self._output = CellOutput(shell)
        self._view: LiveView | None = None

    def follow(self, submit: Submit, captured: Capture) -> RunEnded:
        """Submit the run, show its output, apply its answer; returns how it ended."""
        self._restarts = submit.spec.max_restarts
        self._supervisor.say(submit)
        try:
            return self._follow(captured)
        except BaseException:
            if self._run and self._supervisor.alive:  # nobody else will show it
                self._supervisor.say(Abandon(run=self._run))
            raise

    def _follow(self, captured: Capture) -> RunEnded:
        while True:
            for message in self._supervisor.hear(_LOOK_ROUND_MS):
                self._patience.heard()
                if not isinstance(message, Accepted) and getattr(message, "run", self._run) != self._run:
                    continue  # of a run that was abandoned
                if self._view is not None:
                    self._view.note(message)
                if isinstance(message, RunEnded):
                    try:
                        self._take_answer(message, captured)
                    finally:
                        self._end_view(message)
                    say(*message.notices)
                    return message
                self._take(message)
            if self._view is not None:
                self._view.refresh()
            self._relay_interrupts()

    def _end_view(self, ended: RunEnded) -> None:
        if self._view is not None:
            self._view.refresh(final=True)

    def _take(self, message: Message) -> None:
        match message:
            case Accepted():
                self._run = message.run
                record = read_record(Path(message.folder))
                if record is not None:
                    self._view = LiveView(record, self._shell)
            case Refused():
                raise getattr(errors, message.error, TaasError)(message.message)
            case Printed():
                self._output.show(message.rank, message.items)
                self._supervisor.say(Seen(run=message.run, vm=message.vm, size=message.size))
            case StartedAgain():
                say(f"{message.why}; started again ({message.restarts} of {self._restarts} restarts used)")
            case _:
                pass  # the live view's

    def _relay_interrupts(self) -> None:
        while self._run and self._relayed < len(self._interrupts):
            self._relayed += 1
            self._supervisor.say(Interrupt(run=self._run))
        if self._patience.is_over:
            self._supervisor.kill()
            raise KeyboardInterrupt

    def _take_answer(self, ended: RunEnded, captured: Capture) -> None:
        """Apply the answer; whatever comes of it, the supervisor learns that the run's machines are free."""
        if ended.answer is None:
            return
        try:
            self._apply(ended.answer, captured)
        finally:
            self._supervisor.say(AnswerTaken(run=self._run))

    def _apply(self, answer: Memory, captured: Capture) -> None:
        try:
            fd = answer.open()
        except OSError:
            raise RunLost(
                "the agent that held the run's names was killed before they were taken. Nothing came back; the next "
                "cell starts anew."
            ) from None
        try:
            with ended_by_a_second_interrupt():
                applied = captured.apply(fd)
        finally:
            os.close(fd)
        if applied.value is not NOTHING:
            self._shell.displayhook.update_user_ns(applied.value)  # Out[n] and _
        self._shell.compile._filename_map.update(applied.cells)  # tracebacks through functions that came
        say_lost(applied.lost)


@contextmanager
def ended_by_a_second_interrupt() -> Iterator[None]:
    """Let go of unpacking that does not end: it runs code of the notebook's classes.

    The first SIGINT comes from a person who meant the run, which is over: the names come, all of them.

    Raises:
        KeyboardInterrupt: there was a second one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def press(number: int, frame: object) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            raise interrupted("interrupted while the run's names were unpacked: some of them may have come")

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_counted() -> Iterator[list[int]]:
    """Collect SIGINTs instead of having each raise in the middle of something.

    The second one would otherwise raise inside the clean-up of the first. In a thread other than the main one
    no signal arrives, and nothing is changed.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    handler: Callable[..., None] = lambda number, frame: arrived.append(number)  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGINT, before)

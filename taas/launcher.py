"""Launch a run: collect what the cell needs from the notebook and from the machine, and submit it.

For ``--keep`` cells, this module also records which ranks the last such cell has left, and which
variables they hold.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from taas.base.memory_limits import memory_left
from taas.base.places import check_room
from taas.capture import Capture, Kept, capture, check_syntax
from taas.capture.environment import changed_variables, is_utf8, sendable_variables
from taas.capture.settings import process_state
from taas.capture.settings.setup_cells import setup_cells
from taas.config import load_catalog, project_folder
from taas.dataloader_registry import list_registered
from taas.delivery.registered import Registration, apply_final, delivering, loaders_in_use
from taas.engines.choice import check_installed, current_engine
from taas.engines.gpus import check_devices, device_in_words, physical, visible_gpus
from taas.engines.local import check_memory
from taas.errors import CaptureError, DeliveryError, EngineError, HeaderError, RanksGone, RunFailed
from taas.header.catalog import DATA_VM
from taas.header.options import RunSpec
from taas.notebook import pending
from taas.notebook.foreground import Interrupts, run_in_foreground, start_background
from taas.notebook.reached_code import takes_first_gpu_for_its_own
from taas.notebook.supervisor_client import get_supervisor
from taas.notebook.view.cell_output import say
from taas.notebook.view.live_view import notify_at_end
from taas.project.wall.boundary import make_shared, missing_shared
from taas.protocol.clients import DeliveryOrder, RunState, Submit
from taas.protocol.engines import EngineChoice
from taas.protocol.framing import Memory
from taas.protocol.ranks import AtImport, Cell, Workspace
from taas.protocol.records import RunRecord
from taas.runs.reader import finish
from taas.runs.records import read_record

_RANK_BUFFER = 256 << 20
"""The size of the batches prepared ahead for one rank, in bytes.

It applies unless ``delivery.buffer`` in taas.toml sets another size, or memory is short.
"""


@dataclass(frozen=True)
class KeptRun:
    """The kept ranks of a finished run, and the variables that they hold."""

    record: RunRecord
    names: Kept

    def check(self) -> None:
        """Raise RanksGone if the ranks have ended, according to the record.

        The cell is then captured for new ranks. Since kept ranks may end at any time, the
        supervisor may report the same error later, even if this check passes.
        """
        record = read_record(self.record.folder)
        if record is not None and record.kept_ranks is None:
            raise RanksGone(RanksGone.in_words(record.ranks_gone))


_kept: KeptRun | None = None
_turn = threading.RLock()


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Let only one thread of the notebook at a time launch a run, and wait for a foreground run.

    The threads share one connection to the supervisor, and would receive each other's messages. A
    thread that has to wait for its turn prints a message.
    """
    if not _turn.acquire(blocking=False):
        say(
            "another thread of this notebook runs something in ranks: this one waits for its end."
            " taas.submit gives runs that go on side by side"
        )
        _turn.acquire()
    try:
        yield
    finally:
        _turn.release()


def launch(spec: RunSpec, cell: str, shell: Any, *, queue: bool = False) -> RunRecord | None:
    """Run a cell in ranks, and bring its results into the shell's namespace.

    Args:
        spec: the cell's header.
        cell: the text below the header.
        shell: the notebook's IPython shell.
        queue: if other runs use the devices, wait for these runs instead of raising an error.

    Returns:
        With ``--background``, the run's record, at once. Otherwise None, after the run has ended.

    Raises:
        SyntaxError, CaptureError, EngineError: nothing was started.
        RunFailed: a rank failed, or a process of taas was killed.
        KeyboardInterrupt: the cell was interrupted, and did not complete in spite of this; no rank
            is left.
    """
    global _kept
    check_syntax(cell, shell, cell_number(shell))
    with turn():
        left = _kept if spec.keep else None
        try:
            if left is not None:
                left.check()
            return _launch(spec, cell, shell, left, queue=queue)
        except RanksGone as error:
            say(f"{error}; all names that the cell needs travel")
            return _launch(spec, cell, shell, None, queue=queue)
        except (CaptureError, DeliveryError, EngineError, HeaderError):  # nothing was started
            _kept = left or _kept
            raise


def _launch(
    spec: RunSpec, cell: str, shell: Any, left: KeptRun | None, *, queue: bool
) -> RunRecord | None:
    project = project_folder() if left is None else Path(left.record.project)
    missing_shared(project, spec.shared)
    engine = current_engine(project)
    local = engine.kind == "local"
    _check_machine(spec, engine, new_ranks=left is None)
    known = list_registered(shell.user_ns)
    loaders = known if spec.data_vms else []
    names = partial(
        capture,
        cell,
        shell.user_ns,
        shell,
        project=project,
        returned=spec.returned,
        size=spec.world_size,
        keep=spec.keep,
    )
    with delivering(loaders), ExitStack() as captures:
        kept = left.names if left else None
        anew = [entry.loader for entry in known]
        captured = captures.enter_context(
            names(kept=kept, anew=anew, for_data=bool(loaders and not left))
        )
        say(*loaders_in_use(loaders, captured.names))
        delivery = None
        if loaders:  # data processes need all variables, including those that kept ranks hold
            whole = captures.enter_context(names(for_data=True)) if left else captured
            delivery = make_delivery_order(whole, spec, local=local)
            if left:
                say(*whole.notices_of_data)
        say(*captured.notices)
        submit = make_submit(spec, cell, shell, engine, captured, delivery, left, project)
        submit = msgspec.structs.replace(submit, queue=queue)
        say(*make_shared(project, spec.shared))
        if spec.background:
            return _run_in_background(submit, captured, loaders, shell)
        ended = _run_in_front(submit, captured, shell)
        apply_final(ended.loaders, loaders)
    finish(ended.record)
    return None


def _check_machine(spec: RunSpec, engine: EngineChoice, *, new_ranks: bool) -> None:
    """Raise an EngineError if this machine lacks what a run needs, before variables are captured.

    If ``new_ranks`` is true, the run does not use kept ranks, and needs memory for new ones.
    """
    local = engine.kind == "local"
    check_installed(engine)
    check_room(spec.world_size, local=local)
    if local:
        check_devices(spec, visible_gpus())
    if local and new_ranks:
        check_memory(spec.world_size)


def _run_in_background(
    submit: Submit, captured: Capture, loaders: list[Registration], shell: Any
) -> RunRecord:
    """Start a background run; hold the objects that were sent to it until it is attached."""
    with Interrupts() as interrupts:
        supervisor = get_supervisor(warm=submit.engine.kind == "local")
        record = start_background(supervisor, submit, interrupts)
        notify_at_end(record, shell)
        if submit.cell.spec.returned != ():  # otherwise nothing will change in the notebook
            pending.hold(record, captured, loaders)
        return record


def _run_in_front(submit: Submit, captured: Capture, shell: Any) -> RunState:
    """Run a cell to its end; record which ranks stay afterwards, and what they hold."""
    global _kept
    keep = submit.cell.spec.keep
    with Interrupts() as interrupts:
        supervisor = get_supervisor(warm=submit.engine.kind == "local")
        if keep:
            # From now on the cell changes the variables of the kept ranks, so that the description
            # of them is out of date. An interrupt before this line leaves it valid.
            _kept = None
        ended = run_in_foreground(supervisor, submit, interrupts, captured, shell)
    if keep:
        _kept = KeptRun(ended.record, captured.kept()) if ended.record.kept_ranks else None
        say(*(_kept.names.notices if _kept else ()))
    return ended


def make_delivery_order(captured: Capture, spec: RunSpec, *, local: bool) -> DeliveryOrder:
    """Return the delivery order: data workers read the loaders from the captured variables."""
    catalog = load_catalog()
    vcpus = catalog.find(DATA_VM).vcpus
    return DeliveryOrder(
        Memory(os.getpid(), captured.fd, captured.nbytes),
        # Data workers that wait for reads use no CPU time, so there are more workers than CPUs.
        # The data VMs of one machine share its CPUs.
        min(vcpus, max(2, 2 * len(os.sched_getaffinity(0)) // spec.data_vms)) if local else vcpus,
        catalog["delivery.encrypt"],
        catalog["delivery.buffer"] or min(spec.world_size * _RANK_BUFFER, memory_left().free // 8),
    )


def make_submit(
    spec: RunSpec,
    cell: str,
    shell: Any,
    engine: EngineChoice,
    captured: Capture,
    delivery: DeliveryOrder | None,
    left: KeptRun | None,
    project: Path,
) -> Submit:
    """Return the message that starts a run of a cell, built from the state of this notebook.

    If there are environment variables that cannot be sent, this function tells the user which.
    """
    local = engine.kind == "local"
    gpus = visible_gpus() if local else ()
    environ, unsendable = sendable_variables()
    if unsendable:
        say(f"not in the ranks, since they are not UTF-8: the variables {', '.join(unsendable)}")
    return Submit(
        cell=Cell(
            text=cell,
            execution_count=cell_number(shell),
            spec=spec,
            colors=shell.colors,
            shell_class=type(shell).__name__,
            directory=str(project_folder()),
            own_gpu_first=(
                spec.gpus_per_rank > 0
                and spec.ranks_per_vm > 1
                and not spec.keep
                and takes_first_gpu_for_its_own(cell, shell.user_ns, project)
            ),
        ),
        workspace=Workspace(
            project=str(project),
            environ=environ,
            changed=tuple(filter(is_utf8, changed_variables())),
            at_import=_at_import(),
        ),
        payload=Memory(os.getpid(), captured.fd, captured.nbytes),
        gpus=physical(gpus) if spec.gpus_per_rank else (),
        device=device_in_words(spec, len(gpus)) if local else f"by {engine.kind.capitalize()}",
        delivery=delivery,
        engine=engine,
        notebook=notebook_path(shell),
        left_to=left.record.id if left else "",
        keep_idle=load_catalog(project)["keep.idle"],
    )


def _at_import() -> AtImport:
    """Return the state of this process that modules may read while ranks import them.

    The state is empty if it cannot be compared, or if there are setup cells: these run in a rank
    before its cell imports anything, and may have any effect.
    """
    path, arguments = process_state.path_and_arguments()
    plain = all(isinstance(text, str) and is_utf8(text) for text in (*path, *arguments))
    if not plain or setup_cells():
        return AtImport()
    return AtImport(
        path=tuple(path),
        arguments=tuple(arguments),
        settings=process_state.seen_by_imports(rank=False),
    )


def cell_number(shell: Any) -> int:
    """Return the number ``n`` of the running cell, as in ``In[n]``.

    The shell's counter is not reliable: some releases of IPython increment it before a cell runs,
    others afterwards, and older ones twice for a cell whose header is invalid.
    """
    running = shell.displayhook.exec_result
    return int((running and running.execution_count) or shell.execution_count)


def notebook_path(shell: Any) -> str:
    """Return the notebook's path; empty if neither VS Code nor Jupyter passes it to the kernel."""
    return str(shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", ""))


def debug_rank(shell: Any) -> bool:
    """Open the debugger in the kept rank that raised the notebook's last error.

    Return False if that error was not raised in a rank.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, RunFailed):
        return False
    first = None if _kept is None or _kept.record.name != error.run else _kept.record.first
    if _kept is None or first is None or first.outcome != "raised":
        say(
            f"the ranks of {error.run} have ended, and with them the frames of its error. With"
            " --post-mortem in the header the debugger opens at once; with --keep the ranks stay,"
            " and %debug opens it there"
        )
        return True
    spec = replace(_kept.record.cell.spec, name=None, units=None, data_vms=0, prebuffer=None)
    in_that_rank = f"__import__('os').environ['RANK'] == '{first.rank}'"
    launch(spec, f"if {in_that_rank}:\n    get_ipython().run_line_magic('debug', '')", shell)
    return True

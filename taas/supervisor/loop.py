"""The supervisor's main loop, which serves its clients, its agents, its kernel and the clock."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from taas.agent.processes import SWEEPS, become_subreaper, kill_tree, orphans, sweep_orphans
from taas.base import linux, process_log
from taas.base.import_hooks import keep_paths
from taas.base.linux import remove_tree
from taas.base.places import ProcessMark, no_room
from taas.base.poll_loop import PollLoop, WorkThread, raise_limit
from taas.base.process_log import log_message
from taas.engines import Engine
from taas.errors import EngineError, NotEnoughDevices
from taas.protocol import deadlines
from taas.protocol.agents import AgentSays, AgentUp, KeptGone
from taas.protocol.clients import (
    ClientSays,
    Prepare,
    Refused,
    Released,
    RunRequest,
    RunState,
    Stacks,
    Submit,
    SupervisorConfig,
)
from taas.protocol.curve import make_short_folder
from taas.protocol.framing import Message, MessageReader, Unreadable
from taas.protocol.ranks import Answer
from taas.protocol.records import Verdict
from taas.rank.lifeline import KernelTie
from taas.runs.records import make_room, read_records
from taas.supervisor.connections import ControlSocket, hold_folder, remove_folders_left
from taas.supervisor.fleet import Fleet, KeptRanks
from taas.supervisor.recorder import Recorder
from taas.supervisor.run_queue import RunQueue, check_processors
from taas.supervisor.runs import Run
from taas.supervisor.stages import ENDED, Stage
from taas.supervisor.vms import Vm, choosing, keep_gpus

logger = logging.getLogger(__name__)


class Supervisor:
    """The supervisor of one kernel's runs.

    Attributes:
        up: the data that the kernel needs to connect.
    """

    def __init__(self, config: SupervisorConfig, tie: KernelTie, scratch: Path) -> None:
        self._config, self._tie = config, tie
        self._kernel_mark = ProcessMark.of(config.kernel)
        self._kernel_gone = False
        self._control = ControlSocket(config.client_key, self._kernel_mark, scratch)
        self._scratch, self.up = scratch, self._control.up
        self._sources = PollLoop()
        self._worker = WorkThread(self._sources.soon)
        self._fleet = Fleet(
            self._control, scratch, self._watch_vms, self._strike, self._sweep, self._worker
        )
        self._kept = KeptRanks(self._fleet)
        self._runs: dict[str, Run] = {}
        self._submits: list[tuple[str, Submit]] = []
        self._queue = RunQueue()
        self._releases: list[bytes] = []
        self._read_client = MessageReader(ClientSays)
        self._read_agent = MessageReader(AgentSays)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until the kernel is gone and no background run is left."""
        self._sources.on(self._control.gate.socket, self._control.gate.answer)
        self._sources.on(self._control.socket, self._hear)
        for source in self._tie.sources:
            self._sources.on(source, self._lose_kernel)
        self._worker.do(partial(remove_folders_left, self._scratch), _note_failure)
        threading.Thread(target=make_room, name="taas-retention", daemon=True).start()
        self._worker.do(process_log.remove_old_files, _note_failure)
        if self._config.warm:
            self._fleet.warm_up(idle=self._config.idle)
        try:
            while not self._kernel_gone or self._in_background:
                wait = deadlines.TICK_OF_RUNS if self._runs else 1.0
                self._sources.step(0.0 if self._control.outgoing else wait)
                for run in self._runs.values():
                    run.hangs.step()
                    run.curves.step()
                self._kept.step()
                self._fleet.step()
                self._look_after()
                self._conclude_runs()
                self._release()
                # an agent of a released VM may hold GPUs until it has exited
                while self._submits and not self._worker.pending:
                    self._submit(*self._submits.pop(0))
                if not self._worker.pending:
                    self._serve_queue()
                self._control.flush(deadlines.TURN)
        finally:
            _end(self._control, self._fleet)

    def _hear(self) -> None:
        for key, route, data in self._control.receive():
            if key in self._control.clients:
                try:
                    message = self._read_client(data)
                except Unreadable:  # a message from another version of taas, in a terminal
                    continue
                self._hear_client(key, route, message)
                continue
            vm = self._fleet.find(key)
            if vm is None:  # the VM was released, and this message of its agent came late
                continue
            try:
                said = self._read_agent(data)
            except Unreadable as error:
                vm.kill()
                self._lose_vm(vm, f"given up, since it said what nobody understands ({error})")
            else:
                self._hear_agent(vm, said)

    @property
    def _in_background(self) -> bool:
        return bool(self._queue.names) or any(run.background for run in self._runs.values())

    def _tie_to_kernel(self) -> None:
        if self._kernel_gone or self._in_background:
            self._tie.disarm()
        else:
            self._tie.arm()

    def _lose_kernel(self) -> None:
        """React to the kernel's exit, or to its request to detach from this process.

        Foreground runs end. If there is no background run, this process ends too, with all
        processes below it.
        """
        logger.info("the kernel is gone")
        self._kernel_gone = True
        self._tie_to_kernel()
        self._submits.clear()
        for source in self._tie.sources:
            self._sources.off(source)
        if not self._in_background:
            return  # the loop ends, and everything with it
        self._kept.end("their kernel ended")
        self._fleet.release_idle()
        for run in list(self._runs.values()):
            if not run.background or run.stage in ENDED:
                self._let_go(run)

    def _let_go(self, run: Run) -> None:
        if run.stage not in ENDED:
            run.abandon()
        elif run.stage is Stage.OVER:
            self._forget(run)  # its variables were received, or no client will receive them
        run.found.let_go = True

    # ------------------------------------------------------------ clients

    def _hear_client(self, key: str, route: bytes, message: Message) -> None:
        """Handle a message from the kernel, or from a visitor that read the connection file."""
        run = self._runs.get(getattr(message, "run", ""))
        log_message(logger, "heard from the kernel or a visitor:", message)
        match message:
            case Submit():
                self._submits.append((key, message))
            case Prepare():
                self._fleet.prepare(message.engine)
            case RunRequest(what="release"):
                self._releases.append(route)
            case RunRequest(what="stacks") if run is None:
                self._control.reply(route, Stacks(places=()))
            case RunRequest(what="interrupt") if message.run in self._queue.names:
                self._queue.stop(message.run, message.place)
                self._tie_to_kernel()
            case _ if run is None:
                return  # the run has ended
            case Answer():
                run.ranks.answer(message)
            case RunRequest(what="stacks"):
                run.hangs.ask(partial(self._control.reply, route))
            case RunRequest(what="interrupt"):
                run.interrupt(message.place)
            case RunRequest(what="let go"):
                self._let_go(run)

    def _release(self) -> None:
        """Carry out ``%taas release`` once no run is left whose variables are still to be received.

        The VMs of such runs are idle then, and are released with the other idle VMs.
        """
        while self._releases and all(run.stage not in ENDED for run in self._runs.values()):
            ranks = self._kept.end("%taas release, or %unload_ext taas, ended them")
            released = Released(count=self._fleet.release_idle(), ranks=ranks)
            self._worker.after(partial(self._control.reply, self._releases.pop(0), released))

    def _check_name(self, wanted: str | None) -> None:
        """Check that no other run under way, of any supervisor, has the wanted name."""
        others = [record for record in read_records() if record.live] if wanted else []
        owner = next((f" of {record.owner}" for record in others if record.name == wanted), "")
        if owner or wanted in self._runs or wanted in self._queue.names:
            raise EngineError(
                f"a run called {wanted}{owner} is going on: give this one another --name"
            )

    def _submit(self, key: str, submit: Submit) -> None:
        """Begin a run, queue it until devices are free, or refuse it."""
        recorder = kept = None
        try:
            self._check_name(submit.cell.spec.name)
            kept = self._kept.find(submit)
            recorder = Recorder(submit, self._kernel_mark)
            run = self._make_or_queue(submit, recorder, kept)
        except (EngineError, OSError, RuntimeError) as error:
            if recorder is not None:
                recorder.discard()
            self._control.send(key, _refused(error))
            return
        self._control.send(key, RunState(record=recorder.record))
        if run is not None:
            self._begin(run)

    def _make_or_queue(self, submit: Submit, recorder: Recorder, kept: Run | None) -> Run | None:
        """Make a run, or append it to the queue, if it may wait: behind those that wait already."""
        try:
            if submit.queue and self._queue.names:
                raise NotEnoughDevices("other runs wait for devices")
            return self._make_run(submit, recorder, kept)
        except NotEnoughDevices:
            if not submit.queue:
                raise
        self._queue.check_room()
        self._queue.note_kept(hold_gpus=keep_gpus(self._fleet.vms))
        self._queue.add(submit, recorder)
        self._tie_to_kernel()  # a run in the queue outlives the kernel, too
        return None

    def _make_run(self, submit: Submit, recorder: Recorder, kept: Run | None = None) -> Run:
        """Lease what a run needs, and make it; if a part cannot be obtained, nothing is leased.

        Raises:
            NotEnoughDevices: other runs have the devices.
            EngineError, OSError, RuntimeError: the run cannot begin.
        """
        name, worker = recorder.record.name, None
        if submit.queue:
            going_on = [run for run in self._runs.values() if run.stage not in ENDED]
            check_processors(submit, [run.world_size for run in going_on])
        kept_vms = [] if kept is None else kept.vms
        try:
            with choosing(submit.gpus):
                vms = self._fleet.lease(name, submit, kept_vms)
                recorder.begin(tuple(gpu.device for vm in vms for gpu in vm.gpus))
            data = self._fleet.lease_data(name, submit, vms)
            worker = WorkThread(self._sources.soon)
            run = Run(recorder, vms, data, self._scratch, worker, kept=kept)
            recorder.move(Stage.ACQUIRING)
        except (EngineError, OSError, RuntimeError):
            self._fleet.keep(name, kept_vms, submit.engine.idle)
            if worker is not None:
                worker.close()
            raise
        if kept is not None:
            self._kept.hand_over()
        return run

    def _serve_queue(self) -> None:
        """Begin the run that has waited longest, if there are devices for it now."""
        waiting = self._queue.first()
        if waiting is None:
            return
        try:
            run = self._make_run(waiting.submit, waiting.recorder)
        except NotEnoughDevices:
            self._queue.note_kept(hold_gpus=keep_gpus(self._fleet.vms))
            return
        except (EngineError, OSError, RuntimeError) as error:
            self._queue.remove_first()
            self._tie_to_kernel()
            why = _refused(error)
            waiting.recorder.end(
                Verdict(outcome="lost", message=why.message, error=why.error), (), None
            )
            waiting.recorder.close()
            return
        self._queue.remove_first()
        self._begin(run)

    def _begin(self, run: Run) -> None:
        logger.info("%s begins, with %s", run.name, ", ".join(vm.label for vm in run.vms))
        self._runs[run.name] = run
        self._tie_to_kernel()
        if run.data is not None:
            self._sources.on(run.data.fileno(), partial(self._hear_data, run))
        run.look_at_machines()

    def _restart(self, run: Run) -> bool:
        """Start a run again, with new VMs for lost ones; return whether they could be obtained."""
        try:
            vms = self._fleet.replace(run.submit, run.vms)
            data = self._fleet.lease_data(run.name, run.submit, vms)
            again = run.again(vms, data)
        except (EngineError, OSError) as error:
            run.found.notices.append(f"it could not be started again: {error}")
            return False
        self._begin(again)
        return True

    def _hear_data(self, run: Run) -> None:
        assert run.data is not None
        source = run.data.fileno()
        run.data.step()
        run.data_changed()
        if run.data.over:
            self._sources.off(source)

    def _conclude_runs(self) -> None:
        for run in list(self._runs.values()):
            # if no work is pending, the processes that lost agents left behind have ended, too
            swept = not self._worker.pending
            run.step(swept=swept, hear_no_more=self._sources.off, then=self._conclude)

    def _conclude(self, run: Run) -> None:
        if run.loss and self._restart(run):
            return
        ended = run.conclude()
        if not run.background:
            self._control.send(self._config.client_key, ended)
        if ended.answer is None or self._kernel_gone or run.found.let_go or run.background:
            self._forget(run)

    def _forget(self, run: Run) -> None:
        run.forget()
        if run.ranks.stay and not self._kernel_gone:
            self._kept.keep(run)
        else:
            to_go = run.found.stopped or self._kernel_gone
            self._fleet.release(run.name, 0.0 if to_go else run.submit.engine.idle)
        run.worker.do(run.recorder.close)
        run.worker.do(make_room, lambda _: None)  # a folder that cannot be removed stays
        run.worker.close()
        del self._runs[run.name]
        self._queue.look_again()
        self._tie_to_kernel()

    # ------------------------------------------------------------ agents

    def _watch_vms(self) -> None:
        for vm in self._fleet.vms:
            if vm.machine.fileno() not in self._sources:
                self._sources.on(vm.machine.fileno(), partial(self._lose_vm, vm))
            self._control.agents.add(vm.key)
        for engine in self._fleet.engines:
            source = engine.fileno()
            if source >= 0 and source not in self._sources:
                self._sources.on(source, partial(self._hear_engine, engine, source))

    def _strike(self, vm: Vm) -> None:
        self._sources.off(vm.machine.fileno())
        self._control.agents.discard(vm.key)

    def _hear_engine(self, engine: Engine, source: int) -> None:
        engine.step()
        if engine.fileno() != source:
            self._sources.off(source)
        for run in self._runs.values():
            run.look_at_machines()

    def _look_after(self) -> None:
        """Give up VMs that are out of reach, or that do not end their processes in time."""
        for vm in self._fleet.beat():
            why = f" ({vm.machine.ending})" if vm.machine.ending else ""
            self._lose_vm(vm, f"lost: {vm.place} does not answer any more{why}")
        for run in list(self._runs.values()):
            for vm in run.overdue:
                vm.kill()
                self._lose_vm(vm, "killed, since it did not end what it had started")

    def _hear_agent(self, vm: Vm, message: AgentSays) -> None:
        run = self._runs.get(vm.run or "")
        log_message(logger, f"heard from {vm.label}:", message)
        if isinstance(message, AgentUp):
            vm.take(message)
            if run is not None:
                run.look_at_machines()
        elif isinstance(message, KeptGone):
            self._kept.lose(vm, run, message.how)
        elif run is not None and message.run == run.name:
            run.hear(vm, message.job, message.said)

    def _lose_vm(self, vm: Vm, how: str = "") -> None:
        how = self._fleet.lose(vm, how)
        logger.warning("%s is lost", vm.label)
        run = self._runs.get(vm.run or "")
        if run is not None:
            run.vm_lost(vm, how)
        self._kept.lose(vm, run, f"their agent was {how}")

    def _sweep(self, times: int = SWEEPS) -> None:
        """End the processes that agents have left behind, in up to ``times`` rounds.

        This does the work of :func:`sweep_orphans` in the worker thread.
        """
        own = [pid for engine in self._fleet.engines for pid in engine.pids()]
        own += [
            pid for run in self._runs.values() if run.data is not None for pid in run.data.pids()
        ]
        left = orphans(own)
        if left and times:
            self._worker.do(partial(kill_tree, left), lambda _: self._sweep(times - 1))


def _note_failure(done: Future[None]) -> None:
    """Log a failure to tidy up, which is no reason to end runs."""
    if (error := done.exception()) is not None:
        logger.warning("tidying up went wrong", exc_info=error)


def _refused(error: Exception) -> Refused:
    """Return the message that reports to a client why its run cannot begin."""
    if isinstance(error, EngineError):
        refused = Refused(error=type(error).__name__, message=str(error))
    else:
        said = ("the run could not begin", str(error), no_room(error))
        refused = Refused(error=EngineError.__name__, message=": ".join(filter(None, said)))
    logger.warning("a run is refused: %s", refused.error)
    return refused


def _end(control: ControlSocket, fleet: Fleet) -> None:
    """Shut everything down, even if one step fails.

    Processes on this machine end first, then those that engines have on other machines.
    """
    linux.kill_in(deadlines.END_SUPERVISOR)
    raise_limit()
    drivers = [pid for engine in fleet.engines if engine.remote for pid in engine.pids()]
    with contextlib.ExitStack() as last_first:
        last_first.callback(control.close)
        last_first.callback(sweep_orphans, ())
        last_first.callback(fleet.close)
        last_first.callback(sweep_orphans, drivers)
        last_first.callback(control.hide)


def main() -> None:
    """Read the configuration from standard input, and serve."""
    become_subreaper()
    keep_paths()
    linux.begin_afresh()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_log.begin(os.getpid())
    config = msgspec.json.decode(sys.stdin.readline(), type=SupervisorConfig)
    tie = KernelTie(config.kernel, config.life)
    raise_limit()
    scratch = Path(make_short_folder())
    hold_folder(scratch)
    try:
        supervisor = Supervisor(config, tie, scratch)
        sys.stdout.write(msgspec.json.encode(supervisor.up).decode() + "\n")
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.dup2(os.open(scratch / "supervisor.log", os.O_WRONLY | os.O_CREAT, 0o600), 1)
            os.dup2(1, 2)
        supervisor.run()
    except Exception:  # its agents end with it, and the notebook's error message names the log
        logger.exception(process_log.BROKE_DOWN)
    finally:
        remove_tree(scratch)

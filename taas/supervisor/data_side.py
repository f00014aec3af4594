"""The data side of a run: its coordinator, planner and data workers, from before the ranks until after them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from taas.delivery.config import DeliveryConfig, PlannerConfig, RankConfig, new_keys
from taas.delivery.reports import Failed, Final, Note, Prebuffered, ProgressReport, Report, Serving
from taas.delivery.service import ChildProcess, Service, default_slab, spawn_here
from taas.messages import Delivered, Submit


class DataSide:
    """What the supervisor has of a delivery. ``step`` is to be called when ``fileno`` is readable.

    Attributes:
        ready: enough is prepared: the ranks may start.
        over: nothing more will be reported.
        failed: why nothing is delivered any more, or "".
        final: the generators' states, for the notebook.
        notes: lines for the user, in order.
    """

    def __init__(
        self, submit: Submit, changed: Callable[[], None], progressed: Callable[[Delivered], None]
    ) -> None:
        assert submit.delivery is not None
        spec = submit.spec
        units = (
            spec.units if isinstance(spec.units, dict) else {} if spec.units is None else {"*": spec.units}
        )
        self._submit, self._order = submit, submit.delivery
        self._changed, self._progressed = changed, progressed
        self._payload = f"/proc/{submit.delivery.payload.pid}/fd/{submit.delivery.payload.fd}"
        config = DeliveryConfig(
            new_keys(),
            spec.world_size,
            default_slab(spec.world_size),
            uneven=spec.uneven,
            units=units,
            prebuffer=spec.prebuffer,
            hosts=spec.data_vms,
        )
        self._coordinator = ChildProcess("taas.delivery.coordinator", config, reports=True)
        self._service = Service(config, self._coordinator, "", "")
        self.ready = self.over = False
        self.failed = ""
        self.final = b""
        self.notes: list[str] = []

    def fileno(self) -> int:
        """Return the descriptor on which the coordinator reports."""
        assert self._coordinator.process.stdout is not None
        return self._coordinator.process.stdout.fileno()

    def pids(self) -> list[int]:
        """Return the processes that are the supervisor's own children."""
        return [self._coordinator.pid, *(child.pid for child in self._service.children)]

    def rank_config(self) -> RankConfig:
        """Return what every rank is told; each fills in its own rank."""
        return self._service.rank_config(0, encrypt=self._order.encrypt)

    def step(self) -> None:
        """Take in the coordinator's next report."""
        self._take(self._service.read())
        self._changed()

    def _take(self, report: Report | None) -> None:
        match report:
            case None:
                self.over = True
                self.failed = self.failed or (
                    "" if self.final else "the coordinator of the data workers ended"
                )
            case Serving():
                self._start_makers(report)
            case Prebuffered():
                self.ready = True
            case Failed():
                self.failed = report.reason
            case Note():
                self.notes.append(report.text)
            case ProgressReport():
                self._progressed(_all_together(report))
            case Final():
                self.final, self.over = report.states, True

    def _start_makers(self, serving: Serving) -> None:
        service, submit = self._service, self._submit
        service.endpoint, service.slabs = serving.endpoint, serving.slabs
        keys = service.config.keys.for_peers()
        path = [submit.project]
        planner = PlannerConfig(
            keys, serving.endpoint, self._payload, service.config.ranks, path, submit.project
        )
        service.children.append(spawn_here("planner", planner))
        for vm in range(submit.spec.data_vms):
            worker = service.worker_config(
                self._payload, vm, self._order.processes, self._order.encrypt, path, submit.project
            )
            service.children.append(spawn_here("keeper", worker))

    def ask_for_final(self) -> None:
        """The ranks have ended: ask where the generators are now."""
        self._coordinator.send(msgspec.json.encode({"type": "finish"}))

    def close(self) -> None:
        """End all its processes."""
        self._service.close()


def _all_together(report: ProgressReport) -> Delivered:
    loaders = report.loaders
    return Delivered(
        prepared=sum(loader.prepared for loader in loaders),
        delivered=sum(loader.delivered for loader in loaders),
        planned=sum(loader.planned for loader in loaders),
        rate=sum(loader.rate for loader in loaders),
        waited=sum(report.waited) / max(1, len(report.waited)),
    )

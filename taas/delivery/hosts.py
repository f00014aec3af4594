"""Which data VMs are there, by their beats; and which of their workers are stopped, or may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from taas.delivery.attempts import WorkerState

_SILENT = 6.0
"""Seconds without a beat after which a host's leases are given out again."""
_GONE = 20.0
"""Seconds without a beat after which a host counts as lost."""


class Hosts:
    """The data VMs of a delivery, by name (``h0``); times in seconds.

    Attributes:
        silent_for: what is said of a VM that is lost since it has been silent.
    """

    silent_for = f"silent for {_GONE:.0f} s"

    def __init__(self) -> None:
        self._beats: dict[str, float] = {}
        self._stopped: dict[str, set[str]] = {}
        self._silent: set[str] = set()
        self._lost: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._beats)

    def __contains__(self, host: str) -> bool:
        return host in self._beats

    def is_lost(self, host: str) -> bool:
        """Whether a host was struck."""
        return host in self._lost

    def hear(self, host: str, now: float, stopped: Iterable[str] | None = None) -> None:
        """Note a sign of life; a beat says which workers are stopped."""
        self._beats[host] = now
        if stopped is not None:
            self._stopped[host] = set(stopped)
            self._silent.discard(host)

    def lose(self, host: str) -> bool:
        """Strike a host; returns whether that is news."""
        known = host in self._lost
        self._lost.add(host)
        self._beats.pop(host, None)  # none, where its workers were quicker to say hello
        self._stopped.pop(host, None)
        self._silent.discard(host)
        return not known

    def gone(self, now: float) -> list[str]:
        """Return the hosts that count as lost by their silence."""
        return [host for host, beat in self._beats.items() if now - beat > _GONE]

    def fall_silent(self, now: float) -> bool:
        """Note which hosts are silent; returns whether there is a new one."""
        late = {host for host, beat in self._beats.items() if now - beat > _SILENT} - self._silent
        self._silent |= late
        return bool(late)

    def suspects(self, workers: Iterable[WorkerState]) -> set[str]:
        """Return the workers that are stopped, or on a host that is silent."""
        stopped = set().union(*self._stopped.values())
        return stopped | {worker.name for worker in workers if worker.host in self._silent}

"""The data VMs of a run by their number in its delivery, where the planner is, and what takes the place of a lost one.

A number is given once: a VM, or a worker pool on it, that takes the place of a lost one has the next number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taas.supervisor.vms import Vm

PLANNER = -1
"""The planner's number."""
_REPLACEMENTS = 3
"""So many lost data VMs or worker pools are replaced for each that was asked for; then it is the data that kills them."""


class DataVms:
    """Where the data processes of one start of a run are.

    Args:
        vms: those for worker pools.
        planner: one of this machine, which runs the planner.
        here: tells the address under which the ranks' VMs and these reach this machine; empty while it is not known.
        another: asks for one more; None where there is none.

    Attributes:
        by_number: those that are there or come.
        most: so many numbers are given at most.
        started: the VMs that were told to start the data process of a number, and have not said that it is gone.
        elsewhere: whether they are, or may be, other hosts.
    """

    def __init__(
        self, vms: list[Vm], planner: Vm, here: Callable[[], str], another: Callable[[], Vm | None]
    ) -> None:
        self.by_number = dict(enumerate(vms))
        self.started: dict[int, Vm] = {}
        self.elsewhere = any(vm.remote for vm in vms)
        self.here, self._another, self._planner = here, another, planner
        self._all = dict(self.by_number)
        self.most = (1 + _REPLACEMENTS) * len(vms)

    @property
    def rehearse(self) -> bool:
        """Whether ranks on this machine have no GPU."""
        return not self._planner.gpus

    def startable(self) -> Iterator[tuple[int, Vm]]:
        """Give the numbers that have no data process yet, on VMs that are up."""
        for number, vm in ((PLANNER, self._planner), *self.by_number.items()):
            if vm.up and not vm.gone and number not in self.started:
                yield number, vm

    def of(self, vm: Vm) -> list[int]:
        """Return the numbers that a VM has."""
        planner = [PLANNER] if vm is self._planner else []
        return planner + [number for number, mine in self.by_number.items() if mine is vm]

    def name(self, number: int) -> str:
        """Return what messages call a data VM."""
        place = self._all[number].machine.place if number in self._all else ""
        return f"data VM {number} ({place})" if place else f"data VM {number}"

    def lose(self, number: int) -> Vm | None:
        """Strike a number; returns the VM that its data process was started on."""
        self.by_number.pop(number, None)
        return self.started.pop(number, None)

    def replace(self, vm: Vm | None = None) -> bool:
        """Take a VM in place of a lost one: this one, or another; returns whether there is one."""
        if len(self._all) < self.most:
            vm = vm or self._another()
            if vm is not None:
                self.by_number[len(self._all)] = self._all[len(self._all)] = vm
                return True
        return False

    @property
    def starting(self) -> Vm | None:
        """The first of them, where they are all on their way; None where one is there, or none comes."""
        coming = list(self.by_number.values())
        return None if not coming or any(vm.up for vm in coming) else coming[0]

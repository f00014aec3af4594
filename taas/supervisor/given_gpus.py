"""The GPUs that a run was given on its VMs: by the supervisor of this machine's, or by the engine."""

from __future__ import annotations

from collections.abc import Mapping

from taas.errors import NotEnoughDevices
from taas.header import RunSpec
from taas.supervisor.vms import Vm

__all__ = ["check_gpus", "device_in_words", "gpus_of"]


def gpus_of(vm: Vm) -> tuple[str, ...]:
    """Return a VM's GPUs, as CUDA_VISIBLE_DEVICES names them; none: its ranks are rehearsed, if they need some."""
    return vm.gpus if vm.machine.gpus is None else vm.machine.gpus


def check_gpus(spec: RunSpec, vms: Mapping[str, Vm]) -> None:
    """See that a run is on GPUs as a whole, or rehearsed as a whole.

    Args:
        spec: what it asked for.
        vms: its VMs, which are up, by what messages call them.

    Raises:
        NotEnoughDevices: a VM has fewer GPUs than its ranks need, and not all have none.
    """
    needed = spec.ranks_per_vm * spec.gpus_per_rank
    given = {name: len(gpus_of(vm)) for name, vm in vms.items()}
    short = [name for name, count in given.items() if count < needed]
    if short and any(given.values()):
        raise NotEnoughDevices(
            f"{short[0]} has {given[short[0]]} of the {needed} GPUs that its ranks need, and that it was said to have. "
            "`nvidia-smi` there tells whether its driver is loaded. Take it out of the cluster until then (`ray stop` "
            "there), or rehearse the run on CPU ranks (--rehearse)."
        )


def device_in_words(spec: RunSpec, vms: list[Vm]) -> str:
    """Say what the ranks run on, where only the engine knew; else nothing."""
    if vms[0].machine.gpus is None or not spec.gpus_per_rank:
        return ""
    count = sum(len(gpus_of(vm)) for vm in vms)
    if not count:
        return f"rehearsed on CPU ({'as --rehearse asks' if spec.rehearse else 'no GPU there'})"
    return f"{count} GPU{'s' if count > 1 else ''}"

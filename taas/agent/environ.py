"""The environment of a VM's processes: the notebook's, and a rank's own variables, as torchrun sets them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from taas.engines import AgentConfig
from taas.engines.local import present_gpus
from taas.wire.framing import LOOPBACK
from taas.wire.ranks import RankOrder, Staged

_RANKS_ARE_KNOWN = "Distributed|distributed|LOCAL_RANK|local_rank"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment(notebook: dict[str, str], changed: Iterable[str], config: AgentConfig) -> dict[str, str]:
    """Return the environment that ranks have on this VM.

    A variable that the notebook set itself holds here, too; one that it inherited holds where this VM has none
    of that name: PATH, HOME and their like are the VM's.

    Args:
        notebook: the notebook's environment, or a part of it.
        changed: names of variables that the notebook set, changed or removed.
        config: the agent's.
    """
    own = {name: value for name, value in config.environ.items() if name not in changed}
    return {**notebook, **own}


def interface_of(host: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return str(name)
    return None


def _visible(order: RankOrder, own: str) -> Iterable[str]:
    """Return the GPUs that a rank sees, in order: in a cell for DataParallel, its own first.

    Such programs call the first GPU theirs (``cuda:0``), and have their batches there; those for several processes number GPUs
    by ranks, as later cells of kept ranks may.
    """
    for_one_process = re.search(r"\bDataParallel\b", order.cell.text) and not re.search(
        _RANKS_ARE_KNOWN, order.cell.text
    )
    own_first = for_one_process and not order.cell.spec.keep
    return sorted(order.gpus, key=lambda gpu: gpu != own) if own_first else order.gpus


def rank_environ(order: RankOrder, staged: Staged, local_rank: int) -> dict[str, str]:
    """Return the variables torchrun sets in a rank (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    rank, store = order.first_rank + local_rank, order.store
    environ = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": order.cell.spec.world_size,
        "LOCAL_WORLD_SIZE": order.local_world_size,
        "GROUP_RANK": order.group_rank,
        "GROUP_WORLD_SIZE": order.cell.spec.vms,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": order.cell.spec.world_size,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": order.run,
        "TORCHELASTIC_RESTART_COUNT": order.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": order.cell.spec.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": not store.folder,
        "TORCHELASTIC_ERROR_FILE": Path(staged.output) / str(rank) / "error.json",
    }
    if order.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(order, order.gpus[local_rank]))
    elif present_gpus():  # a rehearsal, or a CPU type, on a machine that has some
        environ["CUDA_VISIBLE_DEVICES"] = ""
    if store.host == LOOPBACK:  # nothing of the run can be reached from another machine
        interface: str | None = "lo"
    else:
        interface = interface_of(order.host)
    if interface is not None:
        environ |= {name: interface for name in _INTERFACES if name not in staged.environ}
    if order.local_world_size > 1 and "OMP_NUM_THREADS" not in staged.environ:
        environ["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in environ.items()}

"""``--backend``: another torch.distributed backend in the place of the one that a cell asks for.

In a rehearsal the rewritten call is then the one that is rehearsed: ``nccl`` still becomes ``gloo``.
"""

from __future__ import annotations

import torch.distributed as dist

from taas.errors import HeaderError
from taas.rehearsal.patches import Arguments, rewrite_calls

_AVAILABLE = {
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": dist.is_nccl_available,
    "ucc": dist.is_ucc_available,
}


def install(backend: str) -> None:
    """Use this backend wherever one is chosen.

    Args:
        backend: a name, or one per device such as ``cpu:gloo,cuda:nccl``.

    Raises:
        HeaderError: this torch was built without it.
    """
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    lacking = [name for name in names if not _AVAILABLE[name]()]
    if lacking:
        built = ", ".join(name for name, there in _AVAILABLE.items() if there())
        raise HeaderError(f"--backend {backend}: this torch has no {lacking[0]}; it was built with {built}")

    def choose(arguments: Arguments) -> None:
        arguments["backend"] = backend
        if "nccl" not in names:
            arguments.pop("device_id", None)
            arguments.pop("pg_options", None)

    def choose_again(arguments: Arguments) -> None:
        if arguments.get("backend") is not None:
            choose(arguments)

    rewrite_calls(dist, "init_process_group", choose)
    rewrite_calls(dist, "new_group", choose_again)

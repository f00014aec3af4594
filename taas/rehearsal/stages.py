"""The parts of a rehearsal in the order they are installed. Importing this module is the costly half of install."""

from __future__ import annotations

from taas.rehearsal import (
    amp,
    backends,
    children,
    compiling,
    cuda_module,
    device_copies,
    devices,
    dispatcher_net,
    distributed,
    factories,
    loading,
    memory_figures,
    older_gloo,
    random_streams,
    refused,
    streams,
    sync_batch_norm,
    tensors,
)


def install_all(local_rank: int, device_count: int) -> None:
    """Install every stage."""
    place(local_rank, device_count)
    for stage in (
        cuda_module,
        random_streams,
        streams,
        memory_figures,
        factories,
        tensors,
        amp,
        backends,
        loading,
        compiling,
        sync_batch_norm,
        device_copies,
        distributed,
        older_gloo,
        dispatcher_net,
        refused,  # last: it looks at what the stages before left of torch
    ):
        stage.install()


def place(local_rank: int, device_count: int) -> None:
    """Say which device is this process's own; all that the stages put in place asks when it is called."""
    devices.install(local_rank, device_count)
    children.install(local_rank, device_count)

"""The parts of a rehearsal in the order they are installed. Importing this module is the costly half of install."""

from __future__ import annotations

from taas.rehearsal import (
    cuda_module,
    devices,
    distributed,
    operators,
    patches,
    refused,
    streams,
    tensors,
    warned,
)

place = devices.place


def install_all() -> None:
    """Install every stage; all of them ask which device is the process's own when they are called."""
    stages = (
        devices,
        cuda_module,
        streams,
        operators,
        tensors,
        distributed,
        refused,  # last: it looks at what the stages before left of torch
    )
    for stage in stages:
        stage.install()
    warned.install((patches, *stages))

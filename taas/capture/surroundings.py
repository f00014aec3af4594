"""What earlier cells did to their process, for ranks; and what the cell did to rank 0's, for the notebook.

Both ways: changed variables of the environment, ``sys.path``, the working directory, the random number
generators of ``random``, NumPy and torch, and torch's process-wide settings (:mod:`torch_settings`). To the
ranks alone: how the notebook logs, warns and prints (:mod:`reporting`). Variables that describe a rank, as
torchrun's, never travel.
A rank starts in the project whatever the notebook's working directory is (contract); where the cell
changes it, the notebook's changes too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from taas.capture import reporting
from taas.capture.generators import set_generators, states_of_generators
from taas.capture.torch_settings import put_settings, settings_of_torch

__all__ = ["Surroundings", "extend_path", "not_brought"]

_A_RANKS_OWN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MPLBACKEND",
    "NODE_RANK", "PWD", "OLDPWD", "SHLVL", "_",
}  # fmt: skip
_A_RANKS_OWN_PREFIXES = ("ROLE_", "TORCHELASTIC_", "TAAS_", "JPY_", "TORCH_NCCL_", "TORCHDYNAMO_")


def _mine(name: str) -> bool:
    return name in _A_RANKS_OWN or name.startswith(_A_RANKS_OWN_PREFIXES)


def _first_environment() -> dict[str, str]:
    """Return the environment this process was started with."""
    raw = Path("/proc/self/environ").read_bytes()
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def _loaded(name: str, attribute: str) -> Any:
    module = sys.modules.get(name)
    return module if module is not None and hasattr(module, attribute) else None


def not_brought(error: Exception) -> str:
    """Say what did not come back with the names, which have to, whatever a cell did to its process."""
    return (
        "the state of the process (environment, working directory, random numbers, settings of torch): "
        f"{type(error).__name__}: {error}"
    )


def extend_path(first: Iterable[str]) -> None:
    """Put ``first`` at the front of ``sys.path``, each entry once, before what is there."""
    wanted = [entry for entry in dict.fromkeys(first) if entry]
    sys.path[:] = wanted + [entry for entry in sys.path if entry not in wanted]


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # somebody removed it
        return ""


class Surroundings:
    """The process-wide state at one moment, as plain values.

    Args:
        cuda: whether this process may have CUDA; False for rehearsed ranks, which only pretend.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self.environ = {name: value for name, value in os.environ.items() if not _mine(name)}
        self.path = list(sys.path)
        self.directory = _working_directory()
        self.generators = states_of_generators(cuda=cuda)
        self.settings = settings_of_torch()

    @classmethod
    def of_notebook(cls) -> dict[str, Any]:
        """Return what ranks have to apply with :meth:`enter`."""
        here = cls(cuda=True)
        first = _first_environment()
        if "numpy" not in here.generators:  # forks of one process must not all draw the same numbers for ever
            here.generators["numpy seed"] = int.from_bytes(os.urandom(4), "little")
        return {
            "environ": {name: value for name, value in here.environ.items() if first.get(name) != value},
            "unset": [name for name in first if name not in os.environ and not _mine(name)],
            "path": [entry for entry in here.path if entry],
            "generators": here.generators,
            "settings": here.settings,
            "reporting": reporting.of_notebook(),
        }

    @staticmethod
    def enter(state: dict[str, Any], project: str) -> None:
        """In a rank, before the names are unpickled: environment and ``sys.path`` as the notebook's."""
        os.environ.update(state["environ"])
        for name in state["unset"]:
            os.environ.pop(name, None)
        extend_path([project, *state["path"]])

    @staticmethod
    def settle(state: dict[str, Any], device: str | None) -> None:
        """In a rank, after the names are unpickled: settings of torch, random number generators.

        Args:
            state: what :meth:`of_notebook` returned.
            device: the rank's CUDA device, or None.
        """
        put_settings(state["settings"], device)
        reporting.enter(state["reporting"])
        generators = state["generators"]
        if "numpy" in sys.modules:  # it loads its random part at the first use, seeded from the system
            numpy = importlib.import_module("numpy.random")
            if "numpy seed" in generators:
                numpy.seed(generators["numpy seed"])
        number = None if device is None else int(device.partition(":")[2] or 0)
        set_generators(generators, device=number)

    def changes(self) -> dict[str, Any]:
        """Return what is different now, for :meth:`apply`."""
        now = Surroundings(cuda=self._cuda)
        return {
            "environ": {n: v for n, v in now.environ.items() if self.environ.get(n) != v},
            "unset": [name for name in self.environ if name not in now.environ],
            "path": [entry for entry in now.path if entry and entry not in self.path],
            "path first": bool(now.path and now.path[0] not in self.path),
            "directory": now.directory if now.directory != self.directory else "",
            "generators": {
                n: v
                for n, v in now.generators.items()
                if self.generators.get(n) != v and not (n == "torch seed" and "cuda" in now.generators)
            },
            "settings": {n: v for n, v in now.settings.items() if self.settings.get(n) != v},
        }

    @staticmethod
    def apply(changes: dict[str, Any]) -> None:
        """In the notebook: do what the cell did to rank 0's process."""
        os.environ.update(changes["environ"])
        for name in changes["unset"]:
            os.environ.pop(name, None)
        if changes["path first"]:
            extend_path(changes["path"])
        else:
            sys.path += [entry for entry in changes["path"] if entry not in sys.path]
        if changes["directory"] and Path(changes["directory"]).is_dir():
            os.chdir(changes["directory"])
        put_settings(changes["settings"], None)
        torch = _loaded("torch", "cuda")
        used = torch is not None and torch.cuda.is_initialized()
        set_generators(changes["generators"], device=torch.cuda.current_device() if used else 0)

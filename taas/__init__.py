"""Run cells of a notebook on many GPUs, in ``torch.distributed`` processes.

In IPython, ``import taas`` or ``%load_ext taas`` activates the ``#pragma taas`` comment (the
*header*) of cells. Outside IPython, importing taas has no such effect.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from taas.errors import TaasError

if TYPE_CHECKING:
    from taas.calls import run, submit
    from taas.capture.moves.collected import collected
    from taas.dataloader_registry import register, resume, unregister
    from taas.past_runs import history

__all__ = [
    "TaasError",
    "collected",
    "history",
    "load_ipython_extension",
    "register",
    "resume",
    "run",
    "submit",
    "unload_ipython_extension",
    "unregister",
]
__version__ = "0.1.0"
_HOMES = {
    "collected": "taas.capture.moves.collected",
    **dict.fromkeys(("register", "resume", "unregister"), "taas.dataloader_registry"),
    **dict.fromkeys(("run", "submit"), "taas.calls"),
    "history": "taas.past_runs",
}
"""For each attribute that is imported at its first use: the module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'taas' has no attribute {name!r}")
    # imported at its first use, because `import taas` has to take less than 50 ms
    return getattr(importlib.import_module(_HOMES[name]), name)


def _magics() -> ModuleType:
    """Return the module for IPython; importing it outside IPython would cost 300 ms."""
    return importlib.import_module("taas.magics")


def load_ipython_extension(shell: Any) -> None:
    """Activate cell headers and magics (``%load_ext taas``)."""
    if getattr(shell, "is_rank", False):  # the kernel has already processed the header
        return
    _magics().activate(shell)
    _magics().start_ahead(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Deactivate cell headers and magics (``%unload_ext taas``)."""
    _magics().deactivate(shell)


def _activate_in_notebook() -> None:
    interactive = sys.modules.get("IPython.core.interactiveshell")
    if interactive is not None and interactive.InteractiveShell.initialized():
        _magics().activate(interactive.InteractiveShell.instance())


_activate_in_notebook()

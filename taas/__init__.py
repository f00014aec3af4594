"""taas makes a notebook cell train on many GPUs.

In IPython, ``import taas`` or ``%load_ext taas`` activates the cell header ``#pragma taas``;
elsewhere importing has no effect.
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

__all__ = [
    "TaasError",
    "collected",
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
}
"""The modules that have what is imported when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'taas' has no attribute {name!r}")
    # at its first use, since `import taas` is to cost less than 50 ms
    return getattr(importlib.import_module(_HOMES[name]), name)


def _magics() -> ModuleType:
    """Return the module for IPython, which is not imported elsewhere: that would cost 300 ms."""
    return importlib.import_module("taas.magics")


def load_ipython_extension(shell: Any) -> None:
    """Activate the cell headers and the magics (``%load_ext taas``)."""
    if getattr(shell, "is_rank", False):  # the notebook has read the header of its cell
        return
    _magics().activate(shell)
    _magics().start_ahead(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Deactivate them (``%unload_ext taas``)."""
    _magics().deactivate(shell)


def _activate_in_notebook() -> None:
    interactive = sys.modules.get("IPython.core.interactiveshell")
    if interactive is not None and interactive.InteractiveShell.initialized():
        _magics().activate(interactive.InteractiveShell.instance())


_activate_in_notebook()

"""taas makes a notebook cell train on many GPUs.

In IPython, ``import taas`` or ``%load_ext taas`` activates the cell header ``#pragma taas``; elsewhere importing
has no effect.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from taas.errors import TaasError

if TYPE_CHECKING:
    from taas.capture.collected import collected
    from taas.dataloader_registry import register, resume, unregister

__all__ = [
    "TaasError",
    "collected",
    "load_ipython_extension",
    "register",
    "resume",
    "unload_ipython_extension",
    "unregister",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("collected", "register", "resume", "unregister"):
        raise AttributeError(f"module 'taas' has no attribute {name!r}")
    # when one is first used: `import taas` is to cost less than 50 ms
    module = "taas.capture.collected" if name == "collected" else "taas.dataloader_registry"
    return getattr(importlib.import_module(module), name)


def _magics() -> ModuleType:
    """What there is in IPython only, whose import outside of it would cost 300 ms."""
    return importlib.import_module("taas.magics")


def load_ipython_extension(shell: Any) -> None:
    """Activate the cell headers and the magics (``%load_ext taas``)."""
    if getattr(shell, "is_rank", False):  # the notebook has read the header of its cell
        return
    _magics().activate(shell)
    _magics().start_ahead(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Undo it (``%unload_ext taas``)."""
    _magics().deactivate(shell)


def _activate_in_notebook() -> None:
    interactive = sys.modules.get("IPython.core.interactiveshell")
    if interactive is not None and interactive.InteractiveShell.initialized():
        _magics().activate(interactive.InteractiveShell.instance())


_activate_in_notebook()

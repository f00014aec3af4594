"""taas makes a notebook cell train on many GPUs.

In IPython, ``import taas`` or ``%load_ext taas`` activates the cell header ``#pragma taas``; elsewhere importing
has no effect.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from taas.errors import TaasError

if TYPE_CHECKING:
    from taas.dataloader_registry import register, unregister
    from taas.resuming import resume

__all__ = [
    "TaasError",
    "load_ipython_extension",
    "register",
    "resume",
    "unload_ipython_extension",
    "unregister",
]
__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """Activate the cell headers and the magics (``%load_ext taas``)."""
    from taas.magics import activate

    activate(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Undo it (``%unload_ext taas``)."""
    from taas.magics import deactivate

    deactivate(shell)


def __getattr__(name: str) -> Any:
    if name in ("register", "unregister"):
        from taas import dataloader_registry

        return getattr(dataloader_registry, name)
    if name == "resume":
        from taas import resuming

        return resuming.resume
    raise AttributeError(f"module 'taas' has no attribute {name!r}")


def _activate_in_notebook() -> None:
    interactive = sys.modules.get("IPython.core.interactiveshell")
    if interactive is not None and interactive.InteractiveShell.initialized():
        load_ipython_extension(interactive.InteractiveShell.instance())


_activate_in_notebook()

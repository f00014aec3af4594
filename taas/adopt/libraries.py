"""Other libraries, as the program imports them: their launchers, and rich's live displays.

Launchers are adopted where they start processes for training, else refused by name.

Lightning needs nothing to find its ranks (torchrun's environment is there) but the number of VMs, and its
strategies that fork (``ddp_notebook``, ``ddp_spawn``) must not.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from taas.adopt.membership import Membership
from taas.adopt.spawn import Adopter, without_torchrun_variables
from taas.errors import CannotAdopt
from taas.import_hooks import after_import

_HANDLE = "_taas_display"
FORKING_LIGHTNING = (
    "lightning.pytorch.strategies.launchers.multiprocessing",
    "lightning.fabric.strategies.launchers.multiprocessing",
    "pytorch_lightning.strategies.launchers.multiprocessing",
    "lightning_fabric.strategies.launchers.multiprocessing",
)


def install(membership: Membership, adopter: Adopter) -> None:
    """Wait for rich, accelerate, Lightning and torch's elastic launcher to be imported, and adopt them then."""
    after_import("rich.live", _adopt_rich)
    after_import("torch.distributed.launcher.api", lambda module: _refuse_elastic(module, membership))
    for name in FORKING_LIGHTNING:
        after_import(name, lambda module: _adopt_lightning(module, membership))
    if membership.world_size == 1:
        return
    after_import("accelerate.launchers", lambda module: _adopt_accelerate(module, membership, adopter))
    if membership.nodes > 1:
        for variable in ("PL_TRAINER_NUM_NODES", "LT_NUM_NODES"):  # Trainer and Fabric take them as defaults
            os.environ.setdefault(variable, str(membership.nodes))


def _refuse_elastic(module: ModuleType, membership: Membership) -> None:
    native = module.launch_agent

    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        if membership.world_size == 1:
            with without_torchrun_variables():
                return native(*args, **kwargs)
        raise CannotAdopt(
            f"torchrun (torch.distributed.launcher) was called in a rank: each of the {membership.world_size} ranks of "
            "this run would start processes of its own. The ranks are there already: call the training function itself."
        )

    module.launch_agent = membership.in_rank(native, launch_agent)  # type: ignore[attr-defined]


def _adopt_accelerate(module: Any, membership: Membership, adopter: Adopter) -> None:
    native = module.notebook_launcher
    signature = inspect.signature(native)

    def launch(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        os.environ["ACCELERATE_MIXED_PRECISION"] = str(given["mixed_precision"]).lower()
        asked, function = given["num_processes"], given["function"]
        processes = membership.local_world_size if asked is None else asked
        adopter.run("notebook_launcher", processes, lambda _: function(*given["args"]), given["args"])

    module.notebook_launcher = membership.in_rank(native, launch)


def _adopt_lightning(module: ModuleType, membership: Membership) -> None:
    launcher = module._MultiProcessingLauncher
    native = launcher.launch

    def launch(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy
        if membership.world_size == 1 and strategy.num_processes > 1:
            strategy.cluster_environment = _own_environment(module)  # not torchrun's, which the rank has
            with without_torchrun_variables():
                return native(self, function, *args, **kwargs)
        kwargs.pop("trainer", None)
        nodes = getattr(strategy, "num_nodes", membership.nodes)
        strategy.cluster_environment.validate_settings(num_devices=strategy.num_processes, num_nodes=nodes)
        return function(*args, **kwargs)

    launcher.launch = membership.in_rank(native, launch)


def _own_environment(module: ModuleType) -> Any:
    """Return what Lightning takes for a program that starts its processes itself."""
    package = "lightning.fabric" if module.__name__.startswith("lightning.") else "lightning_fabric"
    return importlib.import_module(f"{package}.plugins.environments").LightningEnvironment()


# ---------------------------------------------------------------- live displays
#
# rich's progress bars, and so Lightning's ``RichProgressBar``. In a notebook rich draws them into a widget of ipywidgets,
# where that is installed, and the widget needs the kernel that made it. Here each is one IPython display that is
# updated, which any front end shows.


def _adopt_rich(module: ModuleType) -> None:
    live = module.Live
    native_refresh, native_stop = live.refresh, live.stop

    def refresh(self: Any) -> None:
        if not self.console.is_jupyter or getattr(self, "_nested", False):
            native_refresh(self)
            return
        with self._lock:
            self._live_render.set_renderable(self.renderable)
            _show(self, self.console, self._live_render.renderable)

    def stop(self: Any) -> None:
        last = self.is_started and self.console.is_jupyter and not getattr(self, "_nested", False)
        if last:
            refresh(self)
        native_stop(self)
        if last and self.transient:
            _show(self, self.console, "")

    live.refresh, live.stop = refresh, stop


def _show(live: Any, console: Any, renderable: Any) -> None:
    from IPython.display import display
    from rich.jupyter import _render_segments

    segments = list(console.render(renderable, console.options)) if renderable else []
    text = "".join(segment.text for segment in segments if not segment.control)
    bundle = {"text/plain": text, "text/html": _render_segments(segments)}
    handle = live.__dict__.get(_HANDLE)
    if handle is None:
        live.__dict__[_HANDLE] = display(bundle, raw=True, display_id=True)
    else:
        handle.update(bundle, raw=True)

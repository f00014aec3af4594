"""Launchers of other libraries: adopted where they start processes for training, else refused by name.

Lightning needs nothing to find its ranks (torchrun's environment is there) but the number of VMs, and its
strategies that fork (``ddp_notebook``, ``ddp_spawn``) must not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from taas.adopt.import_hooks import after_import
from taas.adopt.membership import Membership
from taas.adopt.spawn import Adopter
from taas.errors import CannotAdopt

FORKING_LIGHTNING = (
    "lightning.pytorch.strategies.launchers.multiprocessing",
    "lightning.fabric.strategies.launchers.multiprocessing",
    "pytorch_lightning.strategies.launchers.multiprocessing",
    "lightning_fabric.strategies.launchers.multiprocessing",
)


def install(membership: Membership, adopter: Adopter) -> None:
    """Wait for accelerate, Lightning and torch's elastic launcher to be imported, and adopt them then."""
    after_import("torch.distributed.launcher.api", lambda module: _refuse_elastic(module, membership))
    if membership.world_size == 1:
        return
    after_import("accelerate.launchers", lambda module: _adopt_accelerate(module, membership, adopter))
    for name in FORKING_LIGHTNING:
        after_import(name, lambda module: _adopt_lightning(module, membership))
    if membership.nodes > 1:
        for variable in ("PL_TRAINER_NUM_NODES", "LT_NUM_NODES"):  # Trainer and Fabric take them as defaults
            os.environ.setdefault(variable, str(membership.nodes))


def _refuse_elastic(module: ModuleType, membership: Membership) -> None:
    native = module.launch_agent

    @functools.wraps(native)
    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        if not membership.active:
            return native(*args, **kwargs)
        return _refuse("torchrun (torch.distributed.launcher)", membership)

    module.launch_agent = launch_agent  # type: ignore[attr-defined]


def _refuse(what: str, membership: Membership) -> NoReturn:
    raise CannotAdopt(
        f"{what} was called in a rank: each of the {membership.world_size} rank(s) of this run would start "
        "processes of its own. The ranks are there already: call the training function itself."
    )


def _adopt_accelerate(module: ModuleType, membership: Membership, adopter: Adopter) -> None:
    native, native_debug = module.notebook_launcher, module.debug_launcher

    @functools.wraps(native)  # a notebook that imports it gets its own back, by its name
    def notebook_launcher(
        function: Callable[..., object],
        args: Sequence[Any] = (),
        num_processes: int | None = None,
        mixed_precision: str = "no",
        *others: Any,
        **kwargs: Any,
    ) -> None:
        if not membership.active:
            native(function, args, num_processes, mixed_precision, *others, **kwargs)
            return
        os.environ["ACCELERATE_MIXED_PRECISION"] = str(mixed_precision).lower()
        processes = membership.local_world_size if num_processes is None else num_processes
        adopter.run("notebook_launcher", processes, lambda _: function(*args), args)

    @functools.wraps(native_debug)
    def debug_launcher(
        function: Callable[..., object], args: Sequence[Any] = (), num_processes: int = 2
    ) -> None:
        if not membership.active:
            native_debug(function, args, num_processes)
            return
        adopter.run("debug_launcher", num_processes, lambda _: function(*args), args)

    module.notebook_launcher = notebook_launcher  # type: ignore[attr-defined]
    module.debug_launcher = debug_launcher  # type: ignore[attr-defined]


def _adopt_lightning(module: ModuleType, membership: Membership) -> None:
    launcher = module._MultiProcessingLauncher
    native = launcher.launch

    def launch(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not membership.active:
            return native(self, function, *args, **kwargs)
        kwargs.pop("trainer", None)
        strategy = self._strategy
        nodes = getattr(strategy, "num_nodes", membership.nodes)
        strategy.cluster_environment.validate_settings(num_devices=strategy.num_processes, num_nodes=nodes)
        return function(*args, **kwargs)

    launcher.launch = launch

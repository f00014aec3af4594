"""Functions that make tensors take CUDA devices and make them on the CPU.

Random factories asked for a CUDA device draw from that device's own generator (``random_streams``), as on a GPU:
``torch.randn(3, device="cuda")`` does not advance the CPU's stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.node
import torch.jit._builtins
import torch.utils._device

from taas.rehearsal.devices import CPU, as_cpu, machine, ordinal
from taas.rehearsal.patches import replace
from taas.rehearsal.random_streams import generators

Factory = Callable[..., torch.Tensor]

# torch's own list of what obeys `with torch.device(…)`, and those that take a device without obeying it
LIKE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
)
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
DRAWS = frozenset({"rand", "randn", "randint", "randperm"})

_standing_in: dict[Any, Factory] = {}  # torch's own factory -> ours


def _on_the_cpu(original: Factory, draws: bool = False) -> Factory:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            device = kwargs.get("device")
            if device is not None:
                cpu = kwargs["device"] = as_cpu(device)
                if draws and cpu is CPU and device is not CPU and kwargs.get("generator") is None:
                    kwargs["generator"] = generators[ordinal(device)]
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


def _found() -> list[tuple[Any, str, Factory]]:
    """Where the factories are: module, name, function."""
    wanted = {*torch.utils._device._device_constructors(), *(getattr(torch, name) for name in LIKE)}
    return [
        (module, name, value)
        for module in (torch, torch.fft, torch.nested)
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and _hashable(value) and value in wanted
    ]


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


# at import, so before the fork: looking through torch in a fork copies the pages of all it looks at
_FACTORIES = _found()


def install() -> None:
    """Wrap every factory of ``torch``, ``torch.fft``, ``torch.nested`` and ``torch.Tensor.new_*``."""
    for module, name, original in _FACTORIES:
        factory = _on_the_cpu(original, name in DRAWS)
        _standing_in[original] = factory
        replace(module, name, factory)
        _tell_torchscript(original, factory)
    for name in NEW:
        replace(torch.Tensor, name, _on_the_cpu(getattr(torch.Tensor, name)))
    replace(torch.utils._device.DeviceContext, "__init__", _device_context_init)
    replace(torch.utils._device.DeviceContext, "__torch_function__", _device_context_function)
    replace(torch.fx.node, "_find_module_of_method", _find_module_of_method)


def _tell_torchscript(original: Any, factory: Factory) -> None:
    """Keep ``torch.jit.script`` compiling the operator; it finds operators by the identity of the function."""
    table = torch.jit._builtins._builtin_table
    if (
        table is not None and id(original) in table
    ):  # else it will be built from torch's names, which are ours by then
        torch.jit._builtins._register_builtin(factory, table[id(original)])


_context_init = torch.utils._device.DeviceContext.__init__
_find_module = torch.fx.node._find_module_of_method


def _device_context_init(self: Any, device: Any) -> None:
    _context_init(self, device)
    if self.device.type == "cuda" and self.device.index is None:  # torch.get_default_device() tells the index
        self.device = torch.device("cuda", machine.current)


def _device_context_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func in torch.utils._device._device_constructors() and kwargs.get("device") is None:
        kwargs["device"] = self.device
        func = _standing_in.get(func, func)
    return func(*args, **kwargs)


def _find_module_of_method(orig_method: Any) -> str:
    """Name the module of a factory that FX has traced; FX looks for the very function in ``torch``."""
    if orig_method in _standing_in:
        return _standing_in[orig_method].__module__
    return _find_module(orig_method)

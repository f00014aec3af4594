"""Rehearses functions of torch that depend on a GPU.

These are factories, mixed precision, choices among kernels, and compilation. Inside
``autocast("cuda")`` the CPU's autocast is also on, with the same dtype: the CUDA flags are set as
on a GPU (``torch.is_autocast_enabled()``, ``custom_fwd``), and the CPU's autocast does the work.
``GradScaler`` needs no patch, because it works on the device of the loss. ``torch.compile`` runs
eagerly: it returns the same kinds of objects, without graphs and kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.amp.autocast_mode
import torch.jit._builtins
import torch.utils._device
from torch import _VF
from torch.nn import attention
from torch.utils._pytree import tree_map

from taas.base.import_hooks import after_import
from taas.rehearsal.cuda_module import gpu_generator
from taas.rehearsal.devices import CPU, cuda_index, machine
from taas.rehearsal.patches import (
    Arguments,
    always,
    overridable,
    replace,
    replace_all,
    rewrite_calls,
)
from taas.rehearsal.tensors import stays_itself

# ---------------------------------------------------------------- creating tensors
#
# As on a GPU, random factories for a CUDA device draw from a generator that is not the CPU's:
# ``torch.randn(3, device="cuda")`` does not advance the CPU's stream.

Factory = Callable[..., torch.Tensor]

# torch's own list of factories that respect `with torch.device(…)`, and factories that take a
# device without respecting it
LIKE = (
    *(
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
    ),
    "normal",
)
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
DRAWS = frozenset({"rand", "randn", "randint", "randperm"})
SHARES = frozenset({"as_tensor", "asarray"})  # on the CPU the result shares the argument's memory

_standing_in: dict[Any, Factory] = {}  # from torch's own factory to its replacement
_originals: dict[Any, Factory] = {}  # and back


def _on_the_cpu(original: Factory, draws: bool = False, shares: bool = False) -> Factory:
    @overridable
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs:
            return original(*args)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if cuda_index(kwargs.get("device")) is None:
            return original(*args, **kwargs)
        kwargs["device"] = CPU
        if draws and kwargs.get("generator") is None:
            kwargs["generator"] = gpu_generator()
        made = original(*args, **kwargs)
        return made.clone() if shares and not stays_itself(made) else made

    return factory


# This runs at import, and so before the fork: searching torch in a fork copies the pages it reads.
_WANTED = {*torch.utils._device._device_constructors(), *(getattr(torch, name) for name in LIKE)}
_FACTORIES: list[tuple[Any, str, Any]] = [
    (module, name, value)
    for module in (torch, torch.fft, torch.nested)
    for name, value in vars(module).items()
    if callable(value) and isinstance(value, Hashable) and value in _WANTED
]


def _install_factories() -> None:
    """Wrap every factory of ``torch``, ``torch.fft`` and ``torch.nested``, and ``Tensor.new_*``."""
    table = torch.jit._builtins._builtin_table
    for module, name, original in _FACTORIES:
        factory = _on_the_cpu(original, name in DRAWS, name in SHARES)
        _standing_in[original], _originals[factory] = factory, original
        replace(module, name, factory)
        # torch.jit.script finds operators by the identity of the function. If its table does not
        # exist yet, it will be built from the new functions.
        if table is not None and id(original) in table:
            torch.jit._builtins._register_builtin(factory, table[id(original)])
    for name in NEW:
        replace(torch.Tensor, name, _on_the_cpu(getattr(torch.Tensor, name)))
    replace(torch.utils._device.DeviceContext, "__init__", _device_context_init)
    replace(torch.utils._device.DeviceContext, "__torch_function__", _device_context_function)


_context_init = torch.utils._device.DeviceContext.__init__


def _device_context_init(self: Any, device: Any) -> None:
    _context_init(self, device)
    # torch.get_default_device() also returns the index
    if self.device.type == "cuda" and self.device.index is None:
        self.device = torch.device("cuda", machine.current)


def _device_context_function(
    self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    obeys = _originals.get(func, func) in torch.utils._device._device_constructors()
    if obeys and kwargs.get("device") is None:
        kwargs["device"] = self.device
        func = _standing_in.get(func, func)
    return func(*args, **kwargs)


# ---------------------------------------------------------------- mixed precision

_autocast = torch.amp.autocast_mode.autocast
_enter, _exit = _autocast.__enter__, _autocast.__exit__
_cast = torch.amp.autocast_mode._cast
_lstm: Callable[..., Any] = _VF.lstm


def _enter_both(self: Any) -> Any:
    entered = _enter(self)
    if self.device == "cuda":
        inner = _autocast(
            "cpu", dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
        )
        self.__dict__.setdefault("_on_the_cpu", []).append(inner)
        _enter(inner)
    return entered


def _exit_both(self: Any, *exc: Any) -> Any:
    if self.device == "cuda":
        _exit(self._on_the_cpu.pop(), *exc)
    return _exit(self, *exc)


def _cast_on_the_cpu(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Cast CPU tensors where ``custom_fwd(cast_inputs=…)`` would cast those of its device."""
    return _cast(value, "cpu" if device_type == "cuda" else device_type, dtype)


def _lstm_in_single_precision(*args: Any, **kwargs: Any) -> Any:
    """Run an LSTM under fp16 autocast in fp32, and round the results.

    The CPU has no fp16 LSTM.
    """
    if not (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16):
        return _lstm(*args, **kwargs)
    with _autocast("cpu", enabled=False):
        outputs = _lstm(*tree_map(_single, args), **kwargs)
    return tuple(output.half() for output in outputs)


def _single(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


# ---------------------------------------------------------------- attention


def _and_the_plain_one(arguments: Arguments) -> None:
    """Also allow the plain attention.

    Programs choose flash and memory-efficient attention for speed; every device has the plain one.
    """
    backends = arguments["backends"]
    chosen = [backends] if isinstance(backends, attention.SDPBackend) else list(backends)
    arguments["backends"] = [*chosen, attention.SDPBackend.MATH]


# ---------------------------------------------------------------- torch.compile


def _eagerly(arguments: Arguments) -> None:
    """Compile without kernel and graph.

    The result behaves like the compiled model, and is pickled like it.
    """
    arguments |= {"backend": "eager", "fullgraph": False, "mode": None, "options": None}


def _turn_off(config: Any) -> None:
    """Also let compiled models among the notebook's variables run eagerly.

    A value that is set would hold in one context only, so this changes the default.
    """
    config._config["disable"].default = True


def install() -> None:
    """Patch autocast in place, so that ``torch.cuda.amp.autocast`` follows; turn Dynamo off."""
    _install_factories()
    replace_all(_autocast, {"__enter__": _enter_both, "__exit__": _exit_both})
    replace(torch.amp.autocast_mode, "_cast", _cast_on_the_cpu)
    _VF.lstm = _lstm_in_single_precision
    rewrite_calls(attention, "sdpa_kernel", _and_the_plain_one)
    replace_all(torch.backends.cuda, {"enable_math_sdp": always(None), "is_built": always(True)})
    replace(torch.backends.cudnn, "is_available", always(True))
    after_import("torch._dynamo.config", _turn_off)
    rewrite_calls(torch, "compile", _eagerly)

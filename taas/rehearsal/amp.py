"""Mixed precision: inside ``autocast("cuda")`` the CPU's autocast is on as well, with the same dtype.

The CUDA flags are set as on a GPU (``torch.is_autocast_enabled()``, ``custom_fwd``), the CPU's do the work. With
honest tensors ``GradScaler`` needs no help: it goes where the loss is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.amp.autocast_mode
from torch import _VF

from taas.rehearsal.patches import replace

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
    """What ``custom_fwd(cast_inputs=…)`` casts are the tensors of its device, which are CPU tensors here."""
    return _cast(value, "cpu" if device_type == "cuda" else device_type, dtype)


def _lstm_in_single_precision(*args: Any, **kwargs: Any) -> Any:
    """Run an LSTM under fp16 autocast in fp32, rounding what comes out: the CPU has no fp16 LSTM."""
    if not (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16):
        return _lstm(*args, **kwargs)
    with _autocast("cpu", enabled=False):
        outputs = _lstm(*(_single(argument) for argument in args), **kwargs)
    return tuple(output.half() for output in outputs)


def _single(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.float() if argument.is_floating_point() else argument
    if isinstance(argument, (list, tuple)):
        return type(argument)(_single(item) for item in argument)
    return argument


def install() -> None:
    """Patch ``torch.autocast`` in place, so ``torch.cuda.amp.autocast``, its subclass, follows."""
    replace(_autocast, "__enter__", _enter_both)
    replace(_autocast, "__exit__", _exit_both)
    replace(torch.amp.autocast_mode, "_cast", _cast_on_the_cpu)
    _VF.lstm = _lstm_in_single_precision

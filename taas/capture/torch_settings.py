"""torch's process-wide settings: default dtype and device, gradient mode, determinism, precision, cuDNN's flags.

How precise float32 is has two interfaces: one for each backend and kind of operation, and the older one, whose
functions raise once the newer one has said something that they have no word for. Both travel: the older one as
far as it can be read, then the newer one, where torch has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["put_settings", "settings_of_torch"]


def _readable(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a getter that gives None where torch refuses, for it has been set by the newer interface."""

    def get_or_none(torch: Any) -> Any:
        try:
            return get(torch)
        except RuntimeError:
            return None

    return get_or_none


_SETTINGS: tuple[tuple[str, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    ("default dtype", lambda t: t.get_default_dtype(), lambda t, v: t.set_default_dtype(v)),
    ("gradient mode", lambda t: t.is_grad_enabled(), lambda t, v: t.set_grad_enabled(v)),
    (
        "deterministic algorithms",
        lambda t: (
            t.are_deterministic_algorithms_enabled(),
            t.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda t, v: t.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    (
        "anomaly detection",
        lambda t: t.is_anomaly_enabled(),
        lambda t, v: t.autograd.set_detect_anomaly(v),
    ),
    (
        "cudnn flags",
        lambda t: (t._C._get_cudnn_benchmark(), t._C._get_cudnn_deterministic(), t._C._get_cudnn_enabled()),
        lambda t, v: _set_cudnn(t._C, *v),
    ),
    (
        "matmul precision",
        _readable(lambda t: t.get_float32_matmul_precision()),
        lambda t, v: t.set_float32_matmul_precision(v),
    ),
    (
        "cudnn TF32",
        _readable(lambda t: t._C._get_cudnn_allow_tf32()),
        lambda t, v: t._C._set_cudnn_allow_tf32(v),
    ),
)

_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"), ("mkldnn", "all"),
    ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip
"""Backends and operations whose precision can be set; what is set for all comes before what has its own."""


def _set_cudnn(bindings: Any, benchmark: bool, deterministic: bool, enabled: bool) -> None:
    """Set its flags; by torch's bindings, since ``torch.backends.cudnn.set_flags`` resets others."""
    bindings._set_cudnn_benchmark(benchmark)
    bindings._set_cudnn_deterministic(deterministic)
    bindings._set_cudnn_enabled(enabled)


def _torch() -> Any:
    """Return torch, or None where it isn't loaded, or only in part."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "set_default_dtype") else None


def settings_of_torch() -> dict[str, Any]:
    """Return this process's settings, as :func:`put_settings` takes them; none where torch isn't loaded."""
    if (torch := _torch()) is None:
        return {}
    found = {name: get(torch) for name, get, _ in _SETTINGS}
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        found["precisions"] = tuple(precision(*what) for what in _PRECISIONS)
    found["default device"] = _default_device(torch)
    return found


def _default_device(torch: Any) -> str | None:
    """Return the default device as it was set, or None for the CPU; torch itself would say which GPU it is now."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None or context.device.type == "cpu" else str(context.device)


def _device_here(wanted: str | None, own: str | None) -> str | None:
    """Return the default device of another process as this process has it.

    Args:
        wanted: the device there.
        own: this rank's CUDA device, e.g. ``cuda:1``; None where the process has no device of its own.

    Returns:
        None where it is a CUDA device, and there is none here.
    """
    if wanted is None or not wanted.startswith("cuda"):
        return wanted
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():  # a rehearsed rank says that it has one
        return None
    number = wanted.partition(":")[2]
    if number and own is not None:
        return own
    return wanted if not number or int(number) < torch.cuda.device_count() else "cuda"


def put_settings(settings: dict[str, Any], own: str | None) -> None:
    """Make them this process's settings; those that aren't given stay as they are.

    Args:
        settings: as :func:`settings_of_torch` returns them.
        own: this rank's CUDA device; None for a notebook, or a rank without.
    """
    if not settings or (torch := _torch()) is None:
        return
    current = settings_of_torch()
    for name, _, put in _SETTINGS:
        if settings.get(name) is not None and settings[name] != current[name]:
            put(torch, settings[name])
    if "precisions" in settings:
        _put_precisions(torch, settings["precisions"])
    if "default device" in settings:
        device = _device_here(settings["default device"], own)
        if device != current["default device"]:
            torch.set_default_device(device)


def _put_precisions(torch: Any, precisions: tuple[str, ...]) -> None:
    """Set what differs: an operation that has none of its own is read as what holds for all."""
    for what, precision in zip(_PRECISIONS, precisions, strict=True):
        if torch._C._get_fp32_precision_getter(*what) != precision:
            torch._C._set_fp32_precision_setter(*what, precision)

"""``torch.backends`` and the attention kernels: a choice among a GPU's kernels leaves the CPU's."""

from __future__ import annotations

import torch
from torch.nn import attention

from taas.rehearsal.patches import Arguments, replace, rewrite_calls


def _and_the_plain_one(arguments: Arguments) -> None:
    """Flash and memory-efficient attention are chosen to be fast; what every device has is the plain one."""
    backends = arguments["backends"]
    chosen = [backends] if isinstance(backends, attention.SDPBackend) else list(backends)
    arguments["backends"] = [*chosen, attention.SDPBackend.MATH]


def _kept(enabled: bool) -> None:
    """The plain attention kernel stays on."""


def install() -> None:
    """Say that CUDA and cuDNN are there; keep the plain attention kernel among those chosen."""
    rewrite_calls(attention, "sdpa_kernel", _and_the_plain_one)
    replace(torch.backends.cuda, "enable_math_sdp", _kept)
    replace(torch.backends.cuda, "is_built", lambda: True)
    replace(torch.backends.cudnn, "is_available", lambda: True)

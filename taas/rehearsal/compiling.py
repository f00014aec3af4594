"""``torch.compile`` runs eagerly: the same object shapes, no graph is captured, no kernel is generated."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import nn

from taas.rehearsal.patches import replace


def _compile(model: Any = None, **options: Any) -> Any:
    """Return what behaves like the compiled model: ``_orig_mod``, its prefix in ``state_dict``, shared parameters."""
    if model is None:
        return functools.partial(_compile, **options)
    if isinstance(model, nn.Module):
        import torch._dynamo
        from torch._dynamo.eval_frame import OptimizedModule

        return OptimizedModule(model, torch._dynamo.disable())
    if not callable(model):
        raise RuntimeError(f"torch.compile takes a module or a function, not {type(model).__name__}")

    @functools.wraps(model)
    def eager(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    vars(eager)["_torchdynamo_orig_callable"] = model
    return eager


def install() -> None:
    """Turn Dynamo off, for whoever calls it by another way, before or after its import."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo.config" in sys.modules:
        config: Any = sys.modules["torch._dynamo.config"]
        config.disable = True
    replace(torch, "compile", _compile)

"""What cells can do to their process beside making names, as plain values: a row each."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oracle.atoms import ADDRESS

__all__ = ["process_state"]


def _torch(read: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: read(sys.modules["torch"]) if "torch" in sys.modules else None


def _numpy(read: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: read(sys.modules["numpy"]) if "numpy" in sys.modules else None


def _precision(torch: Any) -> Any:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer interface
        return [
            torch._C._get_fp32_precision_getter(*what)
            for what in (("generic", "all"), ("cuda", "matmul"))
        ]


def _pandas_options() -> Any:
    pandas = sys.modules.get("pandas")
    if pandas is None or not hasattr(pandas, "options"):
        return None
    names = [
        name
        for name in pandas._config.config._registered_options
        if not name.startswith("plotting.")
    ]
    return {name: ADDRESS.sub("", str(pandas.get_option(name))) for name in sorted(names)}


def _plot_settings() -> Any:
    matplotlib = sys.modules.get("matplotlib")
    if not hasattr(matplotlib, "rcParams"):
        return None
    return {
        name: str(dict.get(matplotlib.rcParams, name))
        for name in matplotlib.rcParams
        if name != "backend"
    }


def _loggers() -> Any:
    found = {}
    named = [v for v in logging.root.manager.loggerDict.values() if isinstance(v, logging.Logger)]
    for logger in (logging.root, *named):
        if logger.name.startswith(
            ("asyncio", "torch.distributed", "ipykernel", "taas", "parso", "Comm")
        ):
            continue  # what runs kernels and ranks has its own
        handlers = [(type(handler).__name__, handler.level) for handler in logger.handlers]
        if logger.level or logger.disabled or not logger.propagate or handlers:
            found[logger.name] = (logger.level, logger.disabled, logger.propagate, handlers)
    return logging.root.manager.disable, found


def _filters() -> Any:
    def pattern(found: re.Pattern[str] | str | None) -> Any:
        return found.pattern if isinstance(found, re.Pattern) else found

    return [
        (action, pattern(text), category.__qualname__, pattern(module), line)
        for action, text, category, module, line in warnings.filters
    ]


def _float_format() -> Any:
    shell = sys.modules["IPython"].get_ipython()
    formatter = shell.display_formatter.formatters["text/plain"]
    return formatter.float_precision, shell.colors, shell.ast_node_interactivity, formatter.pprint


_OF_RUNS = re.compile(
    r"_$|OLDPWD|PWD|KINETO_|TORCHINDUCTOR_|TRITON_|CUDA_MODULE_LOADING|MPLBACKEND"
)

ROWS: dict[str, Callable[[], Any]] = {
    "os.environ": lambda: {k: v for k, v in os.environ.items() if not _OF_RUNS.match(k)},
    "sys.path": lambda: list(sys.path),
    "sys.argv": lambda: [argument for argument in sys.argv[1:] if not argument.endswith(".json")],
    "working directory": lambda: str(Path.cwd()),
    "recursion limit": sys.getrecursionlimit,
    "time zone": lambda: time.tzname,
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold()),
    "decimal": lambda: repr(decimal.getcontext()),
    "log levels": _loggers,
    "warning filters": _filters,
    "IPython's formats": _float_format,
    "torch default dtype": _torch(lambda t: str(t.get_default_dtype())),
    "torch default device": _torch(lambda t: str(t.get_default_device())),
    "torch gradients": _torch(lambda t: (t.is_grad_enabled(), t.is_inference_mode_enabled())),
    "torch threads": _torch(lambda t: t.get_num_threads()),
    "torch determinism": _torch(
        lambda t: (t.are_deterministic_algorithms_enabled(), t.backends.cudnn.benchmark)
    ),
    "torch anomaly": _torch(lambda t: t.is_anomaly_enabled()),
    "torch precision": _torch(_precision),
    "torch print options": _torch(lambda t: repr(vars(t._tensor_str.PRINT_OPTS))),
    "numpy errors": _numpy(lambda n: n.geterr()),
    "numpy print options": _numpy(
        lambda n: {k: ADDRESS.sub("", str(v)) for k, v in n.get_printoptions().items()}
    ),
    "pandas options": _pandas_options,
    "matplotlib settings": _plot_settings,
    "random draws": lambda: repr(random.getstate()),
    "numpy draws": _numpy(lambda n: repr(n.random.get_state())),
    "torch draws": _torch(lambda t: bytes(t.get_rng_state().numpy())),
}


def process_state() -> dict[str, Any]:
    """Return this process's state, a row each."""
    return {name: read() for name, read in ROWS.items()}

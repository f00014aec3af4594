"""Settings of libraries: how errors are treated, how numbers, tables and plots look, what is reported, how torch computes.

How precise torch's float32 is has two interfaces: one for each backend and kind of operation, and the older one, whose
functions raise once the newer one has said something that they have no word for. Both travel: the older one as
far as it can be read, then the newer one, where torch has it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from taas.capture.holders import all_loggers

Take = Callable[[Any], Any]
Put = Callable[[Any, Any], Any]


class Row(NamedTuple):
    """One kind of state of a process.

    Attributes:
        name: what messages call it.
        library: the module it belongs to.
        take: reads it, as plain values; None where there is nothing to be told.
        put: writes what was told: of a dict the entries that changed, None for those that are gone; of a list the
            items but for those that a rank had beside the notebook's; anything else whole.
        early: whether ranks need it before names are built.
        only_back: whether it stays as ranks have it.
    """

    name: str
    library: str
    take: Take
    put: Put
    early: bool = False
    only_back: bool = False


def _options(name: str, library: str, take: Take, put: Callable[[Any, str, Any], Any]) -> Row:
    """Return a row of many settings, of which those are put that differ."""

    def put_all(module: Any, told: dict[str, Any]) -> None:
        here = take(module) or {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated
            for option, value in told.items():
                if option not in here or here[option] != value:
                    put(module, option, value)

    return Row(name, library, take, put_all)


def setting(name: str, library: str, get: str, put: str) -> Row:
    """Return a row of a library's own two functions; None where it refuses to say (torch's older words for precision)."""

    def take(module: Any) -> Any:
        with contextlib.suppress(RuntimeError):
            return operator.attrgetter(get)(module)()
        return None

    return Row(name, library, take, lambda module, value: operator.attrgetter(put)(module)(value))


# ---------------------------------------------------------------- how things look

_PLAIN = (str, int, float, bool, type(None))
_UNSET = 0, True, False
_NOT_OF_RANKS = ("backend", "toolbar", "webagg", "tk.", "macosx", "savefig.directory")


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _pandas_options(pandas: Any) -> dict[str, Any]:
    """Return the plain options of pandas, without what asking for some says; the function among them is data of a module."""
    config = pandas._config.config
    found = {
        name: functools.reduce(operator.getitem, name.split("."), config._global_config)
        for name in config._registered_options.keys() - {"display.float_format"}
    }
    return {name: value for name, value in found.items() if _is_plain(value)}


def _plot_settings(matplotlib: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: dict.get(matplotlib.rcParams, name) for name in matplotlib.rcParams}
    cycle = found.pop("axes.prop_cycle")
    plain = {n: v for n, v in found.items() if not n.startswith(_NOT_OF_RANKS) and _is_plain(v)}
    return {**plain, "axes.prop_cycle": tuple(cycle)}


def _put_plot_setting(matplotlib: Any, name: str, value: Any) -> None:
    if name == "axes.prop_cycle":
        value = matplotlib.cycler(**{key: [entry[key] for entry in value] for key in value[0]})
    matplotlib.rcParams[name] = value


_INLINE = "matplotlib_inline.backend_inline"


def _inline_settings(config: Any) -> dict[str, Any] | None:
    """Return ``%config InlineBackend``."""
    if not config.InlineBackend.initialized():
        return None
    backend = config.InlineBackend.instance()
    return {
        "figure_formats": sorted(backend.figure_formats),
        "print_figure_kwargs": backend.print_figure_kwargs,
        "close_figures": backend.close_figures,
    }


def _show_figures(_: Any, told: bool) -> None:
    """Let the shell show figures, as from a kernel's first one on; pyplot does it by itself where it is being imported."""
    del told
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or hasattr(pyplot, "switch_backend"):
        importlib.import_module(_INLINE)


def _formats(ipython: Any) -> dict[str, Any] | None:
    """Return how IPython shows values (``%precision``, ``%pprint``), and its aliases."""
    shell = ipython.get_ipython()
    if shell is None:
        return None
    text = shell.display_formatter.formatters["text/plain"]
    found = {name: getattr(text, name) for name in ("float_precision", "pprint", "max_seq_length")}
    found["ast_node_interactivity"] = shell.ast_node_interactivity
    return found | {f"alias {name}": command for name, command in shell.alias_manager.aliases}


def _put_format(ipython: Any, name: str, value: Any) -> None:
    shell = ipython.get_ipython()
    _, _, alias = name.partition(" ")
    if shell is None:
        return  # a data process shows nothing
    if alias and value is None:
        shell.alias_manager.undefine_alias(alias)
    elif alias:
        shell.alias_manager.soft_define_alias(alias, value)
    else:
        shown = (
            shell if name == "ast_node_interactivity" else shell.display_formatter.formatters["text/plain"]
        )
        setattr(shown, name, value)


# ---------------------------------------------------------------- what is reported


def _log_levels(_: Any) -> dict[str, Any]:
    levels = {log.name: (log.level, log.propagate, log.disabled) for log in all_loggers()}
    return {name: told for name, told in levels.items() if told != _UNSET}


def _put_log_levels(_: Any, told: dict[str, Any]) -> None:
    here = _log_levels(None)
    for name, state in told.items():
        if here.get(name) != state:  # each that is set empties the caches of all loggers
            logger = logging.getLogger(name)
            level, logger.propagate, logger.disabled = state or _UNSET
            logger.setLevel(level)


def _warning_filters(_: Any) -> list[Any]:
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    return [(action, text, (c.__module__, c.__qualname__), *place) for action, text, c, *place in filters]


def _put_warning_filters(told: list[Any], *, rank: bool) -> None:
    """Set the filters; in a rank, before those it has. Nothing warns with a category that no module here has."""
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    new = []
    for action, message, (module, name), *place in told:
        category = getattr(sys.modules.get(module), name, None)
        if category is not None:
            new.append((action, message, category, *place))
    filters[:] = [*new, *(entry for entry in filters if rank and entry not in new)]
    warnings._filters_mutated()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- torch


_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"), ("mkldnn", "all"),
    ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip
"""Backends and operations whose precision can be set; what is set for all comes before what has its own."""


def _precisions(torch: Any) -> tuple[str, ...] | None:
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    return None if precision is None else tuple(precision(*what) for what in _PRECISIONS)


def _put_precisions(torch: Any, told: tuple[str, ...]) -> None:
    """Set what differs: an operation that has none of its own is read as what holds for all."""
    for what, precision in zip(_PRECISIONS, told, strict=True):
        if torch._C._get_fp32_precision_getter(*what) != precision:
            torch._C._set_fp32_precision_setter(*what, precision)


def _default_device(torch: Any) -> str:
    """Return the default device as it was set; torch itself would say which GPU it is now."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return "cpu" if context is None else str(context.device)


def _put_default_device(torch: Any, wanted: str, own: str | None) -> None:
    """Set it to the device of another process as this one has it, whose own CUDA device is ``own``; ``cuda``: all are."""
    number = wanted.partition(":")[2]
    if wanted.startswith("cuda"):
        if not torch.cuda.device_count():  # a rehearsed rank says that it has one
            wanted = "cpu"
        elif number and own not in (None, "cuda"):
            wanted = own
        elif number and int(number) >= torch.cuda.device_count():
            wanted = "cuda"
    if wanted != _default_device(torch):
        torch.set_default_device(None if wanted == "cpu" else wanted)


def _put_next_hook(hooks: Any, told: int) -> None:
    """Go on from the larger number: a hook must not take the number, and so the place, of one that travelled."""
    hooks.RemovableHandle.next_id = max(told, hooks.RemovableHandle.next_id)


def rows(own: str | None, *, rank: bool = False) -> tuple[Row, ...]:
    """Return the rows of libraries, of the table of :mod:`process_state`.

    Args:
        own: this rank's CUDA device; None for a notebook, or a rank without.
        rank: whether this process is one.
    """
    return (
        Row("decimal context", "decimal", lambda d: d.getcontext().__reduce__()[1],
            lambda d, told: d.setcontext(d.Context(*told))),
        Row("warning filters", "warnings", _warning_filters, lambda _, told: _put_warning_filters(told, rank=rank)),
        Row("log levels", "logging", _log_levels, _put_log_levels),
        Row("levels of all logs", "logging", lambda m: m.root.manager.disable, lambda m, told: m.disable(told)),
        _options("formats and aliases of IPython", "IPython", _formats, _put_format),
        Row("errors of NumPy", "numpy", lambda n: n.geterr(), lambda n, told: n.seterr(**told)),
        Row("print options of NumPy", "numpy",
            lambda n: {k: v for k, v in n.get_printoptions().items() if k not in ("formatter", "override_repr")},
            lambda n, told: n.set_printoptions(**told, formatter=n.get_printoptions()["formatter"])),
        _options("options of pandas", "pandas", _pandas_options, lambda p, name, value: p.set_option(name, value)),
        _options("how figures are shown", "matplotlib_inline.config", _inline_settings,
                 lambda config, name, value: setattr(config.InlineBackend.instance(), name, value)),
        Row("figures are shown", "matplotlib.figure", lambda _: _INLINE in sys.modules or None, _show_figures),
        _options("settings of matplotlib", "matplotlib", _plot_settings, _put_plot_setting),
        setting("default dtype", "torch", "get_default_dtype", "set_default_dtype"),
        setting("gradient mode", "torch", "is_grad_enabled", "set_grad_enabled"),
        setting("anomaly detection", "torch", "is_anomaly_enabled", "autograd.set_detect_anomaly"),
        Row("deterministic algorithms", "torch",
            lambda t: (t.are_deterministic_algorithms_enabled(), t.is_deterministic_algorithms_warn_only_enabled()),
            lambda t, v: t.use_deterministic_algorithms(v[0], warn_only=v[1])),
        # by torch's bindings: torch.backends.cudnn.set_flags resets others
        setting("benchmark of cuDNN", "torch", "_C._get_cudnn_benchmark", "_C._set_cudnn_benchmark"),
        setting("determinism of cuDNN", "torch", "_C._get_cudnn_deterministic", "_C._set_cudnn_deterministic"),
        setting("use of cuDNN", "torch", "_C._get_cudnn_enabled", "_C._set_cudnn_enabled"),
        setting("precision of matmul", "torch", "get_float32_matmul_precision", "set_float32_matmul_precision"),
        setting("TF32 of cuDNN", "torch", "_C._get_cudnn_allow_tf32", "_C._set_cudnn_allow_tf32"),
        Row("precisions", "torch", _precisions, _put_precisions),
        Row("default device of torch", "torch", _default_device, lambda t, v: _put_default_device(t, v, own)),
        Row("print options of torch", "torch._tensor_str", lambda m: tuple(vars(m.PRINT_OPTS).items()),
            lambda m, told: m.set_printoptions(**dict(told))),
        Row("numbers of hooks", "torch.utils.hooks", lambda m: m.RemovableHandle.next_id, _put_next_hook),
    )  # fmt: skip

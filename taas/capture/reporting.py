"""How earlier cells set what a program reports: log levels and handlers, warning filters, the look of numbers and plots.

Ranks take it from the notebook, so that ``logging.info`` and ``warnings.filterwarnings("ignore")`` mean there
what they mean here. Travelling are handlers of the standard library that write to a standard stream or a file;
others (and formatters of classes of their own) stay behind.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["enter", "of_notebook"]

_NOT_OF_RANKS = ("backend", "interactive", "toolbar", "webagg", "tk.", "macosx", "savefig.directory")
_NUMPY_CALLABLES = ("formatter", "override_repr")
_STYLES: dict[type, str] = {
    logging.PercentStyle: "%",
    logging.StrFormatStyle: "{",
    logging.StringTemplateStyle: "$",
}
_PLAIN = (str, int, float, bool, type(None))


def of_notebook() -> dict[str, Any]:
    """Return what ranks have to apply with :func:`enter`, as plain values."""
    loggers = [logging.root, *_named_loggers()]
    return {
        "disabled below": logging.root.manager.disable,
        "loggers": [_logger(logger) for logger in loggers if _was_set(logger)],
        "warnings": [_filter(*entry) for entry in warnings.filters],
        "numpy": _numpy_options(),
        "torch": _torch_options(),
        "matplotlib": _plot_settings(),
    }


def enter(state: dict[str, Any]) -> None:
    """In a rank, after the names are unpickled and its streams are in place: report as the notebook does."""
    logging.disable(state["disabled below"])
    for name, level, propagate, disabled, handlers in state["loggers"]:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        if not logger.handlers:
            for handler in handlers:
                logger.addHandler(_new_handler(*handler))
    _put_filters(state["warnings"])
    if state["numpy"] and (numpy := _loaded("numpy")) is not None:
        numpy.set_printoptions(**state["numpy"])
    if state["torch"] and (torch := _loaded("torch")) is not None:
        torch.set_printoptions(**state["torch"])
    if state["matplotlib"] and (matplotlib := _loaded("matplotlib")) is not None:
        _put_plot_settings(matplotlib, dict(state["matplotlib"]))


def _loaded(module: str) -> Any:
    return sys.modules.get(module)


# ---------------------------------------------------------------- logging


def _named_loggers() -> Iterator[logging.Logger]:
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def _was_set(logger: logging.Logger) -> bool:
    return bool(
        logger.level or logger.disabled or not logger.propagate or any(map(_handler, logger.handlers))
    )


def _logger(logger: logging.Logger) -> tuple[Any, ...]:
    handlers = [found for handler in logger.handlers if (found := _handler(handler)) is not None]
    name = "" if logger is logging.root else logger.name
    return name, logger.level, logger.propagate, logger.disabled, handlers


def _handler(handler: logging.Handler) -> tuple[Any, ...] | None:
    """Describe a handler; None for one that stays behind."""
    if type(handler) is logging.FileHandler:
        target = handler.baseFilename
    elif type(handler) is logging.StreamHandler and handler.stream in (sys.stdout, sys.stderr):
        target = "stdout" if handler.stream is sys.stdout else "stderr"
    else:
        return None
    return type(handler).__name__, target, handler.level, _form(handler.formatter)


def _form(formatter: logging.Formatter | None) -> tuple[Any, ...] | None:
    if type(formatter) is not logging.Formatter or type(formatter._style) not in _STYLES:
        return None
    return formatter._fmt, formatter.datefmt, _STYLES[type(formatter._style)]


def _new_handler(kind: str, target: str, level: int, form: tuple[Any, ...] | None) -> logging.Handler:
    handler: logging.Handler
    if kind == "FileHandler":
        handler = logging.FileHandler(target, delay=True)
    else:
        handler = logging.StreamHandler(getattr(sys, target))
    handler.setLevel(level)
    if form is not None:
        handler.setFormatter(logging.Formatter(*form))
    return handler


# ---------------------------------------------------------------- warnings


def _filter(action: str, message: Any, category: Any, module: Any, line: int) -> tuple[Any, ...]:
    return action, _pattern(message), (category.__module__, category.__qualname__), _pattern(module), line


def _pattern(pattern: re.Pattern[str] | str | None) -> tuple[str, int] | str | None:
    return (pattern.pattern, pattern.flags) if isinstance(pattern, re.Pattern) else pattern


def _put_filters(entries: list[tuple[Any, ...]]) -> None:
    """Put them first; one whose category no module here has is left out, since nothing warns with it."""
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    new = []
    for action, message, (module, name), where, line in entries:
        category = getattr(_loaded(module), name, None)
        if category is not None:
            new.append((action, _compiled(message), category, _compiled(where), line))
    filters[:] = [*new, *(entry for entry in filters if entry not in new)]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _compiled(pattern: tuple[str, int] | str | None) -> re.Pattern[str] | str | None:
    return re.compile(*pattern) if isinstance(pattern, tuple) else pattern


# ---------------------------------------------------------------- numbers and plots


def _numpy_options() -> dict[str, Any]:
    numpy = _loaded("numpy")
    options = numpy.get_printoptions() if hasattr(numpy, "get_printoptions") else {}
    return {name: value for name, value in options.items() if name not in _NUMPY_CALLABLES}


def _torch_options() -> dict[str, Any]:
    module = _loaded("torch._tensor_str")
    return dict(vars(module.PRINT_OPTS)) if hasattr(module, "PRINT_OPTS") else {}


def _plot_settings() -> dict[str, Any]:
    """Return the entries of matplotlib's rcParams that are not matplotlib's defaults."""
    matplotlib = _loaded("matplotlib")
    if not hasattr(matplotlib, "rcParamsDefault"):
        return {}
    found: dict[str, Any] = {}
    for name, standard in dict.items(matplotlib.rcParamsDefault):
        value: Any = dict.get(matplotlib.rcParams, name)
        if name.startswith(_NOT_OF_RANKS) or value == standard:
            continue
        if name == "axes.prop_cycle":
            found[name] = value.by_key()
        elif isinstance(value, _PLAIN) or (
            isinstance(value, (list, tuple)) and all(isinstance(part, _PLAIN) for part in value)
        ):
            found[name] = value
    return found


def _put_plot_settings(matplotlib: Any, settings: dict[str, Any]) -> None:
    cycle = settings.pop("axes.prop_cycle", None)
    if cycle is not None:
        settings["axes.prop_cycle"] = matplotlib.cycler(**cycle)
    matplotlib.rcParams.update(settings)

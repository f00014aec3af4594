"""Where libraries hold what the notebook gave them: places that stand among the names, as one would write the way to them.

A setting that is a plain value is a row of the process' state (:mod:`~taas.capture.settings`). One that is an object of the
notebook, a handler or a function that shows values, travels and changes by the rule of names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from taas.capture import loggers
from taas.capture.settings import is_plain, pandas_options
from taas.import_hooks import after_import

_PANDAS = "pandas.options."
_PRINTERS = "get_ipython().display_formatter.formatters["
_OF_KERNELS = ("IPython.", "ipykernel.", "matplotlib_inline.")
_last: dict[str, Any] = {}
"""What stood among the names last, where it is made for that: it is the same object each time."""


class LibraryPlace(NamedTuple):
    """One kind of place.

    Attributes:
        begins: how the names of such places begin.
        library: the module that has them.
        take: reads them, by name.
        put: ``put(name, told, before)`` makes what is there what was told; None for nothing.
        without: what a user is told where it cannot travel.
    """

    begins: str
    library: str
    take: Callable[[ModuleType], dict[str, Any]]
    put: Callable[[str, Any, Any], None]
    without: str


def held_by_libraries() -> dict[str, Any]:
    """Return what libraries that are imported hold for the notebook."""
    loaded = ((place, sys.modules.get(place.library)) for place in _PLACES)
    return {n: v for place, module in loaded if module is not None for n, v in place.take(module).items()}


def place_of(name: str) -> LibraryPlace | None:
    """Return the kind of place that a name means; None for other names."""
    return next((place for place in _PLACES if name.startswith(place.begins)), None)


# ---------------------------------------------------------------- functions that show values


def _options_of_pandas(pandas: ModuleType) -> dict[str, Any]:
    return {f"{_PANDAS}{name}": v for name, v in pandas_options(pandas).items() if not is_plain(v)}


def _put_option_of_pandas(name: str, told: Any, before: Any) -> None:
    del before
    after_import("pandas", lambda pandas: pandas.set_option(name.removeprefix(_PANDAS), told))


def _formatters() -> Iterator[tuple[str, Any]]:
    shell = sys.modules["IPython"].get_ipython()
    known = {} if shell is None else shell.display_formatter.formatters
    yield from ((f"{_PRINTERS}{kind!r}]", formatter) for kind, formatter in known.items())


def _own_printers(formatter: Any) -> dict[Any, Any]:
    """Return what shows which class, but for IPython's own; a library's class by its name, as IPython takes it, too."""
    known = {c if c.__module__ == "__main__" else f"{c.__module__}.{c.__qualname__}": printer
             for c, printer in formatter.type_printers.items()}  # fmt: skip
    known |= {".".join(names): printer for names, printer in formatter.deferred_printers.items()}
    homes = {key: getattr(printer, "__module__", None) or "" for key, printer in known.items()}
    return {key: printer for key, printer in known.items() if not homes[key].startswith(_OF_KERNELS)}


def _taken_printers(_: ModuleType) -> dict[str, Any]:
    found = {}
    for name, formatter in _formatters():
        own = _own_printers(formatter)
        if own or name in _last:
            found[name] = _last.setdefault(name, own)
            if own != found[name]:
                found[name].clear()
                found[name].update(own)
    return found


def _put_printers(name: str, told: dict[Any, Any] | None, before: Any) -> None:
    del before
    formatter = dict(_formatters()).get(name)
    if formatter is None or told is None:
        return
    here = _own_printers(formatter)
    for key in here.keys() - told.keys():
        formatter.pop(key, None)
    for key, printer in told.items():
        if here.get(key) is not printer:
            formatter.for_type(key, printer)
    _last[name] = told


_LOOKS = "The ranks show values without it."
_PLACES = (
    LibraryPlace(loggers.NAME, "logging", lambda _: loggers.lists_of_loggers(), loggers.put_list,
          "What the cell logs does not reach it."),
    LibraryPlace(_PANDAS, "pandas", _options_of_pandas, _put_option_of_pandas, _LOOKS),
    LibraryPlace(_PRINTERS, "IPython", _taken_printers, _put_printers, _LOOKS),
)  # fmt: skip

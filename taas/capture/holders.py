"""Loggers and display formatters: objects of libraries that hold what the notebook gave them.

They are objects of the heap, known by name. A logger's state is its handlers and filters, but for those that come with a library
or with what runs the kernel (levels are settings); a formatter's is which function shows which class.
"""

from __future__ import annotations

import io
import logging
import sys
import types
from collections.abc import Callable, Container, Iterator
from typing import Any

from taas.capture.modules import data_of, left_out, modules_with_data
from taas.capture.reading import ATOMS, Reading, keeps_pickling_of_object, make_plain, turn_into

_OF_KERNELS = ("IPython.", "ipykernel.", "matplotlib_inline.")
_LARGEST = 256 << 20
"""Data of a module that have more bytes stay behind."""
_listed: set[str] = set()
"""What has held something of the notebook once: that it holds nothing any more is its state."""


def reader_of_holders(cls: type) -> Callable[[Any], Reading | None] | None:
    """Return what reads loggers, handlers and display formatters, or None for other classes."""
    if issubclass(cls, logging.Logger):
        return _read_logger
    if issubclass(cls, logging.Handler) and keeps_pickling_of_object(cls):
        return _read_handler
    formatter = getattr(sys.modules.get("IPython.core.formatters"), "BaseFormatter", None)
    return _read_formatter if formatter is not None and issubclass(cls, formatter) else None


def holders(project: str, modules: Container[str] | None = None) -> dict[str, Any]:
    """Return what holds something of the notebook, by what messages call it; of some modules of the project only."""
    found: dict[str, Any] = {f"logging.getLogger({log.name!r})": log for log in all_loggers()}
    found |= {f"get_ipython().display_formatter.formatters[{kind!r}]": f for kind, f in _formatters().items()}
    _listed.update(name for name, holder in found.items() if any(_own_parts(holder).values()))
    listed = {name: holder for name, holder in found.items() if name in _listed}
    return listed | modules_with_data(project, modules)


def leave_out(
    held: dict[str, Any],
    fails: Callable[[Any, int | None], Exception | None],
    why: Callable[[str, Any], str | None],
    known: Container[int] = (),
) -> list[str]:
    """Leave out what cannot travel of what loggers, formatters and modules hold, until :data:`left_out` is emptied.

    Args:
        held: these, as :func:`holders` has them.
        fails: returns why an object cannot travel; with a number, in so many bytes, and without code of modules.
        why: says of a part, by its name, why it cannot travel.
        known: ids of what both sides know.

    Returns:
        What it said of parts that are not in modules: these have their own in each process.
    """
    said = []
    for holder_name, holder in held.items():
        in_module = isinstance(holder, types.ModuleType)
        for kind, parts in _own_parts(holder).items():
            for key, part in [*(parts.items() if isinstance(parts, dict) else enumerate(parts))]:
                if type(part) in ATOMS or id(part) in known:
                    continue
                if fails(part, _LARGEST if in_module else None) is not None:
                    left_out[id(part)] = part
                    said += [] if in_module else [why(f"{holder_name}.{kind}[{key!r}]", part) or ""]
    return said


def _own_parts(holder: Any) -> dict[str, Any]:
    """Return what the notebook gave to a logger, a formatter or a module."""
    if isinstance(holder, types.ModuleType):
        return {"data": data_of(holder)}
    if not isinstance(holder, logging.Logger):
        return {"type_printers": _own_printers(holder)}
    return {
        name: [item for item in getattr(holder, name) if not _stays(holder, item)]
        for name in ("handlers", "filters")
    }


# ---------------------------------------------------------------- loggers


def all_loggers() -> Iterator[logging.Logger]:
    """Yield the root logger and all named ones."""
    yield logging.root
    for known in list(logging.root.manager.loggerDict.values()):
        if isinstance(known, logging.Logger):
            yield known


def _stays(log: logging.Logger, item: Any) -> bool:
    """Tell whether a library has added it to a logger of its own, or what runs the kernel has; or it cannot travel."""
    if id(item) in left_out:
        return True
    homes = getattr(item, "__module__", ""), type(getattr(item, "formatter", None)).__module__
    if log.name.partition(".")[0] in {home.partition(".")[0] for home in homes}:
        return True
    stream = getattr(item, "stream", None)
    if not isinstance(stream, io.TextIOWrapper) or stream in (sys.stdout, sys.stderr):
        return isinstance(item, logging.NullHandler)
    return isinstance(stream.name, int) or stream.name in ("<stdout>", "<stderr>")


def _read_logger(log: Any) -> Reading | None:
    registered: Any = logging.root.manager.loggerDict.get(log.name)
    if log is not logging.root and registered is not log:
        return None
    return Reading(logging.getLogger, (log.name,), _set_logger, (_own_parts(log),), (".",))


def _set_logger(log: Any, state: tuple[dict[str, list[Any]]]) -> None:
    for name, items in state[0].items():
        here = getattr(log, name)
        here[:] = [*(item for item in here if _stays(log, item)), *items]


def _read_handler(handler: Any) -> Reading:
    """Read a handler: its lock, and the file that it has opened, are its process' own."""
    state = {**vars(handler), "lock": None}
    if isinstance(handler, logging.FileHandler):
        state |= {"stream": None, "mode": handler.mode.replace("w", "a")}
    return Reading(make_plain, (type(handler),), _set_handler, (state,), (".",), turn_into)


def _set_handler(handler: Any, told: tuple[dict[str, Any]]) -> None:
    (state,), here = told, vars(handler)
    own = ("lock", "stream", "mode") if isinstance(handler, logging.FileHandler) else ("lock",)
    for name in here.keys() - state.keys():
        del here[name]
    here.update({**state, **{name: here[name] for name in own if name in here}})
    if here["lock"] is None:
        handler.createLock()
        logging._addHandlerRef(handler)  # type: ignore[attr-defined]


def go_to_ends() -> None:
    """Let open log files go on at their ends, where other processes have written since."""
    for known in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = known()
        stream = handler.stream if isinstance(handler, logging.FileHandler) else None
        if stream is not None and not stream.closed and stream.seekable():
            stream.seek(0, io.SEEK_END)


# ---------------------------------------------------------------- display formatters


def _formatters() -> dict[str, Any]:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return {} if shell is None else shell.display_formatter.formatters


def _formatter(kind: str) -> Any:
    return _formatters()[kind]


def _read_formatter(formatter: Any) -> Reading | None:
    kind = formatter.format_type
    if _formatters().get(kind) is not formatter:
        return None
    return Reading(_formatter, (kind,), _set_printers, (_own_parts(formatter),), (".",))


def _own_printers(formatter: Any) -> dict[Any, Any]:
    """Return what shows which class, but for IPython's own; a library's class by its name, as IPython takes it, too."""
    known = {c if c.__module__ == "__main__" else f"{c.__module__}.{c.__qualname__}": printer
             for c, printer in formatter.type_printers.items()}  # fmt: skip
    known |= {".".join(names): printer for names, printer in formatter.deferred_printers.items()}
    homes = {key: getattr(printer, "__module__", None) or "" for key, printer in known.items()}
    return {
        key: printer
        for key, printer in known.items()
        if not homes[key].startswith(_OF_KERNELS) and id(printer) not in left_out
    }


def _set_printers(formatter: Any, state: tuple[dict[str, dict[Any, Any]]]) -> None:
    here, told = _own_printers(formatter), state[0]["type_printers"]
    for key in here.keys() - told.keys():
        formatter.pop(key, None)
    for key, printer in told.items():
        if here.get(key) is not printer:
            formatter.for_type(key, printer)

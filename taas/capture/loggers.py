"""What loggers are told: levels, and where what is logged goes.

Handlers that write to a standard stream or into a file, as many libraries add, are told of in words. What else a notebook adds
to its loggers (a handler on a buffer of its own or of a class of its own, a filter) stands among the names, as data of the
project's modules do: ``logging.getLogger('train').handlers``.
"""

from __future__ import annotations

import ast
import io
import logging
import pickle
import sys
from collections import Counter
from collections.abc import Collection
from typing import Any

from taas.capture.reading import Reading, make_plain, turn_into

_UNSET = 0, True, False, ()
NAME = "logging.getLogger("
"""Begins the names of lists of loggers."""
_lists: dict[str, list[Any]] = {}
"""As they stood among the names last: it is the same object each time."""


def _all_loggers() -> list[logging.Logger]:
    known = [value for value in logging.root.manager.loggerDict.values() if isinstance(value, logging.Logger)]
    return [logging.root, *known]


# ---------------------------------------------------------------- told in words


def loggers(_: Any) -> dict[str, Any]:
    """Return level, propagation and handlers of the loggers that have been told something, by name."""
    found = {}
    for log in _all_loggers():
        handlers = tuple(filter(None, map(_described, log.handlers)))
        found[log.name] = log.level, log.propagate, log.disabled, handlers
    return {name: state for name, state in found.items() if state != _UNSET}


def put_loggers(_: Any, told: dict[str, Any]) -> None:
    """Set the loggers that are told, and are not so; a handler that is there already stays."""
    here_already = loggers(None)
    free: dict[Any, logging.Handler] | None = None
    for name, state in told.items():
        if here_already.get(name) == state:  # each that is set empties the caches of all loggers
            continue
        logger = logging.getLogger(name)
        level, logger.propagate, logger.disabled, handlers = state or _UNSET
        logger.setLevel(level)
        left = Counter(handlers)
        for handler, described in [(handler, _described(handler)) for handler in logger.handlers]:
            left[described] -= 1
            if described is not None and left[described] < 0:
                logger.removeHandler(handler)
        for described in left.elements():
            free = _free_handlers() if free is None else free
            logger.addHandler(free.pop(described) if described in free else _new_handler(*described))


def _free_handlers() -> dict[Any, logging.Handler]:
    """Return the handlers that no logger has, by how they are described: one that a name means is the one to add."""
    taken = {id(handler) for log in _all_loggers() for handler in log.handlers}
    return {described: one for one in _alive() if id(one) not in taken and (described := _described(one))}


def _alive() -> list[logging.Handler]:
    return [handler for known in logging._handlerList if (handler := known()) is not None]  # type: ignore[attr-defined]


def go_to_ends() -> None:
    """Let open log files go on at their ends, where other processes have written since."""
    for handler in _alive():
        stream = handler.stream if isinstance(handler, logging.FileHandler) else None
        if stream is not None and not stream.closed and stream.seekable():
            stream.seek(0, io.SEEK_END)


def _described(handler: Any) -> tuple[Any, ...] | None:
    """Say where a handler writes, from which level on, and how; None for one that is not told in words."""
    if type(handler) is logging.FileHandler:
        target = handler.baseFilename
    elif type(handler) is logging.StreamHandler and handler.stream in (sys.stdout, sys.stderr):
        target = "stdout" if handler.stream is sys.stdout else "stderr"
    else:
        return None
    if handler.filters or type(handler.formatter) not in (logging.Formatter, type(None)):
        return None
    return target, handler.level, pickle.dumps(handler.formatter)


def _new_handler(target: str, level: int, form: bytes) -> logging.Handler:
    stream = getattr(sys, target) if target in ("stdout", "stderr") else None
    handler = logging.StreamHandler(stream) if stream else logging.FileHandler(target, delay=True)
    handler.setLevel(level)
    handler.setFormatter(pickle.loads(form))
    return handler


# ---------------------------------------------------------------- handlers as objects


def read_handler(handler: Any) -> Reading:
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


# ---------------------------------------------------------------- among the names


def lists_of_loggers() -> dict[str, list[Any]]:
    """Return what the notebook has added to its loggers, unless all of it is told in words, by how it would be written."""
    found = {}
    for log in _all_loggers():
        for attribute in ("handlers", "filters"):
            if not (_lists or getattr(log, attribute)):
                continue
            name = f"{NAME}{log.name!r}).{attribute}"
            own = [item for item in getattr(log, attribute) if not _comes_with_modules(log, item)]
            if name in _lists or not all(map(_described, own)):
                found[name] = _lists.setdefault(name, own)
                found[name][:] = own
    return found


def _comes_with_modules(log: logging.Logger, item: Any) -> bool:
    """Tell whether a library has added it to a logger of its own, or what runs the kernel has."""
    homes = getattr(item, "__module__", ""), type(getattr(item, "formatter", None)).__module__
    if log.name.partition(".")[0] in {home.partition(".")[0] for home in homes}:
        return True
    stream = getattr(item, "stream", None)
    if not isinstance(stream, io.TextIOWrapper) or stream in (sys.stdout, sys.stderr):
        return isinstance(item, logging.NullHandler)
    return isinstance(stream.name, int) or stream.name in ("<stdout>", "<stderr>")


def put_list(name: str, told: list[Any] | None, before: Collection[Any] | None) -> None:
    """Make a list what was told, beside what was there before it and what is not the notebook's."""
    if told is None:
        return
    logger, _, attribute = name.removeprefix(NAME).rpartition(").")
    log = logging.getLogger(ast.literal_eval(logger))
    here = getattr(log, attribute)
    others = [item for item in here if item in (before or ()) or _comes_with_modules(log, item)]
    there = {_described(item) for item in others} - {None}
    here[:] = [*others, *(item for item in told if item not in others and _described(item) not in there)]
    _lists[name] = told

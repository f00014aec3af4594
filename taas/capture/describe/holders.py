"""Holders: objects with data other than variables (modules of the project, loggers, formatters).

A module is sent by name. The state of a project module is its data (``helper.counter``) and the
data of its classes (``helper.Model.count``). These data are sent if the cell reaches the module
through anything that it uses. Functions and classes are not data unless the notebook defined them,
because the module's file contains them. If the ranks have another version of the module than the
notebook (its file was edited in between), each side keeps its own data. An object that another
process cannot rebuild from names (a lock, a library opened by ctypes) is not sent: the ranks'
module has its own.

A logger's state is its handlers and filters, except those of a library or of the program that runs
the kernel (levels are settings: ``process_state``). A formatter's state says which function
displays which class.
"""

from __future__ import annotations

import enum
import io
import logging
import operator
import os
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from taas.base.import_hooks import (
    attribute_of,
    attributes_of,
    imported_since,
    is_edited,
    loaded,
    may_be_of_project,
)
from taas.capture.describe.code_by_value import words_in
from taas.capture.describe.reading import (
    MissingModule,
    Reading,
    attribute_of_class,
    import_or_stand_in,
    keeps_pickling_of_object,
    make_plain,
    turn_into,
)

_ANY_MODULE = ({"import_module"}, {"__import__"}, {"sys", "modules"}, {"runpy"}, {"%run"})
"""Code that contains all words of one of these sets may reach modules that it does not mention."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_NOT_DATA_OF = ("typing", "__future__", "_frozen_importlib_external")
_HOLDS = {"pandas": "options.display.float_format"}
"""Attributes of libraries' modules that may refer to a function of the notebook."""


# ---------------------------------------------------------------- data

_known: set[str] = set()
_maybe_of_projects: list[str] = []
_put: set[str] = set()
"""Attributes that were set in modules: a value that replaces such a value is data, too."""
left_out: dict[int, Any] = {}
"""Parts of holders that cannot be sent, by id; each process has its own."""
apart: set[str] = set()
"""Display names of the holders that keep their data because the other side has another version."""


def set_apart(names: Iterable[str]) -> None:
    """Let these holders, and no others, keep their data."""
    apart.clear()
    apart.update(names)


class Left:
    """In a module's state, stands for data of which each process has its own."""


def survey() -> None:
    """Record which modules may belong to a project; called before a fork, to save ranks time."""
    _maybe_of_projects.extend(filter(may_be_of_project, imported_since(_known)))


def _of_project(project: str) -> list[tuple[str, types.ModuleType]]:
    survey()
    below = project.rstrip(os.sep) + os.sep
    # a lazy module has no data before its first use
    modules = [
        (name, module) for name in _maybe_of_projects if (module := loaded(name)) is not None
    ]
    return [
        (n, m) for n, m in modules if (attributes_of(m).get("__file__") or "").startswith(below)
    ]


def loaded_as(project: str) -> dict[str, Any]:
    """Return the spec of each imported project module, by name; a reload replaces it."""
    return {name: module.__spec__ for name, module in _of_project(project)}


def edited_modules(project: str) -> dict[str, types.ModuleType]:
    """Return the project's modules whose file was edited after the import, by display name."""
    return {
        name_of_holder(module): module for name, module in _of_project(project) if is_edited(name)
    }


def reader_of_module(module: types.ModuleType, project: str) -> Reading:
    """Read a module by name; a module of the project also has data, unless it is set apart."""
    name = module.__name__
    has_data = name in _HOLDS or (bool(project) and name in dict(_of_project(project)))
    if not has_data or name_of_holder(module) in apart:
        return Reading(import_or_stand_in, (name,))
    here = {way: Left if id(value) in left_out else value for way, value in data_of(module).items()}
    told = dict(sorted(here.items()))
    return Reading(import_or_stand_in, (name,), _set_data, (told,))


def data_of(module: types.ModuleType) -> dict[str, Any]:
    """Return the data of a module, by their dotted paths in the module."""
    name = module.__name__
    if name in _HOLDS:
        found = operator.attrgetter(_HOLDS[name])(module) if hasattr(module, "options") else None
        return {_HOLDS[name]: found}
    ways = _attributes(module, name, "")
    return {way: value for way, value in ways if _is_data(value) or f"{name}:{way}" in _put}


def _set_data(module: types.ModuleType, state: tuple[dict[str, Any]]) -> None:
    name = module.__name__
    if isinstance(module, MissingModule) or name_of_holder(module) in apart:
        return
    here, told = data_of(module), state[0]
    for way in here.keys() - told.keys():
        holder, attribute = _held(module, way)
        if attribute in vars(holder) and id(here[way]) not in left_out:  # the ranks never had those
            delattr(holder, attribute)
    for way, value in told.items():
        if value is not Left and here.get(way, Left) is not value:
            _put.add(f"{name}:{way}")
            setattr(*_held(module, way), value)


def _held(module: types.ModuleType, way: str) -> tuple[Any, str]:
    """Return the module, or the class in it, that has an attribute; and the attribute's name."""
    holder: Any = module
    *classes, attribute = way.split(".")
    for cls in classes:
        holder = getattr(holder, cls, None) or type(cls, (), {})  # the file no longer has the class
    return holder, attribute


def _attributes(holder: Any, module: str, begins: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and of its own classes, except enumerations."""
    for name, value in list(vars(holder).items()):
        if not isinstance(name, str):  # a program wrote it through ``vars``
            continue
        # a program may set ``__str__`` of a class, too
        is_method = begins and isinstance(value, types.FunctionType)
        if (name.startswith("__") and not is_method) or not name.isidentifier():
            continue
        yield f"{begins}{name}", value
        is_class = isinstance(value, type) and not issubclass(value, enum.Enum)
        if is_class and (value.__module__, value.__qualname__) == (module, f"{begins}{name}"):
            yield from _attributes(value, module, f"{begins}{name}.")


def _is_data(value: Any) -> bool:
    """Tell whether a part of a module or class is data: no code, except the notebook's."""
    if isinstance(value, _CODE) or attribute_of_class(type(value), "__get__") is not None:
        parts = [value]
        if not isinstance(value, (type, types.ModuleType)):  # those may respond to any name
            parts += [getattr(value, name, None) for name in ("__func__", "fget", "func")]
        return any(getattr(part, "__module__", "") == "__main__" for part in parts)
    cls = type(value)
    return cls is not object and cls.__module__ not in _NOT_DATA_OF


# -------------------------------------------------- modules that a cell reaches


def modules_reached(words: set[str], named: set[str], project: str) -> set[str]:
    """Return the project's modules that ``words`` or ``named`` mean, and those they use."""
    modules = dict(_of_project(project))
    if any(any_module <= words for any_module in _ANY_MODULE):
        return {*modules}
    found: set[str] = set()
    while new := {
        n for n in modules.keys() - found if n in named or words & {n, n.rpartition(".")[2]}
    }:
        found |= new
        for name in new:
            named = named | {name.rpartition(".")[0]}
            for _, value in _attributes(modules[name], name, ""):
                code = value
                if isinstance(value, (classmethod, staticmethod)):
                    code = value.__func__
                elif isinstance(value, property):
                    code = value.fget
                if isinstance(code, types.FunctionType):
                    words = words | words_in(code.__code__)
                is_module = isinstance(value, types.ModuleType)
                home = value.__name__ if is_module else getattr(value, "__module__", "")
                named = named | {str(home)}
    return found


# ----------------------------------------------------------------------------- all holders

_OF_KERNELS = ("IPython.", "ipykernel.", "matplotlib_inline.")
_listed: set[str] = set()
"""Holders that once had something from the notebook; being empty now is part of their state."""


def reader_of_holders(cls: type) -> Callable[[Any], Reading | None] | None:
    """Return the reader for loggers, handlers and display formatters; None for other classes."""
    if issubclass(cls, logging.Logger):
        return _read_logger
    if issubclass(cls, logging.Handler) and keeps_pickling_of_object(cls):
        return _read_handler
    return _read_formatter if issubclass(cls, holder_kinds()) else None


def holders(project: str, modules: Container[str] | None = None) -> dict[str, Any]:
    """Return the holders that have something from the notebook, by display name.

    Project modules are included only if they are in ``modules``; None means all.
    """
    found = {name_of_holder(one): one for one in _all()}
    _listed.update(name for name, holder in found.items() if any(_own_parts(holder).values()))
    listed = {name: holder for name, holder in found.items() if name in _listed}
    with_data = [
        module for name, module in _of_project(project) if modules is None or name in modules
    ]
    for name in filter(loaded, _HOLDS):
        if name in _put or any(value is not None for value in data_of(sys.modules[name]).values()):
            with_data.append(sys.modules[name])
            _put.add(name)
    named = {name_of_holder(module): module for module in with_data}
    return listed | {name: module for name, module in named.items() if name not in apart}


def _all() -> list[Any]:
    return [*all_loggers(), *_formatters().values()]


def all_holders() -> list[str]:
    """Return the display names of all modules, loggers and formatters of this process."""
    return [f"the module {name}" for name in sys.modules] + [name_of_holder(one) for one in _all()]


def name_of_holder(holder: Any) -> str:
    """Return the name of a module, logger or display formatter in messages."""
    if isinstance(holder, types.ModuleType):
        return f"the module {holder.__name__}"
    if isinstance(holder, logging.Logger):
        return f"logging.getLogger({holder.name!r})"
    return f"get_ipython().display_formatter.formatters[{holder.format_type!r}]"


def holder_kinds() -> tuple[type, ...]:
    """Return the classes of modules, loggers and display formatters."""
    formatter = attribute_of("IPython.core.formatters", "BaseFormatter", logging.Logger)
    return types.ModuleType, logging.Logger, formatter


def parts_of_holder(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a module, logger or formatter, each with the code that accesses it."""
    if isinstance(holder, types.ModuleType):
        yield from ((f"{holder.__name__}.{way}", part) for way, part in data_of(holder).items())
        return
    for kind, parts in _own_parts(holder).items():
        for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
            yield f"{name_of_holder(holder)}.{kind}[{key!r}]", part


def _own_parts(holder: Any) -> dict[str, Any]:
    if not isinstance(holder, logging.Logger):
        return {"type_printers": _own_printers(holder)}
    both: dict[str, list[Any]] = {"handlers": holder.handlers, "filters": holder.filters}
    return {
        name: [item for item in items if not _stays(holder, item)] for name, items in both.items()
    }


# ---------------------------------------------------------------- loggers


def all_loggers() -> Iterator[logging.Logger]:
    """Yield the root logger and all named ones."""
    yield logging.root
    known = list(logging.root.manager.loggerDict.values())
    yield from (one for one in known if isinstance(one, logging.Logger))


def _stays(log: logging.Logger, item: Any) -> bool:
    """Tell whether a handler stays: a library or the kernel owns it, or it cannot be sent."""
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
    return Reading(logging.getLogger, (log.name,), _set_logger, (_own_parts(log),))


def _set_logger(log: Any, state: tuple[dict[str, list[Any]]]) -> None:
    for name, items in state[0].items() if name_of_holder(log) not in apart else ():
        here = getattr(log, name)
        here[:] = [*(item for item in here if _stays(log, item)), *items]


def _read_handler(handler: Any) -> Reading:
    """Read a handler without its lock and its open file, which belong to its process."""
    state = {**vars(handler), "lock": None}
    if isinstance(handler, logging.FileHandler):
        state |= {"stream": None, "mode": handler.mode.replace("w", "a")}
    return Reading(make_plain, (type(handler),), _set_handler, (state,), turn_into)


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
    """Move open log files to their ends, because other processes have written to them since."""
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
    return Reading(_formatter, (kind,), _set_printers, (_own_parts(formatter),))


def _own_printers(formatter: Any) -> dict[Any, Any]:
    """Return a formatter's printers except IPython's; classes of libraries are keyed by name."""
    known = {c if c.__module__ == "__main__" else f"{c.__module__}.{c.__qualname__}": printer
             for c, printer in formatter.type_printers.items()}  # fmt: skip
    known |= {".".join(names): printer for names, printer in formatter.deferred_printers.items()}

    def is_own(printer: Any) -> bool:
        home = getattr(printer, "__module__", None) or ""
        return not home.startswith(_OF_KERNELS) and id(printer) not in left_out

    return {key: printer for key, printer in known.items() if is_own(printer)}


def _set_printers(formatter: Any, state: tuple[dict[str, dict[Any, Any]]]) -> None:
    if name_of_holder(formatter) in apart:
        return
    here, told = _own_printers(formatter), state[0]["type_printers"]
    for key in here.keys() - told.keys():
        formatter.pop(key, None)
    for key, printer in told.items():
        if here.get(key) is not printer:
            formatter.for_type(key, printer)

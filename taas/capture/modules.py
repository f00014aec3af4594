"""What travels of modules beside their names: which to import first, and the data of the project's own.

A module travels by its name. A cell may use what an import of another one did to it: the submodules that it has as attributes,
the methods that a package's module gives the package's classes. The data of the project's modules travel by the same rule as the
notebook's names: ``helper:counter`` stands among them, as that name, while names are packed, compared and put in place.
So do attributes of its classes, ``helper:Model.count``. They travel where the cell reaches the module, by whatever it uses.
Functions and classes are not data, unless they are the notebook's own: they are what the module's file says. Where the file was
edited since the notebook imported it, the data are what it says, too. An object that another process cannot rebuild from names (a
lock, a library opened by ctypes) stays behind: the ranks' module has its own.
"""

from __future__ import annotations

import ast
import enum
import os
import re
import sys
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

from taas.capture.code_by_value import words_in
from taas.capture.holders import holders
from taas.capture.of_ipython import python_of
from taas.import_hooks import after_import, imported_since, is_edited

_IMPORT = re.compile(r"(?:^|\\n|')[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)
"""Found also in a body that a magic was given, as text."""
_ANY_MODULE = ({"import_module"}, {"__import__"}, {"sys", "modules"}, {"runpy"}, {"%run"})
"""Code with such words may reach modules that it does not name."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_NOT_DATA_OF = ("typing", "__future__", "_frozen_importlib_external")
_NOT_OF_PROJECTS = {"taas", "__main__", "__mp_main__", *sys.stdlib_module_names}
_NOTHING = object()
_FLOAT_FORMAT = "pandas:options.display.float_format"
"""The one option of pandas that is a function."""


# ---------------------------------------------------------------- what to import


def modules_used(
    modules: Iterable[str], words: Iterable[str], found_in: Container[str], namespace: dict[str, Any]
) -> list[str]:
    """Return modules to import before names are rebuilt.

    They are those that are used as attributes of captured ones (``concurrent.futures`` of ``concurrent``), and those that
    earlier cells imported of packages that travel by reference: importing one may have changed the package's classes
    (``import fastai.distributed`` gives learners methods), and the cell may rely on it without a name of it.

    Args:
        modules: those that travel.
        words: of the cell, and of the functions that travel.
        found_in: the packages that something that travels is found in.
        namespace: the notebook's names.
    """
    waiting, found = [*modules], dict[str, None]()
    words = {*words}
    while waiting:
        parent = waiting.pop()
        if hasattr(sys.modules.get(parent), "__path__"):
            below = [f"{parent}.{word}" for word in words if f"{parent}.{word}" in sys.modules]
            found |= dict.fromkeys(below)
            waiting += below
    for module in (module for cell in namespace.get("In", ()) for module in _IMPORT.findall(cell)):
        if "." in module and module in sys.modules and module.partition(".")[0] in found_in:
            found[module] = None
    return list(found)


def imported_by(cell: str) -> Iterator[str]:
    """Yield the modules below others that a cell imports: the notebook's packages get them as attributes, too."""
    for node in ast.walk(ast.parse(python_of(cell))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." in alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


# ---------------------------------------------------------------- data


_known: set[str] = set()
_maybe_of_projects: list[str] = []
_put: set[str] = set()
"""Names of data that were put into modules: what takes their place is data, too."""


def survey() -> None:
    """Note which modules may be a project's: done once before forking, it costs a rank nothing."""
    _maybe_of_projects.extend(filter(_may_be_of_project, imported_since(_known)))


def _may_be_of_project(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None) or ""
    return file != "" and "site-packages" not in file and name.partition(".")[0] not in _NOT_OF_PROJECTS


def _of_project(project: str) -> list[tuple[str, types.ModuleType]]:
    survey()
    below = project.rstrip(os.sep) + os.sep
    modules = [(name, sys.modules[name]) for name in _maybe_of_projects if name in sys.modules]
    return [
        (n, module) for n, module in modules if (getattr(module, "__file__", None) or "").startswith(below)
    ]


def loaded_as(project: str) -> dict[str, Any]:
    """Return of the project's modules that are imported what a reload makes anew, by name."""
    return {name: module.__spec__ for name, module in _of_project(project)}


def edited_modules(project: str, modules: Container[str]) -> list[str]:
    """Return those of some modules of the project whose file was edited since the notebook imported it."""
    return [name for name, _ in _of_project(project) if is_edited(name) and name in modules]


def data_of_modules(project: str, modules: Container[str] | None = None) -> dict[str, Any]:
    """Return the data of the project's modules that are imported, as ``module:attribute``; of some modules only."""
    return {
        place: value
        for name, module in _of_project(project)
        if (modules is None or name in modules) and not is_edited(name)
        for place, value in _attributes(module, name, f"{name}:")
        if _is_data(value) or place in _put
    }


def _attributes(holder: Any, module: str, begins: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and of the classes that it defines; those of an enumeration never change."""
    for name, value in list(vars(holder).items()):
        if name.startswith("__") or not name.isidentifier():
            continue
        yield f"{begins}{name}", value
        of_class = isinstance(value, type) and f"{value.__module__}:{value.__qualname__}" == f"{begins}{name}"
        if of_class and not issubclass(value, enum.Enum):
            yield from _attributes(value, module, f"{begins}{name}.")


def _is_data(value: Any) -> bool:
    if isinstance(value, _CODE) or hasattr(type(value), "__get__"):  # the notebook may have put it there
        parts = (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func")))
        return any(getattr(part, "__module__", "") == "__main__" for part in parts)
    cls = type(value)
    return cls is not object and cls.__module__ not in _NOT_DATA_OF


# ---------------------------------------------------------------- places: what stands beside the names


def places_now(project: str, modules: Container[str] | None = None) -> dict[str, Any]:
    """Return what the notebook holds elsewhere than in names: in the project's modules, and in libraries."""
    found = holders() | data_of_modules(project, modules)
    options = getattr(sys.modules.get("pandas"), "options", None)
    return found if options is None else found | {_FLOAT_FORMAT: options.display.float_format}


def is_gone(name: str, now: dict[str, Any]) -> bool:
    """Tell whether a place that was there is not; of a module that is not imported nobody knows."""
    return name not in now and _module_of(name) in sys.modules


def stays_silently(name: str) -> bool:
    """Tell whether a place that cannot travel is none of the user's business: the ranks' module has its own."""
    return ":" in name and name != _FLOAT_FORMAT


def _module_of(name: str) -> str:
    return name.rpartition(":")[0]


def put_places(told: dict[str, Any], gone: Iterable[str] = (), before: dict[str, Any] | None = None) -> None:
    """Put values where they belong; a module that is not imported gets them when it is."""
    before = before or {}
    for name in gone:
        holder, attribute = _held(sys.modules[_module_of(name)], name)
        if attribute in vars(holder):
            delattr(holder, attribute)
    for name, value in told.items():
        if ":" in name and before.get(name, _NOTHING) is not value:
            _put.add(name)
            after_import(_module_of(name), lambda module, n=name, v=value: setattr(*_held(module, n), v))  # type: ignore[misc]


def _held(module: types.ModuleType, name: str) -> tuple[Any, str]:
    """Return which of a module's classes, or the module itself, holds what a name stands for, and under which name."""
    holder: Any = module
    *classes, attribute = name.rpartition(":")[2].split(".")
    for cls in classes:
        holder = getattr(holder, cls, None) or type(cls, (), {})  # the file has none such any more
    return holder, attribute


# ---------------------------------------------------------------- which of them


def modules_reached(words: set[str], named: set[str], project: str) -> set[str]:
    """Return the project's modules that are named, or are meant by words, with their packages and all that they use."""
    modules = dict(_of_project(project))
    if any(any_module <= words for any_module in _ANY_MODULE):
        return {*modules}
    found: set[str] = set()
    while new := {
        name for name in modules.keys() - found if name in named or words & {name, name.rpartition(".")[2]}
    }:
        found |= new
        for name in new:
            named = named | {name.rpartition(".")[0]}
            for _, value in _attributes(modules[name], name, f"{name}:"):
                method = isinstance(value, (classmethod, staticmethod))
                code = value.__func__ if method else value.fget if isinstance(value, property) else value
                words = words | (words_in(code.__code__) if isinstance(code, types.FunctionType) else set())
                of_module = isinstance(value, types.ModuleType)
                named = named | {str(value.__name__ if of_module else getattr(value, "__module__", ""))}
    return found

"""What travels of modules beside their names: which to import first, and the data of the project's own.

A module travels by its name. A cell may use what an import of another one did to it: the submodules that it has as attributes,
the methods that a package's module gives the package's classes. The data of the project's modules (``helper.counter``), and of
their classes (``helper.Model.count``), are the module's state in the heap. They travel where the cell reaches the module, by
whatever it uses. Functions and classes are not data, unless they are the notebook's own: they are what the module's file says.
Where the file was edited since the notebook imported it, the data are what it says, too. An object that another process cannot
rebuild from names (a lock, a library opened by ctypes) stays behind: the ranks' module has its own.
"""

from __future__ import annotations

import ast
import enum
import operator
import os
import re
import sys
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any

from taas.capture.code_by_value import words_in
from taas.capture.of_ipython import python_of
from taas.capture.reading import MissingModule, Reading, import_or_stand_in
from taas.import_hooks import imported_since, is_edited

_IMPORT = re.compile(r"(?:^|\\n|')[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)
"""Found also in a body that a magic was given, as text."""
_ANY_MODULE = ({"import_module"}, {"__import__"}, {"sys", "modules"}, {"runpy"}, {"%run"})
"""Code with such words may reach modules that it does not name."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_NOT_DATA_OF = ("typing", "__future__", "_frozen_importlib_external")
_NOT_OF_PROJECTS = {"taas", "__main__", "__mp_main__", *sys.stdlib_module_names}
_HOLDS = {"pandas": "options.display.float_format"}
"""What modules of libraries hold that is a function of the notebook, and no plain setting."""


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
"""What was put into modules: what takes its place is data, too."""
left_out: dict[int, Any] = {}
"""Parts of what holds something of the notebook that cannot travel, by their ids: each process has its own."""


class Left:
    """Stands in a module's state for data that each process has of its own."""


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


def reader_of_module(module: types.ModuleType, project: str) -> Reading:
    """Read a module: it is found by its name; one of the project that was not edited has its data as state."""
    name = module.__name__
    of_project = bool(project) and name in dict(_of_project(project)) and not is_edited(name)
    if not of_project and name not in _HOLDS:
        return Reading(import_or_stand_in, (name,))
    told = {way: Left if id(value) in left_out else value for way, value in sorted(data_of(module).items())}
    return Reading(import_or_stand_in, (name,), _set_data, (told,), (".",))


def modules_with_data(project: str, modules: Container[str] | None = None) -> dict[str, types.ModuleType]:
    """Return the modules that are imported and have data of the notebook's, by what messages call them; of some only."""
    found = {
        name: module
        for name, module in _of_project(project)
        if (modules is None or name in modules) and not is_edited(name)
    }
    for name in _HOLDS.keys() & sys.modules.keys():
        if name in _put or any(value is not None for value in data_of(sys.modules[name]).values()):
            found[name] = sys.modules[name]
            _put.add(name)
    return {f"the module {name}": module for name, module in found.items()}


def data_of(module: types.ModuleType) -> dict[str, Any]:
    """Return the data of a module, by the way from it to them."""
    name = module.__name__
    if name in _HOLDS:
        found = operator.attrgetter(_HOLDS[name])(module) if hasattr(module, "options") else None
        return {_HOLDS[name]: found}
    return {
        way: value
        for way, value in _attributes(module, name, "")
        if _is_data(value) or f"{name}:{way}" in _put
    }


def _set_data(module: types.ModuleType, state: tuple[dict[str, Any]]) -> None:
    name = module.__name__
    if isinstance(module, MissingModule) or is_edited(name):
        return
    here, told = data_of(module), state[0]
    for way in here.keys() - told.keys():
        holder, attribute = _held(module, way)
        if attribute in vars(holder):
            delattr(holder, attribute)
    for way, value in told.items():
        if value is not Left and here.get(way, Left) is not value:
            _put.add(f"{name}:{way}")
            setattr(*_held(module, way), value)


def _held(module: types.ModuleType, way: str) -> tuple[Any, str]:
    """Return what a way from a module ends at: the module itself or one of its classes, and a name there."""
    holder: Any = module
    *classes, attribute = way.split(".")
    for cls in classes:
        holder = getattr(holder, cls, None) or type(cls, (), {})  # the file has none such any more
    return holder, attribute


def _attributes(holder: Any, module: str, begins: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and of the classes that it defines; those of an enumeration never change."""
    for name, value in list(vars(holder).items()):
        if name.startswith("__") or not name.isidentifier():
            continue
        yield f"{begins}{name}", value
        is_class = isinstance(value, type) and not issubclass(value, enum.Enum)
        if is_class and (value.__module__, value.__qualname__) == (module, f"{begins}{name}"):
            yield from _attributes(value, module, f"{begins}{name}.")


def _is_data(value: Any) -> bool:
    if isinstance(value, _CODE) or hasattr(type(value), "__get__"):  # the notebook may have put it there
        parts = (value, *(getattr(value, name, None) for name in ("__func__", "fget", "func")))
        return any(getattr(part, "__module__", "") == "__main__" for part in parts)
    cls = type(value)
    return cls is not object and cls.__module__ not in _NOT_DATA_OF


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
            for _, value in _attributes(modules[name], name, ""):
                method = isinstance(value, (classmethod, staticmethod))
                code = value.__func__ if method else value.fget if isinstance(value, property) else value
                words = words | (words_in(code.__code__) if isinstance(code, types.FunctionType) else set())
                of_module = isinstance(value, types.ModuleType)
                named = named | {str(value.__name__ if of_module else getattr(value, "__module__", ""))}
    return found

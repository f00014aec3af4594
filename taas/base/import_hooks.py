"""Change modules when the program imports them; detect which modules were imported or edited."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

# ---------------------------------------------------------------- modules in sys.modules
#
# A lazy module imports itself, or raises an error, when an attribute is read: a module of
# ``importlib.util.LazyLoader`` for any attribute, a module with a ``__getattr__`` (speechbrain's)
# for any attribute that it lacks, such as ``__file__``. Code that merely inspects modules must not
# trigger that. So attributes of modules in ``sys.modules`` are read by the following functions, and
# not by ``getattr``.

_Unexecuted: type = importlib.util._LazyModule  # type: ignore[attr-defined]
"""The class of a module of ``LazyLoader`` until its first use."""


def loaded(name: str) -> Any:
    """Return a module that was imported and executed; None if it was not, or is still lazy."""
    module = sys.modules.get(name)
    return None if type(module) is _Unexecuted else module


def attributes_of(module: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of a module or object, bypassing its class; empty if it has none."""
    try:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:  # None, or an object that a program has put into sys.modules
        return {}
    return found


def attribute_of(name: str, attribute: str, default: Any = None) -> Any:
    """Return an attribute of an imported module, or the default, without triggering an import."""
    return attributes_of(sys.modules.get(name)).get(attribute, default)


# ---------------------------------------------------------------- changes at an import

Change = Callable[[ModuleType], None]
Around = Callable[[], AbstractContextManager[None]]


class _Changed(importlib.abc.Loader):
    """Loads a module by its own loader, and changes it before any other code uses it."""

    def __init__(
        self, native: importlib.abc.Loader, changes: Sequence[Change], arounds: Sequence[Around]
    ) -> None:
        self._native, self._changes, self._arounds = native, changes, arounds

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, since libraries get resources and source from it.
        module.__loader__ = self._native
        if module.__spec__ is not None:
            module.__spec__.loader = self._native
        with ExitStack() as stack:
            for around in self._arounds:
                stack.enter_context(around())
            self._native.exec_module(module)
        for change in self._changes:
            change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules for which a change or a context is registered, through the finders after it."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}
        self.arounds: dict[str, Around] = {}
        self.known = set[str]()  # modules that the notebook has imported
        self.around_known: Around = nullcontext
        self._finding = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A change is applied at the import, and not at the search: libraries search for other
        # libraries to see whether they are installed. A reload, which has a target, does not count
        # as a first import: it would execute the module again in a notebook, too.
        is_known = fullname in self.known and target is None
        waits = is_known or fullname in self.changes or fullname in self.arounds
        if not waits or getattr(self._finding, "name", "") == fullname:
            return None
        self._finding.name = fullname  # other finders of this kind search from the start again
        try:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    arounds = [self.arounds[fullname]] if fullname in self.arounds else []
                    arounds += [partial(self._first_time, fullname)] if is_known else []
                    spec.loader = _Changed(spec.loader, self.changes.get(fullname, []), arounds)
                    return spec
        finally:
            self._finding.name = ""
        return None

    @contextmanager
    def _first_time(self, name: str) -> Iterator[None]:
        """Enter the context for the first import of a module that the notebook has imported.

        The program itself has asked for any later import of the module.
        """
        self.known.discard(name)
        with self.around_known():
            yield


_finder = _Finder()


def after_import(name: str, change: Change) -> None:
    """Call ``change(module)`` right after a module is executed, or now if it already was."""
    module = sys.modules.get(name)
    if module is not None:  # this executes a lazy module, so that it can be changed
        change(module)
        return
    _finder.changes.setdefault(name, []).append(change)
    _begin()


def around_import(names: Collection[str], around: Around) -> None:
    """Execute modules within ``with around():`` when they are imported."""
    _finder.arounds |= dict.fromkeys(names, around)
    _begin()


@contextmanager
def around_imports(names: Collection[str], around: Around) -> Iterator[None]:
    """In the body, execute modules within ``with around():`` when they are imported."""
    before = _finder.arounds
    _finder.arounds = {**before, **dict.fromkeys(names, around)}
    _begin()
    try:
        yield
    finally:
        _finder.arounds = before


def around_imports_of_known(names: set[str], around: Around) -> None:
    """Execute the first import of each of these modules within ``around``.

    The modules replace those of an earlier call.
    """
    _finder.known, _finder.around_known = names, around
    _begin()


def _begin() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def imported_since(known: set[str]) -> list[str]:
    """Return the names of the modules that are not in ``known``, and add them to it.

    The known modules themselves are not touched, because a forked rank copies each page that it
    touches; for all names that would take 5 ms.
    """
    count = max(0, len(sys.modules) - len(known))
    *new, before = itertools.islice(reversed(sys.modules), count + 1)
    if before not in known or not known.isdisjoint(new):  # a module was removed, or imported again
        new = [name for name in [*sys.modules] if name not in known]
    known.update(new)
    return new


def is_installed(path: str) -> bool:
    """Return whether a file belongs to Python's library or to an installed package."""
    in_package = "/site-packages/" in path or "/dist-packages/" in path
    return in_package or path.startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    import sysconfig  # a kernel imports this file, but never calls this function

    return tuple(f"{sysconfig.get_path(kind)}/" for kind in ("stdlib", "platstdlib"))


_NOT_OF_PROJECTS = {"taas", "__main__", "__mp_main__", *sys.stdlib_module_names}


def may_be_of_project(name: str) -> bool:
    """Return whether a module may be a project's: it is not Python's, and not installed."""
    file = attribute_of(name, "__file__") or ""
    return (
        file != ""
        and "site-packages" not in file
        and name.partition(".")[0] not in _NOT_OF_PROJECTS
    )


_noted: dict[str, tuple[object, int]] = {}
"""By module name: the spec with which the module was loaded, and the modification time (ns) of its
file.
"""


def note_files(_result: object = None) -> None:
    """Record the file times of modules that were imported or reloaded since the last call.

    This runs before and after each cell.

    ``%autoreload`` may change a module's functions in place, and does not change the spec then.
    """
    reloaded = _reloaded_by_itself()
    for name, module in list(sys.modules.items()):
        spec = attributes_of(module).get("__spec__")
        if spec is not None and (_noted.get(name, (None,))[0] is not spec or name in reloaded):
            _noted[name] = spec, _changed_at(getattr(spec, "origin", None))


AUTORELOAD = "IPython.extensions.autoreload"
_times_of_autoreload: dict[str, float] = {}
"""By module name: the file time that ``%autoreload`` had seen by the last record."""


def _reloaded_by_itself() -> set[str]:
    """Return the modules that ``%autoreload`` has successfully reloaded since the last record."""
    reloader = _autoreload()
    if reloader is None:
        return set()
    now: dict[str, float] = {**reloader.modules_mtimes}
    before = dict(_times_of_autoreload)
    _times_of_autoreload.update(now)
    looked_at = {
        name for name, changed_at in now.items() if before.get(name, changed_at) != changed_at
    }
    return {name for name in looked_at if attribute_of(name, "__file__") not in reloader.failed}


def _autoreload() -> Any:
    """Return the object that reloads modules for ``%autoreload``, if that extension is loaded."""
    if AUTORELOAD not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    magics = None if shell is None else shell.magics_manager.registry.get("AutoreloadMagics")
    return getattr(magics, "_reloader", None)


def is_edited(name: str) -> bool:
    """Return whether the file of a recorded module has changed since it was recorded."""
    spec, changed_at = _noted.get(name, (None, 0))
    return spec is not None and _changed_at(getattr(spec, "origin", None)) != changed_at


def _changed_at(file: str | None) -> int:
    try:
        return Path(file).stat().st_mtime_ns if file else 0
    except OSError:  # "built-in", or a removed file
        return 0


def absolute_import_path(text: str) -> str:
    """Return a PYTHONPATH with absolute folders; an empty entry is the working directory."""
    folders = text.split(os.pathsep)
    if all(map(os.path.isabs, folders)):
        return text
    return os.pathsep.join(map(os.path.abspath, folders))


_FOLDERS = (
    "HOME",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "TMPDIR",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
)


def keep_paths() -> None:
    """Make paths in environment variables absolute, as the working directory will change."""
    if text := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = absolute_import_path(text)
    for name in _FOLDERS:
        if folder := os.environ.get(name):
            os.environ[name] = str(Path(folder).absolute())

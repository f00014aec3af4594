"""Do something to a module when, and only if, the program imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

Change = Callable[[ModuleType], None]


class _Changed(importlib.abc.Loader):
    """Loads a module as its own loader does, then changes it, before anyone can take names from it."""

    def __init__(self, native: importlib.abc.Loader, changes: Sequence[Change]) -> None:
        self._native, self._changes = native, changes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._native.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: libraries ask it for resources and source.
        module.__loader__ = self._native
        if module.__spec__ is not None:
            module.__spec__.loader = self._native
        self._native.exec_module(module)
        for change in self._changes:
            change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that have a change waiting, with the finders that come after it."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}
        self._finding = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A change waits until the import, not the search: libraries look whether others are installed.
        if fullname not in self.changes or getattr(self._finding, "name", "") == fullname:
            return None
        self._finding.name = fullname  # finders like this one search from the start again
        try:
            return self._wrapped(fullname, path, target, self.changes[fullname])
        finally:
            self._finding.name = ""

    def _wrapped(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None, changes: Sequence[Change]
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Changed(spec.loader, changes)
                return spec
        return None


_finder = _Finder()


def after_import(name: str, change: Change) -> None:
    """Call ``change(module)`` right after module ``name`` is executed, or now if it has been.

    Args:
        name: full dotted name of the module.
        change: what to do to it. Modules that import names from it see the changed ones.
    """
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    _finder.changes.setdefault(name, []).append(change)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)

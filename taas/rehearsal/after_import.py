"""Patches for modules that are not imported yet: applied as the import ends, before anyone sees the module."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]

_waiting: dict[str, Patch] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module the ordinary way and lets its patch run behind its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = _waiting.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def patch_module(name: str, patch: Patch) -> None:
    """Apply ``patch`` to the module: now if it is imported, else when it will be."""
    if name in sys.modules:
        patch(sys.modules[name])
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting[name] = patch

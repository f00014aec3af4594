"""Values that need no description: those without identity, and those their module holds by name."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from typing import Any

__all__ = ["ADDRESS", "ATOMS", "atom", "name_of", "of_notebook", "source"]

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ATOMS = (bool, int, complex, str, bytes, range, slice)


def atom(value: Any) -> str | None:
    """Return the text of a value without identity, or of one that its module holds by name."""
    if value is None or value is ... or value is NotImplemented:
        return repr(value)
    cls = type(value)
    if cls in ATOMS:
        return repr(value)
    if cls.__name__ == "OutStream":  # ``sys.stdout`` of a kernel
        return str(value.name)
    if cls is tuple:
        parts = [atom(part) for part in value]
        return None if None in parts else f"({', '.join(filter(None, parts))})"
    if cls is float:
        return repr(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return None if of_notebook(value) else _importable(value)
    return _held_by_module(value)


def of_notebook(value: Any) -> bool:
    return getattr(value, "__module__", None) == "__main__"


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _importable(value: Any) -> str | None:
    """Return the name under which a class or function is found in its module, or None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found = sys.modules.get(module or "builtins")
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None


@functools.cache
def _held(module: str) -> dict[int, tuple[str, Any]]:
    return {id(value): (name, value) for name, value in list(vars(sys.modules[module]).items())}


def _held_by_module(value: Any) -> str | None:
    """Return the name by which its class's module holds an object (``dataclasses.MISSING``)."""
    module = type(value).__module__
    if module in ("builtins", "__main__") or module not in sys.modules:
        return None
    name, held = _held(module).get(id(value), ("", None))
    return f"{module}.{name}" if held is value else None


def source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return ""

"""Replaces torch's entry points in place, under their own names, as listed in tables."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed  # noqa: F401 - _DISTRIBUTED lists its modules
from torch.overrides import handle_torch_function, has_torch_function

Arguments = dict[str, Any]


def replace(owner: Any, name: str, new: Any) -> None:
    """Replace ``owner.name`` by ``new``, which pickles find under the same name."""
    old = getattr(owner, name, None)
    if inspect.isfunction(new) and callable(old):
        functools.update_wrapper(new, old)
        new.__name__ = name
        if inspect.ismodule(owner):
            new.__module__, new.__qualname__ = owner.__name__, name
        else:
            new.__module__, new.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
    setattr(owner, name, new)


def replace_all(owner: Any, table: Mapping[str, Any]) -> None:
    """Replace every name of a table, even names that this version of torch does not have."""
    for name, new in table.items():
        replace(owner, name, new)


def rewrite_calls(owner: Any, name: str, rewrite: Callable[[Arguments], None]) -> None:
    """Let ``rewrite`` change the arguments, by name, of all calls of a function or method."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        rewrite(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    replace_everywhere(owner, name, rewritten)


def replace_everywhere(owner: Any, name: str, new: Any) -> None:
    """Replace a function, including in modules of torch.distributed that imported it by name."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    if inspect.ismodule(owner):
        for module in _DISTRIBUTED:
            if vars(module).get(name) is old:
                setattr(module, name, new)


def overridable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let arguments and modes with a ``__torch_function__`` override a call, as torch does.

    They receive the function that the program has called, which is the replacement, because
    libraries use it as a key of tables (``{torch.zeros_like: …}``). torch's own function would pass
    itself.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if has_torch_function(given):
            return handle_torch_function(call, given, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def stand_in(name: str, real: type, make: Callable[..., Any], module: str = "torch") -> type:
    """Return a class that replaces one of torch's that cannot be patched.

    Calling it calls ``make``, and objects of the real class are its instances.
    """

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    return Meta(name, (), {"__module__": module, "__doc__": real.__doc__})


def always(value: Any) -> Callable[..., Any]:
    """Return a function that always returns the same value."""
    return lambda *args, **kwargs: value


# This runs at import, and so before the fork: searching sys.modules in a fork copies the pages of
# all modules.
_DISTRIBUTED = [
    module for path, module in sys.modules.items() if path.startswith("torch.distributed")
]

"""How torch's entry points are replaced: in place, under their own names, each in one line of a table."""

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
    """Put ``new`` in the place of ``owner.name``; pickles go on finding it by the name of what it replaces."""
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
    """Replace every name of a table, also one that this version of torch does not have."""
    for name, new in table.items():
        replace(owner, name, new)


def rewrite_calls(owner: Any, name: str, rewrite: Callable[[Arguments], None]) -> None:
    """Let a function or method be called with arguments that ``rewrite`` has changed; it gets those given, by name."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        rewrite(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    replace_everywhere(owner, name, rewritten)


def replace_everywhere(owner: Any, name: str, new: Any) -> None:
    """Replace a function also in the modules of torch.distributed that took it by ``from … import``."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    if inspect.ismodule(owner):
        for module in _DISTRIBUTED:
            if vars(module).get(name) is old:
                setattr(module, name, new)


def overridable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let arguments, and modes, with a ``__torch_function__`` of their own have a call first, as functions of torch do.

    They are told what the program has called, which is what stands in torch's place: libraries keep
    tables by it (``{torch.zeros_like: …}``), and torch's own function would tell them of itself.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if has_torch_function(given):
            return handle_torch_function(call, given, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def stand_in(name: str, real: type, make: Callable[..., Any], module: str = "torch") -> type:
    """A class of torch that cannot be patched in place: calls of it ``make`` objects, and it recognises real ones."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    return Meta(name, (), {"__module__": module, "__doc__": real.__doc__})


def always(value: Any) -> Callable[..., Any]:
    """A function that gives one answer, whatever it is asked."""
    return lambda *args, **kwargs: value


# at import, so before the fork: looking through sys.modules in a fork copies the pages of all
# modules
_DISTRIBUTED = [
    module for path, module in sys.modules.items() if path.startswith("torch.distributed")
]

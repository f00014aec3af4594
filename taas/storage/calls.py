"""Put a ``Diversion`` in the place of the functions Python programs call.

``os`` and ``open`` are replaced where they are defined, and in every module that took them by name before;
``posix`` and ``_io`` keep the real ones. A call that was missed is no hole: it meets the wall.
"""

from __future__ import annotations

import _io
import builtins
import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from taas.import_hooks import imported_since
from taas.storage.diversion import Diversion

_DIVERTED = [name for name in vars(Diversion) if name in os.__all__]
# Standard modules that bound the real functions as defaults or class attributes when they were imported.
_BOUND_EARLY = ("tempfile", "shutil", "pathlib", "glob", "zipfile", "tarfile")
_REAL = {"posix", "_io", "os", "io", "builtins"}


_surveyed: set[str] = set()
_bound: list[tuple[Callable[[Any], None], str]] = []
"""Where modules hold a real function: what puts another there, and its name. Known before the fork: a rank that looked through
all modules again would touch, and so copy, the pages of each of them."""


def survey() -> None:
    """Note which modules hold real functions by name: done once before forking, it costs a rank nothing."""
    originals = {id(getattr(os, name)): name for name in _DIVERTED}
    originals |= {id(builtins.open): "builtins.open", id(shutil.rmtree): "shutil.rmtree"}
    for name in imported_since(_surveyed):
        module = sys.modules[name]
        if not isinstance(module, ModuleType) or name in _REAL or name.startswith("taas.storage."):
            continue
        for key, value in [*vars(module).items()]:
            if id(value) in originals:
                _bound.append((partial(setattr, module, key), originals[id(value)]))
            elif name in _BOUND_EARLY and getattr(value, "__module__", "") == name:
                _survey_bound(value, originals)


def _survey_bound(value: Any, originals: dict[int, str]) -> None:
    """Note real functions that a function has as defaults, or a class as static methods or in methods' defaults."""
    if isinstance(value, type):
        for key, member in [*vars(value).items()]:
            if isinstance(member, staticmethod) and id(member.__func__) in originals:
                _bound.append((partial(_set_static, value, key), originals[id(member.__func__)]))
            else:
                _survey_bound(member, originals)
    elif isinstance(value, FunctionType):
        for index, default in enumerate(value.__defaults__ or ()):
            if id(default) in originals:
                _bound.append((partial(_set_default, value, index), originals[id(default)]))


def _set_static(owner: type, key: str, new: Callable[..., Any]) -> None:
    setattr(owner, key, staticmethod(new))


def _set_default(function: FunctionType, index: int, new: Callable[..., Any]) -> None:
    defaults = [*(function.__defaults__ or ())]
    defaults[index] = new
    function.__defaults__ = tuple(defaults)


def install(diversion: Diversion) -> None:
    """Divert this process's calls, for good: they mean what the diversion says from now on."""
    replacements: dict[str, Callable[..., Any]] = {name: getattr(diversion, name) for name in _DIVERTED}
    links = os.supports_follow_symlinks
    links |= {new for name, new in replacements.items() if getattr(os, name) in links}
    replace(replacements | {"builtins.open": _opener(diversion), "shutil.rmtree": diversion.rmtree})
    if "torch" in sys.modules:
        _divert_torch(sys.modules["torch"], diversion)


def replace(new: Mapping[str, Callable[..., Any]]) -> None:
    """Put others in the place of functions of ``os``, of ``builtins.open`` and ``shutil.rmtree``, wherever modules hold them."""
    survey()
    for name, function in new.items():
        if name == "builtins.open":
            builtins.open = io.open = function
        else:
            setattr(shutil if name == "shutil.rmtree" else os, name.rpartition(".")[2], function)
    for put, name in _bound:
        if name in new:
            put(new[name])


def _opener(diversion: Diversion) -> Callable[..., Any]:
    """``open``: Python's own, which gets its descriptor from the diversion and keeps the name it was given."""

    def divert(path: Any, flags: int) -> int:
        return diversion.open(path, flags, 0o666)

    def open(  # noqa: A001 stands for the built-in, so it bears its name
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        if opener is None and not isinstance(file, int):
            opener = divert
        return _io.open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    return open


def _divert_torch(torch: Any, diversion: Diversion) -> None:
    """Let ``torch.save`` and ``torch.load(mmap=True)``, whose C++ opens files by name itself, follow."""
    real_writer = torch._C.PyTorchFileWriter

    class PyTorchFileWriter(real_writer):  # type: ignore[misc, valid-type]
        """The C++ writer, on the rank's own file."""

        def __init__(self, file: Any, *args: Any, **options: Any) -> None:
            super().__init__(diversion.target(file) if isinstance(file, str) else file, *args, **options)

    torch._C.PyTorchFileWriter = PyTorchFileWriter
    native_map = torch.UntypedStorage.from_file

    def from_file(filename: Any, shared: bool = False, *args: Any, **options: Any) -> Any:
        return native_map(filename if shared else diversion.source(filename), shared, *args, **options)

    torch.UntypedStorage.from_file = staticmethod(from_file)

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
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from taas.import_hooks import imported_since
from taas.storage.diversion import Diversion
from taas.storage.view import View

# What the methods of a view stand for, and those that a diversion adds.
_READERS, _WRITERS = ([name for name in vars(of) if name in os.__all__] for of in (View, Diversion))
# Standard modules that bound the real functions as defaults or class attributes when they were imported.
_BOUND_EARLY = ("tempfile", "shutil", "pathlib", "glob", "zipfile", "tarfile")
_REAL = {"posix", "_io", "os", "io", "builtins"}


# Where modules hold real functions: known before the fork, applied in each rank. A rank that looked through all modules
# again would touch, and so copy, the pages of each of them.
_surveyed: set[str] = set()
_names: list[tuple[str, str, str]] = []  # module, its name for it, name of the real function
_defaults: list[tuple[FunctionType, tuple[str, ...]]] = []  # "" keeps the default that is there
_statics: list[tuple[type, str, str]] = []  # class, attribute, name of the real function


def survey() -> None:
    """Note which modules hold real functions by name: done once before forking, it costs a rank nothing."""
    originals = _originals()
    for name in imported_since(_surveyed):
        module = sys.modules[name]
        if not isinstance(module, ModuleType) or _is_real(name):
            continue
        held = list(vars(module).items())
        _names.extend((name, key, originals[id(value)]) for key, value in held if id(value) in originals)
        if name in _BOUND_EARLY:
            _survey_bound(module, originals)


def _originals() -> dict[int, str]:
    """Identity of each real function -> the name it is replaced under."""
    found = {id(getattr(os, name)): name for name in (*_WRITERS, *_READERS)}
    return {**found, id(builtins.open): "builtins.open", id(shutil.rmtree): "shutil.rmtree"}


def _survey_bound(module: ModuleType, originals: dict[int, str]) -> None:
    """Note real functions that a module holds as default arguments or static methods."""
    for value in list(vars(module).values()):
        members = list(vars(value).items()) if isinstance(value, type) else [("", value)]
        for key, member in members:
            if (
                isinstance(member, FunctionType)
                and member.__defaults__
                and member.__module__ == module.__name__
            ):
                names = tuple(originals.get(id(default), "") for default in member.__defaults__)
                if any(names):
                    _defaults.append((member, names))
            elif isinstance(value, type) and isinstance(member, staticmethod):
                name = originals.get(id(member.__func__), "")
                if name:
                    _statics.append((value, key, name))


def _is_real(module: str) -> bool:
    return module in _REAL or module.startswith("taas.storage.")


def install(diversion: Diversion) -> None:
    """Divert this process's calls, for good: they mean what the diversion says from now on."""
    survey()
    names = [*_WRITERS, *(_READERS if diversion.denial.mode == "discard" else ())]
    replacements: dict[str, Callable[..., Any]] = {name: getattr(diversion, name) for name in names}
    replacements["builtins.open"] = _opener(diversion)
    replacements["shutil.rmtree"] = diversion.rmtree(shutil.rmtree)
    options = os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids
    for supported in options:
        supported |= {new for name, new in replacements.items() if getattr(os, name, None) in supported}
    _replace_surveyed(replacements)
    for name, new in replacements.items():
        if "." not in name:
            setattr(os, name, new)
    builtins.open = io.open = replacements["builtins.open"]
    if "torch" in sys.modules:
        _divert_torch(sys.modules["torch"], diversion)


def _replace_surveyed(replacements: dict[str, Callable[..., Any]]) -> None:
    """Replace what modules have taken by name, or bound as defaults and static methods."""
    for module, key, name in _names:
        if name in replacements and module in sys.modules:
            setattr(sys.modules[module], key, replacements[name])
    for function, names in _defaults:
        kept = function.__defaults__ or ()
        function.__defaults__ = tuple(
            replacements.get(name, default) for name, default in zip(names, kept, strict=True)
        )
    for owner, key, name in _statics:
        if name in replacements:
            setattr(owner, key, staticmethod(replacements[name]))


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

"""Finds the code that a cell may run.

This is the cell's own code, the code of the notebook's functions that it mentions, and the
project's files that these import.

The code is only read as text; nothing is imported. So it is known before a run starts what a cell
may do, but not whether it will do it.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_MOST_FILES = 300
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[^\W\d]\w*")
_IMPORT = re.compile(
    r"^\s*(?:from\s+(\.*)([\w.]*)\s+import\s+\(?([^#\n)]*)|import\s+([^#\n;]+))", re.MULTILINE
)


def reached_code(cell: str, namespace: Mapping[str, Any], project: Path) -> list[str]:
    """Return the source texts that a cell may run: its own first, then each project file once."""
    texts, waiting = [cell], [(cell, project)]
    files: set[Path] = set()
    names: set[str] = set()
    while waiting:
        text, folder = waiting.pop()
        found = [*_imported_files(text, folder, project)]
        # such a text may be the notebook's; a project file does not see the notebook's variables
        if folder == project:
            for name in {*_NAME.findall(text)} - names:
                names.add(name)
                for source in _sources(namespace.get(name)):
                    texts.append(source)
                    waiting.append((source, project))
                found += _file_of(namespace.get(name), project)
        for path in found:
            if path not in files and len(files) < _MOST_FILES:
                files.add(path)
                source = _read(path)
                texts.append(source)
                waiting.append((source, path.parent))
    return texts


def _read(path: Path) -> str:
    """Read a file of the project; return an empty string if that fails or the file is too large."""
    try:
        return path.read_text(errors="replace") if path.stat().st_size <= _MOST_BYTES else ""
    except OSError:
        return ""


def _sources(value: Any) -> Iterator[str]:
    """Yield the source of a function of the notebook, or of the functions of one of its classes."""
    kind = type(value)  # isinstance would call a proxy
    if not issubclass(kind, type | types.FunctionType) or value.__module__ != "__main__":
        return
    members = [value] if issubclass(kind, types.FunctionType) else vars(value).values()
    for function in members:
        if type(function) is types.FunctionType:
            try:
                yield inspect.getsource(function)
            except (OSError, TypeError):  # code without a source, made by exec for example
                continue


def _file_of(value: Any, project: Path) -> list[Path]:
    """Return the project file in which a module, function, class or instance's class is defined."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        module = value
    else:
        owner = value if issubclass(kind, type | types.FunctionType) else kind
        module = sys.modules.get(str(owner.__module__))
    path = Path("" if module is None else str(vars(module).get("__file__") or ""))
    return (
        [path] if path.suffix == ".py" and path.is_relative_to(project) and path.is_file() else []
    )


def _imported_files(text: str, folder: Path, project: Path) -> Iterator[Path]:
    """Yield the project's files that a text in this folder imports."""
    for dots, module, members, modules in _IMPORT.findall(text):
        if modules:
            for part in modules.split(","):
                words = part.split()
                yield from _files_of(words[0] if words else "", [folder, project])
            continue
        roots = [folder, project]
        if dots:
            start = folder
            for _ in dots[1:]:
                start = start.parent
            roots = [start]
        yield from _files_of(module, roots)
        for member in members.split(","):
            words = member.split()
            if words:
                yield from _files_of(f"{module}.{words[0]}".strip("."), roots)


def _files_of(module: str, roots: list[Path]) -> Iterator[Path]:
    """Yield the files of a module and of its parent packages."""
    parts = module.split(".")
    for root in dict.fromkeys(roots):
        for depth in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:depth])
            for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if parts[0] and path.is_file():
                    yield path


# ------------------------------------------------------ scripts for one process with several GPUs

_WRAPS = re.compile(r"\bDataParallel\s*\(")
_KNOWS_RANKS = re.compile(
    r"Distributed|distributed|LOCAL_RANK|local_rank"
    r"|\b(?:accelerate|lightning|transformers|fastai|deepspeed|ignite|composer)\b"
)


def takes_first_gpu_for_its_own(cell: str, namespace: Mapping[str, Any], project: Path) -> bool:
    """Tell whether a cell is a program for ``nn.DataParallel``.

    If so, its ``cuda:0`` is mapped to each rank's own GPU. Such a program wraps a model in
    DataParallel, directly or in code that it calls, and no part of it derives GPU numbers from
    ranks.
    """
    texts = reached_code(cell, namespace, project)
    wrapping = [text for text in texts if _WRAPS.search(text)]
    return bool(wrapping) and not any(_KNOWS_RANKS.search(text) for text in [cell, *wrapping])

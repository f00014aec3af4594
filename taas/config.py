"""Find, read and check the configuration files ``taas.toml``.

These files add instance types and set defaults (:mod:`taas.header.catalog`); docs/configuration.md
lists all keys. Two files are read if they exist: ``taas.toml`` in the user's configuration folder
(``$XDG_CONFIG_HOME/taas``, by default ``~/.config/taas``), and ``taas.toml`` in the project, which
is the kernel's working directory. For each key, the value in the project has precedence. Parent
folders of the project are not searched, so that no forgotten file can affect runs. An unknown key
raises a `ConfigError` that names the file, the key and the most similar valid key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from taas.base.wording import nearest, refusal, shown, shown_path
from taas.errors import ConfigError, HeaderError
from taas.header.catalog import CONVERT, Catalog, InstanceType
from taas.header.options import SETTINGS


def project_folder() -> Path:
    """Return the notebook's directory.

    Raises:
        HeaderError: the directory was removed, or its name is not UTF-8, so that it cannot be
            stored in a record.
    """
    try:
        folder = Path.cwd()
        str(folder).encode()
        return folder
    except UnicodeEncodeError:
        raise HeaderError(
            f"the notebook's folder {shown_path(folder)} has a name that is not UTF-8, and what is"
            " told of a run is: rename it, or type %cd and another folder"
        ) from None
    except FileNotFoundError:
        raise HeaderError(
            "the notebook's working directory was removed, and is the project of its runs: type %cd"
            " and a folder that is there"
        ) from None


def load_catalog(project: Path | None = None) -> Catalog:
    """Read ``taas.toml`` of the user and of a project, by default the working directory.

    Raises:
        ConfigError: a file cannot be read, is not TOML, or has a key or value that is not allowed.
    """
    configured = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    home = os.path.expanduser(configured)  # noqa: PTH111  unlike Path.expanduser it never raises
    catalog = Catalog()
    for folder in (Path(home) / "taas", project or project_folder()):
        path = folder / "taas.toml"
        if _is_there(path):
            said = _read(path)
            types = _instances(said.pop("instances", {}), path)
            settings = {key: _setting(key, value, path) for key, value in _flat(said)}
            catalog = Catalog(
                instances={**catalog.instances, **types},
                settings={**catalog.settings, **settings},
                said_in={**catalog.said_in, **dict.fromkeys(settings, path)},
            )
    return catalog


def _is_there(path: Path) -> bool:
    """Tell whether a file exists.

    Raises:
        ConfigError: the path is not that of a file, or it cannot be examined.
    """
    try:
        if path.is_file():
            return True
        other = os.path.lexists(path)
    except OSError as exc:
        raise ConfigError(
            f"{shown_path(path)}: {exc.strerror}; correct the path or remove the file"
        ) from None
    if other:
        raise ConfigError(
            f"{shown_path(path)}: it is no file, nor a link to one; replace it by a file or"
            " remove it"
        )
    return False


def _read(path: Path) -> dict[str, Any]:
    # Imported here, as is msgspec below, to keep `import taas` fast if there is no taas.toml.
    import tomllib

    try:
        with path.open("rb") as file:
            said = tomllib.load(file)
        [*_flat(said)]  # so that tables which are nested too deeply raise an error here
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{path}: {' '.join(str(exc).split())}; correct the file or remove it"
        ) from exc
    return said


def _flat(tables: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a file, each with its full key (``section.key``)."""
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _setting(key: str, value: Any, path: Path) -> Any:
    section = key.rpartition(".")[0]
    if value is None or not isinstance(value, str | int | float | list):
        raise ConfigError(
            f"{path}: {key} = {shown(str(value))}: a date has no meaning here; write a text or a"
            " number"
        )
    beside = [known for known in CONVERT if known.rpartition(".")[0] == section]
    _refuse_unknown([key], beside or [*CONVERT, 'instances."g2.8"'], path)
    convert = CONVERT[key]
    try:
        if key in SETTINGS and SETTINGS[key].repeats:
            items = value if isinstance(value, list) else [value]
            return tuple(
                convert(item) if isinstance(item, str) else _refuse(item) for item in items
            )
        return convert(str(value))
    except ValueError:
        wrote = f"{path}: {key} = {shown(str(value))}"
        near = (
            None
            if isinstance(value, list | bool) and "," not in str(value)
            else convert.near(str(value))
        )
        if key in SETTINGS and SETTINGS[key].repeats:
            raise ConfigError(
                refusal(wrote, f'write ["{convert.instead}"]', convert.allowed)
            ) from None
        answer = (
            f"did you mean {near}? Allowed is {convert.allowed}"
            if near
            else f"write {convert.instead}"
        )
        raise ConfigError(refusal(wrote, answer, "" if near else convert.allowed)) from None


def _refuse(item: object) -> str:
    raise ValueError(item)


def _instances(tables: Any, path: Path) -> dict[str, InstanceType]:
    import msgspec

    types = {}
    for name, entry in tables.items() if isinstance(tables, dict) else [("", None)]:
        if not isinstance(entry, dict) or any(isinstance(value, dict) for value in entry.values()):
            raise ConfigError(
                f'{path}: write [instances."g3.8"], with the dot of the name inside quotes'
            )
        where = f'instances."{shown(name)}"'
        allowed = [f"{where}.{field.name}" for field in fields(InstanceType)[1:]]
        _refuse_unknown([f"{where}.{key}" for key in entry], allowed, path)
        try:
            types[name] = msgspec.convert({"name": name, **entry}, InstanceType)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"{path}: [{where}] {shown(str(exc), 300)}") from exc
    return types


def _refuse_unknown(keys: list[str], allowed: list[str], path: Path) -> None:
    for key in keys:
        if key not in allowed:
            near = nearest(key, allowed, 0.6)
            section = [known for known in allowed if known.startswith(f"{key}.")]
            answer = (
                f"did you mean {near}?" if near else f"write one of {', '.join(section or allowed)}"
            )
            raise ConfigError(refusal(f"{path}: {shown(key)} is no key", answer))

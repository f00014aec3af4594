"""Instance types, and ``taas.toml``.

A run asks for VMs of an *instance type*. The built-in types carry DataSphere's names and sizes, so that its
notebooks mean the same here; ``taas.toml`` adds types and sets defaults::

    [instances."x1.2"]           # a type of your own; a built-in name redefines that type
    vcpus = 16
    gpus = 2
    gpu_model = "L40S"
    vms = [1, 2, 3]              # numbers of VMs that one run may ask for; [1, 2, 4] where left out

    [engine]
    default = "local"            # or "ray"
    address = "ray-head:6379"
    wait = 600.0                 # seconds that a run waits for VMs; 0: it fails at once

    [storage]
    shared = ["checkpoints"]     # directories where every rank may write
    rank_writes = "discard"      # or "deny"
    kept_limit = "2 GiB"         # of writes kept for %taas recover

    [delivery]
    encrypt = true
    buffer = "4 GiB"             # of prepared elements; from the memory there is where left out

    [run]
    hang_timeout = 300.0         # seconds
    max_restarts = 0
    output = "0"                 # or "all", "none"

Two files are read, if they are there: ``taas.toml`` in the user's configuration folder
(``$XDG_CONFIG_HOME/taas``, else ``~/.config/taas``), then ``taas.toml`` in the project, the kernel's working
directory; what the project says wins, key by key. Parents of the project are not searched: a file nobody
remembers would change runs. Unknown keys are errors (`ConfigError`) that name file, key and the nearest key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from taas.errors import ConfigError, HeaderError
from taas.wording import nearest, shown

__all__ = [
    "BUILT_IN_TYPES",
    "DATA_VM",
    "Catalog",
    "DeliveryConfig",
    "EngineConfig",
    "InstanceType",
    "RunConfig",
    "Size",
    "StorageConfig",
    "load_catalog",
]

TYPE_NAME = re.compile(r"[a-z]\d+\.\d+", re.ASCII)
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]i?)?B?", re.ASCII)
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Size(int):
    """A number of bytes; in ``taas.toml`` a whole number, or a text such as ``"2 GiB"`` or ``"500 MB"``."""

    @classmethod
    def parse(cls, value: object) -> Size:
        """Read a size; raises ValueError for what is none."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f'{value!r} is not a size; write bytes, or "2 GiB", or "500 MB"')
        return cls(float(match[1]) * _UNITS.get(match[2] or "", 1))


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A kind of VM.

    Attributes:
        name: as written after ``#!``: a letter, digits, a dot, digits.
        vcpus: virtual CPUs of one VM.
        gpus: GPUs of one VM; 0 for a CPU type.
        gpu_model: for the reader only.
        vms: the numbers of VMs that one run may ask for.
    """

    name: str
    vcpus: int
    gpus: int = 0
    gpu_model: str = ""
    vms: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        if not TYPE_NAME.fullmatch(self.name):
            raise ValueError("an instance type is called like g2.8: a letter, digits, a dot, digits")
        if self.vcpus < 1 or self.gpus < 0:
            raise ValueError("vcpus is at least 1, gpus at least 0")
        if not self.vms or min(self.vms) < 1:
            raise ValueError("vms lists numbers of VMs of at least 1, such as [1, 2, 4]")


def _g1(gpus: int) -> InstanceType:
    return InstanceType(name=f"g1.{gpus}", vcpus=8 * gpus, gpus=gpus, gpu_model="V100")


def _g2(gpus: int) -> InstanceType:
    return InstanceType(name=f"g2.{gpus}", vcpus=28 * gpus, gpus=gpus, gpu_model="A100")


BUILT_IN_TYPES: Mapping[str, InstanceType] = {
    kind.name: kind
    for kind in (
        *(InstanceType(name=f"c1.{vcpus}", vcpus=vcpus) for vcpus in (4, 8, 32, 80)),
        *map(_g1, (1, 2, 4)),
        *map(_g2, (1, 2, 4, 8)),
    )
}


DATA_VM = "c1.4"
"""The type of the VMs that ``--cpus`` asks for."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """``[engine]``: where VMs come from, and how many seconds they are waited for."""

    default: Literal["local", "ray"] = "local"
    address: str | None = None
    wait: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.wait < float("inf"):
            raise ValueError("wait is a number of seconds of at least 0")


_KEPT_LIMIT = Size(2 * 2**30)


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """``[storage]``: the write rule; ``kept_limit`` bounds the writes kept for ``%taas recover``."""

    shared: tuple[str, ...] = ()
    rank_writes: Literal["discard", "deny"] = "discard"
    kept_limit: Size = _KEPT_LIMIT


@dataclass(frozen=True, kw_only=True)
class DeliveryConfig:
    """``[delivery]``: ``buffer`` bytes of prepared elements, None for a share of the memory there is."""

    encrypt: bool = True
    buffer: Size | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """``[run]``: what a header means where it says nothing."""

    hang_timeout: float = 300.0
    max_restarts: int = 0
    output: Literal["0", "all", "none"] = "0"

    def __post_init__(self) -> None:
        if not 0 < self.hang_timeout < float("inf"):
            raise ValueError("hang_timeout is a number of seconds above 0")
        if self.max_restarts < 0:
            raise ValueError("max_restarts is at least 0")


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The instance types there are and the settings of ``taas.toml``.

    ``Catalog()`` is what holds without any file.
    """

    instances: Mapping[str, InstanceType] = field(default_factory=lambda: BUILT_IN_TYPES)
    engine: EngineConfig = EngineConfig()
    storage: StorageConfig = StorageConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    run: RunConfig = RunConfig()

    def find(self, name: str) -> InstanceType:
        """The type called ``name``; raises HeaderError with the types there are and the nearest one."""
        if name in self.instances:
            return self.instances[name]
        raise HeaderError(
            f"#!{shown(name)} is no instance type: allowed is {', '.join(self.instances)}; "
            f"type #!{nearest(name, self.instances)}"
        )


def load_catalog(project: Path | None = None) -> Catalog:
    """Read the user's and the project's ``taas.toml``.

    Args:
        project: the project's directory; the working directory where None.

    Raises:
        ConfigError: a file cannot be read, is not TOML, or has a key or value that is not allowed.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    catalog = Catalog()
    for folder in (Path(home).expanduser() / "taas", project or Path.cwd()):
        path = folder / "taas.toml"
        if path.is_file():
            catalog = _overlay(catalog, _read(path), path)
    return catalog


def _read(path: Path) -> dict[str, Any]:
    import tomllib  # here, as msgspec below: most projects have no taas.toml, and `import taas` is to stay cheap

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {' '.join(str(exc).split())}; correct the file or remove it") from exc


def _overlay(catalog: Catalog, said: dict[str, Any], path: Path) -> Catalog:
    """``catalog`` with what one file says; sections are merged key by key, instance types replaced whole."""
    _refuse_unknown(said, tuple(f.name for f in fields(Catalog)), "section", path)
    merged: dict[str, Any] = {}
    for section, values in said.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} is a section; write [{section}] on a line of its own")
        if section == "instances":
            merged[section] = {**catalog.instances, **_instances(values, path)}
        else:
            before = getattr(catalog, section)
            merged[section] = replace(before, **_section(type(before), values, section, path))
    return replace(catalog, **merged)


def _instances(values: dict[str, Any], path: Path) -> dict[str, InstanceType]:
    types = {}
    for name, entry in values.items():
        where = f'instances."{shown(name)}"'
        if not isinstance(entry, dict) or any(isinstance(value, dict) for value in entry.values()):
            raise ConfigError(f'{path}: write [instances."g3.8"], with the dot of the name inside quotes')
        _refuse_unknown(entry, tuple(f.name for f in fields(InstanceType))[1:], f"key in [{where}]", path)
        types[name] = _convert({"name": name, **entry}, InstanceType, where, path)
    return types


def _section(kind: type, values: dict[str, Any], section: str, path: Path) -> dict[str, Any]:
    """The keys that one file gives for a section, checked and typed."""
    _refuse_unknown(values, tuple(f.name for f in fields(kind)), f"key in [{section}]", path)
    typed = _convert(values, kind, section, path)
    return {key: getattr(typed, key) for key in values}


def _refuse_unknown(values: dict[str, Any], allowed: tuple[str, ...], what: str, path: Path) -> None:
    for key in values:
        if key not in allowed:
            raise ConfigError(
                f"{path}: {shown(key)} is no {what}; allowed is {', '.join(allowed)}; write {nearest(key, allowed)}"
            )


def _convert(values: dict[str, Any], kind: type[Any], where: str, path: Path) -> Any:
    import msgspec

    assert is_dataclass(kind)
    try:
        return msgspec.convert(values, kind, dec_hook=_decode_size)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: [{where}] {shown(str(exc), 300)}") from exc


def _decode_size(kind: type, value: object) -> Size:
    assert kind is Size
    return Size.parse(value)

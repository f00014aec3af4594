"""Instance types, and ``taas.toml``.

A run asks for VMs of an *instance type*. The built-in types carry DataSphere's names and sizes, so that its
notebooks mean the same here; ``taas.toml`` adds types and sets defaults::

    [instances."x1.2"]           # a type of your own; a built-in name redefines that type
    vcpus = 16
    gpus = 2
    gpu_model = "L40S"
    vms = [1, 2, 3]              # numbers of VMs that one run may ask for; [1, 2, 4] where left out
    slurm = "--gres=gpu:l40s:2 --cpus-per-task=16"  # how sbatch is asked for one; a whole node with its GPUs where left out

    [engine]
    default = "local"            # or "ray", or "slurm"
    address = "ray-head:6379"    # of Ray
    wait = 600.0                 # seconds that a run waits for VMs; 0: it fails at once
    idle = 60.0                  # so long VMs elsewhere stay after a run, for the next one; 0: they are given back at once

    [engine.slurm]               # what is asked of Slurm: what %taas engine slurm takes
    partition = "gpu"
    account = "project42"
    time = "2:00:00"             # the longest that VMs stay
    cpu_partition = "cpu"        # for VMs without GPUs
    python = "/shared/env/bin/python"  # on the nodes; the notebook's own path where left out
    host = "login1-ib"           # the address under which nodes reach this machine; found where left out
    sbatch = "--qos=long"        # further options of sbatch

    [keep]
    idle = "30min"               # so long the ranks of a --keep cell stay where no other one comes

    [storage]
    shared = ["checkpoints"]     # directories where every rank may write
    rank_writes = "discard"      # or "deny"

    [delivery]
    encrypt = true
    buffer = "4 GiB"             # of prepared elements; from the memory there is where left out

    [run]
    hang_timeout = 300.0         # seconds, or "5min"
    max_restarts = 0
    output = "0"                 # or "all", "none", "0,3-5"

What an option of the cell header is called, too, takes what that option takes (`header.options`); the others stand in
a table below.

Two files are read, if they are there: ``taas.toml`` in the user's configuration folder
(``$XDG_CONFIG_HOME/taas``, else ``~/.config/taas``), then ``taas.toml`` in the project, the kernel's working
directory; what the project says wins, key by key. Parents of the project are not searched: a file nobody
remembers would change runs. Unknown keys are errors (`ConfigError`) that name file, key and the nearest key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from taas.errors import ConfigError, HeaderError
from taas.header.arguments import TYPE_NAME, Option, Wrong, choice, seconds, seconds_or_none, size, text_of
from taas.header.options import DEFAULTS, SETTINGS
from taas.wording import nearest, shown


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A kind of VM.

    Attributes:
        name: as written after ``#!``: a letter, digits, a dot, digits.
        vcpus: virtual CPUs of one VM.
        gpus: GPUs of one VM; 0 for a CPU type.
        gpu_model: for the reader, who may look for a type by it.
        vms: the numbers of VMs that one run may ask for.
        slurm: the options of ``sbatch`` that get one.
    """

    name: str
    vcpus: int
    gpus: int = 0
    gpu_model: str = ""
    vms: tuple[int, ...] = (1, 2, 4)
    slurm: str = ""

    def __post_init__(self) -> None:
        if not TYPE_NAME.fullmatch(self.name):
            raise ValueError("an instance type is called like g2.8: a letter, digits, a dot, digits")
        if self.vcpus < 1 or self.gpus < 0:
            raise ValueError("vcpus is at least 1, gpus at least 0")
        if not self.vms or min(self.vms) < 1:
            raise ValueError("vms lists numbers of VMs of at least 1, such as [1, 2, 4]")


_GPU_FAMILIES = (("g1", "V100", 8, (1, 2, 4)), ("g2", "A100", 28, (1, 2, 4, 8)))
BUILT_IN_TYPES: Mapping[str, InstanceType] = {
    kind.name: kind
    for kind in (
        *(InstanceType(name=f"c1.{vcpus}", vcpus=vcpus) for vcpus in (4, 8, 32, 80)),
        *(
            InstanceType(name=f"{family}.{gpus}", vcpus=each * gpus, gpus=gpus, gpu_model=model)
            for family, model, each, sizes in _GPU_FAMILIES
            for gpus in sizes
        ),
    )
}
DATA_VM = "c1.4"
"""The type of the VMs that ``--cpus`` asks for."""


class _Key(NamedTuple):
    """A key of ``taas.toml`` that is called like no option of a header: what it takes, and what holds without it."""

    convert: Callable[[str], Any]
    default: Any


def _of_slurm(name: str, metavar: str, allowed: str, instead: str) -> Option:
    setting = f"engine.slurm.{name.replace('-', '_')}"
    return Option(name, metavar, text_of(allowed, instead), allowed, setting)


SLURM_OPTIONS = (
    _of_slurm("partition", "P", "a partition, as sinfo names it", "gpu"),
    _of_slurm("account", "A", "the account that the time is taken from", "project42"),
    _of_slurm("time", "T", "how long VMs may stay at most, as sbatch takes it", "2:00:00"),
    _of_slurm("cpu-partition", "P", "the partition of VMs without GPUs", "cpu"),
    _of_slurm("python", "PATH", "the interpreter on the nodes", "/shared/env/bin/python"),
    _of_slurm("host", "ADDRESS", "the address under which nodes reach this machine", "login1"),
    _of_slurm("sbatch", "OPTIONS", "further options of sbatch, in quotes", '"--qos=long"'),
)
"""What ``%taas engine slurm`` takes, and ``[engine.slurm]``."""

_KEYS: Mapping[str, _Key] = {
    **{option.setting: _Key(option.convert, "") for option in SLURM_OPTIONS if option.convert},
    "engine.default": _Key(choice("local", "ray", "slurm"), "local"),
    "engine.address": _Key(text_of("where the cluster's head is", "ray-head:6379"), None),
    "engine.wait": _Key(seconds_or_none, 600.0),
    "engine.idle": _Key(seconds_or_none, 60.0),
    "keep.idle": _Key(seconds, 1800.0),
    "delivery.encrypt": _Key(lambda text: choice("true", "false")(text.lower()) == "true", True),
    "delivery.buffer": _Key(size, None),
}


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The instance types there are, and what ``taas.toml`` says; ``Catalog()`` is what holds without any file.

    Attributes:
        instances: by name.
        settings: by section and key, such as ``run.hang_timeout``; only what was said.
        said_in: the file that says it, by section and key.
    """

    instances: Mapping[str, InstanceType] = field(default_factory=lambda: BUILT_IN_TYPES)
    settings: Mapping[str, Any] = field(default_factory=dict)
    said_in: Mapping[str, Path] = field(default_factory=dict)

    def in_force(self) -> dict[str, Any]:
        """Return what holds for each key, set or not; what a header says goes before it."""
        without = {**DEFAULTS, **{key: row.default for key, row in _KEYS.items()}}
        return {key: self.settings.get(key, without[key]) for key in sorted(without)}

    def __getitem__(self, key: str) -> Any:
        """What holds for a key that is no option of a header."""
        return self.settings.get(key, _KEYS[key].default)

    def find(self, name: str, before: str = "#!") -> InstanceType:
        """The type called ``name``.

        Args:
            name: as it was typed.
            before: what it was typed after.

        Raises:
            HeaderError: there is none; the message has the types there are, and the nearest one.
        """
        if name in self.instances:
            return self.instances[name]
        misspelt = not TYPE_NAME.fullmatch(name)  # else one of a size or kind that is not there
        near = nearest(name, self.instances, 0.7) if misspelt else None
        step = f"type {before}{near}" if near else "type one of them, or #pragma taas --gpus auto without one"
        raise HeaderError(f"{before}{shown(name)} is no instance type: allowed is {self.in_words()}; {step}")

    def in_words(self) -> str:
        """The types with what they have: ``c1.4, c1.8 (no GPU), g2.4, g2.8 (A100)``."""
        by_model: dict[str, list[str]] = {}
        for kind in self.instances.values():
            model = kind.gpu_model or ("GPU" if kind.gpus else "no GPU")
            by_model.setdefault(model, []).append(kind.name)
        return ", ".join(f"{', '.join(names)} ({model})" for model, names in by_model.items())


def project_folder() -> Path:
    """Return the notebook's directory.

    Raises:
        HeaderError: somebody removed it.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise HeaderError(
            "the notebook's working directory was removed, and is the project of its runs: type %cd and a folder "
            "that is there"
        ) from None


def load_catalog(project: Path | None = None) -> Catalog:
    """Read the user's and the project's ``taas.toml``.

    Args:
        project: the project's directory; the working directory where None.

    Raises:
        ConfigError: a file cannot be read, is not TOML, or has a key or value that is not allowed.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    catalog = Catalog()
    for folder in (Path(home).expanduser() / "taas", project or project_folder()):
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
    converters = {key: row.convert for key, row in _KEYS.items()} | {
        key: o.convert for key, o in SETTINGS.items()
    }
    sections: dict[str, list[str]] = {"instances": []}
    for key in converters:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    parts = dict(_sections(said))
    _refuse_unknown(parts, tuple(sections), "section", path)
    instances, settings, said_in = dict(catalog.instances), dict(catalog.settings), dict(catalog.said_in)
    for section, values in parts.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} is a section; write [{section}] on a line of its own")
        if section == "instances":
            instances |= _instances(values, path)
            continue
        _refuse_unknown(values, tuple(sections[section]), f"key in [{section}]", path)
        for key, value in values.items():
            where, convert = f"{section}.{key}", converters[f"{section}.{key}"]
            said_in[where] = path
            assert convert is not None
            items = value if isinstance(value, list) else [value]
            repeats = where in SETTINGS and SETTINGS[where].repeats
            try:
                settings[where] = (
                    tuple(convert(str(item)) for item in items) if repeats else convert(str(value))
                )
            except Wrong as wrong:
                wrote = f"{path}: [{section}] {key} = {shown(str(value))}"
                raise ConfigError(f"{wrote}: allowed is {wrong.allowed}; write {wrong.instead}") from None
    return Catalog(instances=instances, settings=settings, said_in=said_in)


def _sections(said: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the sections of a file, one within another by both names, such as ``engine.slurm``."""
    for name, values in said.items():
        within = isinstance(values, dict) and name != "instances"
        inner = {key: value for key, value in values.items() if isinstance(value, dict)} if within else {}
        yield name, {key: value for key, value in values.items() if key not in inner} if inner else values
        for key, value in inner.items():
            yield f"{name}.{key}", value


def _instances(values: dict[str, Any], path: Path) -> dict[str, InstanceType]:
    import msgspec

    types = {}
    for name, entry in values.items():
        where = f'instances."{shown(name)}"'
        if not isinstance(entry, dict) or any(isinstance(value, dict) for value in entry.values()):
            raise ConfigError(f'{path}: write [instances."g3.8"], with the dot of the name inside quotes')
        _refuse_unknown(entry, tuple(f.name for f in fields(InstanceType))[1:], f"key in [{where}]", path)
        try:
            types[name] = msgspec.convert({"name": name, **entry}, InstanceType)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"{path}: [{where}] {shown(str(exc), 300)}") from exc
    return types


def _refuse_unknown(values: dict[str, Any], allowed: tuple[str, ...], what: str, path: Path) -> None:
    for key in values:
        if key not in allowed:
            raise ConfigError(
                f"{path}: {shown(key)} is no {what}; allowed is {', '.join(allowed)}; write {nearest(key, allowed)}"
            )

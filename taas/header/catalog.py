"""The instance types and the settings against which a header is checked.

A run requests VMs of an *instance type*. The built-in types have DataSphere's names and sizes, so
that its notebooks mean the same here; ``taas.toml`` adds types and sets defaults
(:mod:`taas.config` reads it; docs/configuration.md lists all keys). If a key belongs to an option
of the cell header, it accepts the values of that option (:mod:`taas.header.options`); the other
keys are in a table below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas.base.wording import nearest, refusal, shown
from taas.errors import HeaderError
from taas.header.arguments import (
    TYPE_NAME,
    Kind,
    Option,
    choice,
    seconds,
    seconds_or_none,
    size,
    text_of,
)
from taas.header.options import DEFAULTS, SETTINGS


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """A type of VM: its hardware, how many VMs a run may request, and ``sbatch`` options."""

    name: str
    vcpus: int
    gpus: int = 0
    gpu_model: str = ""
    vms: tuple[int, ...] = (1, 2, 4)
    slurm: str = ""

    def __post_init__(self) -> None:
        if not TYPE_NAME.fullmatch(self.name):
            raise ValueError(
                "an instance type is called like g2.8: a letter, digits, a dot, digits"
            )
        if self.vcpus < 1 or self.gpus < 0 or not self.vms or min(self.vms) < 1:
            raise ValueError(
                "vcpus is at least 1, gpus at least 0, and vms lists numbers such as [1, 2, 4]"
            )


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


_SIZED = re.compile(r"(?:([0-9]{1,4})\s*x)?([a-z]+[0-9]+)(?:[^a-z0-9]*x?([0-9]{1,4})(?:gpus?)?)?")
"""A name and a number of GPUs, as people write them: ``a100.8``, ``8xa100``, ``a100x8``, ``g2-8``,
``g2``.
"""


DATA_VM = "c1.4"
"""The type of the VMs that ``--cpus`` requests."""


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
"""The options of ``%taas engine slurm``, and the keys of ``[engine.slurm]``."""


_KEYS: Mapping[str, tuple[Kind, Any]] = {
    **{option.setting: (option.convert, "") for option in SLURM_OPTIONS if option.convert},
    "engine.default": (choice("local", "ray", "slurm"), "local"),
    "engine.address": (text_of("where the cluster's head is", "ray-head:6379"), None),
    "engine.wait": (seconds_or_none, 600.0),
    "engine.idle": (seconds_or_none, 60.0),
    "keep.idle": (seconds, 1800.0),
    "delivery.encrypt": (
        Kind("True|False", "true or false", "true", lambda text: text == "True"),
        True,
    ),
    "delivery.buffer": (size, None),
}
"""The keys that do not belong to an option of a header: the kind of value, and the default."""


CONVERT = {key: convert for key, (convert, _) in _KEYS.items()} | {
    key: option.convert for key, option in SETTINGS.items() if option.convert
}


_DEFAULTS = {**DEFAULTS, **{key: default for key, (_, default) in _KEYS.items()}}


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The instance types, and the settings of ``taas.toml``; ``Catalog()`` has the built-in ones.

    Attributes:
        instances: the instance types by name.
        settings: the settings by section and key, such as ``run.hang_timeout``; only those that
            were set.
        said_in: the file that sets a setting, by section and key.
    """

    instances: Mapping[str, InstanceType] = field(default_factory=lambda: BUILT_IN_TYPES)
    settings: Mapping[str, Any] = field(default_factory=dict)
    said_in: Mapping[str, Path] = field(default_factory=dict)

    def in_force(self) -> dict[str, Any]:
        """Return the value of each key, set or default; an option in a header overrides it."""
        return {key: self[key] for key in sorted(_DEFAULTS)}

    def __getitem__(self, key: str) -> Any:
        return self.settings.get(key, _DEFAULTS[key])

    def find(self, name: str, before: str = "#!") -> InstanceType:
        """Return the type called ``name``, which was typed after ``before``.

        Raises:
            HeaderError: there is no such type; the message lists the types, or suggests one.
        """
        if name in self.instances:
            return self.instances[name]
        fact = f"no instance type {before}{shown(name)}"
        if meant := self._meant(name):
            raise HeaderError(f"{fact}: did you mean {before}{meant}? (%taas types lists all)")
        answer = f"type one of {', '.join(self.instances)}, or #pragma taas --gpus auto without one"
        raise HeaderError(refusal(fact, answer))

    def _meant(self, name: str) -> str | None:
        """Return the type that was meant by a name, or None.

        The name may be misspelt, have a size that does not exist, or be the name of a GPU.
        """
        name = name.lower()
        if name in self.instances:
            return name
        found = _SIZED.fullmatch(name)
        if found is None:
            return nearest(name, self.instances, 0.7)
        before, called, count = found.groups()
        wanted = int(count or before or 1)
        alike = [
            kind
            for kind in self.instances.values()
            if called in (kind.gpu_model.lower(), kind.name.partition(".")[0]) and kind.gpus
        ]
        if not alike:
            return None if TYPE_NAME.fullmatch(name) else nearest(name, self.instances, 0.7)
        fit = max(
            alike,
            key=lambda kind: (
                kind.gpus <= wanted,
                kind.gpus if kind.gpus <= wanted else -kind.gpus,
            ),
        )
        several = wanted // fit.gpus if fit.gpus else 1
        more = several in fit.vms and several > 1 and wanted % fit.gpus == 0
        return f"{fit.name} with --gpus {wanted}" if more else fit.name

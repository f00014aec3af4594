"""The cell header's grammar: text to `RunSpec`, or a one-line `HeaderError`.

::

    #!g2.8                              the instance type; optional where a pragma stands
    #pragma taas --gpus 16 --cpus 4     the options; optional where an instance type stands
    <ordinary cell>

``find_header`` (`header_text`) says which cells have a header; ``parse_header`` judges it, before anything
starts, by the option table (`options`) and the instance types (`catalog`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from taas.catalog import Catalog, InstanceType
from taas.errors import HeaderError
from taas.header_text import HeaderText, find_header, parse_magic_line
from taas.options import OPTIONS, read_options
from taas.wording import nearest, shown

__all__ = ["HeaderText", "RunSpec", "find_header", "parse_header", "parse_magic_line"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a header asks for, checked and complete.

    Attributes:
        instance: instance type of the rank VMs; None for this machine, or what the engine has.
        vms: rank VMs.
        ranks_per_vm: ranks on each of them.
        gpus_per_rank: 1; all GPUs of the VM where one process runs on it (``#!TYPE`` without ``--gpus``); 0
            on a CPU type.
        data_vms: c1.4 VMs on which each registered loader runs; 0 without ``--cpus``.
        units: elements taken from each loader, or by loader name; None for no limit.
        name: the run's name; None to have one made.
        background: the cell returns at once.
        rehearse: CPU ranks also where there are GPUs.
        backend: torch.distributed backend in place of the one the cell asks for.
        max_restarts: new starts after the loss of a rank or VM.
        hang_timeout: seconds without progress that are a hang.
        output: ranks whose output the cell shows.
        returned: names that come back; None for all that are new or changed.
        rank_writes: what happens to writes of ranks other than 0 in the project.
        shared: directories where every rank may write, those of ``taas.toml`` first.
        prebuffer: elements made ready before the ranks start; None for two per rank.
        uneven: what happens to a last round that does not give every rank an element.
        keep: the ranks stay after the cell.
        post_mortem: a failing rank opens the debugger.
    """

    instance: str | None = None
    vms: int = 1
    ranks_per_vm: int = 1
    gpus_per_rank: int = 1
    data_vms: int = 0
    units: int | dict[str, int] | None = None
    name: str | None = None
    background: bool = False
    rehearse: bool = False
    backend: str | None = None
    max_restarts: int = 0
    hang_timeout: float = 300.0
    output: Literal["0", "all", "none"] | tuple[int, ...] = "0"
    returned: tuple[str, ...] | None = None
    rank_writes: Literal["discard", "deny"] = "discard"
    shared: tuple[str, ...] = ()
    prebuffer: int | None = None
    uneven: Literal["drop", "pad", "raise"] = "drop"
    keep: bool = False
    post_mortem: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.vms * self.ranks_per_vm


def parse_header(
    header: HeaderText,
    *,
    expand: Callable[[str], str],
    catalog: Catalog,
    visible_gpus: int,
    registered: Sequence[str],
) -> RunSpec:
    """Judge a header.

    Args:
        header: from `find_header` or `parse_magic_line`.
        expand: what replaces ``{name}`` and ``$name``: IPython's ``shell.var_expand``.
        catalog: instance types and defaults.
        visible_gpus: GPUs of this machine, for ``--gpus auto``.
        registered: names of the registered loaders.

    Raises:
        HeaderError: one line: what is wrong, what is allowed, what to type instead.
    """
    if header.problem is not None:
        raise HeaderError(header.problem)
    fill = (lambda text: text) if header.magic else expand
    given = read_options(fill(header.options or ""), magic=header.magic)
    name = given.pop("on", None) if header.magic else header.instance and fill(header.instance).strip()
    kind = catalog.find(name) if name is not None else None
    _check_delivery(given, registered)
    if "background" in given and "post-mortem" in given:
        raise HeaderError(
            "--post-mortem with --background: allowed is one of them, since the prompt needs the launching cell; "
            "leave --background out"
        )
    shape = _shape(kind, given, visible_gpus)
    return RunSpec(
        instance=kind.name if kind else None,
        **shape,
        data_vms=given.get("cpus", 0),
        units=given.get("units"),
        name=given.get("name"),
        background=given.get("background", False),
        rehearse=given.get("rehearse", False),
        backend=given.get("backend"),
        max_restarts=given.get("max-restarts", catalog.run.max_restarts),
        hang_timeout=given.get("hang-timeout", catalog.run.hang_timeout),
        output=_output(given.get("output", catalog.run.output), shape["vms"] * shape["ranks_per_vm"]),
        returned=given.get("return"),
        rank_writes=given.get("rank-writes", catalog.storage.rank_writes),
        shared=tuple(dict.fromkeys((*catalog.storage.shared, *given.get("shared", ())))),
        prebuffer=given.get("prebuffer"),
        uneven=given.get("uneven", "drop"),
        keep=given.get("keep", False),
        post_mortem=given.get("post-mortem", False),
    )


def _shape(kind: InstanceType | None, given: dict[str, Any], visible_gpus: int) -> dict[str, int]:
    """How many VMs, ranks on each, and GPUs for each rank."""
    if kind is None:
        if "gpus" not in given:
            raise HeaderError(
                "neither #!TYPE nor --gpus: allowed is #!g2.8 above, or --gpus N; type --gpus auto"
            )
        return {"vms": 1, "ranks_per_vm": given["gpus"] or visible_gpus or 2, "gpus_per_rank": 1}
    if kind.gpus == 0:
        for option in ("gpus", "rehearse"):
            if option in given:
                raise HeaderError(
                    f"--{option} on {kind.name}, which has no GPU: allowed is one process without it; "
                    f"leave --{option} out, or type #!g2.8"
                )
    if "gpus" not in given:
        return {"vms": 1, "ranks_per_vm": 1, "gpus_per_rank": kind.gpus}
    ranks = given["gpus"] or kind.gpus
    possible = {kind.gpus * vms: vms for vms in sorted(kind.vms)}
    if ranks not in possible:
        enough = [count for count in possible if count >= ranks] or [max(possible)]
        raise HeaderError(
            f"--gpus {ranks} on {kind.name}: allowed is {_either(list(possible))} ({_either(sorted(kind.vms))} VMs "
            f"of {kind.gpus} GPUs); type --gpus {enough[0]}"
        )
    return {"vms": possible[ranks], "ranks_per_vm": kind.gpus, "gpus_per_rank": 1}


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _check_delivery(given: dict[str, Any], registered: Sequence[str]) -> None:
    """Options about registered loaders need ``--cpus``, and ``--cpus`` needs a registered loader."""
    asked = next((name for name in given if OPTIONS[name].delivers or name == "cpus"), None)
    if asked is not None and not registered:
        raise HeaderError(
            f"--{asked}, and no DataLoader is registered: allowed is after taas.register(loader); "
            f"type that in a cell above, or leave --{asked} out"
        )
    if asked is not None and "cpus" not in given:
        raise HeaderError(
            f"--{asked} without --cpus: allowed is with --cpus 1 to 8; type --cpus 1 --{asked} …"
        )
    units = given.get("units")
    for name, count in units.items() if isinstance(units, dict) else ():
        if name not in registered:
            raise HeaderError(
                f"--units {shown(name)}={count}: allowed is the registered {', '.join(registered)}; "
                f"type --units {nearest(name, registered)}={count}"
            )


def _output(
    asked: Literal["0", "all", "none"] | tuple[tuple[int, int], ...], world_size: int
) -> Literal["0", "all", "none"] | tuple[int, ...]:
    if isinstance(asked, str):
        return asked
    highest = max(last for _, last in asked)
    if highest >= world_size:
        raise HeaderError(
            f"--output with rank {highest}: allowed is up to {world_size - 1} in a run of {world_size} ranks; "
            f"type --output all"
        )
    return tuple(sorted({rank for first, last in asked for rank in range(first, last + 1)}))

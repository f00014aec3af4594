"""The options of a header: each is a field of `RunSpec`, with the option that sets it.

To add an option, add a row: the field, its help text, its kind of value, and its default. Parsing,
help, Tab completion, the key in ``taas.toml`` (``setting``) and the transfer to supervisor and
ranks follow from the row. The code that implements the option reads ``submit.cell.spec``, or in a
rank ``order.cell.spec``. The list of options is checked by a test (tests/test_header_parse.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from taas.base.wording import in_columns
from taas.header.arguments import (
    BACKENDS,
    Kind,
    Option,
    backend,
    check_ranks,
    choice,
    gpus,
    names,
    ranks,
    read_line,
    run_name,
    seconds,
    split_words,
    text_of,
    units,
    whole,
)


def _row(
    about: str,
    metavar: str,
    convert: Kind | None,
    default: Any,
    option: str = "",
    **more: Any,
) -> Any:
    """Return a field for an option, ``--field-name`` by default, or else ``--`` and ``option``.

    The other arguments are those of `Option`.
    """
    return field(
        default=default, metadata={"option": Option(option, metavar, convert, about, **more)}
    )


MAY_DIFFER = frozenset(
    {
        "collect",
        "data_vms",
        "hang_timeout",
        "keep",
        "name",
        "notify",
        "output",
        "post_mortem",
        "prebuffer",
        "returned",
        "uneven",
        "units",
    }
)
"""Fields of `RunSpec` in which two ``--keep`` cells may differ and still run in the same ranks."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A header's request, checked and complete; the help texts of the rows describe the options.

    Attributes:
        instance: the instance type of the rank VMs; None for this machine, or for the engine's
            choice.
        gpus_per_rank: 1 in general; all GPUs of the VM if one process runs on it (``#!TYPE``
            without ``--gpus``); 0 on a CPU type.
        data_vms: the number of data VMs; 0 without ``--cpus``.
        name: the name of the run; if None, the supervisor makes one.
        prebuffer: the number of batches; if None, two for each rank.
    """

    instance: str | None = None
    vms: int = 1
    ranks_per_vm: int = 1
    gpus_per_rank: int = 1
    # A row: what the option does; the name and the kind of its value; the default.
    # fmt: off
    data_vms: int = _row(
        "c1.4 VMs on which each registered DataLoader runs",
        "1..8", whole(1, 8), 0, option="cpus",
        meant_by=("num-workers", "workers", "data-vms"))
    units: int | dict[str, int] | None = _row(  # noqa: RUF009  a field, as the others are
        "elements taken from each registered loader in all",
        "K|NAME=K,…", units, None, delivers=True)
    name: str | None = _row(
        "what the run is called in %taas status, logs and stop",
        "NAME", run_name, None,
        meant_by=("job-name", "run-name"))
    background: bool = _row(
        "give the prompt back at once; %taas attach brings the results",
        "", None, False,
        meant_by=("b", "bg", "d", "detach", "daemon", "async"))
    rehearse: bool = _row(
        "CPU ranks in place of GPUs, also where there are GPUs",
        "", None, False,
        meant_by=("dry-run", "no-gpu", "no-gpus", "no-cuda", "cpu-only", "simulate"))
    backend: str | None = _row(
        "torch.distributed backend in place of the one the cell asks for",
        "|".join(BACKENDS), backend, None)
    max_restarts: int = _row(
        "start again up to R times when a rank or VM is lost",
        "R", whole(0, 100), 0, setting="run.max_restarts",
        meant_by=("restarts", "retries", "retry"))
    hang_timeout: float = _row(
        "seconds (or 5min) without progress after which the cell shows the stacks",
        "S", seconds, 300.0, setting="run.hang_timeout",
        meant_by=("timeout",))
    output: Literal["0", "all", "none"] | tuple[int, ...] = _row(
        "ranks whose output the cell shows, such as 0,3-5",
        "0|all|none|LIST", ranks("0", "all", "none"), "0", setting="run.output",
        meant_by=("o", "log", "logs", "stdout", "verbose", "show"))
    returned: tuple[str, ...] | None = _row(
        "names that come back; all new and changed ones if not given",
        "NAME,…|none", names, None, option="return")
    collect: tuple[str, ...] = _row(
        "names of which taas.collected has every rank's value",
        "NAME,…", names, ())
    rank_writes: Literal["discard", "deny"] = _row(
        "writes of ranks other than 0",
        "discard|deny", choice("discard", "deny"), "discard", setting="storage.rank_writes")
    shared: tuple[str, ...] = _row(
        "a directory where every rank may write; may be repeated",
        "PATH", text_of("a directory", "checkpoints"), (), setting="storage.shared", repeats=True)
    prebuffer: int | None = _row(
        "elements made ready before the ranks start",
        "UNITS", whole(0), None, delivers=True)
    uneven: Literal["drop", "pad", "raise"] = _row(
        "an uneven last round",
        "drop|pad|raise", choice("drop", "pad", "raise"), "drop", delivers=True)
    keep: bool = _row(
        "the ranks stay, with their names, for the next --keep cell",
        "", None, False,
        meant_by=("persist", "reuse", "warm", "stay"))
    post_mortem: bool = _row(
        "open the debugger in a rank that fails",
        "", None, False,
        meant_by=("debug", "pdb", "pm"))
    notify: bool = _row(
        "a notification of the browser, or a terminal's bell, when the run has ended",
        "", None, False)
    # fmt: on

    def shown_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose output the cell shows."""
        if isinstance(self.output, tuple):
            return self.output
        return {"0": (0,), "all": tuple(range(self.world_size)), "none": ()}[self.output]

    def of_ranks(self) -> dict[str, object]:
        """Return, by field, what two cells must have in common to run in the same ranks."""
        names = [one.name for one in fields(self) if one.name not in MAY_DIFFER]
        return {name: getattr(self, name) for name in names}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.vms * self.ranks_per_vm

    @property
    def gpus_per_vm(self) -> int:
        """Number of GPUs that the ranks on each VM need; 0 if the run needs none."""
        return self.ranks_per_vm * self.gpus_per_rank


_GPUS = Option(  # it sets three fields, together with the instance type
    "gpus",
    "N|auto",
    gpus,
    "ranks, one GPU each; auto: every GPU there is (2 rehearsed ranks if none)",
    meant_by=(
        *("n", "np", "g", "nproc", "nprocs", "nproc-per-node", "num-processes", "num-procs"),
        *("n-gpus", "ngpus", "num-gpus", "devices", "ranks", "world-size", "procs", "processes"),
    ),
)
_SETUP = Option(
    "setup",
    "",
    None,
    "alone: it runs here, and again in each process of later runs, before names arrive",
)
_FIELDS: dict[str, Option] = {
    row.name: replace(option, name=option.name or row.name.replace("_", "-"))
    for row in fields(RunSpec)
    if (option := row.metadata.get("option")) is not None
}
"""The option that sets a field, by the field's name."""
OPTIONS: dict[str, Option] = {option.name: option for option in (_GPUS, *_FIELDS.values(), _SETUP)}
"""All options of a header; help, completion and error messages list them."""
SETTINGS = {option.setting: option for option in OPTIONS.values() if option.setting}
"""The options that set a default in notebooks, by section and key of ``taas.toml``."""
DEFAULTS = {
    option.setting: getattr(RunSpec, name) for name, option in _FIELDS.items() if option.setting
}
"""The default, by section and key, if neither a header nor ``taas.toml`` sets the option."""
ON = Option(
    "on",
    "TYPE",
    text_of("an instance type", "g2.8"),
    "instance type, as #!TYPE above a cell (only on a %%taas line; see %taas types)",
    meant_by=("type", "instance", "instance-type", "machine", "t"),
)
_IN_HELP = dict.fromkeys(
    ("help", "h"), "type %%taas? in a cell of its own, which shows what there is"
)
_ABOVE = dict.fromkeys(
    (ON.name, *ON.meant_by), "write #!TYPE on the line above (%taas types lists them)"
)
_NOT_NEEDED = dict.fromkeys(
    (
        *("master-addr", "master-port", "standalone", "node-rank", "use-env", "start-method"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-rank"),
    ),
    "leave it out, the ranks of a run find each other",
)
_SEVERAL_VMS = dict.fromkeys(
    ("nnodes", "num-machines", "nodes", "vms"),
    "type --gpus N with the ranks of all machines together: #!g2.8 with --gpus 16 has two",
)


def options_table() -> str:
    """Return the options as plain text, for ``%%taas?`` and ``--help``."""
    return in_columns([(option.usage, option.help) for option in (ON, *OPTIONS.values())])


def read_options(text: str, *, magic: bool) -> dict[str, Any]:
    """Parse the options of a header or magic line, after expansion; omit those that are not given.

    Raises:
        HeaderError: one line: what is wrong, what to type instead, and what is allowed.
    """
    table = {"on": ON, **OPTIONS} if magic else OPTIONS
    elsewhere = {**_IN_HELP, **_NOT_NEEDED, **_SEVERAL_VMS, **({} if magic else _ABOVE)}
    return dict(read_line(split_words(text), table, elsewhere=elsewhere).options)


def spec_values(
    given: Mapping[str, Any], settings: Mapping[str, Any], world_size: int
) -> dict[str, Any]:
    """Return the fields that the header, or else ``taas.toml``, sets.

    Raises:
        HeaderError: a value contains a rank that the run does not have.
    """
    values: dict[str, Any] = {}
    for name, option in _FIELDS.items():
        said = [
            where[key]
            for where, key in ((given, option.name), (settings, option.setting))
            if key in where
        ]
        if option.repeats:  # those of taas.toml first
            values[name] = tuple(dict.fromkeys(item for items in reversed(said) for item in items))
        elif said:
            values[name] = said[0]
    if isinstance(ranks_shown := values.get("output"), tuple):
        check_ranks(ranks_shown, world_size, "output")
    return values

"""What a header asks for, and how a wrong one is refused."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from taas.config import BUILT_IN_TYPES, Catalog
from taas.errors import HeaderError
from taas.header.grammar import find_header, parse_header, parse_magic_line
from taas.header.options import OPTIONS, RunSpec, options_table

REGISTERED = ("train", "valid")


def parse(cell: str, *, gpus: int = 0, registered: tuple[str, ...] = REGISTERED, **settings: Any) -> RunSpec:
    """Read a cell's header, or a ``%%taas`` line, as the notebook does; names are not expanded."""
    header = parse_magic_line(cell.removeprefix("%%taas")) if cell.startswith("%%taas") else find_header(cell)
    assert header is not None
    catalog = Catalog(**settings)
    return parse_header(header, expand=str, catalog=catalog, visible_gpus=gpus, registered=registered)


def options(text: str, **settings: Any) -> RunSpec:
    return parse(f"#pragma taas --gpus 4 {text}", **settings)


def test_option_list_is_frozen() -> None:
    """Options are the contract with every notebook written so far: none comes or goes unnoticed."""
    assert tuple(OPTIONS) == (
        "gpus", "cpus", "units", "name", "background", "rehearse", "backend", "max-restarts", "hang-timeout",
        "output", "return", "collect", "rank-writes", "shared", "prebuffer", "uneven", "keep", "post-mortem", "notify",
    )  # fmt: skip


def test_what_is_offered_is_what_is_there() -> None:
    """Help names each option, once, and errors name the same."""
    rows = options_table().splitlines()
    assert [row.split()[0] for row in rows] == ["--on", *(f"--{name}" for name in OPTIONS)]
    assert max(map(len, rows)) < 110
    with pytest.raises(HeaderError) as refused:
        options("--wibble")
    assert re.findall(r"--([a-z-]+)", str(refused.value)) == ["wibble", *OPTIONS]


SHAPES = {
    "#!g2.8\n#pragma taas --gpus 8": ("g2.8", 1, 8, 1),
    "#!g2.8\n#pragma taas --gpus 16": ("g2.8", 2, 8, 1),
    "#!g2.8\n#pragma taas --gpus 32": ("g2.8", 4, 8, 1),
    "#!g2.8\n#pragma taas --gpus=16": ("g2.8", 2, 8, 1),
    "#!g2.8\n#pragma taas --gpus auto": ("g2.8", 1, 8, 1),
    "#!g1.1\n#pragma taas --gpus 4": ("g1.1", 4, 1, 1),
    "#!g1.2\n#pragma taas --gpus '4'  # two VMs, don't worry": ("g1.2", 2, 2, 1),
    "#!g2.8\n": ("g2.8", 1, 1, 8),
    "#!g2.8\n#pragma taas": ("g2.8", 1, 1, 8),
    "#!c1.4\n": ("c1.4", 1, 1, 0),
    "#!c1.80\n#pragma taas --cpus 2": ("c1.80", 1, 1, 0),
    "#pragma taas --gpus 5": (None, 1, 5, 1),
    "#pragma taas --gpus auto": (None, 1, 3, 1),
    "#pragma taas\u00a0--gpus\u00a05": (None, 1, 5, 1),
    "%%taas --on g2.8 --gpus 16": ("g2.8", 2, 8, 1),
    "%%taas --gpus 2": (None, 1, 2, 1),
}


@pytest.mark.parametrize("cell", SHAPES)
def test_shape(cell: str) -> None:
    """The type and the number of GPUs give VMs, ranks on each VM and GPUs for each rank."""
    spec = parse(cell, gpus=3)
    assert (spec.instance, spec.vms, spec.ranks_per_vm, spec.gpus_per_rank) == SHAPES[cell]
    assert spec.world_size == spec.vms * spec.ranks_per_vm


def test_auto_without_gpus_rehearses_two_ranks() -> None:
    """``--gpus auto`` means two rehearsed ranks where there is no GPU."""
    assert parse("#pragma taas --gpus auto", gpus=0).world_size == 2


def test_seed_header() -> None:
    """DataSphere's own example is taken as it is."""
    spec = parse("#!g2.8\n#pragma taas --gpus 8 --cpus 1 --units 20480000\n\n <launch training>")
    assert (spec.world_size, spec.data_vms, spec.units) == (8, 1, 20480000)


def test_every_option_arrives() -> None:
    """Each option sets the attribute of its name."""
    assert options(
        "--cpus 8 --units train=20480,valid=400 --name night-1 --background --rehearse --backend cpu:gloo,cuda:nccl "
        "--max-restarts 3 --hang-timeout 1.5 --output 3,0-1 --return model,losses --collect loss,preds --rank-writes deny "
        "--shared 'a b' --shared c --prebuffer 0 --uneven pad"
    ) == RunSpec(
        ranks_per_vm=4, data_vms=8, units={"train": 20480, "valid": 400}, name="night-1", background=True,
        rehearse=True, backend="cpu:gloo,cuda:nccl", max_restarts=3, hang_timeout=1.5, output=(0, 1, 3),
        returned=("model", "losses"), collect=("loss", "preds"), rank_writes="deny", shared=("a b", "c"), prebuffer=0, uneven="pad",
    )  # fmt: skip
    assert options("--return none --output none --cpus 1 --units 7") == RunSpec(
        ranks_per_vm=4, returned=(), output="none", data_vms=1, units=7
    )


def test_settings_hold_where_the_header_is_silent() -> None:
    """``taas.toml`` gives defaults; the header overrides them; shared directories add up."""
    settings: dict[str, Any] = {
        "run.hang_timeout": 60.0,
        "run.max_restarts": 2,
        "run.output": "all",
        "storage.shared": ("ckpt",),
        "storage.rank_writes": "deny",
    }
    silent = options("", settings=settings)
    assert (silent.hang_timeout, silent.max_restarts, silent.output) == (60.0, 2, "all")
    assert (silent.shared, silent.rank_writes) == (("ckpt",), "deny")
    said = options(
        "--hang-timeout 5 --output 0 --rank-writes discard --shared b --shared ckpt", settings=settings
    )
    assert (said.hang_timeout, said.output, said.rank_writes, said.shared) == (
        5.0,
        "0",
        "discard",
        ("ckpt", "b"),
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("45s", 45), ("45sec", 45), ("5m", 300), ("5min", 300), ("1.5h", 5400)],
)
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    """Seconds are meant where no unit is given."""
    assert options(f"--hang-timeout {text}").hang_timeout == seconds


REFUSED = {
    "#!g2.8\n#pragma taas --gpus 12": "8, 16, 32 (1, 2, 4 times the 8 GPUs of a VM); type --gpus 16",
    "#!g2.1\n#pragma taas --gpus 3": "1, 2, 4 (1, 2, 4 times the 1 GPU of a VM); type --gpus 4",
    "#!g2.8\n#pragma taas --gpus 4": "; type #!g2.4",
    "#!g2.8\n#pragma taas --gpus 3": "; type #!g2.4 and --gpus 4",
    "#!g2.8\n#pragma taas --gpus 1": "; type #!g2.1",
    "#!g2.4\n#pragma taas --gpus 32": "; type #!g2.8",
    "#!g1.4\n#pragma taas --gpus 32": "; type --gpus 16",
    "%%taas --on g2.8 --gpus 4": "; type --on g2.4",
    "#!g2-4\n": "type #!g2.4",
    "#!g24\n": "type #!g2.4",
    "#!c180\n": "type #!c1.80",
    "#!g2.8\n#pragma taas --gpus 64": "type --gpus 32",
    "#!g9.9\n": "c1.80 (no GPU), g1.1, g1.2, g1.4 (V100), g2.1, g2.2, g2.4, g2.8 (A100); type one of them, or #pragma",
    "#!A100\n": "type one of them",
    "#!8xA100\n": "type one of them",
    "#!g2.16\n": "type one of them",
    "#!g2\n": "type one of them",
    "#!h100.8\n": "type one of them",
    "#!zzzz\n#pragma taas --gpus 2": "type one of them, or #pragma taas --gpus auto without one",
    "#!G2.8\n": "type #!g2.8",
    "#!g28\n#pragma taas --gpus 8": "type #!g2.8",
    "#!/usr/bin/env python\n#!g2,8\n#pragma taas --gpus 8": "type #!g2.8",
    "#!{kind}\n": "#!{kind} is no instance type",
    "#!c1.4\n#pragma taas --gpus 4": "has no GPU",
    "#!c1.4\n#pragma taas --rehearse": "has no GPU",
    "#pragma taas": "type --gpus auto",
    "#pragma taas --background": "type --gpus auto",
    "#pragma taas --gpus 0": "type --gpus 1",
    "#pragma taas --gpus -4": "from 1 to 8192, or auto",
    "#pragma taas --gpus Auto": "type --gpus auto",
    "#pragma taas --gpus eight": "type --gpus auto",
    "#pragma taas --gpus \u0668": "from 1 to 8192",
    "#pragma taas --gpus 99999999999999999999": "from 1 to 8192",
    "#pragma taas --gpus {n}": "expanded only where the notebook has it",
    "#pragma taas --gpus": "--gpus has no value",
    "#pragma taas --gpus --cpus 4": "--gpus has no value",
    "#pragma taas --gpus 8 --gpus 8": "given twice",
    "#pragma taas --gpu 8": "type --gpus",
    "#pragma taas --GPUS=8": "type --gpus",
    "#pragma taas -gpus 8": "; type --gpus",
    "#pragma taas -g 8": "allowed is #!TYPE on the line above, --gpus",
    "#pragma taas \u2013gpus 8": "; type --gpus",
    "#pragma taas \u2014gpus 8": "; type --gpus",
    "#pragma taas --nproc_per_node 4": "leave it out, or see %%taas?",
    "#pragma taas --num-gpus 4": "; type --gpus",
    "#pragma taas --ngpu 4": "; type --gpus",
    "#pragma taas -n 4": "allowed is #!TYPE on the line above, --gpus",
    "#pragma taas --gpus 2 --type g2.8": "allowed is #!TYPE on the line above",
    "#pragma taas --gpus 2 --keep --background": "leave --background out",
    "#pragma taas --gpus 2 --keep --max-restarts 1": "leave --max-restarts out",
    "#pragma taas --gpus 2 --keep --return x": "leave --return out",
    "#pragma taas --gpus 2 --nnodes 2": "leave it out",
    "#pragma taas --gpus all": "type --gpus auto",
    "#pragma taas --gpus 2, --output all": "type --gpus 2",
    "#pragma taas g2.8 --gpus 8": "type #!g2.8",
    "%%taas g2.8 --gpus 8": "type --on g2.8",
    "#pragma taas --gpus 2 --background yes": "yes is no option",
    "#pragma taas --gpus 2 --return model losses": "losses is no option",
    "#pragma taas --gpus 2 --uneven": "drop or pad or raise; type --uneven drop",
    "#pragma taas --gpus 2 --max-restarts": "from 0 to 100; type --max-restarts 1",
    "#pragma taas --help": "%%taas?",
    "#pragma taas --gpus 2 --kep": "type --keep",
    "#pragma taas gpus=8": "type --gpus",
    "#pragma taas 8": "a value is one word",
    "# pragma taas starts the ranks": "starts is no option",
    "#pragma taas --gpus 8 \\": "\\ is no option",
    "#pragma taas --gpus 8 --name my run": "a value is one word: a,b or 'a b'",
    "#pragma taas --gpus 8 --wibble": "leave it out",
    "#pragma taas --gpus 8 --on g2.8": "allowed is #!TYPE on the line above",
    "#pragma taas --gpus 8 --name 'a": "close it",
    '#pragma taas --gpus "8': "close it",
    "#pragma taas --gpus 8 --name don't": "close it",
    "#pragma taas --gpus 8 --cpus 9": "a whole number from 1 to 8; type --cpus 8",
    "#pragma taas --gpus 8 --cpus 0": "type --cpus 1",
    "#pragma taas --gpus 8 --units 5": "without --cpus",
    "#pragma taas --gpus 8 --uneven pad": "without --cpus",
    "#pragma taas --gpus 8 --cpus 1 --units 0": "at least 1",
    "#pragma taas --gpus 8 --cpus 1 --units train=0": "at least 1",
    "#pragma taas --gpus 8 --cpus 1 --units train=1,train=2": "once",
    "#pragma taas --gpus 8 --cpus 1 --units trian=5": "type --units train=5",
    "#pragma taas --gpus 8 --cpus 1 --uneven cut": "drop or pad or raise",
    "#pragma taas --gpus 8 --background=1": "without a value; type --background",
    "#pragma taas --gpus 8 --max_restarts 3": "type --max-restarts",
    "#pragma taas --gpus 8 --hang-timeout 5 min": "min is no option",
    "#pragma taas --gpus 8 --hang-timeout 5d": "a time such as 5min; type --hang-timeout 300",
    "#pragma taas --gpus 8 --hang-timeout 0min": "above 0",
    "#pragma taas --gpus 8 --hang-timeout 0": "above 0",
    "#pragma taas --gpus 8 --hang-timeout inf": "above 0",
    "#pragma taas --gpus 8 --output 8": "up to 7",
    "#pragma taas --gpus 8 --output 0-999999999999": "up to 7",
    "#pragma taas --gpus 8 --output 3-1": "0,3-5",
    "#pragma taas --gpus 8 --output al": "type --output all",
    "#pragma taas --gpus 8 --return a,": "type --return",
    "#pragma taas --gpus 8 --return model.weight": "names of the notebook",
    "#pragma taas --gpus 8 --return lambda": "names of the notebook",
    "#pragma taas --gpus 8 --rank-writes keep": "discard or deny",
    "#pragma taas --gpus 8 --backend ncll": "type --backend nccl",
    "#pragma taas --gpus 8 --backend gloo,nccl": "one per device",
    "#pragma taas --gpus 8 --name 'my run'": "type --name my-run",
    "#pragma taas --gpus 8 --shared ''": "a directory",
    "x = 1\n#pragma taas --gpus 8": "stands below code",
    "%%taas --on g2.8 --gpus 12": "8, 16, 32",
    "%%taas --on g2,8": "--on g2,8 is no instance type",
    "%%taas --on g9.9": "--on g9.9 is no instance type",
    "%%taas --on c1.4 --gpus 2": "or type --on g2.8",
    "%%taas --instance g2.8": "allowed is --on, --gpus",
    "%%taas": "type --gpus auto",
}


@pytest.mark.parametrize("cell", REFUSED)
def test_wrong_header_is_refused_in_one_line(cell: str) -> None:
    """One line says what is wrong, what is allowed, and what to type instead."""
    with pytest.raises(HeaderError) as refused:
        parse(cell)
    message = str(refused.value)
    assert REFUSED[cell] in message
    assert "allowed is " in message
    assert len(message.splitlines()) == 1
    assert len(message) < 500


@pytest.mark.parametrize("text", ["--cpus 4", "--units 5", "--cpus 1 --prebuffer 3"])
def test_delivery_needs_a_registered_loader(text: str) -> None:
    """Options about loaders say so where nothing is registered."""
    with pytest.raises(HeaderError, match=r"taas\.register\(loader\)"):
        options(text, registered=())


def test_names_expand_on_both_lines() -> None:
    """``{name}`` and ``$name`` expand as on any magic line; a ``%%taas`` line was expanded by IPython already."""
    shell = InteractiveShell(user_ns={"kind": "g2.8", "vms": 2, "label": "x"})
    header = find_header("#!{kind}\n#pragma taas --gpus {8 * vms} --name $label")
    assert header is not None
    spec = parse_header(header, expand=shell.var_expand, catalog=Catalog(), visible_gpus=0, registered=())
    assert (spec.instance, spec.world_size, spec.name) == ("g2.8", 16, "x")
    with pytest.raises(HeaderError, match=r"\{vms\}"):
        parse_header(
            parse_magic_line("--gpus {vms}"),
            expand=shell.var_expand,
            catalog=Catalog(),
            visible_gpus=0,
            registered=(),
        )
    shell.history_manager.end_session()


# -- properties ---------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [f"--{name}" for name in (*OPTIONS, "on", "wibble")]
    + [
        "8",
        "16",
        "auto",
        "all",
        "0,3-5",
        "none",
        "train=4,valid=9",
        "pad",
        "'",
        '"',
        "#",
        "\\",
        "{n}",
        "$n",
        "=",
        ",",
    ]
) | st.text(max_size=8)


@given(st.lists(WORDS, max_size=8).map(" ".join), st.sampled_from(["", "#!g2.8\n", "#!c1.4\n", "%%taas "]))
def test_any_text_parses_or_is_refused_in_one_line(text: str, before: str) -> None:
    """No text brings anything but a RunSpec or a one-line HeaderError."""
    cell = before + text if before == "%%taas " else f"{before}#pragma taas {text}".replace("\n#!", "\n")
    try:
        spec = parse(cell)
    except HeaderError as refused:
        assert len(str(refused).splitlines()) == 1
    else:
        assert spec.world_size >= 1


SAFE = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=20)
IDENTIFIER = st.sampled_from(["model", "losses", "\u03b1", "x1", "_y"])
RANK_LISTS = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(lambda ranks: tuple(sorted(set(ranks))))

SPECS = st.fixed_dictionaries(
    {},
    optional={
        "units": st.integers(1, 10**12)
        | st.dictionaries(st.sampled_from(REGISTERED), st.integers(1, 10**9), min_size=1),
        "name": SAFE.filter(lambda name: name[0] not in "-."),
        "background": st.just(True),
        "rehearse": st.just(True),
        "backend": st.sampled_from(["gloo", "nccl", "cpu:gloo,cuda:nccl"]),
        "max_restarts": st.integers(0, 100),
        "hang_timeout": st.integers(1, 10**9).map(lambda millis: millis / 1000),
        "output": st.sampled_from(["0", "all", "none"]) | RANK_LISTS.filter(lambda ranks: ranks != (0,)),
        "returned": st.lists(IDENTIFIER, unique=True, max_size=4).map(tuple),
        "collect": st.lists(IDENTIFIER, unique=True, max_size=4).map(tuple),
        "rank_writes": st.sampled_from(["discard", "deny"]),
        "shared": st.lists(st.text("ab /{}'\u00e9", min_size=1, max_size=9), unique=True, max_size=3).map(
            tuple
        ),
        "prebuffer": st.integers(0, 10**6),
        "uneven": st.sampled_from(["drop", "pad", "raise"]),
    },
)


def written(value: Any) -> str:
    """A value as a person writes it after its option, in quotes where it holds blanks or quotes."""
    if isinstance(value, dict):
        return ",".join(f"{name}={count}" for name, count in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f'"{value}"'


@given(SPECS, st.sampled_from(sorted(BUILT_IN_TYPES)), st.randoms(use_true_random=False), st.booleans())
def test_written_options_come_back(asked: dict[str, Any], kind: str, random: Any, equals: bool) -> None:
    """What is written in any order, with blanks or equal signs, is what the RunSpec holds."""
    itype = BUILT_IN_TYPES[kind]
    if itype.gpus == 0:
        asked.pop("rehearse", None)
    vms = random.choice(itype.vms)
    names = {"returned": "return"}
    pairs = [
        (f"--{names.get(key, key).replace('_', '-')}", value)
        for key, value in asked.items()
        if key != "shared"
    ]
    pairs.append(("--cpus", 3))
    if itype.gpus:
        pairs.append(("--gpus", itype.gpus * vms))
    random.shuffle(pairs)
    pairs += [("--shared", path) for path in asked.get("shared", ())]
    sign = "=" if equals else " "
    line = " ".join(name if value is True else f"{name}{sign}{written(value)}" for name, value in pairs)
    ranks = {"vms": vms, "ranks_per_vm": itype.gpus} if itype.gpus else {"gpus_per_rank": 0}
    if isinstance(asked.get("output"), tuple) and max(asked["output"]) >= ranks.get("vms", 1) * (
        itype.gpus or 1
    ):
        with pytest.raises(HeaderError, match="--output"):
            parse(f"#!{kind}\n#pragma taas {line}")
    else:
        assert parse(f"#!{kind}\n#pragma taas {line}") == RunSpec(instance=kind, data_vms=3, **ranks, **asked)

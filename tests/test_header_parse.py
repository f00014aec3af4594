"""What a header asks for, and how a wrong one is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

from taas.errors import HeaderError
from taas.header.catalog import Catalog
from taas.header.grammar import find_header, parse_header, parse_magic_line
from taas.header.options import OPTIONS, RunSpec, options_table

REGISTERED = ("train", "valid")


def parse(
    cell: str, *, gpus: int = 0, registered: tuple[str, ...] = REGISTERED, **settings: Any
) -> RunSpec:
    """Read a cell's header, or a ``%%taas`` line, as the notebook does; names are not expanded."""
    header = (
        parse_magic_line(cell.removeprefix("%%taas"))
        if cell.startswith("%%taas")
        else find_header(cell)
    )
    assert header is not None
    catalog = Catalog(**settings)
    return parse_header(
        header, expand=str, catalog=catalog, visible_gpus=gpus, registered=registered
    )


def options(text: str, **settings: Any) -> RunSpec:
    return parse(f"#pragma taas --gpus 4 {text}", **settings)


def test_option_list_is_frozen() -> None:
    """Options are the contract with every notebook written so far: none comes or goes unnoticed."""
    assert tuple(OPTIONS) == (
        "gpus",
        "cpus",
        "units",
        "name",
        "background",
        "rehearse",
        "backend",
        "max-restarts",
        "hang-timeout",
        "output",
        "return",
        "collect",
        "rank-writes",
        "shared",
        "prebuffer",
        "uneven",
        "keep",
        "post-mortem",
        "notify",
        "setup",
    )


def test_what_is_offered_is_what_is_there() -> None:
    """Help names each option, once, and errors name the same."""
    rows = options_table().splitlines()
    first = [row.split()[0] for row in rows if row.startswith("--")]
    assert first == ["--on", *(f"--{name}" for name in OPTIONS)]
    assert max(map(len, rows)) <= 80
    with pytest.raises(HeaderError) as refused:
        options("--wibble")
    assert re.findall(r"--([a-z-]+)", str(refused.value)) == ["wibble", *OPTIONS]


SHAPES = {
    "#!g2.8\n#pragma taas --gpus 8": ("g2.8", 1, 8, 1),
    "#!g2.8\n#pragma taas --gpus 16": ("g2.8", 2, 8, 1),
    "#!g2.8\n#pragma taas --gpus auto": ("g2.8", 1, 8, 1),
    "#!g1.2\n#pragma taas --gpus '4'  # two VMs, don't worry": ("g1.2", 2, 2, 1),
    "#!g2.8\n": ("g2.8", 1, 1, 8),
    "#!c1.4\n": ("c1.4", 1, 1, 0),
    "#pragma taas --gpus 5": (None, 1, 5, 1),
    "#pragma taas\u00a0--gpus\u00a05": (None, 1, 5, 1),
    "%%taas --on g2.8 --gpus 16": ("g2.8", 2, 8, 1),
}


@pytest.mark.parametrize("cell", SHAPES)
def test_shape(cell: str) -> None:
    """The type and the number of GPUs give VMs, ranks on each VM and GPUs for each rank."""
    spec = parse(cell, gpus=3)
    assert (spec.instance, spec.vms, spec.ranks_per_vm, spec.gpus_per_rank) == SHAPES[cell]
    assert spec.world_size == spec.vms * spec.ranks_per_vm
    assert parse("#pragma taas --gpus auto").world_size == 2, "rehearsed, where there is no GPU"


def test_seed_header() -> None:
    """DataSphere's own example is taken as it is."""
    spec = parse("#!g2.8\n#pragma taas --gpus 8 --cpus 1 --units 20480000\n\n <launch training>")
    assert (spec.world_size, spec.data_vms, spec.units) == (8, 1, 20480000)


def test_every_option_arrives() -> None:
    """Each option sets the attribute of its name."""
    assert options(
        "--cpus=8 --units train=20480,valid=400 --background --name=night-1 --rehearse "
        "--backend cpu:gloo,cuda:nccl --max-restarts 3 --hang-timeout 1.5 --output 3,0-1 "
        "--return model,losses --collect loss,preds --rank-writes deny "
        "--shared 'a b' --shared c --prebuffer 0 --uneven pad"
    ) == RunSpec(
        ranks_per_vm=4,
        data_vms=8,
        units={"train": 20480, "valid": 400},
        name="night-1",
        background=True,
        rehearse=True,
        backend="cpu:gloo,cuda:nccl",
        max_restarts=3,
        hang_timeout=1.5,
        output=(0, 1, 3),
        returned=("model", "losses"),
        collect=("loss", "preds"),
        rank_writes="deny",
        shared=("a b", "c"),
        prebuffer=0,
        uneven="pad",
    )
    assert options("--return none --output none --cpus 1 --units 7") == RunSpec(
        ranks_per_vm=4, returned=(), output="none", data_vms=1, units=7
    )


def test_settings_hold_where_the_header_is_silent() -> None:
    """``taas.toml`` gives defaults; the header overrides them; shared directories add up."""
    settings: dict[str, Any] = {
        "run.hang_timeout": 60.0,
        "run.output": "all",
        "storage.shared": ("ckpt",),
    }
    silent = options("", settings=settings)
    assert (silent.hang_timeout, silent.output, silent.shared) == (60.0, "all", ("ckpt",))
    said = options("--hang-timeout 5 --output 0 --shared b --shared ckpt", settings=settings)
    assert (said.hang_timeout, said.output, said.shared) == (5.0, "0", ("ckpt", "b"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("45s", 45),
        ("45sec", 45),
        ("5m", 300),
        ("5min", 300),
        ("1.5h", 5400),
    ],
)
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    """Seconds are meant where no unit is given."""
    assert options(f"--hang-timeout {text}").hang_timeout == seconds


REFUSED = {
    "#!g2.8\n#pragma taas --gpus 12": (
        "type --gpus 16; allowed is 8, 16, 32 (1, 2, 4 times the 8 GPUs of a VM)"
    ),
    "#!g2.8\n#pragma taas --gpus 3": ": type --gpus 8;",
    "#!g1.4\n#pragma taas --gpus 32": ": type --gpus 16;",
    "#!g2.8\n#pragma taas --gpus 64": ": type --gpus 32;",
    "#!g9.9\n": "c1.80, g1.1, g1.2, g1.4, g2.1, g2.2, g2.4, g2.8, or #pragma taas --gpus auto",
    "#!G2.8\n": "did you mean #!g2.8?",
    "#!a100.8\n": "did you mean #!g2.8?",
    "#!8xA100\n": "did you mean #!g2.8?",
    "#!A100:4\n": "did you mean #!g2.4?",
    "#!v100\n": "did you mean #!g1.1?",
    "#!g2.16\n": "did you mean #!g2.8 with --gpus 16?",
    "#!g2-8\n": "did you mean #!g2.8?",
    "#!h100.8\n": "no instance type #!h100.8: type one of c1.4",
    "#!{kind}\n": "no instance type #!{kind}: type one of c1.4",
    "#!c1.4\n#pragma taas --gpus 4": "has no GPU: leave --gpus out",
    "#pragma taas": ": type --gpus auto",
    "#pragma taas --gpus 0": ": type --gpus auto; allowed is a whole number from 1",
    "#pragma taas --gpus {n}": "expanded only where the notebook has it",
    "#pragma taas --gpus": "--gpus has no value: type --gpus auto",
    "#pragma taas --gpus four": "did you mean --gpus 4?",
    "#pragma taas --gpus 8x": "did you mean --gpus 8?",
    "#pragma taas 8": "8 is no option: did you mean --gpus 8?",
    "#pragma taas --gpus 8 --gpus 8": "given twice: leave one",
    "#pragma taas --gpu 8": "no option --gpu: did you mean --gpus?",
    "#pragma taas -gpus 8": "no option -gpus: did you mean --gpus?",
    "#pragma taas \u2013gpus 8": "did you mean --gpus?",
    "#pragma taas -n 4": "no option -n: did you mean --gpus?",
    "#pragma taas --nproc_per_node 4": "no option --nproc_per_node: did you mean --gpus?",
    "#pragma taas --nproc-per-node=4": "did you mean --gpus=4?",
    "#pragma taas --num_processes 4": "did you mean --gpus?",
    "#pragma taas --gpus 2 --bg": "no option --bg: did you mean --background?",
    "#pragma taas --gpus 2 --detach": "did you mean --background?",
    "#pragma taas --gpus 2 --timeout 60": "did you mean --hang-timeout?",
    "#pragma taas --gpus 2 --nnodes 2": "the ranks of all machines together",
    "#pragma taas --gpus 2 --master_port 29500": "leave it out, the ranks of a run find each other",
    "#pragma taas --gpus 2 --type g2.8": "no option --type: write #!TYPE on the line above",
    "#pragma taas --gpus 2 --keep --return x": ": leave --return out",
    "#pragma taas --gpus 2 --keep --return none": ": leave --return out",
    "#pragma taas --gpus all": "did you mean --gpus auto?",
    "#pragma taas --gpus 2 --background yes": "type --background, which takes no value",
    "#pragma taas --gpus 2 train.py": "train.py is no option: leave it out",
    "#pragma taas --help": "type %%taas? in a cell of its own",
    "#pragma taas gpus=8": "did you mean --gpus=8?",
    "#pragma taas --gpus 8 --name my run": "did you mean --name my-run?",
    "#pragma taas --gpus 8 --name 'a": ": close it",
    "#pragma taas --gpus 8 --cpus 9": (
        "did you mean --cpus 8? Allowed is a whole number from 1 to 8"
    ),
    "#pragma taas --gpus 8 --units 5": "without --cpus: type --cpus 1",
    "#pragma taas --gpus 8 --cpus 1 --units 0": "at least 1",
    "#pragma taas --gpus 8 --cpus 1 --units 20k": "did you mean --units 20000?",
    "#pragma taas --gpus 8 --cpus 1 --units train: 5, valid: 6": (
        "did you mean --units train=5,valid=6?"
    ),
    "#pragma taas --gpus 8 --cpus 1 --units train=1,train=2": "once",
    "#pragma taas --gpus 8 --cpus 1 --units trian=5": ": type --units train=5",
    "#pragma taas --gpus 8 --cpus 1 --uneven cut": "drop or pad or raise",
    "#pragma taas --gpus 8 --cpus 1 --uneven dorp": "did you mean --uneven drop?",
    "#pragma taas --gpus 8 --background=1": ": type --background, which takes no value",
    "#pragma taas --gpus 8 --hang-timeout 5 minutes": "did you mean --hang-timeout 5min?",
    "#pragma taas --gpus 8 --hang-timeout '2 hours'": "did you mean --hang-timeout 2h?",
    "#pragma taas --gpus 8 --hang-timeout 5d": "did you mean --hang-timeout 120h?",
    "#pragma taas --gpus 8 --hang-timeout 1:30:00": "did you mean --hang-timeout 5400?",
    "#pragma taas --gpus 8 --hang-timeout 0": "above 0",
    "#pragma taas --gpus 8 --output 8": "up to 7",
    "#pragma taas --gpus 8 --output 3-1": "0,3-5",
    "#pragma taas --gpus 8 --output 0, 1": "did you mean --output 0,1?",
    "#pragma taas --gpus 8 --output [0,1]": "did you mean --output 0,1?",
    "#pragma taas --gpus 8 --return model.weight": "did you mean --return model?",
    "#pragma taas --gpus 8 --return model, losses": "did you mean --return model,losses?",
    "#pragma taas --gpus 8 --rank-writes keep": "discard or deny",
    "#pragma taas --gpus 8 --backend ncll": "did you mean --backend nccl?",
    "#pragma taas --gpus 8 --backend gloo,nccl": "did you mean --backend cpu:gloo,cuda:nccl?",
    "#pragma taas --gpus 8 --name 'my run'": "did you mean --name my-run?",
    "#pragma taas --gpus 8 --shared ''": (
        "--shared '': type --shared checkpoints; allowed is a directory"
    ),
    "%%taas --on c1.4 --gpus 2": "or type --on g2.8",
    "%%taas --type g2.8 --gpus 8": "no option --type: did you mean --on?",
}
ANSWERS = ": (did you mean|type|write|leave|close) "
"""What stands right behind the fact."""


@pytest.mark.parametrize("cell", REFUSED)
def test_wrong_header_is_refused_in_one_line(cell: str) -> None:
    """One line says what is wrong, then what to type instead, and only then what is allowed."""
    with pytest.raises(HeaderError) as refused:
        parse(cell)
    message = str(refused.value)
    assert REFUSED[cell] in message
    answer = re.search(ANSWERS, message)
    assert answer is not None
    assert "llowed" not in message[: answer.start()]
    assert len(message.splitlines()) == 1
    assert len(message) < 420
    if "no option" in message and "did you mean" in message:
        assert "--units, --name" not in message, "the list stands where nothing is near"


@pytest.mark.parametrize("text", ["--cpus 4", "--units 5", "--cpus 1 --prebuffer 3"])
def test_delivery_needs_a_registered_loader(text: str) -> None:
    """Options about loaders say so where nothing is registered."""
    with pytest.raises(HeaderError, match=r"taas\.register\(loader\)"):
        options(text, registered=())


def test_names_expand_on_both_lines() -> None:
    """``{name}`` and ``$name`` expand as on any magic line.

    A ``%%taas`` line was expanded by IPython already.
    """
    shell = InteractiveShell(user_ns={"kind": "g2.8", "vms": 2, "label": "x"})
    header = find_header("#!{kind}\n#pragma taas --gpus {8 * vms} --name $label")
    assert header is not None
    spec = parse_header(
        header, expand=shell.var_expand, catalog=Catalog(), visible_gpus=0, registered=()
    )
    assert (spec.instance, spec.world_size, spec.name) == ("g2.8", 16, "x")
    with pytest.raises(HeaderError, match=r"\{vms\}"):
        parse("%%taas --gpus {vms}")
    shell.history_manager.end_session()


VALUES = "8 16 auto all 0,3-5 none train=4,valid=9 pad ' \" # \\ {n} $n = ,"
WORDS = st.text(max_size=8) | st.sampled_from(
    [*(f"--{name}" for name in (*OPTIONS, "on", "wibble")), *VALUES.split()]
)


@given(
    st.lists(WORDS, max_size=8).map(" ".join),
    st.sampled_from(["", "#!g2.8\n", "#!c1.4\n", "%%taas "]),
)
def test_any_text_parses_or_is_refused_in_one_line(text: str, before: str) -> None:
    """No text brings anything but a RunSpec or a one-line HeaderError."""
    cell = (
        before + text
        if before == "%%taas "
        else f"{before}#pragma taas {text}".replace("\n#!", "\n")
    )
    try:
        spec = parse(cell)
    except HeaderError as refused:
        assert len(str(refused).splitlines()) == 1
    else:
        assert spec.world_size >= 1

"""Which GPUs a run gets: those that no other notebook has, and whole ones.

No GPU is needed for that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from taas.engines.gpus import check_devices, physical, present_gpus, refused_as_mig
from taas.errors import NotEnoughDevices
from taas.header.options import RunSpec
from taas.notebook import doctor

PROGRAM = """
import json, os, sys
from taas.header.options import RunSpec
from taas.notebook.supervisor_client import get_supervisor
from taas.protocol.clients import Gpu, Submit
from taas.protocol.framing import Memory
from taas.protocol.ranks import Cell, Workspace

supervisor = get_supervisor(warm=False)
payload = os.memfd_create("names")
submit = Submit(
    cell=Cell("", 1, RunSpec(ranks_per_vm=1, gpus_per_rank=1), "nocolor"),
    workspace=Workspace(os.getcwd(), dict(os.environ)),
    payload=Memory(os.getpid(), payload, 0),
    gpus=tuple(Gpu(*gpu) for gpu in json.loads(sys.argv[1])),
    device="1 GPU",
)
print("ready", flush=True)
sys.stdin.readline()
supervisor.say(submit)
heard = []
while not heard:
    heard = [*supervisor.hear(1000)]
answer = heard[0].record.gpus if hasattr(heard[0], "record") else heard[0].message
print(json.dumps(answer), flush=True)
sys.stdin.readline()
"""


BUSES = ["0000:3b:00.0", "0000:5e:00.0", "0000:d8:00.0"]
UUIDS = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc"]
NUMBERS = [*"012"]
BEGINNINGS = ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]
"""Three GPUs, and what CUDA_VISIBLE_DEVICES may call them."""


@contextmanager
def _kernel(folder: Path, names: Sequence[str] = NUMBERS) -> Iterator[subprocess.Popen[str]]:
    """A process that submits a run on one GPU when told to, and ends when told again."""
    gpus = json.dumps([*zip(names, BUSES, strict=True)])
    command = [sys.executable, "-c", PROGRAM, gpus]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("\n")


def _chosen(kernels: list[subprocess.Popen[str]]) -> list[list[str] | str]:
    """Let them all submit at once; returns the GPUs that each got, or why it got none."""
    for kernel in kernels:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "ready\n"
    for kernel in kernels:
        assert kernel.stdin is not None
        kernel.stdin.write("\n")
        kernel.stdin.flush()
    return [json.loads(kernel.stdout.readline()) for kernel in kernels if kernel.stdout is not None]


@pytest.mark.parametrize("names", [
    [NUMBERS] * 4,
    [NUMBERS, UUIDS, BEGINNINGS, NUMBERS],
], ids=["named alike", "named differently"])  # fmt: skip
def test_each_gets_other_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[Sequence[str]]
) -> None:
    """However they name them. Who comes last is refused, as all are taken."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as stack:
        kernels = [stack.enter_context(_kernel(tmp_path, these)) for these in names]
        said = _chosen(kernels)
    taken = [gpus for gpus in said if isinstance(gpus, list)]
    assert sorted(taken) == [[bus] for bus in BUSES]
    [refused] = [words for words in said if isinstance(words, str)]
    assert refused.startswith(
        "GPUs needed: 1; free of this machine's 3: 0; other runs have the rest (r"
    )


# ---------------------------------------------------------------- which ones they are


def _machine(root: Path, models: Sequence[str], usable: Sequence[int] | None = None) -> None:
    """Make the files of a machine with these GPUs.

    A control group leaves the ``usable`` ones to this process.
    """
    (root / "dev").mkdir()
    for node, (model, bus, uuid) in enumerate(zip(models, BUSES, UUIDS, strict=False)):
        if usable is None or node in usable:
            (root / f"dev/nvidia{node}").touch()
        shown = root / f"proc/driver/nvidia/gpus/{bus.upper()}/information"
        shown.parent.mkdir(parents=True)
        shown.write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 91\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
            f"Bus Location: \t {bus}\nDevice Minor: \t {node}\n"
        )


ALIKE, MIXED = ["NVIDIA A100"] * 3, ["NVIDIA T4", "NVIDIA A100", "NVIDIA A100"]


@pytest.mark.parametrize(
    ("models", "usable", "environ", "names", "devices"),
    [
        (ALIKE, None, {}, NUMBERS, BUSES),
        (ALIKE, None, {}, ["2", "0"], [BUSES[2], BUSES[0]]),
        (ALIKE, None, {}, [*BEGINNINGS, UUIDS[1]], [*BUSES, BUSES[1]]),
        (ALIKE, None, {}, ["GPU-", "GPU-dddd", "7"], ["GPU-", "GPU-dddd", "7"]),
        (ALIKE, [1], {}, ["0"], [BUSES[1]]),
        (ALIKE, [2], {}, ["0"], [BUSES[2]]),
        (MIXED, None, {}, ["0", "1"], ["0", "1"]),
        (MIXED, None, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, NUMBERS, BUSES),
        (MIXED, None, {}, ["GPU-bbbb"], [BUSES[1]]),
        ([], None, {}, ["0"], ["0"]),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_place_on_the_bus(
    tmp_path: Path,
    models: list[str],
    usable: list[int] | None,
    environ: dict[str, str],
    names: list[str],
    devices: list[str],
) -> None:
    """Two jobs of one node, which both have GPU 0, have different ones.

    Where only CUDA knows the order, the number stands.
    """
    _machine(tmp_path, models, usable)
    found = physical(names, environ, tmp_path)
    assert [gpu.name for gpu in found] == names
    assert [gpu.device for gpu in found] == devices
    assert present_gpus(tmp_path) == (len(models) if usable is None else len(usable))


ANSWERS = {
    "each": [f"{uuid}, 0000{bus.upper()}" for uuid, bus in zip(UUIDS, BUSES, strict=True)],
}
ANSWERS["a warning after them"] = [
    *ANSWERS["each"],
    "WARNING: infoROM is corrupted at gpu 0000:3B:00.0",
]
ANSWERS["warnings before them"] = ["", "Unable to determine the device handle", *ANSWERS["each"]]
ANSWERS["a warning with a comma"] = [*ANSWERS["each"], "WARNING: GPU 0, infoROM, is corrupted"]


@pytest.mark.parametrize("case", ANSWERS)
def test_gpus_that_sleep_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The driver shows no UUID of an unused GPU; ``nvidia-smi`` says it, among warnings."""
    _machine(tmp_path, ALIKE)
    for shown in tmp_path.glob("proc/driver/nvidia/gpus/*/information"):
        shown.write_text(re.sub(r"GPU-\S+", "GPU-????????-????", shown.read_text()))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(ANSWERS[case]) + "\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = physical(["GPU-bbbb", UUIDS[0]], {}, tmp_path)
    assert [gpu.device for gpu in found] == [BUSES[1], BUSES[0]]


# ---------------------------------------------------------------- what is no GPU of its own

MIG = ["MIG-1111", "MIG-2222"]


@pytest.mark.parametrize(("names", "needed", "parts"), [
    (MIG, 2, "MIG-1111, MIG-2222"),
    (MIG, 1, ""),
    ([*"01"], 2, "1"),
    (["0", "GPU-bbbb"], 2, "GPU-bbbb"),
    (["0", "2"], 2, ""),
    (["0", MIG[0]], 2, MIG[0]),
    ([f"MIG-{number}" for number in range(7)], 7, "MIG-0, MIG-1, MIG-2, MIG-3 …"),
])  # fmt: skip
def test_several_ranks_on_parts_of_gpus_are_refused(
    tmp_path: Path, names: list[str], needed: int, parts: str
) -> None:
    """CUDA shows a process one MIG instance: all ranks would sit on it.

    GPU 1 is divided, also where it goes by another name.
    """
    _machine(tmp_path, ALIKE)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi3").mkdir(parents=True)
    said = refused_as_mig(names, needed, tmp_path)
    assert said.startswith(
        f"{needed} GPUs asked for, and {parts} are parts of GPUs (MIG)" if parts else ""
    )
    assert bool(said) == bool(parts)


def test_the_header_asks_for_parts_of_gpus() -> None:
    """The run is refused before anything starts, with what to type.

    One of them is a rank's, and a rehearsal needs none.
    """
    spec = RunSpec(ranks_per_vm=2, gpus_per_rank=1)
    with pytest.raises(
        NotEnoughDevices, match=r"MIG-1111, MIG-2222 are parts of GPUs \(MIG\).*--gpus 1"
    ):
        check_devices(spec, MIG)
    check_devices(RunSpec(ranks_per_vm=1, gpus_per_rank=1), MIG)
    check_devices(RunSpec(ranks_per_vm=2, gpus_per_rank=1, rehearse=True), MIG)


def test_the_doctor_says_that_cudas_own_device_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that was booted a moment ago.

    torch sees no GPU then, and the build of torch is not why.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _machine(tmp_path, ALIKE)
    found = doctor._gpus([], tmp_path)
    assert (found.verdict, found.fact) == (
        "bad", "the driver shows 3, and /dev/nvidia-uvm, which CUDA needs, is not there"
    )  # fmt: skip
    assert "nvidia-modprobe -u -c=0" in found.advice
    (tmp_path / "dev/nvidia-uvm").touch()
    assert "torch sees none" in doctor._gpus([], tmp_path).fact
    assert doctor._gpus(ALIKE, tmp_path).verdict == "ok"

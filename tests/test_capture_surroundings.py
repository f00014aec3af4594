"""What cells did to torch as a whole, on machines without a GPU; test_capture_cuda.py and test_gpu.py have the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from capture_processes import Program, elsewhere, forkserver, here

PRECISIONS = """[
    torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision,
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision,
    torch.backends.mkldnn.matmul.fp32_precision,
]"""
OLD_WORDS = """
def old():
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return "mixed"
"""

PROGRAMS = [
    Program(
        f"TF32 by {setting.partition('=')[0].strip()} {where}",
        ("import torch" + OLD_WORDS + (setting if where == "before" else ""),),
        ("" if where == "before" else setting) + f"\nseen = {PRECISIONS}, old()",
        f"{PRECISIONS}, old()",
    )
    for where in ("before", "in the cell")
    for setting in (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.backends.cudnn.allow_tf32 = False",
        "torch.set_float32_matmul_precision('high')",
    )
]


@pytest.fixture(scope="module", autouse=True)
def common_ancestor() -> Iterator[None]:
    """What all programs of this module are forked from is no process that one test leaves behind."""
    with forkserver():
        yield


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch has one setting for all backends"
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_precisions_of_float32_travel(program: Program, tmp_path: Path) -> None:
    """Settings for one backend, for which torch's older functions raise, are in the rank, and come back."""
    expected, actual = here(program, tmp_path), elsewhere(program, tmp_path)
    assert actual.names == expected.names
    assert actual.probe == expected.probe
    assert list(actual.lost) == []


BROKEN = [
    Program("in the rank", ("import random\nn = 0; seen = []",), "random.getstate = None\nn = 5; seen.append(n)"),
    Program("in the notebook", ("import random\nn = 0; seen = []\nrandom.setstate = None",), "x = random.random(); del x\nn = 5; seen.append(n)"),
]  # fmt: skip


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.name)
def test_names_come_back_where_the_state_of_the_process_cannot(program: Program, tmp_path: Path) -> None:
    """What cannot be found out of the process, or be done to it, is said; what was trained is not lost."""
    back = elsewhere(program._replace(probe="n, seen"), tmp_path)
    assert back.probe == "(5, [5])"
    (line,) = back.lost
    assert line.startswith("the state of the process") and "TypeError" in line


DEFAULTS = """
import torch
from taas.capture.torch_settings import put_settings, settings_of_torch
def set_here(wanted, own, count):
    torch.cuda.is_available, torch.cuda.device_count = lambda: count > 0, lambda: count
    torch.set_default_device(None)
    put_settings({"default device": wanted}, own)
    return settings_of_torch()["default device"]
print(set_here("cuda", "cuda:1", 2), set_here("cuda:0", "cuda:1", 2))  # the second rank
print(set_here("cuda", None, 0), set_here("cuda:1", None, 0), torch.zeros(1).device)  # a CPU type
print(set_here("cuda:1", None, 2), set_here("cuda:1", None, 1))  # a notebook, or a rehearsed rank
print(set_here("meta", "cuda:1", 2))
"""


def test_a_default_device_is_each_ranks_own(tmp_path: Path) -> None:
    """``cuda`` stays the current device, a number becomes the rank's; without CUDA the CPU stays the default."""
    ran = subprocess.run(
        [sys.executable, "-c", DEFAULTS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["cuda cuda:1", "None None cpu", "cuda:1 cuda", "meta"]

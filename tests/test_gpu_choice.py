"""Two notebooks of one machine that start runs on GPUs at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
from taas.header.options import RunSpec
from taas.notebook.supervised import supervised
from taas.wire.clients import Submit
from taas.wire.framing import Memory
from taas.wire.ranks import Cell, Workspace

supervisor = supervised(warm=False)
payload = os.memfd_create("names")
submit = Submit(
    cell=Cell("", 1, RunSpec(ranks_per_vm=1, gpus_per_rank=1), "nocolor"), workspace=Workspace(os.getcwd(), dict(os.environ)),
    payload=Memory(os.getpid(), payload, 0), gpus=("0", "1", "2"), device="1 GPU",
)
print("ready", flush=True)
sys.stdin.readline()
supervisor.say(submit)
heard = []
while not heard:
    heard = [*supervisor.hear(1000)]
print(json.dumps(heard[0].record.gpus if hasattr(heard[0], "record") else heard[0].message), flush=True)
sys.stdin.readline()
"""


@contextmanager
def _kernel(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that submits a run on one GPU when it is told to, and ends when it is told again."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("\n")


def test_each_gets_other_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes last is refused, as all are taken."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as stack:
        kernels = [stack.enter_context(_kernel(tmp_path)) for _ in range(4)]
        for kernel in kernels:
            assert kernel.stdout is not None
            assert kernel.stdout.readline() == "ready\n"
        for kernel in kernels:
            assert kernel.stdin is not None
            kernel.stdin.write("\n")
            kernel.stdin.flush()
        said = [json.loads(kernel.stdout.readline()) for kernel in kernels if kernel.stdout is not None]
    taken = [gpus for gpus in said if isinstance(gpus, list)]
    assert sorted(taken) == [["0"], ["1"], ["2"]]
    [refused] = [words for words in said if isinstance(words, str)]
    assert refused.startswith("GPUs needed: 1; free of this machine's 3: 0; other runs have the rest (r")

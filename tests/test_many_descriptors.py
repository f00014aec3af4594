"""Processes that hold more descriptors than select(2) knows of: an agent with hundreds of ranks, a kernel with many files."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_harness import Notebook, gone

from taas.agent.forkserver import Forkserver
from taas.agent.processes import RankProcess
from taas.agent.spares import KeptProcesses
from taas.agent.staging import ProjectArrival
from taas.wire.ranks import Preparation

MANY = 1100
HOLD = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range({MANY})]
"""


@pytest.fixture
def many() -> Iterator[None]:
    """What this process opens from now on has a number above 1,023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    yield
    for one in held:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_agent_sees_how_its_ranks_are(forkserver: Forkserver, many: None, tmp_path: Path) -> None:
    """Whether they are there, whether they leave in time, and whether their forkserver went before them."""
    process = RankProcess(Preparation(environ={}, project="/", colors="nocolor", shell_class=""))
    # its own may have a lower number, which has become free meanwhile
    process.sentinel = fcntl.fcntl(process.sentinel, fcntl.F_DUPFD_CLOEXEC, 1024)
    kept = KeptProcesses(lambda *_: None, lambda _: None, pytest.fail)
    kept.keep({0: process}, None, ProjectArrival(None, tmp_path))
    try:
        assert process.alive
        kept.end(patient=True)
        assert not process.alive
        assert forkserver.outlived(255)
    finally:
        kept.end()
        os.close(process.sentinel)


def test_a_kernel_runs_cells_and_comes_back_to_runs(tmp_path: Path) -> None:
    """It sees that its supervisor lives, and waits for what a run writes."""
    notebook = Notebook(tmp_path)
    try:
        notebook.good("%load_ext taas\n" + HOLD)
        assert notebook.good("#pragma taas --gpus 2\nx = 1\nprint('here')").own == "here\n"
        notebook.good("#pragma taas --gpus 2 --background --name fox\nx = 2")
        notebook.good("%taas attach fox")
        assert notebook.value("x") == "2"
        everybody = notebook.processes()
        notebook.good("%taas release")
        assert gone(everybody.agents)
    finally:
        notebook.close()

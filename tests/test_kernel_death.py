"""What is left when the kernel dies: nothing of a foreground run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from notebook_harness import Notebook, gone, until
from test_background import terminal

from taas.runs.records import read_records

pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Notebook]:
    """A notebook of this test alone, which kills its kernel."""
    book = Notebook(tmp_path)
    try:
        book.good("import taas")
        yield book
    finally:
        book.close()


def test_sigkill_of_the_kernel(book: Notebook) -> None:
    """Nothing of a foreground run outlives its kernel, DataLoader workers and sessions of their own included.

    A child that C code has forked in the kernel lives on, with all that the kernel had open.
    """
    book.good("#pragma taas --gpus 1\npass")
    book.good("import ctypes\nlibc = ctypes.PyDLL(None)\nchild = libc.fork()\nwhile not child: libc.pause()")
    child = psutil.Process(int(book.value("child")))
    book.start(
        "#pragma taas --gpus 2\n"
        "import subprocess, time, torch, torch.distributed as dist\n"
        "from torch.utils.data import DataLoader\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "batches = iter(DataLoader(torch.arange(1000), num_workers=2, persistent_workers=True))\n"
        "next(batches)\n"
        "dist.init_process_group('gloo'); dist.barrier()  # in both ranks\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    book.wait_for("ready")
    found = book.processes()
    assert len(found.ranks) == 2
    book.kill()
    found.others.remove(child)
    everything = found.supervisor + found.agents + found.forkservers + found.ranks + found.others
    assert len(found.others) >= 6, "a child and two workers of each rank"
    try:
        assert gone(everything, 5)
    finally:
        child.kill()


STUCK = """
import itertools, signal, sys
if "taas.supervisor" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, lambda *_: all(itertools.repeat(1)))  # no other thread runs any more
"""


def test_a_supervisor_that_is_stuck_when_its_kernel_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices nothing: the system kills it, and all below it. A terminal may not: who says nothing there may be well."""
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    book = Notebook(tmp_path)
    try:
        book.good("import taas")
        book.start("#pragma taas --gpus 2\nimport time\nprint('ready', flush=True)\ntime.sleep(600)")
        book.wait_for("ready")
        found = book.processes()
        found.supervisor[0].send_signal(signal.SIGUSR1)
        said = terminal("release").stdout
        assert f"nothing of process {found.supervisor[0].pid} was given back" in said
        book.kill()
        assert gone(found.supervisor + found.agents + found.forkservers + found.ranks)
    finally:
        book.close()


KILLERS = {
    "with a run's names in its hands": "class Last:\n"
    "    def __reduce__(self): return os.kill, (kernel, 9)  # when the kernel unpacks it\n"
    "last = Last()",
    "while a cell is deaf to interrupts": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "if os.environ['RANK'] == '0': os.kill(kernel, 9)\ntime.sleep(600)",
}


@pytest.mark.parametrize("when", KILLERS)
def test_a_kernel_that_dies_beside_a_background_run(book: Notebook, tmp_path: Path, when: str) -> None:
    """A foreground run is over, whatever it is at; its background run goes on to its end."""
    book.good("import os\nkernel = os.getpid()")
    book.good(
        "#pragma taas --gpus 1 --background --name outlives\n"
        "import time\nfrom pathlib import Path\n"
        "Path('there').touch()\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
    )
    until(tmp_path.joinpath("there").exists)
    book.start(f"#pragma taas --gpus 2\nimport os\n{KILLERS[when]}")
    [supervisor] = book.processes().supervisor
    os.waitpid(book.pid, 0)
    until(lambda: len(book.processes().ranks) == 1)
    tmp_path.joinpath("go").touch()
    assert gone([supervisor])
    outlives = [record for record in read_records() if record.name == "outlives"][-1]
    assert (outlives.outcome, outlives.message) == ("done", "")


def test_a_kernel_that_dies_while_output_waits_for_it(book: Notebook, tmp_path: Path) -> None:
    """Nobody acknowledges the rest: it stays in its files, and the run ends as any other."""
    book.start(
        "#pragma taas --gpus 1\n"
        "import time\nfrom pathlib import Path\n"
        "print('ready', flush=True)\n"
        "while not Path('go').exists(): time.sleep(0.02)\n"
        "for _ in range(32): print('x' * (1 << 20))\n"
        "Path('printed').touch()\n"
        "time.sleep(600)"
    )
    book.wait_for("ready")
    found = book.processes()
    os.kill(book.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    while not (tmp_path / "printed").exists():
        time.sleep(0.02)
    book.kill()
    assert gone(found.supervisor + found.agents + found.forkservers + found.ranks)

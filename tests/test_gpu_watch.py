"""The agent's look at GPUs, with a library in the place of NVIDIA's, which needs its driver.

On real ones: test_gpu.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taas.agent import looks
from taas.agent.gpu_watch import GpuUse, GpuWatch
from taas.protocol.ranks import RankEnded

UUID = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
LIBRARY = """
import threading, types
asked, goes_on, fails = [], threading.Event(), set()
goes_on.set()
class NVMLError(Exception):
    pass
def __getattr__(name):
    def function(*arguments):
        asked.append((name, *arguments, threading.current_thread().name))
        goes_on.wait()
        if name in fails:
            raise NVMLError(name)
        process = types.SimpleNamespace(pid=7, usedGpuMemory=2 << 30)
        return {
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=40),
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=9 << 30),
            "nvmlDeviceGetComputeRunningProcesses": [process],
        }.get(name, arguments[0] if arguments else None)
    return function
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library in the place of NVIDIA's.

    It notes who asks, and waits or fails when it is told to.
    """
    (tmp_path / "pynvml.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    import pynvml

    yield pynvml
    pynvml.goes_on.set()
    del sys.modules["pynvml"]


def _in_time(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_a_thread_asks_and_shuts_the_library_down_with_the_last_rank(nvml: Any) -> None:
    """What a rank holds is told by its process, else it is what all hold."""
    watch = GpuWatch([[UUID], ["MIG-1"]], [7, 8], {})
    assert _in_time(lambda: watch.now() == (GpuUse(40.0, 2 << 30), GpuUse(40.0, 9 << 30)))
    assert ("nvmlDeviceGetHandleByUUID", UUID, "taas-asks-gpus") in nvml.asked
    assert {asked[-1] for asked in nvml.asked} == {"taas-asks-gpus"}
    assert "nvmlShutdown" not in {asked[0] for asked in nvml.asked}
    watch.end()
    watch.thread.join(60)
    assert nvml.asked[0][0] == "nvmlInit"
    assert nvml.asked[-1][0] == "nvmlShutdown"


def test_a_gpu_is_asked_by_its_place_on_the_bus(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's number is another one than the library's.

    A number that stands for no known place is not asked.
    """
    from taas.agent import gpu_watch
    from taas.protocol.clients import Gpu

    places = {"0": "0000:5e:00.0", "1": "1"}
    monkeypatch.setattr(
        gpu_watch, "physical", lambda names, environ: [Gpu(name, places[name]) for name in names]
    )
    watch = GpuWatch([["0"], ["1"]], [7, 8], {})
    assert _in_time(lambda: watch.now() == (GpuUse(40.0, 2 << 30), GpuUse(None, 0)))
    handles = [asked[:2] for asked in nvml.asked if "Handle" in asked[0]]
    assert handles == [("nvmlDeviceGetHandleByPciBusId", "0000:5e:00.0")]
    watch.end()


@pytest.mark.parametrize(
    ("refused", "found"),
    [
        ("nvmlInit", GpuUse()),
        ("nvmlDeviceGetHandleByUUID", GpuUse()),
        ("nvmlDeviceGetUtilizationRates", GpuUse(None, 2 << 30)),
        ("nvmlDeviceGetComputeRunningProcesses", GpuUse(40.0, 9 << 30)),
        ("nvmlDeviceGetMemoryInfo", GpuUse(40.0, 2 << 30)),
    ],
)
def test_what_the_driver_does_not_say_is_not_known(nvml: Any, refused: str, found: GpuUse) -> None:
    """No driver, a GPU that it does not know, a part of one.

    Nothing of it ends the thread, or is made up.
    """
    nvml.fails.add(refused)
    watch = GpuWatch([[UUID]], [7], {})
    assert _in_time(
        lambda: refused in {asked[0] for asked in nvml.asked} or found == GpuUse(40.0, 2 << 30)
    )
    assert _in_time(lambda: watch.now() == (found,))
    watch.end()
    watch.thread.join(60)
    assert not watch.thread.is_alive()


def test_a_driver_that_does_not_answer_holds_nobody(nvml: Any) -> None:
    """The agent says of its ranks what it knows, and ends; the thread is left to itself."""
    nvml.goes_on.clear()
    process = SimpleNamespace(pid=os.getpid(), recorded=None)
    rank = SimpleNamespace(number=0, ended=None, started=True, process=process)
    usage = looks.RankUsage([[UUID]])
    [seen] = usage.look([rank], {})  # type: ignore[list-item]
    assert _in_time(lambda: bool(nvml.asked))
    assert (seen.state, seen.gpu, seen.gpu_nbytes) == ("running", None, 0)
    usage.end()
    rank.ended = RankEnded(rank=0, outcome="done", at=0.0)
    [seen] = usage.look([rank], {})  # type: ignore[list-item]
    assert seen.state == "done"
    assert threading.current_thread().name not in {asked[-1] for asked in nvml.asked}


def test_no_thread_is_there_without_gpus_nor_when_all_ranks_have_ended(nvml: Any) -> None:
    """A rehearsed run asks for no library, nor does a look at what a short run has left."""
    process = SimpleNamespace(pid=os.getpid(), recorded=None)
    running = SimpleNamespace(number=0, ended=None, started=True, process=process)
    over = SimpleNamespace(number=0, ended=RankEnded(rank=0, outcome="done", at=0.0))
    for gpus, rank in ([], running), ([UUID], over):
        usage = looks.RankUsage([gpus])
        usage.look([rank], {})  # type: ignore[list-item]
        usage.end()
    assert "taas-asks-gpus" not in {thread.name for thread in threading.enumerate()}
    assert not nvml.asked

"""What is free in a container with a memory limit.

Real control groups of version 1, and version 2's files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone
from privileges import needs_mounts

_GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1
_MB = 1 << 20
_LIMIT = 512 * _MB

# What a process of the group does: it fills the page cache, takes shared memory, and asks after
# each.
ASKS = """
import json, os, sys
from taas.capture.heap.payload import check_room
from taas.engines.local import check_memory
from taas.errors import CaptureError, EngineError
from taas.base.memory_limits import memory_left
def ask():
    refused = []
    try:
        check_room({"x": 300 << 20})
    except CaptureError as error:
        refused.append(str(error))
    try:
        check_memory(12)
    except EngineError as error:
        refused.append(str(error))
    said.append((*memory_left(), memory_left().is_scarce, refused))
said = []
ask()
folder = sys.argv[1]
if folder:
    with open(f"{folder}/data", "wb") as file:
        for _ in range(600): file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    with open(f"{folder}/data", "rb") as file:
        while file.read(1 << 20): pass
    ask()
    shared = os.memfd_create("shared")
    os.posix_fallocate(shared, 0, 465 << 20)
    ask()
print(json.dumps(said))
"""


def _no_group() -> str:
    """Why there can be no control group of version 1 with a limit; empty where there can."""
    group = _GROUPS / f"taas-tried-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(_LIMIT))
        group.rmdir()
    except OSError as error:
        return str(error)
    return ""


needs_a_group = pytest.mark.skipif(
    bool(_no_group()), reason=f"makes a control group: {_no_group()}"
)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit; those who are in it at the end are ended."""
    path = _GROUPS / f"taas-{os.getpid()}"
    path.mkdir()
    (path / "memory.limit_in_bytes").write_text(str(_LIMIT))
    yield path
    inside = [psutil.Process(int(pid)) for pid in (path / "cgroup.procs").read_text().split()]
    for process in inside:
        process.kill()
    assert gone(inside)
    path.rmdir()


def _asked(prepare: str, folder: Path | str) -> list[list[object]]:
    """Let a shell prepare itself, and become a Python that asks."""
    command = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        f'{prepare}; exec "$@"',
        "sh",
        sys.executable,
        "-c",
        ASKS,
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[object]] = json.loads(done.stdout)
    return found


@needs_a_group
@needs_mounts
@pytest.mark.parametrize(
    "seen_as", ["the group where it is", "the group as the root, as in a container"]
)
def test_what_can_be_reclaimed_of_a_group_is_free(
    group: Path, tmp_path: Path, seen_as: str
) -> None:
    """A data set that was read takes nothing away, shared memory does.

    That holds for names, ranks and spares.
    """
    prepare = f"echo $$ > {group}/cgroup.procs"
    if "root" in seen_as:
        prepare += f"; mount --bind {group} {_GROUPS}"
    fresh, read, taken = _asked(prepare, tmp_path)
    for free, total, scarce, refused in (fresh, read):
        assert total == _LIMIT
        assert _LIMIT - 180 * _MB < free < _LIMIT  # type: ignore[operator]
        assert not scarce
        assert refused == []
    free, _, scarce, [names, ranks] = taken  # type: ignore[misc]
    assert free < _LIMIT - 465 * _MB  # type: ignore[operator]
    assert scarce
    assert "need 315 MB of shared memory" in names  # type: ignore[operator]
    assert "12 ranks on this machine need 0 GB" in ranks  # type: ignore[operator]


VERSION_2: dict[str, tuple[int | str, int, int | None, int | None]] = {
    "no limit": ("max", 400, 100, None),
    "a limit, and files that were read": (500, 490, 480, 490),
    "a limit, and memory in use": (500, 490, 10, 20),
    "more than the machine has": (1 << 30, 490, 10, None),
    "a limit, and nothing said of files": (500, 490, None, 10),
}


@needs_mounts
@pytest.mark.parametrize("case", VERSION_2)
def test_a_limit_of_version_2(tmp_path: Path, case: str) -> None:
    """As a container sees it, which is the root of the hierarchy to itself.

    Sizes are in MB, None: the machine's.
    """
    limit, used, files, expected = VERSION_2[case]
    (tmp_path / "memory.max").write_text(f"{limit if isinstance(limit, str) else limit * _MB}\n")
    (tmp_path / "memory.current").write_text(f"{used * _MB}\n")
    stat = {"anon": 5, "shmem": 7}
    if files is not None:
        stat |= {"file": files + 7, "inactive_file": files - 4, "active_file": 4}
    (tmp_path / "memory.stat").write_text(
        "".join(f"{name} {size * _MB}\n" for name, size in stat.items())
    )
    [[free, total, _, _]] = _asked(f"mount --bind {tmp_path} /sys/fs/cgroup", "")
    machine = psutil.virtual_memory()
    if expected is None:
        assert total == machine.total
        assert free > machine.available / 4  # type: ignore[operator]
    else:
        assert (free, total) == (expected * _MB, limit * _MB)  # type: ignore[operator]


@needs_mounts
def test_a_kernel_without_control_groups() -> None:
    """Its machine's memory counts."""
    [[free, total, _, _]] = _asked("mount -t tmpfs none /proc/$$", "")
    machine = psutil.virtual_memory()
    assert total == machine.total
    assert free > machine.available / 4  # type: ignore[operator]


@pytest.fixture
def limited(group: Path, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook of its own, in the group with a limit."""
    (group / "memory.limit_in_bytes").write_text(str(6 << 30))
    one = Notebook(tmp_path)
    (group / "cgroup.procs").write_text(str(one.pid))
    one.good("%load_ext taas")
    yield one
    one.close()


@pytest.mark.slow
@needs_a_group
def test_spares_go_when_memory_of_the_group_becomes_scarce(limited: Notebook, group: Path) -> None:
    """They are ended at the next look, though the machine has plenty."""
    limited.good("#pragma taas --gpus 2\npass")
    deadline = time.monotonic() + 60
    while len(spares := limited.processes().spares) < 2:
        assert time.monotonic() < deadline, limited.processes()
        time.sleep(0.05)
    inside = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    assert {spare.pid for spare in spares} <= inside
    limited.good(
        block("""
            import os
            from taas.base.memory_limits import memory_left
            shared = os.memfd_create('shared')
            os.posix_fallocate(shared, 0, memory_left().free - (300 << 20))
        """)
    )
    assert gone(spares)

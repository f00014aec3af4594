"""Shared rules of the suite: a clean environment, and nothing left behind."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from notebook_harness import Notebook, there
from oracle import forkservers
from privileges import no_mounts
from ray_cluster import RayCluster, why_not

from taas.base import linux

# a loaded machine is slow, not wrong; what is new is found by --hypothesis-profile=explore, not by
# whoever runs the suite
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("taas", settings.get_profile("explore"), derandomize=True)
settings.load_profile("taas")
# From Python 3.14 on a DataLoader's workers come from a forkserver, which would outlive the test
# that uses one here.
multiprocessing.set_start_method("fork")
_PR_SET_CHILD_SUBREAPER = 36
_OF_A_RUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"}
_MINUTES = (
    "test_fault_table",
    "test_second_cell",
    "test_gallery",
    "test_browser",
    "test_random_notebooks",
    "test_ready_ahead",
    "test_examples",
    "test_restarts",
    "test_elsewhere",
    "test_export",
    "test_setup_cells",
    "test_docs_cells",
    "test_delivery_faults",
    "test_disk_full",
    "test_delivery_order",
    "test_capture_process_state",
    "test_background",
    "test_rank_storage_attacks",
    "test_said",
    "test_startup",
    "test_children",
    "test_launch",
    "test_endings",
    "test_clients",
    "test_security",
    "test_unreadable",
    "test_keep",
    "test_rank_storage",
    "test_status",
    "test_kept",
    "test_delivery_runs",
)
"""Files that take a minute, the longest first."""


_held: dict[str, contextlib.ExitStack] = {}
_kernels: list[Notebook] = []


DAY = datetime.datetime.now(datetime.UTC).date().isoformat()
"""What draws rows and slow tests, where not all of them run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let long tables be sampled."""
    parser.addoption(
        "--rows",
        type=int,
        default=0,
        help=(
            "so many rows of each table of slow tests, or as many as its mark says, three times as"
            " many of tables whose rows run in a notebook or its ranks, and a quarter of a slow"
            " file's other tests; others each day"
        ),
    )
    parser.addoption("--day", default=DAY, help="the day whose rows run (2026-11-25)")


def pytest_report_header(config: pytest.Config) -> str:
    """Say which rows run, so that they can be run again."""
    rows, day = config.getoption("rows"), config.getoption("day")
    return f"rows: --rows {rows} --day {day} (all others: make test-all)" if rows else "rows: all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest.

    The other processes would wait for the one that begins it last.
    """
    if config.getoption("rows"):
        dropped = _not_drawn(items, config.getoption("rows"), config.getoption("day"))
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    with_notebook = {item.path for item in items if "notebook" in getattr(item, "fixturenames", ())}

    def turn(item: pytest.Item) -> tuple[int, bool]:
        long = _MINUTES.index(item.path.stem) if item.path.stem in _MINUTES else len(_MINUTES)
        return long, item.path not in with_notebook

    items.sort(key=turn)


def _not_drawn(items: list[pytest.Item], rows: int, day: str) -> set[pytest.Item]:
    """Return the rows of long tables, and the tests of slow files, that are not drawn today.

    A table may stand in several files, in which its test has the same name.
    """
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        node, is_row, _ = item.nodeid.partition("[")
        if item.get_closest_marker("slow") or (is_row and _has_processes(item)):
            table = node.rpartition("::")[2] if is_row else str(item.path)
            tables.setdefault(table, []).append(item)
    dice = random.Random(day)
    dropped: set[pytest.Item] = set()
    for name, table in tables.items():
        slow = table[0].get_closest_marker("slow")
        drawn = slow.kwargs.get("rows", rows) if slow else 3 * rows
        if name == str(table[0].path):
            drawn = max(rows, (len(table) + 3) // 4)
        dropped.update(dice.sample(table, max(len(table) - drawn, 0)))
    return dropped


def _has_processes(item: pytest.Item) -> bool:
    return not {"notebook", "oracle"}.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_configure(config: pytest.Config) -> None:
    """See what tests leave behind: adopt orphans, and mount a /dev/shm where that is allowed."""
    if config.getoption("rows"):
        os.environ["TAAS_FEW"] = "1"  # for what draws more than rows of a table
    linux.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if not no_mounts():
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount(None, "/", linux.MS_REC | linux.MS_PRIVATE)
        subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)


@pytest.fixture(autouse=True, scope="session")
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variable of the person who runs the suite reaches a test.

    Runtime files go to folders of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("TAAS_", "MASTER_", "TORCHELASTIC_", "JPY_")) or name in _OF_A_RUN:
                patch.delenv(name)
        for name in (
            "JUPYTER_RUNTIME_DIR",
            "JUPYTER_DATA_DIR",
            "IPYTHONDIR",
            "XDG_CONFIG_HOME",
            "TMPDIR",
        ):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        patch.setattr(tempfile, "tempdir", None)
        yield


def alive_below() -> set[int]:
    """Process ids below this one, but those of multiprocessing's resource tracker."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(
                child.cmdline()
            ):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _of_shared(process: psutil.Process, before: set[int]) -> bool:
    """Return whether a supervisor that was there before has started it.

    A notebook shared by several tests warms up meanwhile.
    """
    try:
        return any(
            parent.pid in before and "taas.supervisor" in parent.cmdline()
            for parent in process.parents()
        )
    except psutil.NoSuchProcess:
        return False


def _left(before: set[int]) -> list[str]:
    """Return the commands of the processes that stay.

    They are killed, so that later tests do not find them.
    """
    processes = [
        process for process in there(alive_below() - before) if not _of_shared(process, before)
    ]
    commands = []
    for process in psutil.wait_procs(processes, 90)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            commands.append(" ".join(process.cmdline()))
            process.kill()
    return commands


def _shared_memory() -> set[str]:
    if no_mounts():
        return set()  # other programs' files come and go there
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def _memory_left(before: set[str]) -> set[str]:
    """What has come to /dev/shm and stays.

    A semaphore has a name until the process it is for has opened it.
    """
    deadline = time.monotonic() + 90
    while (left := _shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def leaves_nothing(who: str) -> Iterator[None]:
    """Fail where something leaves a process or a /dev/shm file."""
    processes, memory = alive_below(), _shared_memory()
    try:
        yield
    finally:
        assert not _left(processes), f"{who} left processes"
        assert not _memory_left(memory), f"{who} left /dev/shm files"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves no process, no thread and no /dev/shm file.

    What a notebook, a cluster or a Jupyter server shared by several tests holds is looked at when
    that is closed.
    """
    shared = not {"notebook", "stage", "cluster", "server"}.isdisjoint(request.fixturenames)
    threads = set(threading.enumerate())
    with contextlib.nullcontext() if shared else leaves_nothing("the test"):
        yield
        late = [
            thread
            for thread in threading.enumerate()
            if thread not in threads and not thread.daemon
        ]
        for thread in late:
            thread.join(30)
        assert not any(thread.is_alive() for thread in late), f"threads left: {late}"


def _hold(fixture: str, made: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Make what a fixture stands for, and keep it while tests of any module need it."""
    if fixture not in _held:
        _held[fixture] = contextlib.ExitStack()
        _held[fixture].enter_context(made())


@pytest.fixture(scope="module")
def oracle() -> None:
    """What the oracle's notebooks are forked from."""
    _hold("oracle", forkservers)


@pytest.fixture(scope="module")
def warm() -> None:
    """What `ranks_harness` forks its ranks from."""
    from ranks_harness import warm_server  # brings torch

    _hold("warm", warm_server)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End kernel and forkservers before a module whose first test does not need them."""
    if nextitem is None or nextitem.path != item.path:
        needed = {*getattr(nextitem, "fixturenames", ())}
        # The last one begun ends first: each counts as left what was begun after it.
        while _held.keys() - needed:
            _held.popitem()[1].close()


@contextlib.contextmanager
def _one_kernel() -> Iterator[None]:
    """The kernel of all modules that want a notebook, while they follow each other."""
    # asked now: the suite's own folder is no longer set when its last test is over
    where = Path(tempfile.gettempdir())
    folders = set(where.glob("taas-*"))
    with leaves_nothing("the notebook"):
        book = Notebook(Path(tempfile.mkdtemp(prefix="first")))
        try:
            book.good("%load_ext taas")
            _kernels.append(book)
            yield
        finally:
            _kernels.clear()
            book.close()
    assert not set(where.glob("taas-*")) - folders, "the notebook left a folder"


@pytest.fixture(scope="module")
def kernel() -> Notebook:
    """The kernel that notebooks share; a module with a notebook of its own has none."""
    _hold("kernel", _one_kernel)
    return _kernels[0]


@pytest.fixture(scope="module")
def notebook(kernel: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    """A notebook with taas loaded, in a project of its own: for the tests of one module."""
    kernel.renew(tmp_path_factory.mktemp("project"))
    return kernel


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayCluster]:
    """Ray nodes with addresses and files of their own, as the module's ``NODES`` says."""
    missing = why_not()
    if missing:
        pytest.skip(f"no Ray nodes on this machine: {missing}")
    with (
        leaves_nothing("the cluster"),
        RayCluster(request.module.NODES, hidden=[tmp_path_factory.getbasetemp()]) as nodes,
    ):
        yield nodes
    assert not nodes.folder.exists(), "the cluster left its folder"

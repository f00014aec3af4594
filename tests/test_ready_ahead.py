"""Spares become the expected ranks ahead of their order; nothing but their imports differs.

A package in a folder of the test's own, installed as pip would, notes in a file each process that
imports it. So it is a fact who imported it, and when.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone, there, until
from privileges import few_processes, needs_pids_controller

pytestmark = pytest.mark.slow

MODULES = 120
"""More than are worth it."""
HEAVY = f"""
import importlib, os, pathlib, sys
_log = pathlib.Path(os.environ["HEAVY_LOG"])
_before = len(_log.read_text().splitlines()) if _log.exists() else 0
for _number in range({MODULES}):
    importlib.import_module(f"heavy.part_{{_number}}")
with _log.open("a") as _file:
    _file.write(f"{{os.getpid()}}\\n")
_does = pathlib.Path(os.environ["HEAVY_DOES"])
if _before >= 2 and _does.exists():  # two ranks of the first cell import it as it should be
    exec(_does.read_text())
"""


class World:
    """A notebook with the package, and what its cells leave on disk."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "installed" / "lib" / "site-packages"
        self.project, self.answers = folder / "project", folder / "answers"
        self.log, self.does = folder / "log", folder / "does"
        for place in (self.site / "heavy", self.project, self.answers):
            place.mkdir(parents=True)
        (self.site / "heavy" / "__init__.py").write_text(HEAVY)
        for number in range(MODULES):
            (self.site / "heavy" / f"part_{number}.py").write_text("")
        environ = {"PYTHONPATH": str(self.site), "HEAVY_LOG": str(self.log)}
        self.book = Notebook(self.project, environ={**environ, "HEAVY_DOES": str(self.does)})
        self.book.good(f"%load_ext taas\nanswers = {str(self.answers)!r}")

    @property
    def imported(self) -> list[int]:
        """The processes that have imported the package, in order."""
        return [*map(int, self.log.read_text().split())] if self.log.exists() else []

    def run(self, body: str = "import heavy", header: str = "--gpus 2") -> set[int]:
        """Run a cell; returns the process ids of its ranks."""
        for old in self.answers.iterdir():
            old.unlink()
        write = "open(f\"{answers}/{os.environ['RANK']}\", 'w').write(str(os.getpid()))"
        self.book.good(f"#pragma taas {header} --return none\nimport os\n{body}\n{write}")
        return {int(answer.read_text()) for answer in self.answers.iterdir()}

    def ready(self, body: str = "import heavy") -> set[int]:
        """Run a cell, and wait until two spares have imported the same; return their ids."""
        ran = self.run(body)
        seen = len(self.imported)

        def there_are() -> bool:
            spares = {spare.pid for spare in self.book.processes().spares}
            return len(spares & {*self.imported} - ran) >= 2

        until(there_are)
        assert len(self.imported) <= seen + 2
        return {*self.imported} & {spare.pid for spare in self.book.processes().spares}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A notebook of its own."""
    one = World(tmp_path)
    try:
        yield one
    finally:
        one.book.close()


STATE = """
import json, logging, os, random, signal, sys, threading, tempfile, warnings
had = "heavy" in sys.modules
import heavy, numpy, torch, torch.distributed as dist
from tqdm.auto import tqdm
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
dist.init_process_group()
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
of_run = "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
state = {
    "environ": {k: v for k, v in os.environ.items() if k not in (*of_run, "EXTRA")},
    "of run": [bool(os.environ[name]) for name in of_run],
    "cwd": os.getcwd(),
    "path": sys.path,
    "argv": sys.argv,
    "drawn": drawn,
    "place": [dist.get_rank(), dist.get_world_size()],
    "total": total.item(),
    "device": torch.cuda.device_count(),
    "bar": tqdm.__module__,
    "name": __name__,
    "sigint": str(signal.getsignal(signal.SIGINT)),
    "threads": sorted(t.name for t in threading.enumerate()),
    "temporary": tempfile.gettempdir(),
    "leads": os.getsid(0) == os.getpid(),
    "comm": open("/proc/self/comm").read(),
    "filters": [str(entry) for entry in warnings.filters],
    "dtype": str(torch.get_default_dtype()),
    "names": sorted(k for k in globals() if k != "state" and not k.strip("_i").isdigit()),
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "open": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in (0, 1, 2)),
    "streams": [type(sys.stdout).__name__, sys.stdout is sys.__stdout__],
    "loggers": len(logging.root.handlers),
    "modules": sorted(name for name in sys.modules if not name.startswith("taas.")),
}
dist.destroy_process_group()
json.dump([os.getpid(), had, state], open(f"{answers}/{os.environ['RANK']}", "w"))
"""
SEEDS = "import random, numpy, torch\nrandom.seed(3); numpy.random.seed(4); torch.manual_seed(5);"


def states(world: World) -> tuple[set[int], list[bool], list[dict[str, object]]]:
    """Run a cell whose ranks write their process id, whether they had the package, their state."""
    world.book.good(SEEDS)
    world.book.good(f"#pragma taas --gpus 2 --return none\n{STATE}")
    both = [json.loads((world.answers / str(rank)).read_text()) for rank in (0, 1)]
    return {pid for pid, _, _ in both}, [had for _, had, _ in both], [state for *_, state in both]


def test_the_next_cells_ranks_have_it_imported_and_nothing_else_is_different(world: World) -> None:
    """Each rank imported it itself before its order; all else is as in a fresh rank."""
    first, had_first, of_first = states(world)
    ready = world.ready(STATE)
    before = world.imported
    pids, had, of_ready = states(world)
    assert (pids, had, had_first) == (ready, [True, True], [False, False])
    assert world.imported[: len(before)] == before
    assert not {*world.imported[len(before) :]} & pids
    assert [state["bar"] for state in of_ready][1] != "tqdm.notebook"
    world.book.good("import os; os.environ['EXTRA'] = '1'")
    fresh, had, of_fresh = states(world)
    assert (had, fresh & (ready | first)) == ([False, False], set())
    for of_one, of_other in ((of_ready, of_fresh), (of_ready, of_first)):
        for one, other in zip(of_one, of_other, strict=True):
            different = {key: (one[key], other[key]) for key in one if one[key] != other[key]}
            assert not different


PROJECTS = "open('heavy.py', 'w').write('part = 1')"
INSTALL = "os.makedirs(f'{site}/another')"
EDIT = "open(f'{site}/heavy/part_7.py', 'a').write('# edited')"
CHANGES = {
    "a variable": ("os.environ['A_VARIABLE'] = '1'", "import heavy", "--gpus 2"),
    "a package that was installed": (INSTALL, "import heavy", "--gpus 2"),
    "an edited file of a package": (EDIT, "import heavy", "--gpus 2"),
    "a module of the project with its name": (PROJECTS, "import heavy", "--gpus 2"),
    "a path": ("import sys; sys.path.append('/opt')", "import heavy", "--gpus 2"),
    "a default that modules read": (
        "torch.set_default_dtype(torch.float64)", "import heavy", "--gpus 2"
    ),
    "warnings that are errors": (
        "warnings.simplefilter('error', ImportWarning)", "import heavy", "--gpus 2"
    ),
    "another number of ranks": ("pass", "import heavy", "--gpus 3"),
    "another backend": ("pass", "import heavy", "--gpus 2 --backend gloo"),
    "another rule for writes": ("pass", "import heavy", "--gpus 2 --rank-writes deny"),
    "another rank that is shown": ("pass", "import heavy", "--gpus 2 --output all"),
    "a cell that sets variables": ("pass", "os.environ['ITS_OWN'] = '1'\nimport heavy", "--gpus 2"),
    "a launcher's argument": ("pass", "import heavy  # --local_rank", "--gpus 2"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_has_fresh_ranks(world: World, change: str) -> None:
    """Ranks that were made ready do not take the order; the cell runs as without them."""
    world.book.good(f"import os, torch, warnings\nsite = {str(world.site)!r}")
    ready = world.ready()
    done, body, header = CHANGES[change]
    world.book.good(done)
    ran = world.run(body, header)
    # the rank of the run that prints is the only one that --output all leaves as it was
    left = 1 if change == "another rank that is shown" else 0
    assert len(ran & ready) == left
    assert gone(there(ready - ran))


DOES = {
    "raises": "raise RuntimeError('not now')",
    "leaves": "os._exit(3)",
    "hangs": "import threading; threading.Event().wait()",
    "draws": "import random; random.random()",
    "reads what each run has of its own": "os.environ.get('MASTER_PORT')",
    "copies the environment": "dict(os.environ)",
    "imports a module of the project": "import mine",
    "goes elsewhere": "os.chdir('/')",
}


@pytest.mark.parametrize("what", DOES)
def test_a_module_that_does_at_import_what_nobody_can_take_back(world: World, what: str) -> None:
    """Such a process takes no order; one whose import raises goes on as it is."""
    (world.project / "mine.py").write_text("")
    world.does.write_text(DOES[what])
    world.run()
    until(lambda: len(world.imported) > 2)
    first = world.imported[2]
    ran = world.run("pass")
    assert (first in ran) == (what == "raises")
    assert gone(there([first]))
    assert len(world.run("import sys")) == 2


def test_a_spare_that_is_killed_while_it_imports(world: World) -> None:
    """The next cell has others."""
    world.does.write_text(DOES["hangs"])
    world.run()
    until(lambda: len(world.imported) > 2)
    killed = world.imported[2]
    os.kill(killed, signal.SIGKILL)
    assert killed not in world.run("pass")


@pytest.mark.parametrize("who", ["agents", "forkservers", "supervisor"])
def test_it_ends_with_whom_it_is_tied_to(world: World, who: str) -> None:
    """One that hangs in an import, and those that wait, end with their agent or supervisor."""
    world.does.write_text(DOES["hangs"])
    world.run()
    until(lambda: len(world.imported) > 2)
    found = world.book.processes()
    for process in getattr(found, who):
        process.kill()
    assert gone(there([world.imported[2]]) + found.spares)
    assert len(world.run("pass")) == 2


PRINTS = """#pragma taas --gpus 2 --return none
import heavy, os
print("mine", os.getpid())
"""


def test_what_an_import_prints_ahead_is_nobodys_output(world: World) -> None:
    """The cell before showed it; this one shows its own lines, from Python, C and children."""
    loud = "print('loud'); os.system('echo loud; echo loud >&2'); sys.stdout.write('no end')"
    world.does.write_text(loud)
    ready = world.ready()
    ran = world.book.good(PRINTS)
    assert ran.own.split()[:1] == ["mine"]
    assert int(ran.own.split()[1]) in ready
    assert "loud" not in ran.stdout + ran.stderr


# ---------------------------------------------------------------- a spare that cannot be forked


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Let a process open nothing any more; it ends in here."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
    yield


@contextlib.contextmanager
def no_processes_of_the_user(pid: int) -> Iterator[None]:
    """Let a process fork no more; it ends in here."""
    resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))
    yield


def rests(process: psutil.Process) -> bool:
    """Whether a process uses no processor time while it is watched."""
    before = process.cpu_times()[:2]
    time.sleep(0.5)
    return process.cpu_times()[:2] == before


LACKS = {
    "a descriptor": (no_descriptors, "import heavy"),
    "a descriptor, and nothing to import": (no_descriptors, "pass"),
    "a process of this user": (no_processes_of_the_user, "import heavy"),
    "a process": (lambda pid: few_processes(pid, 0), "import heavy"),
    "a second process": (lambda pid: few_processes(pid, 1), "import heavy"),
}
NEEDS = {
    "a process of this user": pytest.mark.skipif(
        os.geteuid() == 0, reason="root may have as many processes as it wants"
    ),
    "a process": needs_pids_controller,
    "a second process": needs_pids_controller,
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=NEEDS.get(what, ())) for what in LACKS])
def test_an_agent_whose_forkserver_cannot_fork_a_spare_rests(world: World, what: str) -> None:
    """It waits for the next run, which has its ranks; here the forkserver ends of it."""
    lacks: Callable[[int], contextlib.AbstractContextManager[None]]
    lacks, body = LACKS[what]
    go = world.answers / "go"
    world.book.start(
        block(f"""
            #pragma taas --gpus 2 --return none
            import os, pathlib, time
            {body}
            pathlib.Path(answers, os.environ["RANK"]).touch()
            while not pathlib.Path(answers, "go").exists(): time.sleep(0.02)
        """)
    )
    until(lambda: all((world.answers / rank).exists() for rank in "01"))
    [forkserver], [agent] = world.book.processes().forkservers, world.book.processes().agents
    with lacks(forkserver.pid):
        go.touch()
        assert world.book.end().status == "ok"
        until(lambda: not world.book.processes().forkservers)  # of the first spare
        until(lambda: rests(agent), 30)
    assert len(world.run("pass")) == 2

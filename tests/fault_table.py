"""Faults in processes of taas: the states in which they strike, whom, how, and what follows.

A state is reached by a sign that the run itself gives: each rank writes its process id to a file
when it is there, and stays there until a file says go on.

What no signal from outside can bring about has tests of its own: a rank that leaves with status 255
(test_children), signals that are blocked or ignored where taas starts, and a folder that is deleted
beneath it (both test_startup).
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
from blocks import block
from notebook_harness import Notebook, Ran, gone, until

DEFINITIONS = """
import os, time
from pathlib import Path

def stay(place):
    Path(place, f"new-{os.environ['RANK']}").write_text(str(os.getpid()))
    Path(place, f"new-{os.environ['RANK']}").rename(Path(place, f"rank-{os.environ['RANK']}"))
    while not Path(place, "go").exists(): time.sleep(0.02)
    return place

class Held:  # waits when it is unpacked
    def __init__(self, place): self.place = place
    def __reduce__(self): return stay, (self.place,)

class Kept:  # waits when it is packed
    def __init__(self, place): self.place = place
    def __reduce__(self): return str, (stay(self.place),)

"""
LOADER = """
import taas, taas.dataloader_registry
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 400
    def __getitem__(self, i):
        time.sleep(0.002)
        return i

slow = DataLoader(Slow(), batch_size=2)
taas.register(slow)
"""
CELLS = {
    "starting": "#pragma taas --gpus 2\ngot = held",
    "training": "#pragma taas --gpus 2\ngot = stay(place)",
    "ending": "#pragma taas --gpus 2\ngot = Kept(place)",
    "delivering": block("""
        #pragma taas --gpus 2 --cpus 1
        count = 0
        for batch in slow:
            count += 1
            if count == 3: got = stay(place)
    """),
    "idle": "#pragma taas --gpus 2\ngot = place",
    "kept": "#pragma taas --gpus 2 --keep\ngot = stay(place)",
}
"""What runs in each state. Only rank 0 packs its names; idle and kept are what comes after their
cells.
"""
STEPS = """
import torch
import torch.distributed as dist
if not dist.is_initialized(): dist.init_process_group("gloo")
for step in range(25):
    steps.append(len(steps))
    total = len(steps)
    batch = next(batches, None) if loads else None
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""
STEPPING = {
    "training": f"#pragma taas --gpus 2\nloads = False{STEPS}",
    "delivering": (
        f"#pragma taas --gpus 2 --cpus 1\nloads, batches = True, iter(slow){STEPS}del batches"
    ),
    "kept": f"#pragma taas --gpus 2 --keep\nloads = False{STEPS}",
}
"""Cells that take half a second, and go on by themselves."""
HELPERS = ("supervisor", "agent", "forkserver")
DATA_HELPERS = ("coordinator", "planner", "pool", "worker", "data agent")


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        state: what the run is at.
        who: whom it strikes.
        how: ``SIGKILL``, ``SIGSTOP``, or ``EMFILE``: it gets no descriptor any more.
        then: ``interrupt`` (twice, if need be), ``release``, ``goes on`` (the cell is let go to its
            end, and another runs), ``kernel killed``.
        ends: how the cell ends: the error's name, or "" for well; several where that is a matter of
            who was quicker.
        says: a part of what is said about that.
    """

    state: str
    who: str
    how: str
    then: str
    ends: tuple[str, ...] = ()
    says: str = ""

    def __str__(self) -> str:
        return f"{self.state}-{self.who}-{self.how}-{self.then}".replace(" ", "_")


def table() -> list[Fault]:
    """Return the rows that a notebook survives."""
    stopped = [
        Fault(state, who, "SIGSTOP", then, ("KeyboardInterrupt",) if then == "interrupt" else ("",))
        for state, who, then in (
            *itertools.product(
                ("starting", "training"), (*HELPERS, "rank 0", "rank 1"), ("interrupt",)
            ),
            *itertools.product(("ending",), (*HELPERS, "rank 0"), ("interrupt",)),
            *itertools.product(("delivering",), DATA_HELPERS, ("interrupt",)),
            ("delivering", "worker", "goes on"),
            *itertools.product(("idle",), (*HELPERS, "spare"), ("release",)),
            *itertools.product(("kept",), HELPERS, ("release",)),
        )
    ]
    lost, failed = ("RunLost",), ("CellFailed",)
    killed = [
        Fault(state, who, "SIGKILL", "goes on", ends, says)
        for state, (who, ends, says) in itertools.product(
            ("starting", "training", "ending"),
            (
                ("supervisor", lost, "the supervisor was killed (by somebody"),
                ("agent", lost, "the agent was killed by SIGKILL"),
                ("forkserver", lost, "the forkserver was killed"),
                ("rank 0", failed, "rank 0 was killed by SIGKILL"),
            ),
        )
    ]
    killed += [
        Fault("training", "rank 1", "SIGKILL", "goes on", failed, "rank 1 was killed by SIGKILL"),
        Fault(
            "delivering",
            "coordinator",
            "SIGKILL",
            "goes on",
            ("RunLost", "CellFailed"),
            "coordinator",
        ),
        Fault(
            "delivering",
            "planner",
            "SIGKILL",
            "goes on",
            ("", *lost, *failed),
            "the process that iterates",
        ),
        Fault("delivering", "pool", "SIGKILL", "goes on", ("",)),
        Fault("delivering", "worker", "SIGKILL", "goes on", ("",)),
        *(Fault("idle", who, "SIGKILL", "goes on", ("",)) for who in (*HELPERS, "spare")),
        *(Fault("kept", who, "SIGKILL", "goes on", ("",)) for who in HELPERS),
        *(
            Fault("kept", who, "SIGKILL", "goes on", ("", *lost, *failed))
            for who in ("rank 0", "rank 1")
        ),
    ]
    starved = [
        Fault("training", "agent", "EMFILE", "goes on", ("", *lost)),
        Fault("training", "agent", "EMFILE", "interrupt", ("KeyboardInterrupt",)),
        Fault("training", "supervisor", "EMFILE", "goes on", ("", *lost)),
        Fault("training", "supervisor", "EMFILE", "interrupt", ("KeyboardInterrupt", *lost)),
        Fault("delivering", "coordinator", "EMFILE", "goes on", ("", *lost, *failed)),
        Fault("delivering", "data agent", "EMFILE", "goes on", ("", *lost)),
        Fault("idle", "agent", "EMFILE", "goes on", ("",)),
        Fault("kept", "agent", "EMFILE", "goes on", ("", *lost)),
    ]
    return stopped + killed + starved


def kernel_deaths() -> list[Fault]:
    """Return the rows that end with the kernel's death."""
    rows = (
        *itertools.product(("training",), (*HELPERS, "rank 0", "everybody")),
        *itertools.product(("starting", "ending"), ("everybody",)),
        *itertools.product(("delivering",), (*DATA_HELPERS, "everybody")),
        *itertools.product(("idle",), ("agent", "forkserver", "spare", "everybody")),
        *itertools.product(("kept",), ("agent", "forkserver", "rank 0", "everybody")),
    )
    return [Fault(state, who, "SIGSTOP", "kernel killed") for state, who in rows] + [
        Fault("training", who, how, "kernel killed")
        for how in ("SIGKILL", "EMFILE")
        for who in ("supervisor", "agent")
    ]


class Stage:
    """A notebook in which faults are tried, one after the other.

    Its kernel is another one where it has to be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = itertools.count()
        # outside the project, where all ranks may write
        self._place = self._signs = Path(f"{folder}-signs")
        self._state = ""
        self._starved: list[tuple[psutil.Process, tuple[int, int]]] = []
        self._open()

    def _open(self) -> None:
        self.notebook = Notebook(self._folder)
        self.notebook.good("%load_ext taas")
        self.notebook.good(DEFINITIONS)
        self._cell_runs = self._has_loader = False

    def close(self) -> None:
        """End the kernel, and so everything."""
        everybody = self.everybody()
        self.notebook.close()
        assert gone(everybody)

    def reach(self, state: str) -> None:
        """Run a cell until it is in a state."""
        if self._cell_runs:
            self.close()
            self._open()
        if state == "delivering" and not self._has_loader:
            self.notebook.good(LOADER)
            self._has_loader = True
        self._state = state
        self._place = self._signs / f"fault-{next(self._count)}"
        self._place.mkdir(parents=True)
        held = "\nheld = Held(place)" if state == "starting" else "\nheld = None"
        self.notebook.good(f"place = {str(self._place)!r}; got = None{held}")
        if state == "idle":
            self.notebook.good(CELLS[state])
            until(lambda: len(self.notebook.processes().spares) == 2)
            return
        if state == "kept":
            (self._place / "go").touch()
            self.notebook.good(CELLS[state])
            return
        self.notebook.start(CELLS[state])
        self._cell_runs = True
        ranks = ("0",) if state == "ending" else ("0", "1")
        until(lambda: all((self._place / f"rank-{rank}").exists() for rank in ranks))

    def find(self, who: str) -> list[psutil.Process]:
        """Return the processes with a role."""
        found = self.notebook.processes()
        pools = [one for one in found.data_processes if one.name() == "taas-pool"]
        if who == "everybody":
            return self.everybody()
        if who.startswith("rank"):
            return [psutil.Process(int((self._place / who.replace(" ", "-")).read_text()))]
        if who == "coordinator":
            return [one for one in found.others if "taas.delivery.coordinator" in one.cmdline()]
        if who == "data agent":
            return [
                agent for agent in found.agents if any(agent in pool.parents() for pool in pools)
            ]
        by_role = {
            "supervisor": found.supervisor,
            "agent": found.agents,
            "forkserver": found.forkservers,
            "spare": found.spares[:1],
            "planner": [one for one in found.data_processes if one.name() == "taas-planner"],
            "pool": pools,
            "worker": [worker for pool in pools for worker in pool.children()][:1],
        }
        return by_role[who]

    def everybody(self) -> list[psutil.Process]:
        """Return all processes of taas, and what they started."""
        found = self.notebook.processes()
        return [one for name in found.__dataclass_fields__ for one in getattr(found, name)]

    def strike(self, fault: Fault) -> None:
        """Let the fault happen."""
        struck = self.find(fault.who)
        assert struck, f"there is no {fault.who}"
        self._let_happen(fault, struck)

    def strike_if_there(self, fault: Fault) -> None:
        """Let the fault happen, unless an earlier fault has ended its victim."""
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            self._let_happen(fault, self.find(fault.who))

    def _let_happen(self, fault: Fault, struck: list[psutil.Process]) -> None:
        for one in struck:
            if fault.how == "EMFILE":
                self._starved.append((one, starve(one)))
            else:
                one.send_signal(signal.Signals[fault.how])
        if fault.how == "SIGKILL":
            until(lambda: not any(map(_alive, struck)))  # a large process takes a while to die

    def follow(self, then: str) -> Ran:
        """Interrupt the cell, or let it go to its end, or run the next one in the kept ranks.

        Returns how it ended.
        """
        if then == "release":
            self.notebook.good("%taas release")
            return Ran()
        if self._state == "kept":
            ran = self.notebook.run(CELLS["kept"])
            self.notebook.good("%taas release")
            return ran
        if then == "interrupt":
            self.notebook.interrupt()
            if not self.notebook.ends_within(5):
                self.notebook.interrupt()
        else:
            (self._place / "go").touch()
        ran = self.notebook.end() if self._cell_runs else Ran()
        self._cell_runs = False
        return ran

    def interrupt_at(self, state: str, moment: float, again: float | None) -> Ran:
        """Start a cell and interrupt it so many seconds later; and ``again`` so long after that.

        Returns how it ended.
        """
        if state == "delivering" and not self._has_loader:
            self.notebook.good(LOADER)
            self._has_loader = True
        self._state = state
        self.notebook.good("steps, total = [], 0")
        self.notebook.start(STEPPING[state])
        if not self.notebook.ends_within(moment):
            self.notebook.interrupt()
            if again is not None and not self.notebook.ends_within(again):
                self.notebook.interrupt()
        ran = self.notebook.end()
        assert self.notebook.value("len(steps) - total in (0, 1)") == "True"
        if state == "kept":
            self.notebook.good("%taas release")
        return ran

    def check(self) -> None:
        """Nothing of the run is left, and the next one runs.

        The next run is that of the next row, if this row had one.
        """
        until(lambda: not self._left())
        starved = bool(self._starved)
        for one, limits in self._starved:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(one.pid, resource.RLIMIT_NOFILE, limits)
        self._starved.clear()
        if starved or self._state in ("idle", "kept"):
            self.check_next()

    def check_next(self) -> None:
        """Another run ends well."""
        ran = self.notebook.good("#pragma taas --gpus 2\nprint('world', os.environ['WORLD_SIZE'])")
        assert "world 2\n" in ran.own

    def _left(self) -> list[psutil.Process]:
        found = self.notebook.processes()
        return found.ranks + found.data_processes + found.others


def starve(process: psutil.Process) -> tuple[int, int]:
    """Let a process open nothing more than it has open; returns its limits until then."""
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    open_ones = {int(entry.name) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
    first_free = next(number for number in itertools.count() if number not in open_ones)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (first_free, limits[1]))
    return limits


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

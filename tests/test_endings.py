"""However a run ends, what was trained is not lost.

Rank 0's names come back as they stood (contract, section 4).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook, Ran, gone, terminal, until

from taas.errors import EngineError
from taas.protocol.clients import RunRequest, Stacks
from taas.runs.records import read_records
from taas.supervisor.connections import Visit, connection_of

pytestmark = pytest.mark.slow

GROUP = """\
import time, torch, torch.distributed as dist
dist.init_process_group('gloo')
rank = dist.get_rank()
"""
STOOD = "rank 0's names came back as they stood"


READY = """
import os, pathlib, time
def ready():
    "Say that all ranks have come here."
    places = pathlib.Path(ready_at)
    (places / os.environ["RANK"]).touch()
    if os.environ["RANK"] == "0":
        while len(list(places.iterdir())) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        print("ready", flush=True)

def after_rank_0():
    "Wait until rank 0 is at its last line, and most probably in it: no sign tells that."
    while not pathlib.Path(ready_at, "0").exists():
        time.sleep(0.01)
    time.sleep(0.3)
"""
COMES = "pathlib.Path(ready_at, '0').touch()"
"""Rank 0 says that it is at its last line."""


@pytest.fixture(autouse=True)
def no_rank_is_left(notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After each ending no rank is left.

    That a run in the same notebook succeeds shows the next test.
    """
    places = tmp_path_factory.mktemp("ready")
    notebook.good(f"{READY}\nready_at = {str(places)!r}")
    yield
    assert not notebook.processes().ranks


@pytest.fixture(autouse=True, scope="module")
def next_cell_runs(notebook: Notebook) -> Iterator[None]:
    """So does one after them all."""
    yield
    assert (
        notebook.good("#pragma taas --gpus 2\nimport os\nprint(os.environ['WORLD_SIZE'])").own
        == "2\n"
    )


def interrupted(notebook: Notebook, body: str) -> Ran:
    """Run a cell, and press interrupt once it has printed "ready"."""
    notebook.start(f"#pragma taas --gpus 2\n{body}")
    notebook.wait_for("ready")
    notebook.interrupt()
    return notebook.end()


# ---------------------------------------------------------------- patience


def test_a_handled_interrupt_ends_well_however_long_it_takes(notebook: Notebook) -> None:
    """A checkpoint that takes 4 s is whole, the cell succeeds, and all names come back."""
    ran = interrupted(
        notebook,
        block("""
            import os, time
            steps = 0
            try:
                ready()
                while True: steps += 1; time.sleep(0.01)
            except KeyboardInterrupt:
                if os.environ['RANK'] == '0':
                    with open('checkpoint', 'wb') as file:
                        for _ in range(40):
                            file.write(bytes(100_000)); file.flush(); time.sleep(0.1)
                saved = True
        """),
    )
    assert ran.status == "ok", ran.evalue
    assert (notebook.folder / "checkpoint").stat().st_size == 4_000_000
    assert notebook.value("saved, steps > 0") == "True True"
    lines = [update["data"]["text/plain"] for update in ran.updates]
    assert any(
        "interrupted: the cell is finishing; press again to end it" in line for line in lines
    )


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_an_interrupt_waits_for_c_code_that_takes_its_time(
    notebook: Notebook, library: str
) -> None:
    """The line says what it is in; ``except`` runs, and groups are whole.

    Also of code that holds the GIL.
    """
    with (notebook.folder / "spin").open("w+b") as file:
        file.truncate(4)
        lock = ctypes.byref(ctypes.c_int.from_buffer(mmap.mmap(file.fileno(), 4)))
    ctypes.CDLL(None).pthread_spin_init(lock, 1)  # shared with rank 0, which then spins on it in C
    notebook.start(
        f"#pragma taas --gpus 2\n{GROUP}import ctypes, mmap\nstages = []\n"
        "try:\n    if rank: ready(); time.sleep(600)\n    with open('spin', 'r+b') as file:\n"
        "        lock = ctypes.byref(ctypes.c_int.from_buffer(mmap.mmap(file.fileno(), 4)))\n"
        f"    ctypes.{library}(None).pthread_spin_lock(lock)\n    ready()\n"
        f"    ctypes.{library}(None).pthread_spin_lock(lock)\n"
        "except KeyboardInterrupt:\n    dist.barrier()\n    stages.append('saved')\n"
        "if not rank: del lock"
    )
    try:
        notebook.wait_for("ready")
        ranks = notebook.processes().ranks
        begun = [rank.cpu_times().user for rank in ranks]
        until(lambda: any(r.cpu_times().user > b + 0.2 for r, b in zip(ranks, begun, strict=True)))
        notebook.interrupt()
        notebook.wait_for_line(
            f"press again to end it (rank 0: cell line 13: ctypes.{library}(None).pthread_spin"
        )
    finally:
        ctypes.CDLL(None).pthread_spin_unlock(lock)
    ran = notebook.end()
    assert ran.status == "ok", ran.evalue
    assert notebook.value("stages") == "['saved']"


def _wait_for_stacks(visit: Visit, run: str, place: str) -> None:
    """Ask until rank 0 is said to be at a place.

    On a busy machine, supervisor or rank may not answer within the time that they are given.
    """

    def is_there() -> bool:
        with contextlib.suppress(EngineError):
            return place in str(visit.ask(RunRequest(run=run, what="stacks"), Stacks).places[0])
        return False

    until(is_there)


def test_questions_to_a_rank_that_holds_the_gil_do_not_cut_it_off(notebook: Notebook) -> None:
    """A run that is finishing for minutes is looked at again and again.

    Here at once, more often than a socket holds.
    """
    with (notebook.folder / "spin").open("w+b") as file:
        file.truncate(4)
        lock = ctypes.byref(ctypes.c_int.from_buffer(mmap.mmap(file.fileno(), 4)))
    ctypes.CDLL(None).pthread_spin_init(lock, 1)
    ctypes.CDLL(None).pthread_spin_lock(lock)
    notebook.start(
        block("""
            #pragma taas --gpus 1 --name deaf
            import ctypes, mmap
            stages = []
            ready()
            with open('spin', 'r+b') as file:
                lock = ctypes.byref(ctypes.c_int.from_buffer(mmap.mmap(file.fileno(), 4)))
            try:
                ctypes.PyDLL(None).pthread_spin_lock(lock)
                while True: pass
            except KeyboardInterrupt:
                stages.append('saved')
            del lock
        """)
    )
    try:
        notebook.wait_for("ready")
        notebook.interrupt()
        notebook.wait_for_line("press again to end it (rank 0: cell line 8", 30)
        [run] = [record for record in read_records() if record.name == "deaf" and record.live]
        with Visit(connection_of(run)) as visit:
            for _ in range(500):
                visit.say(RunRequest(run="deaf", what="stacks"))
            _wait_for_stacks(visit, "deaf", "pthread_spin_lock")
    finally:
        ctypes.CDLL(None).pthread_spin_unlock(lock)
    ran = notebook.end()
    assert ran.status == "ok", ran.evalue
    assert notebook.value("stages") == "['saved']"


def test_an_unhandled_interrupt_brings_the_model_as_it_stood(notebook: Notebook) -> None:
    """In the middle of training with DDP.

    The notebook's own model has the trained weights, history its entries.
    """
    notebook.good(
        block("""
            import torch
            model = torch.nn.Linear(4, 1)
            before = model.weight.detach().clone()
            history = []
            own = model
        """)
    )
    ran = interrupted(
        notebook,
        GROUP + "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "net = DDP(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "while True:\n"
        "    loss = net(torch.ones(8, 4)).square().mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    history.append(loss.item())\n"
        "    if len(history) == 20: ready()\n",
    )
    assert ran.ename == "KeyboardInterrupt"
    assert STOOD in ran.evalue
    assert (
        notebook.value("len(history) >= 20, own is model, bool((model.weight != before).any())")
        == "True True True"
    )


def test_a_handler_of_the_cells_own_is_asked(notebook: Notebook) -> None:
    """``signal.signal(SIGINT, …)`` works as in a script.

    The loop ends when it has seen the flag.
    """
    ran = interrupted(
        notebook,
        block("""
            import signal, time
            stopped = []
            before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
            ready()
            while not stopped: time.sleep(0.05)
            after = 'saved'
        """),
    )
    assert ran.status == "ok", ran.evalue
    assert notebook.value("after, stopped") == "saved [2]"


AWAITED = {
    "a timer": "await asyncio.sleep(600)",
    "tasks": "await asyncio.gather(asyncio.sleep(600), asyncio.sleep(700))",
    "a thread": "await asyncio.to_thread(released.wait)",
    "a context manager that awaits at its end": "async with Managed(): await asyncio.sleep(600)",
    "an iterator": "async for _ in ticks(): pass",
}
"""What the top-level code of a cell may be in, each without an end."""
AWAITS = """
import asyncio, threading
released, order = threading.Event(), []
class Managed:
    async def __aenter__(self): pass
    async def __aexit__(self, *error):
        await asyncio.sleep(0.01)
        order.append("left")
async def ticks():
    while True:
        await asyncio.sleep(0.01)
        yield
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "asyncio.CancelledError"])
@pytest.mark.parametrize("what", AWAITED)
def test_an_interrupt_of_a_cell_that_awaits(notebook: Notebook, what: str, error: str) -> None:
    """Its ``except`` and ``finally`` run, and may await; if they handle it, the cell ends well."""
    ran = interrupted(
        notebook,
        f"{AWAITS}\ntry:\n    ready()\n    {AWAITED[what]}\nexcept {error}:\n"
        "    await asyncio.sleep(0.01)\n    order.append('except')\n"
        "finally:\n    await asyncio.sleep(0.01)\n    order.append('finally')\n    released.set()",
    )
    assert ran.status == "ok", ran.evalue
    assert notebook.value("order[-2:]") == "['except', 'finally']"
    assert notebook.value("'left' in order") == str(what.startswith("a context manager"))


RUNS = {
    "os.system": "os.system(program)",
    "os.system in a thread": (
        "threading.Thread(target=os.system, args=[program]).start()\n"
        "    while True: time.sleep(0.01)"
    ),
    "system(3) of C code": "ctypes.CDLL(None).system(program.encode())",
    "subprocess.run": "subprocess.run(program, shell=True)",
    "a program that is waited for": "subprocess.Popen(['sh', '-c', program]).wait()",
    "!": "get_ipython().system(program)",
    "%%bash": "get_ipython().run_cell_magic('bash', '', program)",
}
"""What runs another program, and waits for it."""
SWALLOWED = ("!",)
"""IPython ends its program at an interrupt, and the cell goes on, as in a notebook's kernel."""


@pytest.mark.parametrize("what", RUNS)
def test_one_press_ends_a_program_that_the_cell_runs(
    notebook: Notebook, tmp_path: Path, what: str
) -> None:
    """It gets the signal as in a terminal, and the cell a KeyboardInterrupt; ``finally`` runs."""
    notebook.good(
        block(f"""
            program = 'touch {tmp_path}/$RANK; exec sleep 600'
            order = []
            import ctypes, os, subprocess, threading, time
        """)
    )
    notebook.start(
        f"#pragma taas --gpus 2\ntry:\n    {RUNS[what]}\nfinally:\n    order.append('finally')"
    )
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    notebook.interrupt()
    ran = notebook.end()
    assert ran.ename == ("" if what in SWALLOWED else "KeyboardInterrupt")
    assert notebook.value("order") == "['finally']"


def test_a_program_that_handles_an_interrupt_comes_to_its_end(
    notebook: Notebook, tmp_path: Path
) -> None:
    """And a DataLoader's workers, which end at one, go on for ``except``."""
    notebook.good(
        f"program = '''trap 'touch {tmp_path}/cleaned-$RANK; exit 0' INT\n"
        f"touch {tmp_path}/$RANK\nwhile true; do sleep 0.05; done'''\n"
        "import os, torch\nfrom torch.utils.data import DataLoader\nseen = []"
    )
    notebook.start(
        block("""
            #pragma taas --gpus 2
            batches = iter(DataLoader(torch.arange(4), num_workers=1))
            next(batches)
            try:
                os.system(program)
            except KeyboardInterrupt:
                seen += [batch.item() for batch in batches]
        """)
    )
    until(lambda: {path.name for path in tmp_path.iterdir()} >= {"0", "1"})
    notebook.interrupt()
    ran = notebook.end()
    assert ran.status == "ok", ran.evalue
    assert notebook.value("seen") == "[1, 2, 3]"
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "cleaned-0", "cleaned-1"}


def test_an_interrupt_of_a_cell_that_awaits_and_does_not_handle_it(notebook: Notebook) -> None:
    """It is a KeyboardInterrupt, also where Python code runs.

    ``finally`` runs, the next such cell as well.
    """
    for waits in ("await asyncio.sleep(600)", "await asyncio.sleep(0)\n    while True: pass"):
        ran = interrupted(
            notebook,
            f"import asyncio\norder = [1]\ntry:\n    ready()\n    {waits}\n"
            "finally:\n    await asyncio.sleep(0.01)\n    order.append(2)",
        )
        assert ran.ename == "KeyboardInterrupt"
        assert STOOD in ran.evalue
        assert notebook.value("order") == "[1, 2]"
    ran = notebook.good(
        "#pragma taas --gpus 2\nimport asyncio\nprint(await asyncio.sleep(0.01, 'slept'))"
    )
    assert ran.own == "slept\n"


def test_what_fails_while_the_cell_is_finishing_is_said(notebook: Notebook) -> None:
    """The checkpoint that could not be written is not silently missing."""
    ran = interrupted(
        notebook,
        block("""
            import time
            try:
                ready()
                time.sleep(600)
            finally:
                raise OSError('no room for the checkpoint')
        """),
    )
    assert ran.ename == "KeyboardInterrupt"
    assert "raised OSError: no room for the checkpoint" in ran.evalue


def test_a_rank_that_does_not_notice_holds_nobody(notebook: Notebook) -> None:
    """Rank 1 is stuck in C; rank 0 finishes all the same."""
    ran = interrupted(
        notebook,
        block("""
            import ctypes, os, time
            if os.environ['RANK'] == '1':
                ready()
                ctypes.PyDLL(None).pause()
                ctypes.PyDLL(None).sleep(600)
            try:
                ready(); time.sleep(600)
            finally:
                time.sleep(3); finished = True
        """),
    )
    assert ran.ename == "KeyboardInterrupt"
    assert STOOD in ran.evalue
    assert notebook.value("finished") == "True"


# ---------------------------------------------------------------- waiting in C

ALONE = {
    "all_reduce": (GROUP, "dist.all_reduce(torch.ones(4))"),
    "store": (GROUP, "dist.distributed_c10d._get_default_store().wait(['never'])"),
    "DataParallel, whose group is none of torch's own": (
        (
            "import os, time, torch\n"
            "rank = int(os.environ['RANK'])\n"
            "model, x = torch.nn.DataParallel(torch.nn.Linear(2, 1).cuda()),"
            " torch.ones(4, 2).cuda()\n"
            "model(x)\n"
        ),
        "model(x)",
    ),
    "init_process_group": (
        "import os, time, torch.distributed as dist\nrank = int(os.environ['RANK'])\n",
        "dist.init_process_group('gloo')",
    ),
}
"""What rank 0 waits in while rank 1 does not come."""


@pytest.mark.parametrize("what", ALONE)
def test_an_interrupt_breaks_off_what_rank_0_waits_in(notebook: Notebook, what: str) -> None:
    """Its ``finally`` runs, and its names come back."""
    before, wait = ALONE[what]
    ran = interrupted(
        notebook,
        f"{before}import threading\n"
        "done = [1]\n"
        "if rank:\n"
        "    ready()\n"
        "    time.sleep(600)\n"
        "try:\n"
        "    threading.Timer(0.5, ready).start()"
        "  # it waits by then; if not, the interrupt finds it in Python code\n"
        f"    {wait}\n"
        "finally:\n"
        "    done.append(2)",
    )
    assert ran.ename == "KeyboardInterrupt"
    assert STOOD in ran.evalue
    assert notebook.value("done") == "[1, 2]"


OTHERS: dict[str, tuple[str, str, str, str, str]] = {
    "recv": (
        f"{GROUP}done = [1]",
        "raise ValueError('bad batch')",
        "    dist.recv(torch.ones(4), 1)\nfinally:\n    done.append(2)",
        "done",
        "[1, 2]",
    ),
    "all_reduce, and it is killed": (
        f"{GROUP}import signal\nstep = 7",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "    dist.all_reduce(torch.ones(1))\nfinally: pass",
        "step",
        "7",
    ),
    "C code": (
        "import ctypes\nkept = {'step': 3}",
        "raise ValueError('bad batch')",
        "    while True: ctypes.CDLL(None).sleep(600)\nfinally: pass",
        "kept",
        "{'step': 3}",
    ),
    "a loop that swallows interrupts and changes its names": (
        "counts = {}",
        "raise ValueError('bad batch')",
        (
            "    while True:\n"
            "        try:\n"
            "            counts[len(counts)] = object(); counts[len(counts) - 1] = 1\n"
            "        except KeyboardInterrupt: pass\n"
            "finally: pass"
        ),
        "bool(counts) and set(list(counts.values())[:-1]) <= {1}",  # the last one may be half done
        "True",
    ),
}
"""What rank 0 is in when rank 1 fails: what comes before, rank 1's end, rank 0's lines, and a name
of it afterwards.
"""


@pytest.mark.parametrize("what", OTHERS)
def test_rank_1_fails_while_rank_0_is_in(notebook: Notebook, what: str) -> None:
    """Rank 1's end is the cell's; rank 0 is freed, or packed as it stands: its names come back."""
    before, end, stays, name, value = OTHERS[what]
    ran = notebook.run(
        f"#pragma taas --gpus 2\n{before}\nimport os, pathlib\n"
        f"if os.environ['RANK'] == '1':\n    after_rank_0()\n    {end}\ntry:\n    {COMES}\n{stays}"
    )
    assert ran.ename == "CellFailed"
    said = (
        "was killed by SIGKILL: out of memory?"
        if "SIGKILL" in end
        else "raised ValueError: bad batch"
    )
    assert f"rank 1 {said}" in ran.evalue
    assert STOOD in ran.evalue
    assert notebook.value(name) == value


# ---------------------------------------------------------------- failures


def test_rank_0_fails(notebook: Notebook) -> None:
    """Changed in place and rebound, as in a notebook whose cell raised.

    Statements that did not run have done nothing.
    """
    notebook.good("rows, table = [1], {'a': 1}\nsame = rows")
    ran = notebook.run(
        block("""
            #pragma taas --gpus 2
            import os, time
            rows.append(2)
            table['b'] = 2
            made = 3
            if os.environ['RANK'] == '0': raise ValueError('late')
            time.sleep(600)
            never = 4
        """)
    )
    assert ran.ename == "CellFailed"
    assert f"All ranks were ended; {STOOD}" in ran.evalue
    assert (
        notebook.value("rows, same is rows, table, made, 'never' in globals()")
        == "[1, 2] True {'a': 1, 'b': 2} 3 False"
    )


@pytest.mark.parametrize(
    ("body", "said", "holds"),
    [
        (
            block("""
                import os, signal, time
                lost = 1
                if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
            """),
            ("no names came back: rank 0 was killed by SIGKILL",),
            "'lost' not in globals()",
        ),
        (
            "import threading\nlock = threading.Lock()\nkept = 1\nraise ValueError('mine')",
            ("raised ValueError: mine", "lock"),
            "kept == 1",
        ),
    ],
    ids=["rank 0 is killed", "a name cannot be packed"],
)
def test_what_does_not_come_is_said(
    notebook: Notebook, body: str, said: tuple[str, ...], holds: str
) -> None:
    """Nothing, where rank 0 is gone; else all others come, and the error is the cell's own."""
    ran = notebook.run(f"#pragma taas --gpus 2\n{body}")
    assert all(words in ran.evalue + ran.stdout + ran.stderr for words in said)
    assert notebook.value(holds) == "True"


def test_return_narrows_what_comes_after_an_error(notebook: Notebook) -> None:
    """``--return NAME`` and ``--return none`` hold for every ending."""
    notebook.run("#pragma taas --gpus 2 --return asked\nasked = other = 1\nraise ValueError")
    assert notebook.value("asked, 'other' in globals()") == "1 False"
    ran = notebook.run("#pragma taas --gpus 2 --return none\nnothing = 1\nraise ValueError")
    assert "no names came back, as none were asked for" in ran.evalue
    assert notebook.value("'nothing' in globals()") == "False"


# ---------------------------------------------------------------- a second press

DEAF = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stage = 'begun'
while True:
    try:
        ready(); time.sleep(600)
    except KeyboardInterrupt:
        stage = 'noticed'; print('noticed', flush=True)
"""


def test_a_second_press_ends_everything(notebook: Notebook) -> None:
    """Also ranks that swallow interrupts and ignore SIGTERM; names come as they stood."""
    notebook.start(f"#pragma taas --gpus 2\n{DEAF}")
    notebook.wait_for("ready")
    ranks = notebook.processes().ranks
    notebook.interrupt()
    notebook.wait_for("noticed")
    notebook.interrupt()
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    assert STOOD in ran.evalue
    assert gone(ranks, 0)
    assert notebook.value("stage") == "noticed"


def test_a_second_press_while_rank_0_holds_the_gil(notebook: Notebook) -> None:
    """Nobody answers: nothing comes, and the error says it."""
    notebook.start("#pragma taas --gpus 2\nimport itertools\nready()\nsum(itertools.repeat(0.5))")
    notebook.wait_for("ready")
    for rank in notebook.processes().ranks:
        begun = rank.cpu_times().user
        while rank.cpu_times().user < begun + 0.2:  # then it is in the loop
            time.sleep(0.02)
    notebook.interrupt()
    notebook.wait_for_line("press again to end it")
    notebook.interrupt()
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    assert (
        "no names came back: rank 0 was ended by SIGKILL, since its names did not come in time"
        in ran.evalue
    )


# ---------------------------------------------------------------- from elsewhere


def test_stop_is_one_press(notebook: Notebook) -> None:
    """The cell's ``finally`` runs; its error says who stopped it."""
    notebook.start(
        block("""
            #pragma taas --gpus 2 --name long
            import time
            try:
                ready()
                time.sleep(600)
            finally:
                finished = 1
        """)
    )
    notebook.wait_for("ready")
    assert "long stopped after" in terminal("stop", "long").stdout
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    assert "long was stopped from a terminal" in ran.evalue
    assert STOOD in ran.evalue
    assert notebook.value("finished") == "1"


def test_stop_now_is_two(notebook: Notebook) -> None:
    """The cell's own patience is over."""
    notebook.start(f"#pragma taas --gpus 2 --name deaf\n{DEAF}")
    notebook.wait_for("ready")
    assert "deaf stopped" in terminal("stop", "deaf", "--now").stdout
    assert notebook.end().ename == "KeyboardInterrupt"
    assert notebook.value("stage in ('begun', 'noticed')") == "True"


def test_a_background_run_that_fails_leaves_its_names(notebook: Notebook) -> None:
    """``attach`` brings them, in place, and raises."""
    notebook.good("rows = [1]\nsame = rows")
    notebook.good(
        block("""
            #pragma taas --gpus 2 --background --name bad
            rows.append(2)
            made = 3
            raise ValueError('late')
        """)
    )
    ran = notebook.run("%taas attach bad")
    assert ran.ename == "CellFailed"
    assert STOOD in ran.evalue
    assert notebook.value("rows, same is rows, made") == "[1, 2] True 3"

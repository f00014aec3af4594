"""Registered DataLoaders in taas cells.

Data workers run them, and the ranks yield the notebook's order.
"""

from __future__ import annotations

import re

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone

from taas.runs.records import read_records

pytestmark = pytest.mark.slow

SETUP = """
import taas, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
{register}
data = TensorDataset(torch.arange(40).float())
def make():
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
loader = make()
taas.register(loader);
"""
EPOCHS = """
seen = [[] for _ in range(2)]
for epoch in range(2):
    for (batch,) in loader: seen[epoch].append(batch.tolist())
"""
ONE_BY_ONE = "reference = make(); expected = [[b.tolist() for (b,) in reference] for _ in range(2)]"
HEAD = "#pragma taas --gpus 2 --cpus 1"


@pytest.fixture
def registered(notebook: Notebook) -> Notebook:
    """A notebook with one registered loader."""
    forget = "[taas.unregister(one.loader) for one in taas.dataloader_registry.list_registered()]"
    notebook.good(SETUP.format(register="import taas.dataloader_registry\n" + forget + ";"))
    return notebook


def test_each_rank_gets_its_share_in_the_notebooks_order(registered: Notebook) -> None:
    """Rank 0 yields every second batch of the loader here, and the generator moves on."""
    registered.good(HEAD + EPOCHS)
    registered.good(ONE_BY_ONE)
    assert registered.value("seen == [epoch[0::2] for epoch in expected]") == "True"
    same = "torch.equal(loader.generator.get_state(), reference.generator.get_state())"
    assert registered.value(same) == "True"
    assert registered.value("type(loader).__name__, len(loader)") == "DataLoader 20"


def test_an_iterable_dataset_with_workers_of_its_own(registered: Notebook) -> None:
    """One data worker iterates it, with as many processes as here, and leaves none."""
    registered.good(
        block("""
            import os
            from torch.utils.data import IterableDataset, get_worker_info
            class Shards(IterableDataset):
                def __iter__(self):
                    info = get_worker_info()
                    for number in range(info.id, 24, info.num_workers):
                        yield torch.tensor([number, os.getpid()])
            shards = DataLoader(Shards(), batch_size=2, num_workers=2)
            taas.register(shards);
        """)
    )
    registered.good(HEAD + "\nseen = [batch.tolist() for _ in range(2) for batch in shards]")
    registered.good(
        block("""
            expected = [batch.tolist() for batch in shards][::2]
            firsts = lambda pairs: [x for x, _ in pairs]
        """)
    )
    assert registered.value("list(map(firsts, seen)) == 2 * list(map(firsts, expected))") == "True"
    makers = eval(registered.value("{pid for batch in seen for _, pid in batch}"))
    assert gone([psutil.Process(pid) for pid in makers if psutil.pid_exists(pid)])


def test_a_loader_in_other_objects(notebook: Notebook) -> None:
    """It is the same loader, there and afterwards.

    Nothing is said of one that stays in the notebook.
    """
    notebook.good(
        block("""
            import taas, torch
            from torch.utils.data import DataLoader
            numbers = DataLoader(torch.arange(4), batch_size=2)
            taas.register(numbers); held = {'l': numbers}
        """)
    )
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2 --cpus 1
            seen = [int(b[0]) for b in numbers]; new = [numbers]; same = held['l'] is numbers
        """)
    )
    assert "did not come back" not in ran.stdout
    assert (
        notebook.value("seen, same, new[0] is numbers, held['l'] is numbers")
        == "[0] True True True"
    )


def test_units_past_a_finite_loader(registered: Notebook) -> None:
    """Units that the loops do not use harm nothing.

    A loop that they do not suffice for is told which option to change.
    """
    ran = registered.good(HEAD + " --units 60" + EPOCHS)
    assert registered.value("[len(epoch) for epoch in seen]") == "[10, 10]"
    assert "40 of 60 units" in (ran.displays + ran.updates)[-1]["data"]["text/plain"]
    ran = registered.run(HEAD + " --units 40" + EPOCHS + "for (batch,) in loader: pass")
    assert ran.ename == "CellFailed"
    assert "UnitsExhausted" in ran.traceback
    assert "--units loader=NUMBER" in ran.traceback


def test_a_loader_that_the_cell_does_not_use_is_not_run(registered: Notebook) -> None:
    """It is said; where the cell uses none, the run is refused."""
    registered.good("other = make(); taas.register(other);")
    ran = registered.good(HEAD + "\nfirst = next(iter(loader))")
    assert "other is registered, and this cell does not use it: not run" in ran.stdout
    ran = registered.run(HEAD + "\nprint('the body ran')")
    assert "UsageError" in ran.stderr
    assert "the body ran" not in ran.stdout


def test_the_live_line_and_the_environment(registered: Notebook) -> None:
    """The cell's line says how the delivery is.

    A dataset sees the notebook's environment, no GPU, and may print.
    """
    registered.good(
        block("""
            import os
            os.environ['WHERE_DATA_IS'] = 'bucket'
            class Reading(Dataset):
                def __len__(self): return 30
                def __getitem__(self, i):
                    print('reading', i)
                    gpus = os.environ.get('CUDA_VISIBLE_DEVICES', ' and GPUs')
                    return os.environ['WHERE_DATA_IS'] + gpus
            reading = DataLoader(Reading(), batch_size=3)
            taas.register(reading);
        """)
    )
    ran = registered.good(
        HEAD + " --name reader\nplaces = {place for batch in reading for place in batch}"
    )
    assert registered.value("places") == "{'bucket'}"
    last = (ran.displays + ran.updates)[-1]["data"]["text/plain"]
    assert re.search(r"10 of 10 units, \d+/s, waited \d+\.\d s", last), last
    [record] = [record for record in read_records() if record.name.startswith("reader")]
    log = (record.folder / "data.log").read_text().splitlines()
    assert {f"reading {number}" for number in range(30)} <= set(log)


def test_a_killed_worker_pool_is_replaced(registered: Notebook) -> None:
    """The only data VM of this machine is SIGKILLed: nothing is lost, doubled or reordered."""
    registered.good(
        block("""
            import time
            class Slow(Dataset):
                def __len__(self): return 200
                def __getitem__(self, i):
                    time.sleep(0.03)
                    return i
            slow = DataLoader(Slow(), batch_size=2); taas.register(slow)
        """)
    )
    registered.start(
        HEAD
        + """
import os
got = []
for batch in slow:
    got.append(batch.tolist())
    print('got', len(got), flush=True)
    while len(got) == 5 and not os.path.exists('killed'):
        time.sleep(0.01)
"""
    )
    registered.wait_for("got 5\n")
    [worker_pool] = [
        data_process
        for data_process in registered.processes().data_processes
        if data_process.name() == "taas-pool"
    ]
    workers = worker_pool.children()
    worker_pool.kill()
    (registered.folder / "killed").touch()
    ran = registered.end()
    assert ran.status == "ok", ran.traceback
    assert gone([worker_pool, *workers])
    assert "data VM 0 was lost" in ran.stdout
    assert registered.value("got == [[i, i + 1] for i in range(0, 200, 4)]") == "True"


def test_a_run_that_is_started_again_gets_its_plan_from_the_start(registered: Notebook) -> None:
    """A rank dies in its third step.

    With ``--max-restarts`` all ranks get the epoch again, in the same order.
    """
    ran = registered.good(
        HEAD
        + """ --max-restarts 1
import os, signal
seen = []
first = (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0')
for (batch,) in loader:
    seen.append(batch.tolist())
    if first and len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert "SIGKILL" in ran.stdout
    registered.good(ONE_BY_ONE)
    assert registered.value("seen == expected[0][0::2]") == "True"


RESUMING = """
import os, signal, taas, torch.distributed as dist
dist.init_process_group()
start = taas.resume()
seen = []
for epoch in range(start[loader].iteration, 3):
    for (batch,) in loader:
        seen.append(batch.tolist())
        dist.barrier()
        if start.restart == 0 and len(seen) == 14 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
iteration, step = start[loader]
dist.destroy_process_group()
"""


def test_a_run_that_resumes_goes_on_in_the_middle_of_an_epoch(registered: Notebook) -> None:
    """A rank kills itself in the fourth step of its second epoch.

    All ranks go on there, in the notebook's order.
    """
    ran = registered.good(HEAD + " --max-restarts 1" + RESUMING)
    assert "SIGKILL" in ran.stdout
    registered.good(
        block("""
            reference = make()
            expected = [[b.tolist() for (b,) in reference][0::2] for _ in range(3)]
        """)
    )
    assert registered.value("iteration, step <= 3, start.restart") == "1 True 1"
    assert registered.value("seen == expected[1][step:] + expected[2]") == "True"
    same = "torch.equal(loader.generator.get_state(), reference.generator.get_state())"
    assert registered.value(same) == "True"
    assert registered.value("taas.resume(), taas.resume()[loader]").startswith(
        "Resumed(restart=0) Position("
    )


PARTS = """
import random, numpy as np
class Shifted(Dataset):
    step = 1
    def __init__(self, transform): self.transform = transform
    def __len__(self): return 8
    def __getitem__(self, i): return self.transform(torch.tensor([i]))
def plus(x): return x + offset * Shifted.step
class Backwards:
    def __len__(self): return len(order())
    def __iter__(self): return iter(order())
def order(): return np.arange(8)[::-1].tolist()
def collate(samples): return Pair([torch.stack(samples).flatten().tolist(), scale])
class Pair(list): pass
drawn = []
def begin(worker): drawn.append(scale)
def total(samples): return [int(sum(samples)), scale + sum(drawn)]
offset, scale = 100, 2.0
taas.unregister(loader)
"""
BOUND_BY_THE_CELL = {
    "an import, and what a method reads": (
        "loader = DataLoader(Shifted(lambda x: x * int(scale)), batch_size=2)",
        "import torch\nscale = 3.0",
        "[tensor([[0],[2]]),tensor([[8],[10]])]",
        "data workers have scale as the notebook has it now",
    ),
    "functions that a transform and a collate function use": (
        "loader = DataLoader(Shifted(plus), batch_size=2, collate_fn=collate)",
        block("""
            def plus(x): return None
            class Pair(list): of_the_cell = True
            offset = scale = 0
            import torch
        """),
        "[[[100,101],2.0],[[104,105],2.0]]",
        "data workers have Pair, offset, scale as",
    ),
    "a sampler's function, and its module": (
        "loader = DataLoader(Shifted(plus), batch_size=2, sampler=Backwards(), collate_fn=collate)",
        "import numpy as np\ndef order(): return []\nclass Shifted: pass",
        "[[[107,106],2.0],[[103,102],2.0]]",
        "data workers have Shifted, order as",
    ),
    "the target of a loop, and worker_init_fn": (
        (
            "loader = DataLoader(Shifted(lambda x: x), batch_size=2, collate_fn=total,"
            " worker_init_fn=begin, num_workers=1)"
        ),
        "for scale in (5.0,): drawn = ()",
        "[[1,4.0],[9,4.0]]",
        "data workers have drawn, scale as",
    ),
}


@pytest.mark.parametrize("case", BOUND_BY_THE_CELL)
def test_data_workers_have_what_the_cell_binds_as_the_notebook_has_it(
    registered: Notebook, case: str
) -> None:
    """Whatever the cell binds before it iterates the loader.

    A line says where that makes a difference.
    """
    make, binds, expected, said = BOUND_BY_THE_CELL[case]
    registered.good(PARTS + make + "\ntaas.register(loader)")
    ran = registered.good(f"{HEAD}\n{binds}\nseen = [batch for batch in loader]")
    assert said in ran.stdout
    assert registered.value("str(seen).replace(' ', '').replace('\\n', '')") == expected
    if "scale" in binds:
        assert registered.value("scale") in (
            "3.0",
            "0",
            "5.0",
        ), "the notebook has what the cell bound"


def test_kept_ranks_do_not_take_what_data_workers_have_for_theirs(registered: Notebook) -> None:
    """An object that only data workers got travels to kept ranks when a cell needs it."""
    registered.good(PARTS + "table = [7]\ndef pick(samples): return table[0]")
    registered.good(
        "loader = DataLoader(Shifted(plus), batch_size=2, collate_fn=pick)\ntaas.register(loader)"
    )
    registered.good("table_too = table")
    registered.good(f"{HEAD} --keep\ntable = [8]\nseen = [batch for batch in loader]")
    registered.good(f"{HEAD} --keep\nthere = table_too, table, [batch for batch in loader]")
    assert (
        registered.value("seen, there, there[0] is table_too") == "[7, 7] ([7], [8], [8, 8]) True"
    )


def test_what_only_the_cell_binds_is_told_before_it_starts(registered: Notebook) -> None:
    """Data workers have what the notebook has.

    Where it lacks a name, a line says so before the error does.
    """
    registered.good(
        block("""
            class Late(Dataset):
                def __len__(self): return 8
                def __getitem__(self, i): return json.dumps(i)
        """)
    )
    registered.good("late = DataLoader(Late()); taas.register(late);")
    ran = registered.run(f"{HEAD}\nimport json\nfor batch in late: pass")
    assert "data workers lack json, which the code of a registered loader uses" in ran.stdout
    assert "name 'json' is not defined" in ran.traceback


FAILING = """
import threading
class Broken(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return self.decode(i)
    def decode(self, i):
        try:
            return {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 6, 7: 7}[i]
        except KeyError as error:
            raise ValueError(f"cannot decode picture {i}") from error  # broken
class Lines(IterableDataset):
    def __iter__(self):
        yield 0
        raise ValueError("the file is broken")  # broken
class Torn(Exception):
    def __init__(self): self.lock = threading.Lock()
class Order:
    def __len__(self): return 8
    def __iter__(self):
        yield from range(4)
        raise ValueError("no more order")  # broken
def tear(samples):
    raise Torn()  # broken
def begin(worker): raise LookupError("no database")  # broken
"""
FAILURES = {
    "the dataset, from another error": (
        "DataLoader(Broken(), batch_size=2)",
        "ValueError: cannot decode picture 5",
        "raised while making 'bad' at indices [4, 5] in data worker",
        ["decode", "__getitem__", "decode"],
    ),
    "an iterable dataset, of which no row is whole": (
        "DataLoader(Lines(), batch_size=1)",
        "ValueError: the file is broken",
        "raised while making element 1 of 'bad'",
        ["__iter__"],
    ),
    "the collate function, by what cannot be pickled": (
        "DataLoader(range(8), batch_size=2, collate_fn=tear)",
        "DeliveryError: the registered loader's own code raised Torn",
        "raised while making 'bad' at indices",
        ["tear"],
    ),
    "the sampler": (
        "DataLoader(range(8), sampler=Order())",
        "ValueError: no more order",
        "raised by the sampler of 'bad'",
        ["__iter__"],
    ),
    "worker_init_fn": (
        "DataLoader(range(8), worker_init_fn=begin, num_workers=1)",
        "LookupError: no database",
        "raised by worker_init_fn of 'bad' in data worker",
        ["begin"],
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_error_of_a_data_worker_is_one_traceback_on_the_users_lines(
    registered: Notebook, case: str
) -> None:
    """From the cell's line into the dataset's; of taas and of torch's fetching it shows nothing."""
    loader, error, where, functions = FAILURES[case]
    registered.good(
        "from torch.utils.data import IterableDataset\n"
        f"{FAILING}\n"
        f"bad = {loader}; taas.register(bad);"
    )
    ran = registered.run(f"{HEAD}\nfor batch in bad:\n    pass")
    assert ran.ename == "CellFailed"
    assert f"{error}" in ran.traceback
    assert where in ran.traceback
    assert re.findall(r"Cell In\[\d+\], line \d+, in (\w+)", ran.traceback) == functions
    assert "----> 2 for batch in bad:" in ran.traceback
    assert re.search(r"--+> \d+ .*# broken", ran.traceback)
    assert not re.search(r"/taas/|RemoteTraceback|fetch\.py|loader\.py", ran.traceback)


def test_an_iterable_dataset_of_one_row(registered: Notebook) -> None:
    """The ranks begin when all is made that there is, though more might have been."""
    registered.good(
        block("""
            from torch.utils.data import IterableDataset
            class Few(IterableDataset):
                def __iter__(self): return iter(range(2))
            few = DataLoader(Few(), batch_size=1); taas.register(few);
        """)
    )
    registered.good(f"{HEAD}\nseen = [batch.tolist() for batch in few]")
    assert registered.value("seen") == "[[0]]"

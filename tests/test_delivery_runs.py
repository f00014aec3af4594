"""Registered DataLoaders in taas cells: data workers run them, and the ranks yield the notebook's order."""

from __future__ import annotations

import re

import psutil
import pytest
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
    forget = "[taas.unregister(one.loader) for one in taas.dataloader_registry.registered()]"
    notebook.good(SETUP.format(register="import taas.dataloader_registry\n" + forget + ";"))
    return notebook


def test_each_rank_gets_its_share_in_the_notebooks_order(registered: Notebook) -> None:
    """Rank 0 yields every second batch of what the loader yields here, and the generator is moved on."""
    registered.good(HEAD + EPOCHS)
    registered.good(ONE_BY_ONE)
    assert registered.value("seen == [epoch[0::2] for epoch in expected]") == "True"
    same = "torch.equal(loader.generator.get_state(), reference.generator.get_state())"
    assert registered.value(same) == "True"
    assert registered.value("type(loader).__name__, len(loader)") == "DataLoader 20"


def test_an_iterable_dataset_with_workers_of_its_own(registered: Notebook) -> None:
    """One data worker iterates it, with as many processes as it has in the notebook, and leaves none."""
    registered.good(
        "import os\nfrom torch.utils.data import IterableDataset, get_worker_info\n"
        "class Shards(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        info = get_worker_info()\n"
        "        for number in range(info.id, 24, info.num_workers): yield torch.tensor([number, os.getpid()])\n"
        "shards = DataLoader(Shards(), batch_size=2, num_workers=2); taas.register(shards);"
    )
    registered.good(HEAD + "\nseen = [batch.tolist() for _ in range(2) for batch in shards]")
    registered.good(
        "expected = [batch.tolist() for batch in shards][::2]; firsts = lambda pairs: [x for x, _ in pairs]"
    )
    assert registered.value("list(map(firsts, seen)) == 2 * list(map(firsts, expected))") == "True"
    makers = eval(registered.value("{pid for batch in seen for _, pid in batch}"))
    assert gone([psutil.Process(pid) for pid in makers if psutil.pid_exists(pid)])


def test_a_loader_in_other_objects(notebook: Notebook) -> None:
    """It is the same loader, there and afterwards; and nothing is said of one that stays in the notebook."""
    notebook.good(
        "import taas, torch\nfrom torch.utils.data import DataLoader\n"
        "numbers = DataLoader(torch.arange(4), batch_size=2)\ntaas.register(numbers); held = {'l': numbers}"
    )
    ran = notebook.good(
        "#pragma taas --gpus 2 --cpus 1\nseen = [int(b[0]) for b in numbers]; new = [numbers]; same = held['l'] is numbers"
    )
    assert "did not come back" not in ran.stdout
    assert notebook.value("seen, same, new[0] is numbers, held['l'] is numbers") == "[0] True True True"


def test_units_past_a_finite_loader(registered: Notebook) -> None:
    """Units that the loops do not use harm nothing; a loop that they do not suffice for is told which option to change."""
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
    """The cell's line says how the delivery is; a dataset sees the notebook's environment, no GPU, and may print."""
    registered.good(
        "import os\nos.environ['WHERE_DATA_IS'] = 'bucket'\n"
        "class Reading(Dataset):\n    def __len__(self): return 30\n"
        "    def __getitem__(self, i):\n        print('reading', i)\n"
        "        return os.environ['WHERE_DATA_IS'] + os.environ.get('CUDA_VISIBLE_DEVICES', ' and GPUs')\n"
        "reading = DataLoader(Reading(), batch_size=3); taas.register(reading);"
    )
    ran = registered.good(HEAD + " --name reader\nplaces = {place for batch in reading for place in batch}")
    assert registered.value("places") == "{'bucket'}"
    last = (ran.displays + ran.updates)[-1]["data"]["text/plain"]
    assert re.search(r"10 of 10 units, \d+/s, waited \d+\.\d s", last), last
    [record] = [record for record in read_records() if record.name.startswith("reader")]
    log = (record.folder / "data.log").read_text().splitlines()
    assert {f"reading {number}" for number in range(30)} <= set(log)


def test_a_killed_worker_pool_is_replaced(registered: Notebook) -> None:
    """The only data VM of this machine is SIGKILLed: nothing is lost, doubled or reordered."""
    registered.good(
        "import time\nclass Slow(Dataset):\n    def __len__(self): return 200\n"
        "    def __getitem__(self, i):\n        time.sleep(0.03)\n        return i\n"
        "slow = DataLoader(Slow(), batch_size=2); taas.register(slow)"
    )
    registered.start(
        HEAD
        + "\nimport os\ngot = []\nfor batch in slow:\n    got.append(batch.tolist())\n    print('got', len(got), flush=True)\n"
        "    while len(got) == 5 and not os.path.exists('killed'): time.sleep(0.01)"
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
    """A rank dies in its third step: with ``--max-restarts`` all ranks get the epoch again, in the same order."""
    ran = registered.good(
        HEAD + " --max-restarts 1\nimport os, signal\nseen = []\n"
        "first = (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0')\n"
        "for (batch,) in loader:\n    seen.append(batch.tolist())\n"
        "    if first and len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)"
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
    """A rank kills itself in the fourth step of its second epoch: all ranks go on there, in the notebook's order."""
    ran = registered.good(HEAD + " --max-restarts 1" + RESUMING)
    assert "SIGKILL" in ran.stdout
    registered.good(
        "reference = make(); expected = [[b.tolist() for (b,) in reference][0::2] for _ in range(3)]"
    )
    assert registered.value("iteration, step <= 3, start.restart") == "1 True 1"
    assert registered.value("seen == expected[1][step:] + expected[2]") == "True"
    same = "torch.equal(loader.generator.get_state(), reference.generator.get_state())"
    assert registered.value(same) == "True"
    assert registered.value("taas.resume(), taas.resume()[loader]").startswith("Resumed(restart=0) Position(")


def test_an_exception_of_the_dataset_is_raised_in_the_rank(registered: Notebook) -> None:
    """The remote traceback is in the cell."""
    registered.good(
        "class Bad(Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n        if i == 5: raise ValueError('cannot decode picture 5')\n        return i\n"
        "bad = DataLoader(Bad(), batch_size=2); taas.register(bad);"
    )
    ran = registered.run(HEAD + "\nfor batch in bad: print(batch)")
    assert ran.ename == "CellFailed"
    assert "cannot decode picture 5" in ran.traceback

"""Registered DataLoaders in taas cells: data workers run them, and the ranks yield the notebook's order."""

from __future__ import annotations

import pytest
from notebook_harness import Notebook

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


def test_units_end_the_loops(registered: Notebook) -> None:
    """``--units 24`` are 12 batches a rank: the second epoch ends early, and the cell goes on."""
    registered.good(HEAD + " --units 24" + EPOCHS)
    assert registered.value("[len(epoch) for epoch in seen]") == "[10, 2]"


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


def test_a_loader_that_the_cell_does_not_use_is_not_run(registered: Notebook) -> None:
    """It is said; where the cell uses none, the run is refused."""
    registered.good("other = make(); taas.register(other);")
    ran = registered.good(HEAD + "\nfirst = next(iter(loader))")
    assert "other is registered, and this cell does not use it: not run" in ran.stdout
    ran = registered.run(HEAD + "\nprint('the body ran')")
    assert "UsageError" in ran.stderr
    assert "the body ran" not in ran.stdout


def test_an_interrupt_ends_the_data_workers(registered: Notebook) -> None:
    """No data worker, planner or coordinator outlives the run."""
    registered.start(
        HEAD + "\nimport time\nfor batch in loader:\n    print('ready', flush=True)\n    time.sleep(600)"
    )
    registered.wait_for("ready")
    assert registered.processes().others
    registered.interrupt()
    assert registered.end().ename == "KeyboardInterrupt"
    assert not registered.processes().others

"""Sharded values come back whole or are named as lost: a name never holds only rank 0's shard."""

from __future__ import annotations

import pytest
from notebook_harness import Notebook, Ran

pytestmark = pytest.mark.slow

MODELS = """
import torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
alone, one, two = nn.Linear(2, 2), nn.Linear(4, 4), nn.Linear(4, 4)
before = {name: value.clone() for name, value in net.state_dict().items()}
"""

PROGRAM = """#pragma taas --gpus 2
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = dist.init_device_mesh("cuda", (2,))
parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(3, 4)).sum().backward()
optimizer.step()
full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
numbers = torch.arange(6.).reshape(2, 3)
sharded = distribute_tensor(numbers, mesh, [Shard(0)])
replicated = distribute_tensor(numbers, mesh, [Replicate()])
gathered = sharded.full_tensor()
distribute_module(alone, mesh)
alone(distribute_tensor(torch.ones(1, 2), mesh, [Replicate()])).to_local().sum().backward()
held = [sharded, 5]
fsdp = fully_shard(nn.Linear(4, 4), mesh=mesh)
for wrapped in (FullyShardedDataParallel(one), FullyShardedDataParallel(two, use_orig_params=True)):
    wrapped(torch.ones(2, 4)).sum().backward()
del wrapped
"""

TRAINED_HERE = """
same = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
same.load_state_dict(before)
step = torch.optim.SGD(same.parameters(), lr=0.1)
same(torch.ones(3, 4)).sum().backward()
step.step()
"""


@pytest.fixture(scope="module", name="said")
def _said(notebook: Notebook) -> str:
    """Run ``PROGRAM`` once for all tests that look at what it left; return its line of lost names.

    No test binds a name that another one looks at: each passes alone, and after any other.
    """
    notebook.good(MODELS)
    return lost(notebook.good(PROGRAM))


def lost(ran: Ran) -> str:
    """Return the line that names what did not come back."""
    lines = ran.stdout.splitlines()
    return next(line for line in lines if line.startswith("taas: did not come back"))


def test_sharded_values_are_whole_or_named(notebook: Notebook, said: str) -> None:
    """What rank 0 has all of is an ordinary tensor or parameter.

    A shard is listed with what to type.
    """
    for name in ("net", "optimizer", "sharded", "held", "fsdp", "one", "two"):
        assert f" {name}" in said, name
    assert "full_tensor()" in said
    assert "full_state_dict=True" in said
    assert notebook.value("[n for n in ('sharded', 'held', 'fsdp') if n in globals()]") == "[]"
    plain = "type(p) is nn.Parameter and p.shape == before[n].shape"
    assert notebook.value(f"all({plain} for n, p in net.named_parameters())") == "True"
    unchanged = "all(value.equal(before[n]) for n, value in net.state_dict().items())"
    assert notebook.value(unchanged) == "True"
    shapes = "[[*m(torch.ones(1, 4)).shape] for m in (net, one, two)]"
    assert notebook.value(shapes) == "[[1, 2], [1, 4], [1, 4]]"
    assert notebook.value("[m.weight.shape == (4, 4) for m in (one, two)]") == "[True, True]"
    whole = "type(replicated), replicated.equal(numbers), gathered.equal(numbers)"
    assert notebook.value(whole) == "<class 'torch.Tensor'> True True"
    parameter = "type(alone.weight) is nn.Parameter, alone.weight.grad.shape"
    assert notebook.value(parameter) == "True torch.Size([2, 2])"


@pytest.mark.usefixtures("said")
def test_a_gathered_state_dict_is_what_one_process_trains(notebook: Notebook) -> None:
    """The line that is given brings the trained model: as the same step here, without ranks."""
    notebook.good(TRAINED_HERE)
    compared = "all(torch.allclose(full[name], value) for name, value in same.state_dict().items())"
    assert notebook.value(compared) == "True"


def test_a_shard_is_named_by_what_holds_it(notebook: Notebook) -> None:
    """By its name, as the cell's last value, by its module, never by the message's first word."""
    (notebook.folder / "holder.py").write_text("kept = None\n")
    notebook.good("import torch, torch.distributed as dist, holder\nearlier = 1")
    ran = notebook.good("""#pragma taas --gpus 2
from torch.distributed.tensor import Shard, distribute_tensor
mesh = dist.init_device_mesh("cuda", (2,))
shard = distribute_tensor(torch.arange(6.), mesh, [Shard(0)])
holder.kept, earlier = shard, (1, [shard])
{"last": shard}""")
    said = lost(ran)
    names = said.removeprefix("taas: did not come back: ").partition(": rank 0 has only a shard")[0]
    assert {*names.split(", ")} == {"shard", "earlier", "the cell's last value", "holder.kept"}
    assert said.count("rank 0 has only a shard") == 1

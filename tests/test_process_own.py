"""What belongs to the process that made it is left out, named, and costs nothing else.

Both ways, and with kept ranks.
"""

from __future__ import annotations

import pytest
from blocks import block
from notebook_harness import Notebook

ENGINE = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
class Engine:
    def __init__(self):
        self.net, self.steps, self.log = nn.Linear(2, 1), 0, []
    def step(self):
        self.net.weight.data.fill_(7.0); self.steps += 1; self.log.append(self.steps)
class Net(nn.Linear):
    pass
class Infinite(DataLoader):
    pass
"""
# by what it is: what a cell puts into an attribute, in ranks, and what the line calls it
IN_RANKS = {
    "a process group": ("engine.own = dist.new_group()", "engine.own (ProcessGroup)"),
    "groups in a list, as DeepSpeed's": (
        "engine.own = [[dist.new_group()], 1]",
        "engine.own (ProcessGroup)",
    ),
    "a handle of a collective": (
        "engine.own = dist.all_reduce(torch.ones(1), async_op=True)",
        "engine.own (Work)",
    ),
    "a mesh": ("engine.own = dist.init_device_mesh('cuda', (2,))", "engine.own (DeviceMesh)"),
    "a store": ("engine.own = dist.HashStore()", "engine.own (HashStore)"),
    "a stream": ("engine.own = torch.cuda.Stream()", "engine.own (Stream)"),
    "an iterator of workers, as ultralytics'": (
        "engine.own = iter(DataLoader(range(4), num_workers=1))",
        "engine.own (_MultiProcessingDataLoaderIter)",
    ),
    "one in a model": ("engine.net.own = dist.new_group()", "engine.net.own (ProcessGroup)"),
    "one in an optimizer": (
        block("""
            engine.opt = torch.optim.SGD(engine.net.parameters(), lr=0.1)
            engine.opt.own = dist.new_group()
        """),
        "engine.opt.own (ProcessGroup)",
    ),
}


@pytest.mark.parametrize(("puts", "told"), IN_RANKS.values(), ids=IN_RANKS)
def test_what_a_rank_has_of_its_process_does_not_lose_what_was_trained(
    notebook: Notebook, puts: str, told: str
) -> None:
    """The object comes back without that attribute, which one line names.

    It works in the next cell.
    """
    notebook.good("%load_ext taas")
    notebook.good(ENGINE + "engine = Engine(); net = engine.net")
    ran = notebook.good(
        f"#pragma taas --gpus 2\ndist.init_process_group('nccl')\n{puts}\nengine.step()"
    )
    lines = [line for line in ran.stdout.splitlines() if "did not come back" in line]
    assert lines == [
        f"taas: did not come back: {told}: each process has its own; the rest came back"
    ]
    assert (
        notebook.value("engine.steps, engine.log, engine.net is net, net.weight.sum().item()")
        == "1 [1] True 14.0"
    )
    assert notebook.value("hasattr(engine, 'own') or hasattr(net, 'own')") == "False"
    again = notebook.good("#pragma taas --gpus 2\nengine.step()")
    assert "did not" not in again.stdout
    assert notebook.value("engine.steps, engine.log") == "2 [1, 2]"


IN_NOTEBOOK = {
    "an iterator of workers": "engine.own = iter(DataLoader(range(4), num_workers=1))",
    "one beside a dict whose class has items of its own": (
        "class Shy(dict):\n    def values(self): raise KeyError('shy')\n"
        "engine.shy, engine.own = Shy(a=1), [iter(DataLoader(range(4), num_workers=1))]"
    ),
    "one in a list": "engine.own = [iter(DataLoader(range(4), num_workers=1)), 1]",
    "a group of one process": block("""
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
        engine.own = dist.group.WORLD
    """),
    "one in a model": "net.own = iter(DataLoader(range(4), num_workers=1))",
    "one in a DataLoader": block("""
        engine.loader = Infinite([3, 4])
        engine.loader.own = iter(DataLoader(range(4), num_workers=1))
    """),
}


@pytest.mark.parametrize("puts", IN_NOTEBOOK.values(), ids=IN_NOTEBOOK)
def test_what_the_notebook_has_of_its_process_stays_where_it_is(
    notebook: Notebook, puts: str
) -> None:
    """The ranks do without it, which is said before the cell starts.

    The object keeps its own and gets all else.
    """
    notebook.good("%load_ext taas")
    notebook.good(ENGINE + "engine = Engine(); net = engine.net\n" + puts)
    holder = "net" if "net.own" in puts else "engine.loader" if "loader.own" in puts else "engine"
    notebook.good(f"before = {holder}.own")
    ran = notebook.good(
        f"#pragma taas --gpus 2\nhas = hasattr({holder}, 'own'); engine.step(); engine.made = [2]"
    )
    assert f"{holder}.own (" in ran.stdout
    assert "each process has its own, so the ranks do without." in ran.stdout
    assert "did not come back" not in ran.stdout
    assert (
        notebook.value(f"has, {holder}.own is before, engine.steps, engine.made")
        == "False True 1 [2]"
    )
    notebook.good("del before, engine.own" if holder == "engine" else f"del before, {holder}.own")
    if "init_process_group" in puts:
        notebook.good("dist.destroy_process_group()")


def test_kept_ranks_go_on_with_what_is_theirs(notebook: Notebook) -> None:
    """The next cell of kept ranks finds the group where it left it, and is told of it once."""
    notebook.good("%load_ext taas")
    notebook.good(ENGINE + "engine = Engine()")
    head = "#pragma taas --gpus 2 --keep\n"
    first = notebook.good(
        f"{head}dist.init_process_group('nccl'); engine.own = dist.new_group(); engine.step()"
    )
    assert "engine.own (ProcessGroup)" in first.stdout
    second = notebook.good(
        f"{head}x = torch.ones(1); dist.all_reduce(x, group=engine.own); engine.step(); total ="
        " x.item()"
    )
    assert "did not come back" not in second.stdout
    assert notebook.value("total, engine.steps") == "2.0 2"
    notebook.good("%taas release")


def test_a_name_that_is_of_its_process_is_named(notebook: Notebook) -> None:
    """Under a name of its own it does not come back, and no other name suffers.

    A hook that closes over one costs its model.
    """
    notebook.good("%load_ext taas")
    notebook.good(ENGINE + "net, other = nn.Linear(2, 1), nn.Linear(2, 1)")
    ran = notebook.good("""#pragma taas --gpus 2
dist.init_process_group("nccl")
mesh, group = dist.init_device_mesh("cuda", (2,)), dist.new_group()
net.register_forward_hook(lambda module, given, made: dist.all_reduce(made.detach(), group=group))
net.weight.data.fill_(2.0); other.weight.data.fill_(3.0)
def reduce_with(group): return lambda *_: dist.all_reduce(torch.ones(1), group=group)
other.register_forward_hook(reduce_with(group))""")
    said = next(line for line in ran.stdout.splitlines() if "did not come back" in line)
    for name in ("mesh: mesh is a", "group: group is a", "other: other"):
        assert name in said
    assert "so all of it is as it was before the cell" in said
    assert (
        notebook.value("'mesh' in globals(), 'group' in globals(), net.weight.sum().item()")
        == "False False 4.0"
    )

"""When a rank selects its GPU.

No GPU is needed: torch is not asked for one here. On real ones: test_gpu.py.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path

import pytest
from blocks import block
from fresh_interpreter import printed

from taas.agent.torchrun import rank_environ
from taas.header.options import RunSpec
from taas.notebook.reached_code import takes_first_gpu_for_its_own
from taas.protocol.framing import LOOPBACK, Memory, StoreAddress
from taas.protocol.ranks import Cell, RankOrder, Staged

RANK_1_OF_2 = """
import os, types, torch
from taas.rank import prepared
os.environ["CUDA_VISIBLE_DEVICES"] = "4,6"
order = types.SimpleNamespace(rehearsed=0, gpus=("4", "6"), local_world_size=2)
"""


def test_a_rank_leaves_cuda_alone_until_its_program_uses_it() -> None:
    """What the cell forks before that may use CUDA itself."""
    lines = printed(
        RANK_1_OF_2
        + """
device = prepared._enter_device(order, 1)
print(device, torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), flush=True)
if (child := os.fork()) == 0:
    print(torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    assert sorted(lines) == ["False", "cuda:1 False False"]


def test_the_device_is_selected_where_the_program_has_left_it_visible() -> None:
    """CUDA's first use selects the rank's own.

    A script that sets CUDA_VISIBLE_DEVICES for each rank has one, its own.
    """
    lines = printed(
        RANK_1_OF_2
        + """
prepared._enter_device(order, 1)
torch._C._cuda_setDevice = lambda number: print("selected", number)
for visible in "4,6", "6", "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.cuda.device_count = lambda: len(visible.split(","))
    torch.cuda._queued_calls[-1][0]()
"""
    )
    assert lines == ["selected 1", "selected 0"]


@pytest.mark.parametrize(("first", "visible"), [(True, "6,4"), (False, "4,6")])
def test_the_first_gpu_is_the_ranks_own_where_its_program_takes_it_for_that(
    first: bool, visible: str
) -> None:
    """Its ``cuda:0`` would be one GPU for all ranks."""
    store = StoreAddress(LOOPBACK, b"")
    cell = Cell("", 1, RunSpec(name="r", ranks_per_vm=2), "", own_gpu_first=first)
    order = RankOrder(run="r", vm="vm", cell=cell, group_rank=0, store=store, gpus=("4", "6"))
    staged = Staged(Memory(1, 1, 0), "/", "", "", {}, "/", "/", 0)
    assert rank_environ(order, staged, 1)["CUDA_VISIBLE_DEVICES"] == visible


FILES = {
    "wrapping.py": (
        "from torch import nn\ndef wrap(net):\n    return nn.DataParallel(net).to('cuda:0')\n"
    ),
    "training.py": "import wrapping as w\ndef train(net):\n    return w.wrap(net)\n",
    "package/__init__.py": "from .inner import wrap\n",
    "package/inner.py": (
        "from torch.nn import DataParallel\nwrap = lambda net: DataParallel (net)\n"
    ),
    "package/deep/__init__.py": "",
    "package/deep/uses.py": "from ..inner import wrap\n",
    "asks.py": """\
from torch import nn
def plain(net):
    return net.module if isinstance(net, nn.DataParallel) else net
""",
    "either.py": """\
def wrap(net):
    return DistributedDataParallel(net) if LOCAL_RANK else DataParallel(net)
""",
    "circle.py": "import circle, wrapping\n",
    "plain.py": "import torch\n",
    "loaded.py": "def trained(net):\n    import wrapping\n    return wrapping.wrap(net)\n",
}


@pytest.mark.parametrize(
    ("cell", "first"),
    [
        ("model = nn.DataParallel(net).to('cuda:0')", True),
        ("DistributedDataParallel(net)", False),
        ("DataParallel(net.to(int(os.environ['LOCAL_RANK'])))", False),
        ("print(1)", False),
        ("import wrapping\nwrapping.wrap(net)", True),
        ("%time 1\nfrom training import train\ntrain(net)", True),
        ("from package import wrap", True),
        ("from package.deep import uses", True),
        ("import plain, circle", True),
        ("import plain\nimport torch", False),
        ("from asks import plain", False),
        ("from either import wrap", False),
        ("from wrapping import wrap\nfrom accelerate import Accelerator", False),
        ("import wrapping\ntorch.cuda.set_device(int(os.environ['LOCAL_RANK']))", False),
        ("of_the_notebook(net)", True),
        ("Trainer(net).fit()", True),
        ("calls(net)", True),
        ("trained(net)", True),
        ("loaded.trained(net)", True),
        ("other(net)", False),
    ],
)
def test_programs_for_data_parallel_are_known_by_all_code_that_they_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, first: bool
) -> None:
    """The wrapper may be in a project's module, or in a function or class of an earlier cell."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    earlier = block("""
        def of_the_notebook(net):
            return nn.DataParallel(net)
        class Trainer:
            def __init__(self, net):
                self.net = nn.DataParallel(net)
        def calls(net):
            return of_the_notebook(net)
        def other(net):
            return net
    """)
    linecache.cache["<an earlier cell>"] = (
        len(earlier),
        None,
        earlier.splitlines(True),
        "<an earlier cell>",
    )
    namespace = {"__name__": "__main__"}
    exec(compile(earlier, "<an earlier cell>", "exec"), namespace)
    spec = importlib.util.spec_from_file_location("loaded", tmp_path / "loaded.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded", module)
    spec.loader.exec_module(module)
    namespace |= {"trained": module.trained, "loaded": module}
    assert takes_first_gpu_for_its_own(cell, namespace, tmp_path) == first

"""When a rank selects its GPU; a GPU isn't needed: torch is not asked for one here. On real ones: test_gpu.py."""

from __future__ import annotations

import pytest
from fresh_interpreter import printed

from taas.agent.torchrun import rank_environ
from taas.header.options import RunSpec
from taas.wire.framing import LOOPBACK, Memory, StoreAddress
from taas.wire.ranks import Cell, RankOrder, Staged

RANK_1_OF_2 = """
import os, types, torch
from taas.rank import entry
os.environ["CUDA_VISIBLE_DEVICES"] = "4,6"
order = types.SimpleNamespace(rehearsed=0, gpus=("4", "6"), local_world_size=2)
"""


def test_a_rank_leaves_cuda_alone_until_its_program_uses_it() -> None:
    """What the cell forks before that may use CUDA itself."""
    lines = printed(
        RANK_1_OF_2
        + """
print(entry._enter_device(order, 1), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), flush=True)
if (child := os.fork()) == 0:
    print(torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    assert sorted(lines) == ["False", "cuda:1 False False"]


def test_the_device_is_selected_where_the_program_has_left_it_visible() -> None:
    """CUDA's first use selects the rank's own; a script that sets CUDA_VISIBLE_DEVICES for each rank has one, its own."""
    lines = printed(
        RANK_1_OF_2
        + """
entry._enter_device(order, 1)
torch._C._cuda_setDevice = lambda number: print("selected", number)
for visible in "4,6", "6", "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.cuda.device_count = lambda: len(visible.split(","))
    torch.cuda._queued_calls[-1][0]()
"""
    )
    assert lines == ["selected 1", "selected 0"]


@pytest.mark.parametrize(
    ("cell", "keep", "visible"),
    [
        ("model = nn.DataParallel(net).to('cuda:0')", False, "6,4"),
        ("model = nn.DataParallel(net).to('cuda:0')", True, "4,6"),
        ("DistributedDataParallel(net)", False, "4,6"),
        ("DataParallel(net.to(int(os.environ['LOCAL_RANK'])))", False, "4,6"),
        ("print(1)", False, "4,6"),
    ],
)
def test_the_first_gpu_is_the_ranks_own_in_a_cell_for_data_parallel(
    cell: str, keep: bool, visible: str
) -> None:
    """Its ``cuda:0`` would be one GPU for all ranks; a cell that knows ranks numbers GPUs by them, and kept ranks go on so."""
    store = StoreAddress(LOOPBACK, b"")
    order = RankOrder(
        run="r", vm="vm", cell=Cell(cell, 1, RunSpec(name="r", ranks_per_vm=2, keep=keep), ""),
        group_rank=0, store=store, gpus=("4", "6"),
    )  # fmt: skip
    staged = Staged(Memory(1, 1, 0), "/", "", "", {}, "/", "/", 0)
    assert rank_environ(order, staged, 1)["CUDA_VISIBLE_DEVICES"] == visible

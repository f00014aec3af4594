"""When a rank selects its GPU; a GPU isn't needed: torch is not asked for one here. On real ones: test_gpu.py."""

from __future__ import annotations

from fresh_interpreter import printed

RANK_1_OF_2 = """
import os, types, torch
from taas.rank import preparing
order = types.SimpleNamespace(rehearsed=0, gpus=("0", "1"), local_world_size=2)
print(preparing._enter_device(order, 1), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), flush=True)
"""


def test_a_rank_leaves_cuda_alone_until_its_program_uses_it() -> None:
    """What the cell forks before that may use CUDA itself."""
    lines = printed(
        RANK_1_OF_2
        + """
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
torch._C._cuda_setDevice = lambda number: print("selected", number)
for torch.cuda.device_count in (lambda: 2), (lambda: 1):
    torch.cuda._queued_calls[-1][0]()
"""
    )
    assert lines == ["cuda:1 False False", "selected 1"]

"""A rank above 0 leaves GPU 0 alone, in all of its threads; torch's own calls are accounted for, no GPU is needed.

Each context that CUDA makes takes half a GB of the GPU it is on.
"""

from __future__ import annotations

import pytest
from accounting_cuda import STICK, Call, accounts_of, contexts, needs_it

pytestmark = needs_it

RANK_1_OF_2 = (
    STICK
    + """
import os, types, torch
from torch.utils.data import DataLoader, _utils
from taas import adopt
from taas.rank import entry
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
order = types.SimpleNamespace(rehearsed=0, gpus=("0", "1", "2", "3"), local_world_size=4)
print(entry._enter_device(order, 1), torch.cuda.is_initialized())
class ProcessGroupNCCL:
    def abort(self):
        torch.cuda.current_stream().synchronize()
"""
)
USED = "x = torch.empty(4, device='cuda')\n"

PROGRAMS = {
    "its first tensor": USED,
    "pinned memory, at first": "torch.empty(8).pin_memory()",
    "a DataLoader that pins, at first": "list(DataLoader([1.0] * 4, pin_memory=True))",
    "a DataLoader whose workers make what it pins": "list(DataLoader([1.0] * 4, pin_memory=True, num_workers=1))",
    "an element of a registered loader, pinned": "_utils.pin_memory.pin_memory({'x': [torch.empty(2)]})",
    "a look whether it is busy": f"{USED}assert in_a_thread(adopt.waits.gpu_is_busy) == [False]",
    "an abort": f"{USED}adopt.waits.abort_nccl([ProcessGroupNCCL()])",
    "names that another thread packs": (
        f"{USED}def pack():\n"
        "    with adopt.waits.beside_gpu_work():\n"
        "        torch.cuda.get_rng_state()\n"
        "        return x.cpu().shape, torch.cuda.current_device()\n"
        "assert in_a_thread(pack) == [((4,), 1)]"
    ),
    "nothing": "",
}


ALONE = RANK_1_OF_2.replace("local_world_size=4", "local_world_size=1").replace("order, 1", "order, 0")
OTHERS = {
    "selects nothing": f"{RANK_1_OF_2}{USED}in_a_thread(lambda: torch.cuda.default_stream().query())",
    "busy": f"""{RANK_1_OF_2}{USED}
for stuck in 0, 1, 2:
    account.account_stick(stuck, 1)
    print(stuck, in_a_thread(adopt.waits.gpu_is_busy))
    account.account_stick(stuck, 0)
y = torch.empty(4, device="cuda:2")
account.account_stick(2, 1)
print(2, in_a_thread(adopt.waits.gpu_is_busy), torch.cuda.current_device())
account.account_stick(2, 0)
""",
    "packs": f"""{RANK_1_OF_2}{USED}
y = torch.empty(4, device="cuda:2")
account.account_stick(1, 1)
account.account_stick(2, 1)
def pack():
    with adopt.waits.beside_gpu_work():
        return [x.cpu().numel(), y.cpu().numel()]
print(in_a_thread(pack))
account.account_stick(1, 0)
account.account_stick(2, 0)
""",
    "alone": f"""{ALONE}
x = torch.empty(4, device='cuda:3')
print(in_a_thread(adopt.waits.gpu_is_busy), torch.cuda.current_device())
""",
}
Accounts = dict[str, tuple[list[str], list[Call]]]


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Accounts:
    """What each program printed, and did with CUDA."""
    programs = {**{name: RANK_1_OF_2 + program for name, program in PROGRAMS.items()}, **OTHERS}
    imports = "torch, taas.rank.entry"
    return accounts_of(programs, tmp_path_factory.mktemp("accounts"), imports=imports)


@pytest.mark.parametrize("name", PROGRAMS)
def test_contexts_are_on_the_ranks_own_gpu(accounts: Accounts, name: str) -> None:
    """Also where C++ uses CUDA first, and where a thread does that has selected no device."""
    lines, calls = accounts[name]
    assert lines == ["cuda:1 False"]
    assert contexts(calls) == ([1] if PROGRAMS[name] else [])


def test_the_account_shows_what_a_thread_does_that_selects_nothing(accounts: Accounts) -> None:
    """It asks GPU 0, whose answer says nothing about the rank's own, and makes a context there."""
    assert contexts(accounts["selects nothing"][1]) == [1, 0]


def test_a_gpu_is_busy_where_the_program_uses_it(accounts: Accounts) -> None:
    """What another rank's GPU does is no answer; all GPUs are asked that the program has contexts on."""
    lines, calls = accounts["busy"]
    assert lines[1:] == ["0 [False]", "1 [True]", "2 [False]", "2 [True] 1"]
    assert contexts(calls) == [1, 2]


def test_names_are_packed_beside_streams_that_never_end(accounts: Accounts) -> None:
    """Copies from each GPU that the program uses go by streams of the packing thread's own."""
    lines, calls = accounts["packs"]
    assert lines[1:] == ["[[4, 4]]"]
    assert contexts(calls) == [1, 2]
    assert "wait-for-default" not in {call.what for call in calls}


def test_one_process_with_all_gpus_selects_none(accounts: Accounts) -> None:
    """A cell of one rank begins with GPU 0, as a plain one; threads of taas are where it has a context."""
    lines, calls = accounts["alone"]
    assert lines == ["cuda False", "[False] 0"]
    assert contexts(calls) == [3]

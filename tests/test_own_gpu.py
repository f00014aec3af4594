"""A rank above 0 leaves GPU 0 alone, in all of its threads.

torch's own calls are accounted for, no GPU is needed.

Each context that CUDA makes takes half a GB of the GPU it is on.
"""

from __future__ import annotations

import pytest
from accounting_cuda import STICK, Call, accounts_of, contexts, needs_it

pytestmark = [needs_it, pytest.mark.slow]

RANK_1_OF_2 = (
    STICK
    + """
import os, types, torch
from torch.utils.data import DataLoader, _utils
from taas import adopt
from taas.rank import prepared
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
order = types.SimpleNamespace(rehearsed=0, gpus=("0", "1", "2", "3"), local_world_size=4)
print(prepared._enter_device(order, 1), torch.cuda.is_initialized())
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
    "a DataLoader whose workers make what it pins": (
        "list(DataLoader([1.0] * 4, pin_memory=True, num_workers=1))"
    ),
    "an element of a registered loader, pinned": (
        "_utils.pin_memory.pin_memory({'x': [torch.empty(2)]})"
    ),
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


ALONE = RANK_1_OF_2.replace("local_world_size=4", "local_world_size=1").replace(
    "order, 1", "order, 0"
)
OTHERS = {
    "selects nothing": (
        f"{RANK_1_OF_2}{USED}in_a_thread(lambda: torch.cuda.default_stream().query())"
    ),
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
OTHERS |= {
    "kept": f"""{RANK_1_OF_2}{USED}
unused = torch.empty(1 << 28, device="cuda")
held = torch.empty(1 << 26, device="cuda:2")
del unused
before = torch.cuda.memory_reserved()
left = adopt.own_gpu.give_back_unused() - torch.cuda.memory_reserved(2)
print(before >= 1 << 30, left, torch.cuda.memory_reserved())
""",
    "kept, and CUDA not used": f"{RANK_1_OF_2}print(adopt.own_gpu.give_back_unused())",
    "the kernel's memory": """
import torch
from taas.notebook.kernel_memory import kernel_memory_lines
from taas.protocol.clients import Gpu
gpus = [Gpu("5", "bus a"), Gpu("GPU-x", "bus b"), Gpu("6", "bus c")]
print(kernel_memory_lines(gpus, ["bus a", "bus b", "bus c"]))
torch.cuda.init()
much = [torch.empty(3 << 28, device=f"cuda:{number}") for number in (0, 2)]
little = torch.empty(1 << 20, device="cuda:1")
for of_run in ["bus a", "bus b"], ["bus b"], ["bus c"], []:
    print([line.partition(",")[0] for line in kernel_memory_lines(gpus, of_run)])
""",
}
Accounts = dict[str, tuple[list[str], list[Call]]]


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Accounts:
    """What each program printed, and did with CUDA."""
    programs = {**{name: RANK_1_OF_2 + program for name, program in PROGRAMS.items()}, **OTHERS}
    imports = "torch, taas.rank.prepared"
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
    """What another rank's GPU does is no answer.

    All GPUs are asked that the program has contexts on.
    """
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
    """A cell of one rank begins with GPU 0, as a plain one.

    Threads of taas are where it has a context.
    """
    lines, calls = accounts["alone"]
    assert lines == ["cuda False", "[False] 0"]
    assert contexts(calls) == [3]


def test_kept_ranks_give_back_what_no_tensor_has(accounts: Accounts) -> None:
    """What is said of them while they wait is what they themselves hold, of all their GPUs."""
    lines, calls = accounts["kept"]
    small = 2 << 20
    assert lines[1:] == [f"True {small} {small}"]
    assert [call.device for call in calls if call.what == "free"] == [1]
    lines, calls = accounts["kept, and CUDA not used"]
    assert lines[1:] == ["0"]
    assert contexts(calls) == []


def test_the_kernels_memory_on_gpus_of_a_run_is_said(accounts: Accounts) -> None:
    """Where it is more than 1 GB, on those of the run alone.

    A kernel that has not used CUDA is asked nothing.
    """
    lines, calls = accounts["the kernel's memory"]
    said = "this notebook's kernel holds 3.2 GB of cuda:{}"
    assert lines == ["[]", str([said.format(0)]), "[]", str([said.format(2)]), "[]"]
    assert contexts(calls) == [0, 2, 1]

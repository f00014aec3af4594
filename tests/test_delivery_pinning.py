"""Elements of registered loaders are pinned while the one before is used.

torch's own calls are accounted for, no GPU is needed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from accounting_cuda import Call, accounts_of, contexts, needs_it

pytestmark = [needs_it, pytest.mark.slow]

# the elements: a number, of another size each; what pinning copies, and an array, which it leaves
# alone
BEGIN = """
import sys, threading, time
sys.path.insert(0, {tests!r})
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
from delivery_run import DeliveryRun
from taas.adopt import own_gpu
from taas.delivery import loader as rank_side
class Numbers(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == FAILS:
            raise ValueError("not this one")
        size = 1 << (10 + index)
        return torch.full((size,), float(index)), np.full(size, index), index
FAILS = -1
def loader():
    return DataLoader(Numbers(), batch_size=None, collate_fn=lambda item: item, pin_memory=True)
def wait_for(iterator):  # until the next element is here, so that it is pinned ahead
    connection = rank_side._connection
    while iterator._step < 12 and connection.peek(iterator._plan, iterator._step) is None:
        with connection._lock:
            connection._flush()  # as before each wait: else nobody knows what was taken
            connection._wait()
def begin():
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    own_gpu.install("1")
"""
PROGRAMS = {
    "all": """
def body(rank, loaders):
    begin()
    got, before = [], None
    iterator = iter(loaders["d"])
    wait_for(iterator)
    # taken twice, so that the next one is here when this one is yielded
    for tensor, array, index in iterator:
        wait_for(iterator)
        iterator._pin_next()
        whole = set(tensor.tolist()) == {float(index)}, set(array.tolist()) == {index}
        got.append((tensor.is_pinned(), *whole))
        before = tensor, array, index
        assert set(before[1].tolist()) == {index}
    return got, threading.get_native_id()
with DeliveryRun({"d": loader()}, processes=2, slab=32 << 20) as run:
    [(got, main)] = run.ranks(body)
print((got, main))
""",
    "a small slab": """
def body(rank, loaders):
    begin()
    got, kept = [], []
    for tensor, array, index in loaders["d"]:
        kept.append((tensor, array, index))
        got.append(index)
        iterator = None
    return got, all(set(t.tolist()) == {float(i)} and set(a.tolist()) == {i} for t, a, i in kept)
with DeliveryRun({"d": loader()}, processes=2, slab=128 << 10) as run:
    [got] = run.ranks(body)
print(got)
""",
    "a loop that is left": """
def body(rank, loaders):
    begin()
    got = []
    for turn in range(3):
        iterator = iter(loaders["d"])
        for tensor, array, index in iterator:
            wait_for(iterator)
            iterator._pin_next()
            if index == 5:
                break
            got.append(index)
        del iterator
    return got, [thread.name for thread in threading.enumerate() if thread.name == "taas-pins"][1:]
with DeliveryRun({"d": loader()}, processes=2, slab=32 << 20) as run:
    [got] = run.ranks(body)
print(got)
""",
    "one that fails": """
FAILS = 4
def body(rank, loaders):
    begin()
    got, iterator = [], iter(loaders["d"])
    try:
        for tensor, array, index in iterator:
            got.append(index)
            wait_for(iterator)
            iterator._pin_next()
    except ValueError as error:
        got.append(str(error).partition("\\n")[0])
    return got
with DeliveryRun({"d": loader()}, processes=2, slab=32 << 20) as run:
    [got] = run.ranks(body)
print(got)
""",
}
Accounts = dict[str, tuple[list[str], list[Call]]]


@pytest.fixture(scope="module")
def accounts(tmp_path_factory: pytest.TempPathFactory) -> Accounts:
    """What each program printed, and did with CUDA."""
    begin = BEGIN.replace("{tests!r}", repr(str(Path(__file__).parent)))
    programs = {name: begin + program for name, program in PROGRAMS.items()}
    return accounts_of(programs, tmp_path_factory.mktemp("pinning"), imports="torch, taas.capture")


def test_a_thread_pins_the_next_element(accounts: Accounts) -> None:
    """Each is pinned, on the rank's own GPU, and right; so is an array, which is not pinned."""
    lines, calls = accounts["all"]
    got, main = ast.literal_eval(lines[0])
    assert got == [(True, True, True)] * 12
    assert contexts(calls) == [1]
    assert {call.device for call in calls if call.what == "pin"} == {1}
    pinned = [call.thread == main for call in calls if call.what == "pin"]
    assert pinned[0]  # the first one, as CUDA is the program's to use first
    assert pinned.count(False) >= 5


def test_a_rank_that_hoards_gets_its_elements(accounts: Accounts) -> None:
    """Memory that is held ahead is counted and given back.

    Nothing stands still, nothing is written over.
    """
    assert ast.literal_eval(accounts["a small slab"][0][0]) == ([*range(12)], True)


def test_a_loop_that_is_left_leaves_no_thread(accounts: Accounts) -> None:
    """What was pinned ahead is dropped, and the next loop begins at its own first element."""
    assert ast.literal_eval(accounts["a loop that is left"][0][0]) == ([0, 1, 2, 3, 4] * 3, [])


def test_what_a_data_worker_raises_comes_at_its_step(accounts: Accounts) -> None:
    """The elements before it are yielded."""
    got = ast.literal_eval(accounts["one that fails"][0][0])
    assert got[:4] == [0, 1, 2, 3]
    assert "not this one" in got[4]

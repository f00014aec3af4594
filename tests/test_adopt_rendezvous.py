"""Whatever meeting point a program brings, the run's own holds."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks_harness import launch, run_ranks
from torch.utils.data import DistributedSampler

from taas.protocol.framing import LOOPBACK

SEVERAL_MACHINES = "127.0.0.2"  # any address but loopback's first: their store is a TCPStore
pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]


def _sum_of_ranks() -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def _init_and_sum(**how):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **how)
    result = _sum_of_ranks()
    dist.destroy_process_group()
    return result


def _by_environment():
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    return _init_and_sum()


def _by_url(url):
    return _init_and_sum(
        init_method=url, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )


def _three_times():
    return [_by_environment(), _by_url("tcp://127.0.0.1:12355"), _by_environment()]


def _alone():
    return _init_and_sum(init_method="tcp://127.0.0.1:29500", rank=0, world_size=1)


def _too_many():
    _init_and_sum(rank=int(os.environ["RANK"]), world_size=4)


def _same_rank_twice():
    _init_and_sum(rank=0, world_size=2)


def _one_machine_program():
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method="tcp://localhost:23456", rank=local, world_size=here
    )
    sampler = DistributedSampler(range(8), num_replicas=here, rank=local, shuffle=False)
    return *_sum_of_ranks(), list(sampler)


def test_urls_lead_to_the_run(tmp_path):
    """``init_method`` as a file, with rank and world size, meets at the run's store."""
    assert run_ranks(_by_url, 2, f"file://{tmp_path}/meet") == [(0, 2, 3.0), (1, 2, 3.0)]
    assert not (tmp_path / "meet").exists()


@pytest.mark.parametrize("host", [LOOPBACK, SEVERAL_MACHINES])
def test_group_is_made_again_after_destroy(host):
    """Three groups, one after another, on the program's port, on one machine and on several."""
    assert run_ranks(_three_times, 2, host=host) == [[(0, 2, 3.0)] * 3, [(1, 2, 3.0)] * 3]


def test_two_runs_at_once_do_not_meet():
    """Two runs of the same program with the same port, side by side."""
    results: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda w=w: results.update({w: run_ranks(_three_times, w)}))
        for w in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(2, 3.0)} == {one[1:] for rank in results[2] for one in rank}
    assert {(3, 6.0)} == {one[1:] for rank in results[3] for one in rank}


def test_world_of_one_trains_alone_and_says_so():
    """``world_size=1`` in each of two ranks: two groups of one, and a word to the user."""
    outcomes = launch(_alone, 2)
    assert [o.value for o in outcomes] == [(0, 1, 1.0)] * 2
    assert "each rank trains alone" in outcomes[0].notices[0]
    assert outcomes[1].notices == []


@pytest.mark.parametrize(
    ("program", "words"), [(_too_many, "--gpus 4"), (_same_rank_twice, "rank 0 of 2")]
)
def test_groups_that_nobody_could_complete_are_refused(program, words):
    """A world larger than the run, and two ranks with one number, would wait for ever."""
    errors = [o for o in run_ranks(program, 2, fails=True) if o.error == "CannotAdopt"]
    assert errors
    assert all(words in outcome.text for outcome in errors)


def test_program_for_one_machine_trains_on_two():
    """Local ranks given as ranks are numbered through, group and sampler alike."""
    outcomes = launch(_one_machine_program, 4, vms=2)
    assert [(r, 4, 10.0, [r, r + 4]) for r in range(4)] == [o.value for o in outcomes]
    assert "numbers the ranks of one machine" in outcomes[0].notices[0]


# ---------------------------------------------------------------- what the ranks of these tests are


def _imported_and_chosen():
    nccl = dist.Backend._plugins.get("NCCL")  # before torch 2.13 there is none to register
    creator = "" if nccl is None else nccl.creator_fn.__name__
    return "taas.rank.preloaded" in sys.modules, creator, os.environ.get("TORCH_DIST_USE_NCCL2")


@pytest.mark.parametrize("rehearsed", [False, True])
def test_ranks_of_the_harness_are_started_as_an_agent_starts_them(rehearsed):
    """What holds in a notebook's ranks holds in those of the tests.

    That includes the preloading, which settles torch's NCCL.
    """
    creator = "_create_nccl_process_group" if hasattr(dist, "ProcessGroupNCCL2") else ""
    expected = (True, creator, None)
    assert run_ranks(_imported_and_chosen, 2, rehearsed=rehearsed) == [expected, expected]

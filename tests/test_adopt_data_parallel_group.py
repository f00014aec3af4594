"""The group of ``nn.DataParallel``'s replicas is one of torch's, beside those of the program."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist
from adopt_programs import batch, mlp
from ranks_harness import DEADLINE, run_ranks, warm  # noqa: F401
from torch import nn

from taas import adopt

pytestmark = pytest.mark.usefixtures("warm")


def _outlives_the_programs_groups():
    model = nn.DataParallel(mlp())
    before = model(batch(6)[0])
    known = [backend for backend, _ in dist.distributed_c10d._world.pg_map.values()]
    initialized = dist.is_initialized()
    for _ in range(2):
        dist.init_process_group("nccl")
        dist.new_group([0])
        dist.destroy_process_group()
        assert model(batch(6)[0]).equal(before)
    return known, initialized


def test_the_group_is_known_to_torch_and_made_again_with_the_programs_own():
    """It is no default group; a program that destroys all groups ends it, and the next pass has another one."""
    assert run_ranks(_outlives_the_programs_groups, 2) == [(["gloo"], False)] * 2


def _waits_for_a_rank_that_does_not_come(path):
    model = nn.DataParallel(mlp())
    model(batch(6)[0])
    if os.environ["RANK"] == "1":
        return path.read_text()  # until the other one has ended its wait
    ended = threading.Event()

    def end():
        while not ended.wait(0.1):
            adopt.break_off()

    thread = threading.Thread(target=end)
    thread.start()
    try:
        model(batch(6)[0])
    except RuntimeError:
        return "broken off"
    finally:
        ended.set()
        thread.join()
        path.write_text("went on")


def test_a_wait_for_other_replicas_is_broken_off(tmp_path):
    """As any other wait for ranks is, when the cell is to end."""
    os.mkfifo(tmp_path / "pipe")
    outcomes = run_ranks(
        _waits_for_a_rank_that_does_not_come, 2, tmp_path / "pipe", fails=True, grace=DEADLINE
    )
    assert [outcome.value for outcome in outcomes] == ["broken off", "went on"], outcomes
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]

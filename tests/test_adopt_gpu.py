"""Adoption on real GPUs; the machine needs one.

Last run in November 2026 on one H200 (driver 580, CUDA 13.0, torch 2.11, Python 3.12): all passed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from adopt_programs import PROGRAMS, Reference, mlp
from ranks_harness import DEADLINE, run_ranks
from test_adopt_data_parallel import _flat
from torch import nn

from taas import adopt
from taas.adopt import own_gpu, waits
from taas.protocol import deadlines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(
        not Path("/dev/nvidiactl").exists(), reason="no CUDA device on this machine"
    ),
]


def _run_on_gpu(names):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device("cuda")
    results = {}
    for name in names:
        results[name] = [t.detach().cpu().numpy() for t in _flat(PROGRAMS[name](nn.DataParallel))]
    return results


def _reference_on_gpu(names, slices):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device("cuda")
    wrap = lambda module, dim=0: Reference(module, slices, dim)  # noqa: E731
    return {name: [t.detach().cpu().numpy() for t in _flat(PROGRAMS[name](wrap))] for name in names}


@pytest.mark.slow
def test_programs_on_two_ranks_of_one_gpu():
    """The same programs as on the CPU: gloo carries what NCCL refuses on a shared GPU."""
    names = list(PROGRAMS)
    first, second = run_ranks(_run_on_gpu, 2, names, rehearsed=False)
    (expected,) = run_ranks(_reference_on_gpu, 1, names, 2, rehearsed=False)
    for name in names:
        for mine, theirs, reference in zip(first[name], second[name], expected[name], strict=True):
            assert (mine == theirs).all(), name
            torch.testing.assert_close(
                torch.from_numpy(mine), torch.from_numpy(reference), rtol=1e-4, atol=1e-5
            )


def _nccl_of_one():
    from taas.adopt.rendezvous import Membership
    from taas.adopt.replica_group import ReplicaGroup
    from taas.protocol.framing import StoreAddress

    with tempfile.TemporaryDirectory() as folder:
        address = StoreAddress("127.0.0.1", b"key", 1, folder)
        me = Membership(0, 1, 0, 1, address, False, lambda text: None, Path.cwd())
        return _nccl_in(ReplicaGroup(me, cuda=True))


def _nccl_in(group):
    from taas.adopt.replica_group import Slices

    values = torch.arange(6.0, device="cuda").reshape(2, 3)
    gathered, (total,) = group.gather(values > 2, Slices((2,), 0)), group.sum([values])
    group.take_from_rank_0([values])
    kind = type(group._group._get_backend(values.device)).__name__
    chosen = [backend for backend, _ in torch.distributed.distributed_c10d._world.pg_map.values()]
    group.close()
    return (
        kind.startswith("ProcessGroupNCCL"),
        chosen,
        gathered.tolist(),
        total.tolist(),
        values.tolist(),
    )


def test_group_speaks_nccl_where_each_rank_has_a_gpu():
    """One rank shows it: each collective is one that NCCL has, of the class that torch chooses.

    Not run on a GPU since the group is one of torch's own.
    """
    rows = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    expected = (True, ["cpu:gloo,cuda:nccl"], [[False] * 3, [True] * 3], rows, rows)
    assert run_ranks(_nccl_of_one, 1, rehearsed=False) == [expected]


def _dropout_and_noise():
    torch.manual_seed(0)
    model = nn.DataParallel(mlp(nn.Dropout(0.5))).cuda()
    losses = []
    for _ in range(12):
        # drawn on the GPU, and so must be the same on every rank
        x = torch.randn(7, 6, device="cuda")
        loss = model(x).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_noise_drawn_on_the_gpu_stays_the_same_on_all_ranks():
    """Dropout inside the replicas, of uneven slices, doesn't move the GPU's stream outside."""
    first, second = run_ranks(_dropout_and_noise, 2, rehearsed=False)
    assert first == second


def _late_disagreement():
    torch.manual_seed(0)
    model = nn.DataParallel(mlp()).cuda()
    for step in range(14):
        x = torch.full((4, 6), float(step), device="cuda")
        model(x + (int(os.environ["RANK"]) if step == 11 else 0)).sum().backward()


def test_a_late_disagreement_is_found_in_its_pass():
    """Also where batches lie on the GPU."""
    for outcome in run_ranks(_late_disagreement, 2, rehearsed=False, fails=True, grace=DEADLINE):
        assert outcome.error == "RanksDisagree", outcome.trace
        assert "at forward pass 12 " in outcome.text


# ---------------------------------------------------------------- waits (not run on a GPU yet)


def _copies_beside_a_busy_stream():
    weights = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    idle = waits.gpu_is_busy()
    torch.cuda._sleep(10_000_000_000)  # some seconds on the default stream
    copied = []

    def copy():
        with waits.beside_gpu_work():
            copied.append(weights.cpu().sum().item())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    return idle, copied, waits.gpu_is_busy()


def test_names_are_packed_beside_a_stream_that_hangs():
    """Copies of the packing thread do not wait for the GPU's earlier work, which goes on."""
    assert run_ranks(_copies_beside_a_busy_stream, 1, rehearsed=False) == [
        (False, [float(1 << 20)], True)
    ]


def _waits_for_a_rank_that_does_not_come(debug):
    torch.cuda.set_device(rank := int(os.environ["RANK"]))
    if debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    dist.init_process_group(None if debug else "nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    dist.new_group([0, 1])
    torch.cuda.synchronize()
    kinds = [type(backend).__name__ for backend in waits.nccl_backends()]
    dist.barrier()
    if rank == 1:
        time.sleep(5)  # it is interrupted there, and aborts, too
        adopt.break_off()
        return kinds
    breaker = threading.Timer(2.0, adopt.break_off)
    breaker.start()
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    # torch.AcceleratorError, or that the communicator was aborted
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    breaker.join()
    return kinds


def _waits_for_a_rank_that_is_not_in_the_first_collective(fifo):
    dist.init_process_group("nccl")
    if os.environ["RANK"] == "1":
        Path(fifo).read_text()  # until rank 0 has written
        return "did not come"
    main, me = threading.get_ident(), adopt._meeting.membership

    def break_off():
        # the root's listening socket, and this rank's own
        while not (
            len(me.waits._of_nccl(waits._tcp_sockets())) > 1 and waits.waits_at_full_speed(main)
        ):
            time.sleep(0.01)
        time.sleep(deadlines.BREAK_OFF)  # as a rank that is interrupted has before it is broken off
        adopt.break_off()

    breaker = threading.Thread(target=break_off)
    breaker.start()
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
    except RuntimeError as error:
        return type(error).__name__
    finally:
        breaker.join()
        Path(fifo).write_text("go")


def test_a_wait_in_the_first_collective_is_broken_off(tmp_path):
    """The commonest hang: NCCL makes a communicator, for which one rank never comes.

    One GPU shows it. Not run on a GPU yet.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    found = run_ranks(
        _waits_for_a_rank_that_is_not_in_the_first_collective, 2, str(fifo), rehearsed=False
    )
    assert found == ["DistBackendError", "did not come"]


def _contexts_of_each_rank():
    own_gpu.install(os.environ["RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    torch.ones(1).pin_memory()
    looker = threading.Thread(target=waits.gpu_is_busy)
    looker.start()
    looker.join()
    with waits.beside_gpu_work():
        torch.ones(1, device="cuda").cpu()
    return own_gpu.with_contexts()


@pytest.mark.skipif(len([*Path("/dev").glob("nvidia[0-9]*")]) < 2, reason="needs two GPUs")
def test_a_rank_above_0_leaves_gpu_0_alone():
    """Pinning, looks from other threads and packing make no context there.

    Not run on GPUs yet; on the CPU: test_own_gpu.py.
    """
    assert run_ranks(_contexts_of_each_rank, 2, rehearsed=False) == [[0], [1]]


@pytest.mark.skipif(len([*Path("/dev").glob("nvidia[0-9]*")]) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("debug", [False, True])
def test_a_wait_in_nccl_is_broken_off_and_the_process_lives(debug):
    """Also in a group made without a backend, and behind torch's wrapper for debugging."""
    for kinds in run_ranks(_waits_for_a_rank_that_does_not_come, 2, debug, rehearsed=False):
        assert set(kinds) == {"ProcessGroupNCCL"}


def test_nccl2_is_not_aborted():
    """Its abort would end the process, so names are read beside it, and the rank is ended."""
    if not hasattr(dist, "ProcessGroupNCCL2"):
        pytest.skip("this torch has one NCCL backend")
    assert run_ranks(_group_of_one, 1, "nccl2", rehearsed=False) == [["ProcessGroupNCCL2"]]


def test_what_a_rank_gets_as_nccl_can_be_aborted():
    """One GPU shows it: the backend's class, and that process and next group survive an abort."""
    assert run_ranks(_aborted_and_made_anew, 1, rehearsed=False) == [["ProcessGroupNCCL"]]


def _aborted_and_made_anew():
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    kinds = [type(backend).__name__ for backend in waits.nccl_backends()]
    waits.abort_nccl(waits.nccl_backends())
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    return kinds


def _group_of_one(backend):
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    kinds = [type(backend).__name__ for backend in waits.nccl_backends()]
    waits.abort_nccl(waits.nccl_backends())  # which leaves it alone
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    return kinds

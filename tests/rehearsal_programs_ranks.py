"""Programs for two rehearsed ranks. The first makes the process group that the others use."""

# ruff: noqa: N812, N817 - F, DDP and FSDP are what programs call them

from __future__ import annotations

import copy
import functools
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")


def nccl_groups_are_made_of_gloo():
    """init_process_group("nccl", device_id=…) makes a group that works."""
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    assert dist.is_nccl_available()
    x = torch.full((2,), float(RANK), device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [1.0, 1.0]
    dist.barrier(device_ids=[RANK])
    assert torch.cuda.current_device() == RANK


def a_group_has_the_backend_that_the_program_asked_for():
    """A library that compares it goes on.

    torch, which chooses by it how to do something, is told the real one.
    """
    assert dist.get_backend() == dist.get_backend(dist.group.WORLD) == "nccl"
    assert dist.get_backend_config() == "cuda:nccl"
    assert dist.distributed_c10d.get_backend() == "nccl"
    assert dist.get_backend(dist.new_group()) == "nccl"
    assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    assert dist.get_backend(dist.new_subgroups(1)[0]) == "nccl"
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert dist.get_backend(both) == "cpu:gloo,cuda:nccl"
    mesh = dist.init_device_mesh("cuda", (2,))
    # torch 2.6 makes another group for a mesh if the real backend of the default group is gloo
    assert dist.get_backend(mesh.get_group()) in ("nccl", "cpu:gloo,cuda:nccl")
    # torch's own: its function for gloo, which has no reduce_scatter of autograd
    x = torch.ones(2, requires_grad=True)
    torch.distributed.nn.functional.all_gather(x)[RANK].sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    for group in (dist.new_group([0]), dist.new_group([1])):
        assert group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(group) == "nccl"


def the_current_device_is_the_local_rank():
    """Each rank's device is its own from the start; the other's exists, a third does not."""
    assert torch.cuda.device_count() == WORLD
    torch.ones(1).cuda(1 - RANK)
    with torch.cuda.device(1 - RANK):
        assert torch.cuda.current_device() == 1 - RANK
    assert torch.cuda.current_device() == RANK
    with pytest.raises(
        RuntimeError,
        match="invalid device ordinal\ncuda:2 was asked for; this run has cuda:0 to cuda:1",
    ):
        torch.ones(1).cuda(2)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        dist.barrier(device_ids=[2])


def collectives_of_nccl_programs_work():
    """What programs for NCCL call, with the dtypes and reductions they use."""
    ours = torch.arange(4.0, device="cuda") + RANK
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
    ):
        x = torch.ones(3, device="cuda", dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == [2] * 3
        many = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(many, x)
        dist.broadcast(x, 0)
    flag = torch.tensor([RANK == 0], device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    assert flag.item() is True
    for given, mean in (
        (ours, [0.5, 1.5, 2.5, 3.5]),
        (ours.long(), [0, 1, 2, 3]),
        (ours * 1j, [0.5j, 1.5j, 2.5j, 3.5j]),
    ):
        averaged, waited = given.clone(), given.clone()
        dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
        dist.all_reduce(waited, op=dist.ReduceOp.AVG, async_op=True).wait()
        assert averaged.tolist() == waited.tolist() == mean
    for given, mean in ((ours, [0.5, 1.5, 2.5, 3.5]), (ours.long(), [0, 1, 2, 3])):
        reduced = given.clone()
        dist.reduce(reduced, 0, op=dist.ReduceOp.AVG)
        assert RANK or reduced.tolist() == mean
    whole = torch.empty(8, device="cuda")
    dist.all_gather_into_tensor(whole, ours)
    assert whole.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    rows = torch.full((3, 2), float(RANK), device="cuda")
    # NCCL counts elements; accelerate gathers into a flat tensor
    for shape in ((12,), (6, 2), (2, 3, 2)):
        gathered = torch.empty(shape, device="cuda")
        dist.all_gather_into_tensor(gathered, rows)
        assert gathered.flatten().tolist() == [0.0] * 6 + [1.0] * 6
        summed = torch.empty(6, device="cuda")
        dist.reduce_scatter_tensor(summed, gathered)
        assert summed.tolist() == [2.0 * RANK] * 6
    part = torch.empty(4, device="cuda")
    for op, expected in ((dist.ReduceOp.SUM, 2.0), (dist.ReduceOp.AVG, 1.0)):
        dist.reduce_scatter_tensor(part, whole, op=op)
        assert torch.equal(part, whole[RANK * 4 : RANK * 4 + 4] * expected)
    swapped = torch.empty(4, device="cuda")
    dist.all_to_all_single(swapped, ours)
    assert swapped.tolist() == ([0, 1, 1, 2] if RANK == 0 else [2, 3, 3, 4])
    objects = [None] * WORLD
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": 0}, {"rank": 1}]
    if RANK == 0:
        dist.send(ours, 1)
    else:
        dist.recv(part, 0)
        assert part.tolist() == [0, 1, 2, 3]
    ops = [dist.P2POp(dist.isend, ours, 1 - RANK), dist.P2POp(dist.irecv, part, 1 - RANK)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert part.tolist() == [1 - RANK + i for i in range(4)]
    dist.all_reduce(ours, async_op=True).wait()


def _net(norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))


def ddp_takes_device_ids():
    """DDP with device_ids and output_device trains.

    Several device_ids are refused as torch refuses them.
    """
    net = _net().cuda(RANK)
    ddp = DDP(net, device_ids=[RANK], output_device=RANK, find_unused_parameters=True)
    with torch.autocast("cuda"):
        loss = ddp(torch.randn(2, 3, 8, 8, device="cuda")).sum()
    loss.backward()
    gradients = [torch.zeros_like(net[0].weight.grad) for _ in range(WORLD)]
    dist.all_gather(gradients, net[0].weight.grad)
    assert torch.equal(*gradients)
    assert DDP(_net().cuda(), device_ids=[torch.device("cuda", RANK)]).module is not None
    with pytest.raises(ValueError, match="single element"):
        DDP(_net(), device_ids=[0, 1])
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        DDP(_net(), device_ids=[5])


def sync_batch_norm_is_batch_norm_over_all_ranks():
    """SyncBatchNorm's output, gradients and statistics are those of the whole batch."""
    for sizes in ([4, 4], [5, 2], [6, 0]):
        torch.manual_seed(1)
        whole = torch.randn(sum(sizes), 3, 4, 4, dtype=torch.float64)
        plain, synced = (
            nn.BatchNorm2d(3).double(),
            nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3).double()),
        )
        with torch.no_grad():
            for norm in (plain, synced):
                norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
                norm.bias.copy_(torch.tensor([0.1, 0.0, -0.3]))
        mine = whole.split(sizes)[RANK].clone().cuda().requires_grad_()
        reference = whole.clone().requires_grad_()
        plain(reference).pow(3).sum().backward()
        out = synced.cuda()(mine)
        out.pow(3).sum().backward()
        assert torch.allclose(out, _normalised(plain, whole, sizes), atol=1e-9)
        if sizes[RANK]:
            assert torch.allclose(mine.grad, reference.grad.split(sizes)[RANK], atol=1e-9)
        for ours, theirs in ((synced.weight, plain.weight), (synced.bias, plain.bias)):
            # a rank without samples has none
            gradient = torch.zeros_like(ours) if ours.grad is None else ours.grad
            dist.all_reduce(gradient)
            assert torch.allclose(gradient, theirs.grad, atol=1e-9)
        assert torch.allclose(synced.running_mean, plain.running_mean)
        assert torch.allclose(synced.running_var, plain.running_var)
        assert synced.num_batches_tracked == 1


def _normalised(norm, whole, sizes):
    return F.batch_norm(whole, None, None, norm.weight, norm.bias, True).split(sizes)[RANK].detach()


def fsdp1_shards():
    """FSDP1 trains with each form of device_id, mixed precision and a full state dict."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=50)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for keywords in (
        {"device_id": torch.cuda.current_device()},
        {"device_id": torch.device("cuda", RANK), "auto_wrap_policy": policy},
        {"use_orig_params": True, "mixed_precision": half},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ):
        net = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).cuda(), **keywords)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        net(torch.ones(2, 8, device="cuda")).sum().backward()
        net.clip_grad_norm_(1.0)
        optimizer.step()
        with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT):
            assert net.state_dict()["0.weight"].shape == (8, 8)


def fsdp2_shards_and_saves():
    """fully_shard trains on its default mesh.

    Its sharded state is saved and loaded by every rank.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).cuda()
    alone = copy.deepcopy(net)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    for model in (net, alone):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(net[0].weight.full_tensor(), alone[0].weight, atol=1e-6)
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = get_model_state_dict(net)
    dcp.save({"model": state}, checkpoint_id=folder[0])
    with torch.no_grad():
        net[0].weight.zero_()
    dcp.load({"model": state}, checkpoint_id=folder[0])
    set_model_state_dict(net, state)
    assert torch.allclose(net[0].weight.full_tensor(), alone[0].weight, atol=1e-6)
    half = nn.Linear(8, 8, device="cuda")
    fully_shard(
        half, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    half(torch.ones(2, 8, device="cuda")).float().sum().backward()


def meshes_and_dtensors():
    """Meshes of CUDA devices are meshes of CPUs; DTensors and tensor parallelism work on them."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("dp",))
    assert mesh.device_type == "cpu"
    assert DeviceMesh("cuda", [0, 1]).size() == 2
    torch.manual_seed(0)
    whole = torch.randn(4, 4, device="cuda")
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(spread.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.allclose((spread @ spread.T).full_tensor(), whole @ whole.T, atol=1e-6)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).cuda()
    x = torch.ones(2, 4, device="cuda")
    expected = net(x)
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert torch.allclose(net(x), expected, atol=1e-6)
    assert init_device_mesh("cuda", (2, 1), mesh_dim_names=("a", "b"))["a"].size() == 2

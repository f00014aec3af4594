"""Programs for one rehearsed rank that is cuda:0 of one.

Each states, and asserts, what a GPU program relies on.
"""

# ruff: noqa: N812 - F is what programs call it

from __future__ import annotations

import copy
import io
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from taas.errors import CannotRehearse

CPU = torch.device("cpu")
# what needs no GPU: modules, classes, flags, and switches that only set a variable
BY_ITSELF = (
    *(
        "ComplexDoubleStorage",
        "ComplexFloatStorage",
        "CudaError",
        "DeferredCudaCallError",
        "cudaStatus",
    ),
    *(
        "amp",
        "graph_annotations",
        "graphs",
        "jiterator",
        "memory",
        "nccl",
        "nvtx",
        "profiler",
        "random",
        "sparse",
    ),
    *(
        "caching_allocator_disabled",
        "caching_allocator_enable",
        "get_allocator_backend",
        "streams",
        "tunable",
    ),
    *("default_generators", "has_half", "has_magma"),
)


def every_name_of_torch_cuda_is_accounted_for():
    """Each public name of torch.cuda is rehearsed, refused or needs no GPU.

    A new torch's new names fail here.
    """
    from taas.rehearsal import cuda_module, refused, tensors

    legacy = {f"{name}{kind}" for name in tensors.LEGACY_TYPES for kind in ("Tensor", "Storage")}
    accounted = {
        *cuda_module.CUDA,
        *BY_ITSELF,
        *cuda_module.memory_face("torch.cuda"),
        *refused.TORCH_CUDA,
        *legacy,
    }
    assert set(torch.cuda.__all__) - accounted == set()
    assert set(refused.TORCH_CUDA) & {*cuda_module.CUDA} == set()


def every_factory_takes_a_device():
    """Each function of torch that makes a tensor takes CUDA in every form."""
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        made = [
            torch.ones(2, device=device),
            torch.randn(2, device=device),
            torch.randperm(2, device=device),
            torch.arange(2, device=device),
            torch.tensor([1.0, 2.0], device=device),
            torch.as_tensor([1.0, 2.0], device=device),
            torch.fft.fftfreq(2, device=device),
            torch.sparse_coo_tensor([[0]], [1.0], (2,), device=device),
            torch.nested.nested_tensor([torch.ones(2)], device=device),
            torch.zeros_like(torch.ones(2), device=device),
            torch.ones(2).new_zeros(2, device=device),
            torch.normal(0.0, 1.0, (2,), device=device),
        ]
        assert {x.device for x in made} == {CPU}


def what_comes_from_the_gpu_is_a_copy():
    """x.cpu() copies as it does from a GPU: the best model kept that way is not the last one."""
    net = nn.Linear(2, 2).cuda()
    best = {name: value.cpu() for name, value in net.state_dict().items()}
    also = {name: value.to("cpu") for name, value in net.state_dict().items()}
    before = copy.deepcopy(best)
    with torch.no_grad():
        net.weight.add_(1)
    assert torch.equal(best["weight"], before["weight"])
    assert torch.equal(also["weight"], before["weight"])
    assert not torch.equal(net.weight, before["weight"])
    batch = torch.ones(2)
    assert batch.to(net.weight) is batch
    assert batch.to(net.weight.device) is batch


def what_goes_to_the_gpu_is_a_copy():
    """In-place work on a batch that was sent leaves host memory alone; what was sent is dense."""
    batch = torch.arange(12).reshape(3, 4)
    for send in (
        lambda: batch.to("cuda"),
        lambda: batch.to(torch.device("cuda"), torch.int64, True),
        lambda: batch.to(device="cuda:0", copy=False),
        lambda: batch.cuda(),
        lambda: batch.type(torch.cuda.LongTensor),
        lambda: torch.as_tensor(batch, device="cuda"),
        lambda: torch.as_tensor(batch.numpy(), device="cuda"),
        lambda: torch.asarray(batch.numpy(), device="cuda"),
    ):
        sent = send()
        sent.zero_()
        assert batch.sum() == 66
    assert batch[:, 1:].to("cuda").view(-1).tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert batch[:, 1:].cuda().is_contiguous()
    assert batch.t().to("cuda").stride() == (1, 4)
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert image.to("cuda").is_contiguous(memory_format=torch.channels_last)
    assert torch.eye(2).to_sparse().cuda().to_dense().tolist() == [[1, 0], [0, 1]]
    assert torch.func.vmap(lambda row: row.to("cuda") + 1)(batch).tolist() == (batch + 1).tolist()


def a_leaf_stays_the_leaf_that_an_optimizer_has():
    """Sending what requires a gradient gives the same tensor."""
    weight = torch.ones(2, requires_grad=True)
    assert weight.to("cuda") is weight.cuda() is weight
    assert nn.BatchNorm1d(2).cuda().to("cuda").weight.is_leaf


def a_frozen_parameter_stays_itself():
    """What a GPU has already is sent there as it is.

    A buffer that a library keeps as a frozen Parameter stays one.
    """

    class Scale(nn.Parameter):
        pass

    counter = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    frozen = nn.Linear(2, 2).cuda().requires_grad_(False)
    for parameter in (counter, Scale(torch.ones(2), requires_grad=False), frozen.weight):
        assert parameter.to("cuda") is parameter
        assert parameter.to(device="cuda:0", non_blocking=True) is parameter.cuda() is parameter
        assert torch.as_tensor(parameter, device="cuda") is parameter
        assert type(parameter.to("cpu")) is torch.Tensor
    made = nn.LazyLinear(2, device="cuda").weight
    assert made.to("cuda") is made
    assert [name for name, _ in frozen.to("cuda").named_parameters()] == ["weight", "bias"]


class _Table:
    """A container of tensors with a table of torch's functions for it, as tensordict has."""

    meanings: ClassVar[dict] = {}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls.meanings[func](*args, **kwargs or {})


class _Named(torch.Tensor):
    """A tensor of a class of its own."""


class _Watch(torch.overrides.TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **kwargs or {})


def who_overrides_functions_of_torch_is_told_what_was_called():
    """A class's table and a mode get torch's own function, and the arguments as given."""
    like = [
        getattr(torch, f"{name}_like")
        for name in ("zeros", "ones", "empty", "full", "rand", "randn")
    ]
    moves = [
        torch.Tensor.to,
        torch.Tensor.cuda,
        torch.Tensor.cpu,
        torch.Tensor.pin_memory,
        torch.Tensor.type,
    ]
    news = [torch.Tensor.new_zeros, torch.Tensor.new_tensor, torch.as_tensor]
    for function in (*like, *moves, *news):
        _Table.meanings = {function: lambda *given, **named: (given[1:], named)}
        assert function(_Table(), 3, device="cuda") == ((3,), {"device": "cuda"}), function
    x = torch.ones(2)
    with _Watch() as watch:
        torch.zeros_like(x, device="cuda")
        torch.zeros(2, device="cuda")
        x.to("cuda")
        x.new_ones(2)
    assert watch.seen == [torch.zeros_like, torch.zeros, torch.Tensor.to, torch.Tensor.new_ones]
    named = x.as_subclass(_Named)
    assert {
        type(named.to("cuda")),
        type(named.cuda()),
        type(torch.zeros_like(named, device="cuda")),
    } == {_Named}
    assert named.to("cuda") is not named


def seeds_of_cuda_are_its_own():
    """Seeding CUDA leaves the CPU's stream alone.

    What is drawn on a device repeats with its seed.
    """
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.cuda.manual_seed(99)
    torch.cuda.manual_seed_all(7)
    first = torch.randn(3, device="cuda")
    torch.cuda.seed()
    assert torch.equal(expected, torch.rand(4))
    torch.cuda.manual_seed(7)
    assert torch.equal(first, torch.randn(3, device="cuda"))
    assert torch.cuda.initial_seed() == 7
    torch.manual_seed(11)
    assert torch.cuda.initial_seed() == 11
    with torch.device("cuda"):
        torch.manual_seed(5)
        a = torch.rand(2)
        torch.cuda.manual_seed(5)
        assert torch.equal(a, torch.rand(2))


def autocast_computes_in_its_dtype():
    """autocast("cuda") casts what it casts on a GPU, its flags say so, and it nests."""
    net, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    with torch.autocast("cuda"):
        assert net(x).dtype is torch.float16
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", enabled=False):
            assert net(x).dtype is torch.float32
        assert net(x).dtype is torch.float16
        assert F.cross_entropy(net(x), torch.tensor([0, 1])).dtype is torch.float32
    assert net(x).dtype is torch.float32
    with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert net(x).dtype is torch.bfloat16
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
    assert not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu")

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(n):
        return net(x) if n == 0 else forward(n - 1)

    assert forward(2).dtype is torch.bfloat16
    with pytest.raises(KeyError), torch.autocast("cuda"):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.cuda.amp.autocast():
            assert net(x).dtype is torch.float16


def checkpoints_load_onto_any_device():
    """map_location in every form, and none for a file saved on a GPU.

    Its forms are string, device, number, dict and callable.
    """
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, file)
    on_gpu = io.BytesIO(_as_if_saved_on_cuda(file.getvalue()))
    forms = (
        *("cuda", "cuda:0", torch.device("cuda", 0), torch.device(0), None, "cpu"),
        *({"cuda:0": "cuda:0"}, {"cpu": "cuda:0"}, {"cuda:0": "cpu"}),
        *(lambda storage, location: storage.cuda(0), lambda storage, location: storage),
    )
    for source in (file, on_gpu):
        for form in forms:
            for weights_only in (True, False):
                source.seek(0)
                loaded = torch.load(source, map_location=form, weights_only=weights_only)
                assert loaded["w"].tolist() == [0.0, 1.0, 2.0], form
                assert loaded["w"].device == CPU
    on_gpu.seek(0)
    with pytest.raises(RuntimeError, match="CUDA device 3"):
        torch.load(on_gpu, map_location="cuda:3")


def _as_if_saved_on_cuda(data: bytes) -> bytes:
    import zipfile

    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in content
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            new.writestr(name, content)
    return out.getvalue()


class _SeesCuda(torch.utils.data.Dataset):
    """A dataset of this module, whose items say what their process sees."""

    def __init__(self, device="cuda"):
        self.device = device
        self.offset = torch.ones(1)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        here = [float(torch.cuda.is_available()), torch.cuda.device_count()]
        return torch.tensor(here, device=self.device) + self.offset.to(self.device) - 1


def loader_workers_are_rehearsed():
    """Workers are rehearsed as their rank is, however they are started."""
    for context in ("fork", "spawn"):
        data = _SeesCuda("cpu" if context == "fork" else "cuda")
        loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context=context)
        assert [item[0].tolist() for item in loader] == [[1.0, 1.0]] * 2, context


def forked_children_have_no_cuda():
    """Once a process has used CUDA, its forks cannot, and say what CUDA says; seeds do no harm."""
    torch.ones(1).cuda()
    loader = torch.utils.data.DataLoader(_SeesCuda(), num_workers=1)
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(loader)
    for use in (
        lambda: torch.ones(1).to("cuda"),
        lambda: torch.zeros(1, device="cuda"),
        lambda: nn.Linear(1, 1).cuda(),
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.get_device_properties,
        torch.cuda.init,
        lambda: torch.cuda.set_device(0),
    ):
        assert "Cannot re-initialize CUDA" in _raised_in_fork(use)
    assert _raised_in_fork(lambda: torch.manual_seed(1)) == ""
    assert _raised_in_fork(lambda: print(torch.cuda.is_initialized() and 1 / 0)) == ""


def _raised_in_fork(function):
    """What a function raises in a forked child."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as error:
            os.write(sending, repr(error).encode())
        os._exit(0)
    os.close(sending)
    os.waitpid(child, 0)
    with os.fdopen(receiving) as said:
        return said.read()


def libraries_without_a_gpu_are_refused_by_name():
    """Triton kernels, cupy and NVML say so too; libraries that can do without them go on."""
    import triton

    @triton.jit
    def kernel(x):
        pass

    with pytest.raises(CannotRehearse, match="the Triton kernel kernel"):
        kernel[(1,)](torch.ones(1))
    from torch.utils import _triton

    assert _triton.has_triton() is False
    # what these two are, where the machine of the tests has them or not
    installed = Path(tempfile.mkdtemp())
    (installed / "cupy.py").write_text("")
    (installed / "pynvml.py").write_text(
        """
class NVMLError(Exception):
    def __str__(self): return self.value
class NVMLError_LibraryNotFound(NVMLError): pass
def nvmlInit(): pass
"""
    )
    sys.path.insert(0, str(installed))
    for error in (CannotRehearse, ImportError):
        with pytest.raises(error, match="cupy cannot be rehearsed"):
            import cupy  # noqa: F401
    import pynvml

    for error in (CannotRehearse, pynvml.NVMLError):
        with pytest.raises(error, match="pynvml cannot be rehearsed: it reads the sensors"):
            pynvml.nvmlInit()
    sys.path.remove(str(installed))

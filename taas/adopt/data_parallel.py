"""``nn.DataParallel`` in a run of several ranks: one process a GPU, with DataParallel's own meaning.

Natively it copies the module to every GPU, gives each copy a slice of the batch, and gathers the outputs.
Here the copies are the ranks. Every rank runs the whole program and loads the whole batch; inside the
wrapped module it computes its slice only; outputs are gathered, so the loss is that of the whole batch on
every rank, and gradients are summed once on the way back (``replica_group``). Parameters, buffers and
random states are rank 0's from the wrap on; buffers stay replica 0's, as DataParallel keeps them.

The class is changed in place: ``isinstance(model, nn.DataParallel)``, subclasses and instances that came
with the notebook's names all hold.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from taas.adopt.membership import Membership, in_time
from taas.adopt.replica_group import ReplicaGroup, map_leaves
from taas.adopt.replica_pass import ReplicaPass
from taas.capture.process_state import set_generators, states_of_generators
from taas.errors import CannotAdopt

ADVICE = (
    "nn.DataParallel runs as {size} ranks: each computes 1/{size} of every batch, but loads the whole batch. "
    "DistributedDataParallel with a DistributedSampler, or a loader registered with taas.register(), is faster."
)
CLOSE_SECONDS = 5.0
EXAMINED_EVERY = 64  # passes of a module, in one of which the ranks compare its parameters
OVERRIDABLE = ("replicate", "scatter", "parallel_apply", "gather")


@dataclass
class _Divided:
    """What is known of a module that is divided."""

    number: int  # in the program
    home: torch.device | None = None  # where the program had put it, if that is another rank's GPU
    passes: int = 0


class Replicas:
    """This rank's side of every DataParallel of the program.

    Attributes:
        cuda: whether ranks compute on GPUs.
        inside: above 0 while a replica's pass is computed.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.inside = 0
        self._passes = 0
        self._group: ReplicaGroup | None = None
        # The one before, which has ended. Its destructor can wait, holding the GIL, for threads of gloo's that may want the GIL
        # to give back the last collective's tensors; once there is another one they have long been done.
        self._past: ReplicaGroup | None = None
        self._modules: weakref.WeakKeyDictionary[nn.Module, _Divided] = weakref.WeakKeyDictionary()
        self._random_origin, self._since_origin = -1, 0

    @property
    def group(self) -> ReplicaGroup:
        """The ranks; connected when the program first needs them, and again when it has destroyed all groups."""
        if self._group is None or self._group.ended:
            self._past, self._group = self._group or self._past, ReplicaGroup(self.membership, cuda=self.cuda)
        return self._group

    @property
    def cuda(self) -> bool:
        """As above."""
        return not self.membership.rehearsed and torch.cuda.is_available()

    def take_in(self, module: nn.Module) -> _Divided:
        """Make a module that is to be divided the same on every rank.

        ``model.to("cuda:0")`` is what programs say; one process a GPU means each on its own, so it is moved there.

        Raises:
            CannotAdopt: something in it can only be divided within one process.
        """
        if module not in self._modules:
            _refuse_sparse_gradients(module)
            self.membership.tell(ADVICE.format(size=self.membership.world_size))
            self._modules[module] = _Divided(len(self._modules))
            self._settle(module)
            self.group.take_from_rank_0([*module.parameters(), *module.buffers()])
            states = states_of_generators(cuda=self.cuda) if self.membership.rank == 0 else None
            set_generators(self.group.exchange(states)[0], cuda=self.cuda)
        self._settle(module)
        return self._modules[module]

    def _settle(self, module: nn.Module) -> None:
        device = _device_of(module)
        if self.cuda and device.type == "cuda" and device.index != torch.cuda.current_device():
            module.to(torch.device("cuda", torch.cuda.current_device()))
            self._modules[module].home = device

    def forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dim: int,
        home: torch.device | None,
    ) -> Any:
        """The module's output for the whole batch, of which this rank computes its slice along ``dim``.

        It goes ``home``, or where the program had put the module.

        Raises:
            RanksDisagree: the ranks have different batches or parameters.
            CannotAdopt: the output cannot be gathered.
        """
        divided, device = self.take_in(module), _device_of(module)
        examined = divided.passes % EXAMINED_EVERY == 0
        divided.passes += 1
        self._passes += 1
        one = ReplicaPass(self.group, module, device, dim, (self._passes, divided.number))
        self.inside += 1
        try:
            with self._own_random_numbers():
                one.compute(args, kwargs, examined=examined)
        finally:
            self.inside -= 1
        output, home = one.collect(), home or divided.home or device
        return output if home == device else map_leaves(output, Tensor, lambda tensor: tensor.to(home))

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw from this rank's own stream inside, and leave the program's as it was.

        Dropout draws as many numbers as the slice has elements, and slices differ; drawn from the program's own
        stream (the one that shuffles, on CPU) they would lead the ranks to different batches. The stream inside
        follows from the program's state, the rank, and the count of passes since that state changed: the same
        seed gives the same run again.
        """
        outside = states_of_generators(cuda=self.cuda)
        origin = zlib.crc32(outside["torch"])
        self._since_origin = self._since_origin + 1 if origin == self._random_origin else 0
        self._random_origin = origin
        seed = zlib.crc32(f"{origin}/{self._since_origin}/{self.membership.rank}".encode())
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in outside:
            sys.modules["numpy"].random.seed(seed)
        if self.cuda:
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            set_generators(outside, cuda=self.cuda)

    def close(self, *, failed: bool) -> None:
        """Leave the group, if there is one."""
        if self._group is not None:
            in_time(CLOSE_SECONDS, functools.partial(self._group.close, failed=failed))
            self._past, self._group = self._group, None


_replicas: Replicas | None = None


def install(membership: Membership) -> None:
    """Change ``nn.DataParallel`` and ``data_parallel`` in this process; ``world_size`` must be above 1."""
    global _replicas
    replicas = _replicas = Replicas(membership)
    _change_class(nn.DataParallel, replicas)
    _change_function(replicas)
    _avoid_reentrant_checkpoints(replicas)


def close(*, failed: bool) -> None:
    """Leave the replicas' group, if the program made one; ``failed``: the cell raised in this rank."""
    if _replicas is not None:
        _replicas.close(failed=failed)


def _change_class(cls: Any, replicas: Replicas) -> None:
    in_rank = replicas.membership.in_rank

    def init(
        self: Any,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        _refuse_overrides(type(self))
        nn.Module.__init__(self)
        self.module, self.dim = module, dim
        everywhere = range(replicas.membership.local_world_size)
        self.device_ids = list(everywhere if device_ids is None else device_ids)
        self.output_device = output_device if output_device is not None else (self.device_ids or [0])[0]
        given = output_device is not None and replicas.cuda
        self._taas_home = torch.device(output_device) if given else None  # type: ignore[arg-type]
        # One device is no parallelism: natively the module just runs there.
        self._taas_whole = device_ids is not None and len(device_ids) == 1
        if not self._taas_whole:
            replicas.take_in(module)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if getattr(self, "_taas_whole", False):
            return self.module(*inputs, **kwargs)
        _refuse_overrides(type(self))
        # An instance that the notebook made without a GPU has no ``dim``.
        return replicas.forward(
            self.module, inputs, kwargs, getattr(self, "dim", 0), getattr(self, "_taas_home", None)
        )

    cls.__init__, cls.forward = in_rank(cls.__init__, init), in_rank(cls.forward, forward)
    cls.__taas_unwrap__ = True
    cls.forward._torchdynamo_disable = True  # its collectives are no graph's business


def _change_function(replicas: Replicas) -> None:
    module: Any = sys.modules["torch.nn.parallel.data_parallel"]  # the package's attribute is the function

    def data_parallel(
        module: nn.Module,
        inputs: Any,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        module_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
        return nn.DataParallel(module, device_ids, output_device, dim)(*args, **(module_kwargs or {}))

    function = replicas.membership.in_rank(module.data_parallel, data_parallel)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    module.data_parallel = nn.parallel.data_parallel = function


def _avoid_reentrant_checkpoints(replicas: Replicas) -> None:
    """Recompute activations without reentering autograd.

    A reentrant checkpoint runs part of the module again in the backward pass, outside of the replica, on the
    module's own parameters: their gradients would be this rank's share alone.
    """
    module: Any = sys.modules["torch.utils.checkpoint"]
    native = module.CheckpointFunction.apply

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if not replicas.inside:
            return native(function, preserve_rng_state, *args)
        return module.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    module.CheckpointFunction.apply = staticmethod(apply)


def _refuse_overrides(cls: type) -> None:
    own = [name for name in OVERRIDABLE if getattr(cls, name) is not getattr(nn.DataParallel, name)]
    if own:
        raise CannotAdopt(
            f"{cls.__name__} changes {', '.join(own)} of nn.DataParallel, which ranks would not follow. Use "
            "nn.DataParallel itself or DistributedDataParallel, or run the cell in one process (#!TYPE without "
            "--gpus), which sees all GPUs of the machine."
        )


def _refuse_sparse_gradients(module: nn.Module) -> None:
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse:
        raise CannotAdopt(
            f"nn.DataParallel over ranks cannot add up the sparse gradients of {', '.join(sparse)}. Make it with "
            "sparse=False, or wrap the model in DistributedDataParallel."
        )


def _device_of(module: nn.Module) -> torch.device:
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return first.device if first is not None else torch.device("cpu")

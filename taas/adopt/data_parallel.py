"""Runs ``nn.DataParallel`` in several ranks, one process for each GPU, with the same semantics.

DataParallel itself copies the module to every GPU, gives each copy a slice of the batch, and
gathers the outputs. Here the ranks are the copies. Every rank runs the whole program and loads the
whole batch, but inside the wrapped module it computes only its slice. The outputs are gathered, so
that the loss is that of the whole batch on every rank, and the gradients are summed once in the
backward pass (``replica_group``). When a module is wrapped, all ranks adopt rank 0's parameters,
buffers and random states. Buffers stay those of replica 0, as with DataParallel.

The class is changed in place, so that ``isinstance(model, nn.DataParallel)``, subclasses, and
instances among the notebook's variables all work.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import random
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from taas.adopt.rendezvous import Membership, in_time
from taas.adopt.replica_group import (
    Crossing,
    Inward,
    Outward,
    ReplicaGroup,
    Slices,
    divide,
    leaves,
    map_tensors,
    tensors_of,
)
from taas.base.wording import ranks_in_words, text_of
from taas.capture.settings.random_states import set_generators, states_of_generators
from taas.errors import CannotAdopt, RanksDisagree

ADVICE = (
    "nn.DataParallel runs as {size} ranks: each computes 1/{size} of every batch, but loads the"
    " whole batch. DistributedDataParallel with a DistributedSampler, or a loader registered with"
    " taas.register(), is faster."
)
CLOSE_SECONDS = 5.0
GRACE_SECONDS = 2.0
STATISTIC_BYTES = 1 << 20
SAMPLED_ELEMENTS = 4096
SAMPLED_ROWS = 64
PLAIN = (bool, int, float, complex, str, bytes, type(None))
SAME_BATCH = (
    "Every rank of a run with nn.DataParallel must load the same batches, and call the model"
    " equally often, under no condition that depends on the rank. Seed what draws them, before the"
    " DataLoader is made (torch.manual_seed(0), and random.seed / numpy.random.seed where they are"
    " used), or give each rank its own share: DistributedDataParallel with a DistributedSampler."
)
Batch = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
OVERRIDABLE = ("replicate", "scatter", "parallel_apply", "gather")


class Replicas:
    """This rank's part in every DataParallel of the program."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.inside = 0
        """Above 0 while a replica's forward pass is computed."""
        self._passes = 0
        self.group: ReplicaGroup | None = None
        # The previous group, which has ended. Its destructor holds the GIL and may wait for
        # threads of gloo, which may need the GIL to free the last collective's tensors. By the
        # time there is a new group, these threads have long finished.
        self.past: ReplicaGroup | None = None
        # Each module's number in the program, and the device on which the program had placed it,
        # if that is another rank's GPU.
        self._modules: weakref.WeakKeyDictionary[nn.Module, tuple[int, torch.device | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._random_origin, self._since_origin = -1, 0

    @property
    def cuda(self) -> bool:
        """Return whether ranks compute on GPUs."""
        return not self.membership.rehearsed and torch.cuda.is_available()

    def _connect(self) -> ReplicaGroup:
        """Return the ranks' group.

        It is created when the program first needs it, and again after the program has destroyed
        all groups.
        """
        if self.group is None or self.group.ended:
            made = ReplicaGroup(self.membership, cuda=self.cuda)
            self.past, self.group = self.group or self.past, made
        return self.group

    def take_in(self, module: nn.Module) -> tuple[int, torch.device | None]:
        """Give a module that will be divided rank 0's content on every rank.

        Return its number, and the device that the program intended, if that is a different one.
        Programs call ``model.to("cuda:0")``. With one process for each GPU every rank needs its
        own GPU, so the module is moved there.
        """
        known, device = self._modules.get(module), _device_of(module)
        number, home = known or (len(self._modules), None)
        if self.cuda and device.type == "cuda" and device.index != torch.cuda.current_device():
            module.to(torch.device("cuda", torch.cuda.current_device()))
            home = device
        self._modules[module] = number, home
        if known is None:
            self.membership.tell(ADVICE.format(size=self.membership.world_size))
            group = self._connect()
            group.take_from_rank_0([*module.parameters(), *module.buffers()])
            states = states_of_generators(cuda=self.cuda) if self.membership.rank == 0 else None
            set_generators(group.exchange(states)[0], cuda=self.cuda)
        return number, home

    def forward(self, module: nn.Module, batch: Batch, dim: int, home: torch.device | None) -> Any:
        """Return the module's output for the whole batch, divided along ``dim``.

        This rank computes its slice. The output goes to ``home``, or to the device on which the
        program had placed the module.

        Raises:
            RanksDisagree: the ranks have different batches.
            CannotAdopt: the output cannot be gathered.
        """
        (number, meant), device = self.take_in(module), _device_of(module)
        self._passes += 1
        one = ReplicaPass(self._connect(), module, batch, dim, (self._passes, number))
        self.inside += 1
        try:
            with self._own_random_numbers():
                one.compute()
        finally:
            self.inside -= 1
        output, home = one.collect(), home or meant or device
        return output if home == device else map_tensors(output, lambda tensor: tensor.to(home))

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw from this rank's own stream inside, and restore the program's afterwards.

        Dropout draws as many numbers as the slice has elements, and slices differ. Drawn from the
        program's own stream (the one that shuffles, on CPU), they would lead the ranks to
        different batches. The stream inside is derived from the program's state, the rank, and the
        number of passes since that state changed, so the same seed reproduces the same run.
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


_replicas: Replicas | None = None


def install(membership: Membership) -> None:
    """Change ``nn.DataParallel`` and ``data_parallel`` in this process.

    ``world_size`` has to be above 1.
    """
    global _replicas
    replicas = _replicas = Replicas(membership)
    _change_class(nn.DataParallel, replicas)
    # the package's attribute of this name is the function
    module: Any = sys.modules["torch.nn.parallel.data_parallel"]
    function = membership.in_rank(module.data_parallel, _data_parallel)
    module.data_parallel = nn.parallel.data_parallel = function
    _avoid_reentrant_checkpoints(replicas)


def close() -> None:
    """Leave the replicas' group, if the program has made one."""
    if _replicas is not None and _replicas.group is not None:
        in_time(CLOSE_SECONDS, _replicas.group.close)
        _replicas.past, _replicas.group = _replicas.group, None


def _change_class(cls: Any, replicas: Replicas) -> None:
    in_rank = replicas.membership.in_rank

    def init(
        self: Any,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.dim = module, dim
        everywhere = range(replicas.membership.local_world_size)
        self.device_ids = list(everywhere if device_ids is None else device_ids)
        self.output_device = (
            output_device if output_device is not None else (self.device_ids or [0])[0]
        )
        given = output_device is not None and replicas.cuda
        self._taas_home = torch.device(output_device) if given else None
        # With one device there is no parallelism: the module runs there.
        self._taas_whole = device_ids is not None and len(device_ids) == 1
        if not self._taas_whole:
            replicas.take_in(module)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if getattr(self, "_taas_whole", False):
            return self.module(*inputs, **kwargs)
        if own := [
            name
            for name in OVERRIDABLE
            if getattr(type(self), name) is not getattr(nn.DataParallel, name)
        ]:
            raise CannotAdopt(
                f"{type(self).__name__} changes {', '.join(own)} of nn.DataParallel, which ranks"
                " would not follow. Use nn.DataParallel itself or DistributedDataParallel, or run"
                " the cell in one process (#!TYPE without --gpus), which sees all GPUs of the"
                " machine."
            )
        # An instance that the notebook made without a GPU has no ``dim``.
        home = getattr(self, "_taas_home", None)
        return replicas.forward(self.module, (inputs, kwargs), getattr(self, "dim", 0), home)

    cls.__init__, cls.forward = in_rank(cls.__init__, init), in_rank(cls.forward, forward)
    cls.__taas_unwrap__ = True
    cls.forward._torchdynamo_disable = True  # its collectives do not belong in a graph


def _data_parallel(
    module: nn.Module,
    inputs: Any,
    *how: Any,
    module_kwargs: dict[str, Any] | None = None,
    **named: Any,
) -> Any:
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return nn.DataParallel(module, *how, **named)(*args, **(module_kwargs or {}))


def _avoid_reentrant_checkpoints(replicas: Replicas) -> None:
    """Recompute activations without reentering autograd.

    A reentrant checkpoint runs part of the module again in the backward pass, outside the replica,
    on the module's own parameters: their gradients would be this rank's share alone.
    """
    module: Any = sys.modules["torch.utils.checkpoint"]
    native = module.CheckpointFunction.apply

    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if not replicas.inside:
            return native(function, preserve_rng_state, *args)
        return module.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    module.CheckpointFunction.apply = staticmethod(apply)


def _device_of(module: nn.Module) -> torch.device:
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return first.device if first is not None else torch.device("cpu")


# --------------------------- one forward pass: compute the slice, agree with other ranks, gather


class ReplicaPass:
    """One pass of one module over one batch, on this rank."""

    def __init__(
        self, group: ReplicaGroup, module: nn.Module, batch: Batch, dim: int, place: tuple[int, int]
    ) -> None:
        self._group, self._module, self._batch, self._dim = group, module, batch, dim
        self._device = _device_of(module)
        self._grad = torch.is_grad_enabled()
        self._number, module_number = place
        mode = "training" if module.training else "evaluating"
        self._place = f"module {module_number}, {mode}{'' if self._grad else ', without gradients'}"
        # The message to the other ranks, besides the batch: the outputs' shapes, and whether they
        # have gradients; the buffers that replica 0 may have changed (other replicas' are ignored);
        # class and text of an exception.
        self._outputs: list[tuple[tuple[int, ...], bool]] = []
        self._buffers: list[str] = []
        self._failure: tuple[str, str] | None = None
        self._ways, self._replicas = divide(batch, group.size, dim)
        self._idle = group.rank >= self._replicas  # no sample is left for this rank
        self._token: Tensor | None = None
        self._output: Any = None
        self._error: Exception | None = None

    def compute(self) -> None:
        """Run the module on this rank's slice.

        Store an exception until the other ranks know of it.

        A rank without samples runs it on replica 0's slice and drops the output, so that all ranks
        have the same structure and the same graph.
        """
        slices, weights = self._enter()
        own_args, own_kwargs = map_tensors(self._batch, lambda _: slices.pop(0))
        # Only replica 0 works on the module's own buffers. Changes that other replicas make to
        # their buffers are lost, as in DataParallel.
        buffers = dict(self._module.named_buffers())
        versions = {name: buffer._version for name, buffer in buffers.items()}
        weights |= (
            {n: buffer.clone() for n, buffer in buffers.items()} if self._group.rank else buffers
        )
        try:
            self._output = torch.func.functional_call(self._module, weights, own_args, own_kwargs)
            for strange in (
                leaf for leaf in leaves(self._output) if not isinstance(leaf, Tensor | None)
            ):
                raise CannotAdopt(
                    f"{type(self._module).__name__} returned a {type(strange).__name__};"
                    " nn.DataParallel gathers tensors, None, and tuples, lists and dicts of them."
                    " Return a tensor instead."
                )
            self._outputs = [(tuple(t.shape), t.requires_grad) for t in tensors_of(self._output)]
        except Exception as error:
            # Every rank has to learn of it, or the others would wait in the exchange.
            self._error, self._failure = error, (type(error).__name__, text_of(error))
        # Batch norm's kernels update running statistics without raising their version. So while
        # training, small buffers count as changed; a large one (a mask, a table of positions) is
        # not a statistic.
        self._buffers = [
            name
            for name, buffer in buffers.items()
            if versions[name] != buffer._version
            or (self._module.training and buffer.numel() * buffer.element_size() <= STATISTIC_BYTES)
        ]

    def _enter(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Bring batch and parameters into the replica.

        Return its inputs, and the parameters that have gradients, by name.
        """
        tensors, ways = tensors_of(self._batch), self._ways
        mine = 0 if self._idle else self._group.rank
        # These are copies, because a module that changes its input in place would change the batch,
        # and differently on each rank.
        slices = [
            (tensor if way is None else way.of(tensor, mine))
            .detach()
            .to(self._device, non_blocking=True, copy=True)
            for tensor, way in zip(tensors, ways, strict=True)
        ]
        named = {n: p for n, p in self._module.named_parameters() if p.requires_grad and self._grad}
        tracked = [
            index for index, tensor in enumerate(tensors) if tensor.requires_grad and self._grad
        ]
        if not named and not tracked:
            return slices, {}
        crossing = Crossing(
            self._group, (*(ways[i] for i in tracked), *(None for _ in named)), self._device
        )
        self._token, *inner = Inward.apply(
            crossing, *(tensors[i] for i in tracked), *named.values()
        )
        for index in tracked:
            part = inner.pop(0)
            slices[index] = slices[index].requires_grad_() if self._idle else part
        return slices, dict(zip(named, inner, strict=True))

    def collect(self) -> Any:
        """Agree with the other ranks, and gather the output of the whole batch.

        Raises:
            RanksDisagree: ranks are at different calls, or have different batches.
            CannotAdopt: the replicas' outputs don't match.
        """
        shapes, number = _describe(self._batch)
        batch = f"{shapes} for {self._place}", number
        reports = self._group.exchange((batch, self._outputs, self._buffers, self._failure))
        batches, outputs, buffers, failures = zip(*reports, strict=True)
        drew = [rank for rank, drawn in enumerate(batches) if drawn != batches[0]]
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if drew and len(failed) < len(failures):
            raise RanksDisagree(
                f"Rank 0 and {ranks_in_words(drew)} drew different batches at forward pass"
                f" {self._number} of nn.DataParallel (rank 0: {batches[0][0]}; rank {drew[0]}:"
                f" {batches[drew[0]][0]}). {SAME_BATCH}"
            )
        if self._error is not None:
            raise self._error
        if failed:
            # That rank raises the error itself, with its traceback, and should be the first to
            # fail.
            threading.Event().wait(GRACE_SECONDS)
            name, text = failures[failed[0]]
            raise _error_class(name)(
                f"Caught {name} in replica {failed[0]} of nn.DataParallel: {text}"
            )
        if buffers[0]:
            mine = dict(self._module.named_buffers())
            self._group.take_from_rank_0([mine[name] for name in buffers[0]])
        return self._gather(outputs)

    def _gather(self, described: Sequence[Sequence[tuple[tuple[int, ...], bool]]]) -> Any:
        """Join the ranks' outputs; those with gradients are exchanged together."""
        if len(counts := {len(outputs) for outputs in described}) > 1:
            raise CannotAdopt(
                f"The replicas of nn.DataParallel returned different numbers of tensors ({counts}),"
                " so they cannot be gathered. Return the same structure for every slice of the"
                " batch."
            )
        every = list(zip(*described, strict=True))
        ways = [self._way([shape for shape, _ in outputs]) for outputs in every]
        rows = [
            self._rows(tensor, way)
            for tensor, way in zip(tensors_of(self._output), ways, strict=True)
        ]
        tracked = [
            i for i, outputs in enumerate(every) if self._grad and any(grad for _, grad in outputs)
        ]
        crossed = (
            self._exchange([ways[i] for i in tracked], [rows[i] for i in tracked])
            if tracked
            else ()
        )
        joined = dict(zip(tracked, crossed, strict=True))
        results = (
            joined[index] if index in joined else self._group.gather(tensor, way)
            for index, (tensor, way) in enumerate(zip(rows, ways, strict=True))
        )
        return map_tensors(self._output, lambda _: next(results))

    def _rows(self, tensor: Tensor, way: Slices) -> Tensor:
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return rows.narrow(way.dim, 0, 0) if self._idle else rows

    def _exchange(self, ways: Sequence[Slices], rows: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._token is None:
            raise CannotAdopt(
                f"The output of {type(self._module).__name__} depends on parameters that are not"
                " its own, so nn.DataParallel over ranks cannot sum their gradients. Register them"
                " in the module."
            )
        crossing = Crossing(self._group, tuple(ways), self._device)
        return Outward.apply(crossing, self._token, *rows)  # type: ignore[no-any-return]

    def _way(self, shapes: Sequence[tuple[int, ...]]) -> Slices:
        """Return how an output is divided over the ranks.

        Each contributes its rows or one scalar.
        """
        dim = self._dim if shapes[0] else 0
        rows = [shape[dim] if shape else 1 for shape in shapes[: self._replicas]]
        return Slices((*rows, *(0,) * (len(shapes) - self._replicas)), dim)


def _describe(batch: Any) -> tuple[str, int]:
    """Return the shapes of a batch's tensors, and a number that depends on their content.

    The numbers of two different batches are almost certainly different.
    """
    tensors, plain = tensors_of(batch), [leaf for leaf in leaves(batch) if isinstance(leaf, PLAIN)]
    number = zlib.crc32(repr(([(tuple(t.shape), t.dtype) for t in tensors], plain)).encode())
    for part in [_some(t.detach()) for t in tensors if t.layout == torch.strided]:
        number = zlib.crc32(part.cpu().numpy().data, number)
    return (
        ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors) or "no tensor",
        number,
    )


def _some(tensor: Tensor) -> Tensor:
    """Return the bytes of some elements spread over the tensor, as a flat ``uint8`` tensor."""
    # Only some rows are read, because reshaping a transposed tensor copies it.
    rows = tensor[:: max(1, tensor.shape[0] // SAMPLED_ROWS)] if tensor.dim() else tensor
    flat = rows.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].contiguous().view(torch.uint8)


def _error_class(name: str) -> type[Exception]:
    """Return the exception class with a name, so that programs can catch it, or RuntimeError."""
    found = getattr(torch, name, None) or getattr(builtins, name, None)
    known = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError)
    return found if isinstance(found, type) and issubclass(found, known) else RuntimeError

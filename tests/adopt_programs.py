"""Programs for ``nn.DataParallel``, run once over ranks and once in one process.

Each takes ``parallel(module, dim=0)``, which wraps a module, and returns numbers. ``Reference``
computes what ``nn.DataParallel`` on N GPUs computes, slice after slice: batch norm by slice,
buffers of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.checkpoint import checkpoint

Parallel = Callable[..., nn.Module]
PROGRAMS: dict[str, Callable[[Parallel], Any]] = {}


class Reference(nn.Module):
    """``nn.DataParallel`` on ``slices`` GPUs, computed one slice after another."""

    def __init__(self, module: nn.Module, slices: int, dim: int = 0) -> None:
        super().__init__()
        self.module, self.slices, self.dim = module, slices, dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._scatter((args, kwargs))
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        outputs = []
        for index, (own_args, own_kwargs) in enumerate(parts):
            buffers = (
                {} if index == 0 else {name: buffer.clone() for name, buffer in before.items()}
            )
            outputs.append(torch.func.functional_call(self.module, buffers, own_args, own_kwargs))
        return self._gather(outputs)

    def _scatter(self, value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            return [part.clone() for part in value.chunk(self.slices, self.dim)]
        if isinstance(value, (tuple, list)) and value:
            return [type(value)(parts) for parts in zip(*map(self._scatter, value), strict=False)]
        if isinstance(value, dict) and value:
            return [
                dict(parts) for parts in zip(*map(self._scatter, list(value.items())), strict=False)
            ]
        return [value] * self.slices

    def _gather(self, outputs: list[Any]) -> Any:
        first = outputs[0]
        if isinstance(first, Tensor):
            return (
                torch.cat([o.reshape(1) for o in outputs])
                if not first.dim()
                else torch.cat(outputs, self.dim)
            )
        if first is None:
            return None
        if isinstance(first, dict):
            return {key: self._gather([output[key] for output in outputs]) for key in first}
        gathered = [self._gather(list(parts)) for parts in zip(*outputs, strict=True)]
        return type(first)(*gathered) if hasattr(first, "_fields") else type(first)(gathered)


def program(function: Callable[[Parallel], Any]) -> Callable[[Parallel], Any]:
    PROGRAMS[function.__name__] = function
    return function


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), *extra, nn.Tanh(), nn.Linear(16, 3))


def batch(rows: int, step: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator("cpu").manual_seed(step)
    x = torch.randn(rows, 6, generator=source, device="cpu")
    y = torch.randint(3, (rows,), generator=source, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def train(
    model: nn.Module, parameters: Any, rows: int, loss_of: Callable[..., Tensor], steps: int = 4
) -> Any:
    """Train, and return the losses, the parameters and the buffers."""
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(rows, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return (
        losses,
        [p.detach() for p in model.parameters()],
        [b.detach().double() for b in model.buffers()],
    )


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def simple(
    rows: int, make: Callable[[], nn.Module], loss_of: Callable[..., Tensor] = cross_entropy
) -> Any:
    def run(parallel: Parallel) -> Any:
        torch.manual_seed(3)
        model = parallel(make())
        return train(model, model.parameters(), rows, loss_of)

    return run


class Inner(nn.Module):
    """A model whose forward is given as a function of (its layers, its arguments)."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def two_layers(forward: Callable[..., Any]) -> nn.Module:
    return Inner(forward, a=nn.Linear(6, 16), b=nn.Linear(16, 3))


PROGRAMS["fewer_samples_than_ranks"] = simple(1, mlp)
PROGRAMS["batch_norm_uneven"] = simple(11, lambda: mlp(nn.BatchNorm1d(16)))


def _by_keyword(model, x, y):
    return F.cross_entropy(model(x=x, scale=2.0), y)


PROGRAMS["keywords"] = simple(
    7, lambda: two_layers(lambda m, x, scale: m.b(torch.tanh(m.a(x))) * scale), _by_keyword
)


def _of_tuple(model, x, y):
    logits, hidden, nothing = model(x)
    assert nothing is None
    return F.cross_entropy(logits, y) + hidden.pow(2).mean()


def _of_dict(model, x, y):
    out = model({"x": x, "name": "batch"})
    return F.cross_entropy(out["logits"], y) + out["hidden"][0].pow(2).mean()


PROGRAMS["tuple_output"] = simple(
    7, lambda: two_layers(lambda m, x: (m.b(m.a(x)), m.a(x), None)), _of_tuple
)
PROGRAMS["dict_output"] = simple(
    7,
    lambda: two_layers(lambda m, d: {"logits": m.b(m.a(d["x"])), "hidden": [m.a(d["x"])]}),
    _of_dict,
)


PROGRAMS["loss_inside"] = simple(
    12,
    lambda: two_layers(lambda m, x, y: F.cross_entropy(m.b(torch.tanh(m.a(x))), y)),
    lambda model, x, y: model(x, y).mean(),
)


def _with_penalty(model, x, y):
    return cross_entropy(model, x, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def _twice(model, x, y):
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)


PROGRAMS["penalty_on_parameters"] = simple(7, mlp, _with_penalty)
PROGRAMS["two_forwards_one_backward"] = simple(7, mlp, _twice)
PROGRAMS["unused_parameters"] = simple(
    7, lambda: Inner(lambda m, x: m.a(x), a=nn.Linear(6, 3), b=nn.Linear(6, 3))
)


def _tied():
    net = Inner(lambda m, x: m.b(torch.tanh(m.a(x)))[:, :3], a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    net.b.weight = net.a.weight
    return net


PROGRAMS["tied_weights"] = simple(7, _tied)


def _checkpointed():
    def forward(m, x):
        x = m.a(x)
        return m.b(
            checkpoint(torch.tanh, x, use_reentrant=False) + checkpoint(m.c, x, use_reentrant=True)
        )

    return Inner(forward, a=nn.Linear(6, 16), b=nn.Linear(16, 3), c=nn.Linear(16, 16))


PROGRAMS["checkpoint"] = simple(7, _checkpointed)


@program
def lstm_along_dim_1(parallel):
    torch.manual_seed(1)
    model = parallel(Inner(lambda m, x: m.a(x)[0], a=nn.LSTM(6, 5, num_layers=2)), dim=1)
    return train(model, model.parameters(), 20, lambda m, x, y: m(x.reshape(4, 5, 6)).pow(2).mean())


@program
def gradient_penalty(parallel):
    torch.manual_seed(1)
    model = parallel(two_layers(lambda m, x: m.b(torch.tanh(m.a(x)))))
    x = batch(7)[0].requires_grad_()
    score = model(x).pow(2).sum()
    (grad,) = torch.autograd.grad(score, x, create_graph=True)
    (score + (grad.norm(dim=1) - 1).pow(2).mean()).backward()
    return [grad.detach(), x.grad, *(p.grad for p in model.parameters())]


@program
def evaluation(parallel):
    torch.manual_seed(1)
    model = parallel(mlp(nn.BatchNorm1d(16)))
    losses = train(model, model.parameters(), 9, cross_entropy)
    model.eval()
    with torch.no_grad():
        logits = [model(batch(rows, 9)[0]) for rows in (7, 1)]
    assert not any(out.requires_grad for out in logits)
    return losses, logits, [out.argmax(1) for out in logits]

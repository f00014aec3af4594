"""Tensors, modules of torch, optimizers.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import block
from oracle import Program, assert_same, each_of, row, together

pytestmark = pytest.mark.usefixtures("oracle")

NET = """
import torch, torch.nn as nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.steps = 0
        self.seen = []

    def forward(self, x):
        return self.fc(x) * scale

scale = 1.0
"""

SMALL_NET = """
import torch, torch.nn as nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 1)
"""

TRAIN = """
for i in range(3):
    opt.zero_grad()
    loss = net(torch.ones(2, 4)).sum()
    loss.backward()
    opt.step()
    net.steps += 1
    net.seen.append(i)
del loss
"""

ROWS = [
    row(
        "tensor in place",
        setup="""
            import torch
            t = torch.zeros(3)
            u = t
        """,
        cell="""
            t += 1
            t[0] = 5
        """,
    ),
    row(
        "tensor views",
        setup="""
            import torch
            t = torch.arange(6.0)
            v = t[1:4]
            w = t.view(2, 3).T
            k = [v]
        """,
        cell="""
            v.mul_(10)
            w[0, 0] = -1
            x = t[4:]
        """,
    ),
    row(
        "tensor rebound",
        setup="""
            import torch
            t = torch.zeros(3)
            u = t
        """,
        cell="t = t + 1",
    ),
    row(
        "tensor dtypes",
        setup="""
            import torch
            ts = [
                torch.ones(2, dtype=d)
                for d in (
                    torch.bfloat16,
                    torch.int8,
                    torch.bool,
                    torch.complex64,
                    torch.float64,
                )
            ]
            e = torch.empty(0, 3)
            s = torch.tensor(3.0)
        """,
        cell="""
            for t in ts:
                t[0] = 0
            s += 1
            e2 = e + 1
        """,
    ),
    row(
        "sparse tensor",
        setup="""
            import torch
            s = torch.eye(3).to_sparse()
        """,
        cell="d = s.to_dense() * 2",
        check="s.to_dense().tolist()",
    ),
    row(
        "grad and requires_grad",
        setup="""
            import torch
            w = torch.ones(2, requires_grad=True)
            v = torch.ones(2)
        """,
        cell="""
            (w * 3).sum().backward()
            v.requires_grad_()
        """,
        check="w.grad.tolist(), v.requires_grad, w.is_leaf",
    ),
    row(
        "tensor attribute",
        setup="""
            import torch
            t = torch.zeros(1)
            t.tag = [1]
        """,
        cell="""
            t.tag.append(2)
            t.other = t.tag
        """,
    ),
    row(
        "data replaced",
        setup="""
            import torch
            t = torch.zeros(2)
            v = t[:1]
        """,
        cell="t.data = torch.ones(3)",
    ),
    row(
        "module to half",
        setup=block(
            NET,
            """
                net = Net()
                p = net.fc.weight
            """,
        ),
        cell="""
            net.half()
            net.eval()
        """,
        check="net.fc.weight is p, p.dtype",
    ),
    row(
        "resized tensor",
        setup="""
            import torch
            t = torch.empty(0)
            k = [t]
        """,
        cell="t.resize_(4).fill_(1)",
    ),
    row(
        "parameters and optimizer",
        setup=block(
            NET,
            """
                net = Net()
                opt = torch.optim.Adam(net.parameters(), lr=0.1)
            """,
        ),
        cell=TRAIN,
        check='opt.param_groups[0]["params"][0] is net.fc.weight',
    ),
    row(
        "scheduler",
        setup=block(
            NET,
            """
                net = Net()
                opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
                sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
            """,
        ),
        cell="""
            for i in range(3):
                opt.zero_grad()
                loss = net(torch.ones(2, 4)).sum()
                loss.backward()
                opt.step()
                sched.step()
                net.steps += 1
                net.seen.append(i)
            del loss
        """,
        check='opt.param_groups[0]["lr"], sched.get_last_lr(), sched.optimizer is opt',
    ),
    row(
        "shared parameters and buffers",
        setup=block(
            NET,
            """
                class Two(Net):
                    def __init__(self):
                        super().__init__()
                        self.a = nn.Linear(2, 2)
                        self.b = self.a
                        self.bn = nn.BatchNorm1d(2)

                net = Two()
            """,
        ),
        cell="""
            net.bn(torch.ones(4, 2))
            net.a.weight.data.fill_(2)
            net.extra = nn.Linear(1, 1)
        """,
        check="net.a is net.b, list(net.state_dict())",
    ),
    row(
        "model made in the cell, run twice",
        setup=(
            NET,
            """
                net = Net()
                first = net
            """,
            "n = 1",
        ),
        cell=block(
            """
                net = Net()
                opt = torch.optim.SGD(net.parameters(), lr=0.1)
            """,
            TRAIN,
        ),
        check="isinstance(net, Net), first is net",
    ),
    row(
        "distributed wrapper unwrapped",
        setup=block(
            NET,
            """
                net = Net()
                opt = torch.optim.Adam(net.parameters())
            """,
        ),
        cell="""
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel as DDP
            made = dist.HashStore()
            dist.init_process_group("gloo", store=made, rank=0, world_size=1)
            net = DDP(net)
            inner = net.module
            for i in range(3):
                opt.zero_grad()
                loss = net(torch.ones(2, 4)).sum()
                loss.backward()
                opt.step()
                inner.steps += 1
                inner.seen.append(i)
            del loss
            dist.destroy_process_group()
            del made
            net = net.module
        """,
        check="net is inner",
    ),
    row(
        "dataset and loader",
        setup=block(
            NET,
            """
                from torch.utils.data import DataLoader, Dataset

                class D(Dataset):
                    def __init__(self):
                        self.x = torch.arange(8.0)

                    def __len__(self):
                        return 8

                    def __getitem__(self, i):
                        return self.x[i]

                loader = DataLoader(D(), batch_size=4, shuffle=True)
            """,
        ),
        cell="got = [b.tolist() for b in loader]",
        check="sorted(sum(got, []))",
    ),
    row(
        "forward hook beside the notebook's",
        setup="""
            import torch, torch.nn as nn
            seen = []

            def note(*what):
                seen.append(len(seen))

            net = nn.Linear(1, 1)
            h = net.register_forward_hook(note)
        """,
        cell="""
            g = net.register_forward_hook(note)
            net(torch.ones(1))
            n = len(net._forward_hooks)
        """,
        check="h.remove(), len(net._forward_hooks), seen",
    ),
    row(
        "tensor hooks of the notebook",
        setup="""
            import torch, torch.nn as nn
            seen = []

            def note(*what):
                seen.append(len(seen))

            t = torch.ones(2, requires_grad=True)
            t.register_hook(note)
            t.register_post_accumulate_grad_hook(note)
        """,
        cell="(t * 2).sum().backward()",
        check="(t * 2).sum().backward(), seen",
    ),
    row(
        "tensor hooks of the cell",
        setup="""
            import torch, torch.nn as nn
            seen = []

            def note(*what):
                seen.append(len(seen))

            t = torch.ones(2, requires_grad=True)
        """,
        cell="""
            h = t.register_hook(note)
            k = t.register_post_accumulate_grad_hook(note)
        """,
        check="(t * 2).sum().backward(), seen",
    ),
    row(
        "lazy modules take their shape",
        setup="""
            import torch, torch.nn as nn
            net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
            first = net[0]
        """,
        cell="y = net(torch.ones(2, 4)).sum().item()",
        check="type(net[0]).__name__, first is net[0], net(torch.ones(2, 4)).shape, net",
    ),
    row(
        "parametrization",
        setup="""
            import torch, torch.nn as nn
            net = nn.Linear(2, 2)
            k = [net]
        """,
        cell="""
            from torch.nn.utils.parametrizations import weight_norm
            w = weight_norm(net)
        """,
        check="net(torch.ones(2)).shape, k[0] is net, sorted(net.state_dict())",
    ),
    row(
        "method of a model patched",
        setup="""
            import torch, torch.nn as nn

            class Net(nn.Module):
                seen = 0

                def __init__(self):
                    super().__init__()
                    self.l = nn.Linear(1, 1)

                def forward(self, x):
                    Net.seen += 1
                    return self.l(x)

            net = Net()
            first = Net.forward
        """,
        cell="""
            def patched(self, x):
                return first(self, x) * 0

            Net.forward = patched
            r = net(torch.ones(1)).item()
            keep = Net.forward
        """,
        check="r, net(torch.ones(1)).item(), Net.seen, Net.forward is patched is keep",
    ),
    row(
        "whole model, saved by its class's name, which the cell does not say",
        setup=block(SMALL_NET, "net = Net()"),
        cell='torch.save(net, "net.pt")',
        check='type(torch.load("net.pt", weights_only=False)) is Net',
    ),
    row(
        "objects that pickle others by themselves",
        setup=block(
            SMALL_NET,
            """
                import io

                class Holder:
                    def __init__(self, net):
                        self.net = net

                    def __getstate__(self):
                        b = io.BytesIO()
                        torch.save(self.net, b)
                        return {"net": b.getvalue()}

                    def __setstate__(self, state):
                        self.net = torch.load(io.BytesIO(state["net"]), weights_only=False)

                h = Holder(Net())
                k = [h]
            """,
        ),
        cell="total = nn.init.ones_(h.net.l.weight).sum().item()",
        check="h.net.l.weight.tolist(), k[0] is h, type(h.net) is Net",
    ),
    row(
        "frozen parameters",
        setup="""
            import torch, torch.nn as nn
            net = nn.Linear(2, 1)
            x = torch.ones(1, requires_grad=True)
        """,
        cell="""
            for p in net.parameters():
                p.requires_grad = False
            net.bias.requires_grad_(True)
            x.requires_grad_(False)
        """,
        check="[p.requires_grad for p in net.parameters()], x",
    ),
    row(
        "gradient that was retained",
        setup="""
            import torch, torch.nn as nn
            w = torch.ones(2, requires_grad=True)
            held = []
        """,
        cell="""
            out = w * 2
            out.retain_grad()
            held.append(out)
            (out**2).sum().backward()
        """,
        check="out.grad, held[0] is out, w.grad",
    ),
    row(
        "functions of torch under other names",
        setup="import torch",
        cell="""
            from torch import randn, as_tensor, cat
            t2 = torch.as_tensor
            fs = [torch.zeros]
        """,
        check="""
            (
                randn is torch.randn,
                t2 is as_tensor is torch.as_tensor,
                fs[0] is torch.zeros,
                cat,
            )
        """,
    ),
    row(
        "model and its gradients in another precision",
        setup="""
            import torch, torch.nn as nn
            m = nn.Linear(2, 2)
            m(torch.ones(2)).sum().backward()
            g = m.weight.grad
        """,
        cell="m.double()",
        check="""
            (
                m.weight.grad is g,
                m(torch.ones(2).double()),
                [p.grad.dtype for p in m.parameters()],
            )
        """,
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""

ALONE = [
    row(
        "wrappers unwrapped",
        setup=block(NET, "net = Net()"),
        cell="""
            net0 = net
            net = nn.DataParallel(net)
            net.module.steps = 7
            m = nn.DataParallel(Net())
            d = {"m": nn.DataParallel(Net())}
        """,
        check='net is net0, type(m) is Net, type(d["m"]) is Net',
        here_also="""
            net = net.module.cpu()
            m = m.module
            d["m"] = d["m"].module
        """,
    )
]
"""Each has a notebook of its own."""


@each_of([*together(ROWS), *ALONE])
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)

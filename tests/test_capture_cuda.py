"""CUDA tensors travel to the rank's GPU and come back to the device they had; new ones come to host memory.

Last run: torch 2.11.0+cu130, Python 3.12.3, one NVIDIA H200. The eight programs about tensors, modules and
gradients passed. The two about random state hung in torch's initialisation lock; how the state is set there
was rewritten after that run (process_state.py) and has not been run on a GPU since.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import Program, compare, row

pytestmark = [pytest.mark.usefixtures("oracle"), pytest.mark.gpu]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

NET = """
import torch, torch.nn as nn
net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
"""
TRAIN = """
for i in range(3):
    opt.zero_grad()
    net(torch.arange(8., device="cuda").view(2, 4)).sum().backward()
    opt.step()
"""


def _program(name: str, earlier: str, cell: str, probe: str = "", here_also: str = "") -> Program:
    return row(name, (earlier,), cell, probe, here_also=here_also, header="#pragma taas --gpus 1\n")


PROGRAMS = [
    _program("in place, with a view", "import torch\nt = torch.zeros(4, device='cuda'); v = t[1:3]; w = t", "v += 1; t[0] = 5"),
    _program("rebound and new", "import torch\nt = torch.ones(2, device='cuda')", "u = t * 2; v = u[1:]; t = t + 1", "u.data_ptr() + 4 == v.data_ptr()",
             "\nu, t = u.cpu(), t.cpu()\nv = u[1:]"),
    _program("new view of old memory", "import torch\nt = torch.zeros(4, device='cuda')", "v = t[1:]", "v.fill_(3), t.tolist()"),
    _program("dtypes and empty", "import torch\nts = [torch.ones(2, dtype=d, device='cuda') for d in (torch.bfloat16, torch.int64, torch.bool)] + [torch.empty(0, device='cuda')]", "for t in ts[:3]: t[0] = 0"),
    _program("net and Adam on the GPU", NET + "net.cuda(); opt = torch.optim.Adam(net.parameters())", TRAIN, "opt.param_groups[0]['params'][0] is net[0].weight"),
    _program("net moved in the cell", NET + "opt = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)", "net.cuda()\n" + TRAIN,
             "net(torch.ones(2, 4)).sum().backward(), opt.step(), str(net[0].weight.device)",
             "\nnet.cpu()\nfor s in opt.state.values(): s['momentum_buffer'] = s['momentum_buffer'].cpu()\nfor p in net.parameters(): p.grad = p.grad.cpu()\ndel s, p"),
    _program("only made in the cell", "import torch", "u = torch.arange(3, device='cuda')", "", "\nu = u.cpu()"),
    _program("random state, CUDA used before", "import torch\ntorch.manual_seed(3); x = torch.rand(2, device='cuda')", "y = torch.rand(2, device='cuda')", "torch.rand(2, device='cuda').tolist()", "\ny = y.cpu()"),
    _program("random state, CUDA not used before", "import torch\ntorch.manual_seed(3)", "y = torch.rand(2, device='cuda').tolist()", "torch.rand(2, device='cuda').tolist()"),
    _program("gradients", "import torch\np = torch.ones(2, device='cuda', requires_grad=True)", "(p * 3).sum().backward()", "p.grad.device"),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_cell_elsewhere_leaves_what_it_leaves_here(program: Program, tmp_path: Path) -> None:
    """Values, devices, identities and aliases in the notebook are those of running the cell there."""
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)

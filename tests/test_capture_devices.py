"""State that an optimizer brings along follows parameters which the cell moves to another device.

The device is torch's ``meta``, which every machine has; test_gpu.py has the whole way there and back on CUDA.
"""

from __future__ import annotations

from fresh_interpreter import printed

PROGRAM = """
import torch
from taas.capture.libraries import join_devices_at_first_step, library_reader

net = torch.nn.Linear(2, 1)
sent = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for parameter in net.parameters():
    sent.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
make, arguments, put, attributes, *_ = library_reader(type(sent))(sent)
arrived = make(*arguments)
put(arrived, attributes)
join_devices_at_first_step()

torch.__future__.set_swap_module_params_on_conversion(True)  # as .cuda() does, parameters stay the same objects
net.to("meta")
net(torch.ones(1, 2, device="meta")).sum().backward()
arrived.step()
print({state["momentum_buffer"].device.type for state in arrived.state.values()})
"""

BACK = """
import types
from pathlib import Path
import torch
from taas.capture import arrive, capture

notebook, rank = types.ModuleType("__main__").__dict__, types.ModuleType("__main__").__dict__
exec("import torch; net = torch.nn.Linear(2, 1); opt = torch.optim.Adam(net.parameters())", notebook)
train = "net(torch.ones(1, 2)).sum().backward(); opt.step()"
captured = capture(train, notebook, None, project=Path.cwd())
arrival = arrive(captured.fd, rank, device=None)
arrival.mark()
exec(train, rank)

torch.__future__.set_swap_module_params_on_conversion(True)
notebook["net"].to("meta")  # as if they had been on a GPU when they were captured
for stretch in captured._memory.values():
    stretch.device = "cuda:0"
applied = captured.apply(arrival.pack_answer(rank))
print(applied.lost, {s["exp_avg"].device.type for s in notebook["opt"].state.values()}, len(notebook["opt"].state))
"""


def test_state_made_on_the_cpu_follows_parameters_on_the_gpu() -> None:
    """A rehearsed run of a network that the notebook has on a GPU: the optimizer's new state is beside it there."""
    assert printed(BACK) == ["[] {'meta'} 2"]


def test_state_follows_its_parameters_at_the_first_step() -> None:
    """Parameters moved after the optimizer arrived: its momentum is beside them when it is stepped."""
    assert printed(PROGRAM) == ["{'meta'}"]

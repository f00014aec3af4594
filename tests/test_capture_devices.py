"""State that an optimizer brings along follows parameters which the cell moves to another device.

The device is torch's ``meta``, which every machine has; test_gpu.py has the whole way there and back on CUDA.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from taas.capture.tensors import join_devices_at_first_step, reduce_optimizer

net = torch.nn.Linear(2, 1)
sent = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for parameter in net.parameters():
    sent.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
make, arguments, attributes, _, _, put = reduce_optimizer(sent)
arrived = make(*arguments)
put(arrived, attributes)
join_devices_at_first_step()

torch.__future__.set_swap_module_params_on_conversion(True)  # as .cuda() does, parameters stay the same objects
net.to("meta")
net(torch.ones(1, 2, device="meta")).sum().backward()
arrived.step()
print({state["momentum_buffer"].device.type for state in arrived.state.values()})
"""


def test_state_follows_its_parameters_at_the_first_step() -> None:
    """Parameters moved after the optimizer arrived: its momentum is beside them when it is stepped."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.stdout, ran.stderr) == ("{'meta'}\n", "")

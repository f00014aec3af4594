"""What GPUs do with names, where there is none.

They refuse, by being absent; generators and devices stand in for them.

test_gpu.py has real ones.
"""

from __future__ import annotations

import pytest
from fresh_interpreter import all_printed

MEMORY = """
import os, types
from pathlib import Path
import torch
from taas.capture import arrive, capture, pack_answer
from taas.capture.describe import memory, tensors

notebook, rank = types.ModuleType("__main__").__dict__, types.ModuleType("__main__").__dict__
plain_memory_of = tensors.memory_of_storage

def on_gpu(storage):
    found = plain_memory_of(storage)
    found.device = "cuda:0"
    return found

def refuse(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.\\nTried to allocate 20.00 MiB")

def cell(setup, text, *, gpu_here=False, gpu_there=False):
    exec(setup, notebook)
    tensors.memory_of_storage = on_gpu if gpu_here else plain_memory_of
    captured = capture(text, notebook, None, project=Path.cwd())
    arrival = arrive(captured.fd, rank, device=None)
    arrival.mark()
    exec(text, rank)
    tensors.memory_of_storage = on_gpu if gpu_there else plain_memory_of
    return captured, pack_answer(arrival, rank)
"""

GENERATORS = """
import torch
from taas.capture.settings.process_state import ProcessState, of_notebook, put

def initialise():  # as torch does when CUDA is first used, with what was queued until then
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(2))
    torch.cuda.random.device_count = lambda: 2
    torch.cuda.current_device = torch.cuda.random.current_device = lambda: 0
    for call in torch.cuda._lazy_seed_tracker.get_calls():
        if call:
            call[0]()

def draw(device):
    return torch.rand(1, generator=torch.cuda.default_generators[device]).item()

def states(): return of_notebook()["random numbers"]
def apply(**generators): put({"random numbers": generators})

torch.manual_seed(3)
"""

ROWS = {
    # The notebook's GPU is where the next rank computes: only what the notebook has there takes
    # room there.
    "new tensors of a gpu come to host memory": (
        MEMORY
        + """captured, answer = cell("import torch; old = torch.zeros(1)", '''
made = torch.arange(4.)
view = made[1:]
old += 1
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(2)).sum().backward()
optimizer.step()
''', gpu_there=True)
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
memory.copy_storage = refuse
applied = captured.apply(answer)
print(applied.lost, notebook["made"].tolist(), notebook["made"].device, notebook["old"].item())
print(notebook["view"].data_ptr() - notebook["made"].data_ptr())
weight = notebook["net"].weight
state = notebook["optimizer"].state[weight]
print({t.device.type for t in (weight, weight.grad, *state.values())})
""",
        ["[] [0.0, 1.0, 2.0, 3.0] cpu 1.0", "4", "{'cpu'}"],
    ),
    # Each tensor lands on the device of its number, where the rank has that; in one of several
    # ranks, on its own.
    "memory of several gpus stays apart in the process that has them all": (
        MEMORY
        + """
notebook["a"], notebook["b"] = torch.zeros(1), torch.ones(1)
notebook["c"] = torch.ones(2)
numbers = {}
for number, name in enumerate("abc"):
    numbers[notebook[name].untyped_storage().data_ptr()] = f"cuda:{number}"

def on_gpus(storage):
    found = plain_memory_of(storage)
    found.device = numbers[storage.data_ptr()]
    return found

tensors.memory_of_storage = on_gpus
captured = capture("a, b, c", notebook, None, project=Path.cwd())
tensors.memory_of_storage = plain_memory_of
torch.cuda.device_count = lambda: 2
for device in ("cuda", "cuda:1"):
    asked = []
    memory.copy_storage = lambda storage, device: asked.append(device) or storage
    arrive(captured.fd, {}, device=device).close()
    print(asked)
""",
        ["['cuda:0', 'cuda:1', 'cuda:0']", "['cuda:1', 'cuda:1', 'cuda:1']"],
    ),
    # The notebook seeded CUDA and has not used it: each of the rank's devices draws as it would
    # there.
    "a rank with several gpus has them all seeded": (
        GENERATORS
        + """state = of_notebook()
torch.cuda._lazy_seed_tracker.__init__()  # a rank's torch has no seed of the notebook
ProcessState(state, "cuda:0").put()
initialise()
expected = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
print(draw(0) == expected, draw(1) == expected)
""",
        ["True True"],
    ),
    # CUDA's state that came back into a notebook without a context travels on with the next run.
    "the next run goes on where the last one stopped": (
        GENERATORS
        + """came = bytes(torch.Generator().manual_seed(8).get_state().numpy())
print("cuda" in states())
apply(cuda=came)
print(states()["cuda"] == came)
initialise()
print(draw(0) == torch.rand(1, generator=torch.Generator().manual_seed(8)).item())
""",
        ["False", "True", "True"],
    ),
    # A rehearsed run of a network that the notebook has on a GPU: the optimizer's new state is
    # beside it there.
    "state made on the cpu follows parameters on the gpu": (
        """import types
from pathlib import Path
import torch
from taas.capture import arrive, capture, pack_answer

notebook, rank = types.ModuleType("__main__").__dict__, types.ModuleType("__main__").__dict__
exec("import torch\\nnet = torch.nn.Linear(2, 1)", notebook)
exec("opt = torch.optim.Adam(net.parameters())", notebook)
train = "net(torch.ones(1, 2)).sum().backward()\\nopt.step()"
captured = capture(train, notebook, None, project=Path.cwd())
arrival = arrive(captured.fd, rank, device=None)
arrival.mark()
exec(train, rank)

torch.__future__.set_swap_module_params_on_conversion(True)
notebook["net"].to("meta")  # as if they had been on a GPU when they were captured
for stretch in captured._memory.values():
    stretch.device = "cuda:0"
applied = captured.apply(pack_answer(arrival, rank))
state = notebook["opt"].state
print(applied.lost, {one["exp_avg"].device.type for one in state.values()}, len(state))
""",
        ["[] {'meta'} 2"],
    ),
    # Parameters moved after the optimizer arrived: its momentum is beside them when it is stepped.
    "state follows its parameters at the first step": (
        """import torch
from taas.capture.describe.libraries import join_devices_at_first_step, library_reader

net = torch.nn.Linear(2, 1)
sent = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for parameter in net.parameters():
    sent.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
make, arguments, put, attributes, *_ = library_reader(type(sent))(sent)
arrived = make(*arguments)
put(arrived, attributes)
join_devices_at_first_step()

# as .cuda() does, parameters stay the same objects
torch.__future__.set_swap_module_params_on_conversion(True)
net.to("meta")
net(torch.ones(1, 2, device="meta")).sum().backward()
arrived.step()
print({state["momentum_buffer"].device.type for state in arrived.state.values()})
""",
        ["{'meta'}"],
    ),
}


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    return all_printed({name: program for name, (program, _) in ROWS.items()}, imports="torch")


@pytest.mark.parametrize("name", ROWS)
def test_names_and_gpus(name: str, said: dict[str, list[str]]) -> None:
    """Each row's comment says what is so."""
    assert said[name] == ROWS[name][1]

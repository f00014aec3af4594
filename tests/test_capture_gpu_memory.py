"""What the notebook's GPU refuses while an answer is applied; a GPU isn't needed: it refuses here by being absent."""

from __future__ import annotations

from fresh_interpreter import printed

SETUP = """
import os, types
from pathlib import Path
import torch
from taas.capture import arrive, capture, memory, tensors

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
    return captured, arrival.pack_answer(rank)
"""


def said(program: str) -> list[str]:
    """Run a program after the set-up; returns the lines it prints."""
    return printed(SETUP + program)


def test_new_tensors_of_a_gpu_come_to_host_memory() -> None:
    """The notebook's GPU is where the next rank computes: only what the notebook has there takes room there."""
    lines = said("""
captured, answer = cell("import torch; old = torch.zeros(1)", '''
made = torch.arange(4.); view = made[1:]; old += 1; net = torch.nn.Linear(2, 1); optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(2)).sum().backward(); optimizer.step()
''', gpu_there=True)
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
memory.moved = refuse
applied = captured.apply(answer)
print(applied.lost, notebook["made"].tolist(), notebook["made"].device, notebook["old"].item())
print(notebook["view"].data_ptr() - notebook["made"].data_ptr())
state = notebook["optimizer"].state[notebook["net"].weight]
print({t.device.type for t in (notebook["net"].weight, notebook["net"].weight.grad, *state.values())})
""")
    assert lines == ["[] [0.0, 1.0, 2.0, 3.0] cpu 1.0", "4", "{'cpu'}"]


def test_memory_of_several_gpus_stays_apart_in_the_process_that_has_them_all() -> None:
    """Each tensor lands on the device of its number, where the rank has that; in one of several ranks, on its own."""
    lines = said("""
exec("a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)", {"torch": torch}, notebook)
numbers = {notebook[name].untyped_storage().data_ptr(): f"cuda:{number}" for number, name in enumerate("abc")}

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
    memory.moved = lambda storage, device: asked.append(device) or storage
    arrive(captured.fd, {}, device=device).close()
    print(asked)
""")
    assert lines == ["['cuda:0', 'cuda:1', 'cuda:0']", "['cuda:1', 'cuda:1', 'cuda:1']"]


WAITING = """
asked = []
torch.cuda.is_initialized, torch.cuda.device_count = lambda: True, lambda: 3
torch._C._cuda_hasPrimaryContext = lambda number: number != 1
torch.cuda.get_rng_state = torch.get_rng_state
"""


def test_memory_is_read_when_the_gpus_have_written_it() -> None:
    """A kernel that uses CUDA waits for the devices that it uses, before its names travel."""
    lines = said(
        WAITING
        + """
torch.cuda.synchronize = asked.append
notebook["n"] = 1
capture("n", notebook, None, project=Path.cwd())
print(asked)
"""
    )
    assert lines == ["[0, 2]"]


def test_work_on_the_gpu_that_failed_stops_the_run_before_it_starts() -> None:
    """A failure that CUDA tells late is told then: what it left in memory would travel silently."""
    lines = said(
        WAITING
        + """
from taas.errors import CaptureError
torch.cuda.synchronize = refuse
notebook["n"] = 1
try:
    capture("n", notebook, None, project=Path.cwd())
except CaptureError as error:
    print(error)
"""
    )
    assert lines == [
        "an earlier cell's work on the GPU has failed (CUDA out of memory.), and its tensors cannot be trusted. "
        "Nothing was started; restart the kernel."
    ]


def test_tensors_that_cannot_be_changed_on_the_gpu_are_said() -> None:
    """The other names of the run come; the tensor has its old values, and a line says so."""
    lines = said("""
captured, answer = cell("import torch; old = torch.zeros(4)", "old += 1; count = 3", gpu_here=True)
memory.Stretch._write_to_device = refuse
applied = captured.apply(answer)
print(notebook["old"].tolist(), notebook["count"])
print(*applied.lost, sep="\\n")
""")
    assert lines[0] == "[0.0, 0.0, 0.0, 0.0] 3"
    (lost,) = lines[1:]
    assert lost == "new values of tensors that the notebook has on cuda:0 (CUDA out of memory.)"

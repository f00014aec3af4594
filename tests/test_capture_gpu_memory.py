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


def test_new_tensors_that_the_gpu_has_no_room_for_stay_in_host_memory() -> None:
    """They come as CPU tensors, with a line that says why and what to do; other names come as ever."""
    lines = said("""
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
captured, answer = cell("import torch", "made = torch.arange(4.); view = made[1:]; count = 3", gpu_there=True)
memory.moved = refuse
applied = captured.apply(answer)
print(notebook["made"].tolist(), notebook["made"].device, notebook["count"])
print(notebook["view"].data_ptr() - notebook["made"].data_ptr())
print(*applied.lost, sep="\\n")
""")
    assert lines[:2] == ["[0.0, 1.0, 2.0, 3.0] cpu 3", "4"]
    (lost,) = lines[2:]
    assert lost == (
        "to cuda:0: 16 bytes of new tensors, which are in host memory now (CUDA out of memory.); "
        'make room on the GPU and move them there with .to("cuda:0")'
    )


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

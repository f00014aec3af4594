"""Random state of CUDA, by generators that stand in for those of two GPUs; test_capture_cuda.py has real ones."""

from __future__ import annotations

from fresh_interpreter import printed

SETUP = """
import torch
from taas.capture.process_state import ProcessState, of_notebook, put

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


def said(program: str) -> list[str]:
    """Run a program after the set-up; returns the lines it prints."""
    return printed(SETUP + program)


def test_a_rank_with_several_gpus_has_them_all_seeded() -> None:
    """The notebook seeded CUDA and has not used it: each of the rank's devices draws as it would there."""
    assert said("""
state = of_notebook()
torch.cuda._lazy_seed_tracker.__init__()  # a rank's torch has no seed of the notebook
ProcessState(state, "cuda:0").put()
initialise()
expected = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
print(draw(0) == expected, draw(1) == expected)
""") == ["True True"]


def test_the_next_run_goes_on_where_the_last_one_stopped() -> None:
    """CUDA's state that came back into a notebook without a context travels on with the next run."""
    assert said("""
came = bytes(torch.Generator().manual_seed(8).get_state().numpy())
print("cuda" in states())
apply(cuda=came)
print(states()["cuda"] == came)
initialise()
print(draw(0) == torch.rand(1, generator=torch.Generator().manual_seed(8)).item())
""") == ["False", "True", "True"]


def test_a_seed_of_the_notebook_replaces_the_state_that_came() -> None:
    """Seeded after the run, the notebook's next run begins with that seed."""
    assert said("""
apply(cuda=bytes(torch.Generator().manual_seed(8).get_state().numpy()))
torch.manual_seed(5)
print("cuda" in states(), states()["torch seed"])
""") == ["False 5"]


def test_a_seed_of_a_cell_that_used_no_gpu_holds_for_the_notebooks() -> None:
    """``torch.manual_seed`` seeds CUDA too: after the run the notebook's GPUs draw as if it had run there."""
    assert said("""
rank = ProcessState({}, None)
rank.mark()
torch.manual_seed(11)
changes = rank.changes()
torch.manual_seed(3)
put(changes)
initialise()
print(draw(1) == torch.rand(1, generator=torch.Generator().manual_seed(11)).item())
""") == ["True"]

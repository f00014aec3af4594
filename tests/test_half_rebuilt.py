"""An object that was made and could not be filled ends in silence.

Its ``__del__`` would need what it lacks.
"""

from __future__ import annotations

import pytest
from notebook_harness import Notebook

CLASSES = """
import os
def fails(text):
    raise ValueError(text)
class Part:
    def __init__(self, where): self.where = where
    def __reduce__(self): return (make_part, (self.where, os.getpid()))
def make_part(where, pid):
    if (where == "ranks") == ("RANK" in os.environ) and pid != os.getpid():
        fails(f"not in the {where}")
    return Part(where)
class Plain:
    def __init__(self, part): self.part, self.log = part, [1]
    def __del__(self): self.log.append(2)
class State(Plain):
    def __setstate__(self, state):
        fails("its state is refused") if "RANK" not in os.environ else self.__dict__.update(state)
class Cycle(Plain):
    def __init__(self, part): self.me, self.part, self.log = self, part, [1]
class Nested(Plain):
    def __init__(self, part): self.inner, self.log = Plain(part), [1]
"""
MADE = {
    "whose part fails": "Plain(Part('notebook'))",
    "that refuses its state": "State(1)",
    "in a cycle": "Cycle(Part('notebook'))",
    "in another one": "Nested(Part('notebook'))",
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_what_cannot_be_rebuilt_in_the_notebook_is_named_and_nothing_more(
    notebook: Notebook, made: str
) -> None:
    """One line says which, without the traceback of another object's ``__del__``."""
    notebook.good("%load_ext taas")
    notebook.good(CLASSES)
    ran = notebook.good(f"#pragma taas --gpus 2\nmade = {made}; n = 1")
    after = notebook.good("import gc; gc.collect(); n")
    assert "did not come back: made" in ran.stdout
    assert "Exception ignored" not in ran.stderr + after.stderr
    assert notebook.value("'made' in globals(), n") == "False 1"


def test_what_cannot_be_rebuilt_in_a_rank_is_one_error(notebook: Notebook) -> None:
    """The cell says which name it is; no rank prints more."""
    notebook.good("%load_ext taas")
    notebook.good(CLASSES + "made = Cycle(Part('ranks'))")
    ran = notebook.run("#pragma taas --gpus 2 --output all\nn = made.log")
    assert "'made' cannot be rebuilt in the ranks: ValueError: not in the ranks" in ran.evalue
    assert "Exception ignored" not in ran.stderr + ran.traceback
    notebook.good("del made")

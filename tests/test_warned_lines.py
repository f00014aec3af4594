"""A warning of a function that taas replaces names the user's line, as without taas."""

from __future__ import annotations

import re

import pytest
from notebook_harness import Notebook

MADE = """
import os, warnings, torch
x = torch.ones(2)
class Old:
    def __fspath__(self):
        warnings.warn("an old kind of path", FutureWarning, stacklevel=2)
        return "."
"""
CALLS = {
    "of C, in a factory": ("torch.tensor(x, device='cuda')", "To copy construct from a tensor"),
    "of C, in a method": (
        "torch.ones(2, 2).to_sparse_csr().to('cuda')",
        "Sparse CSR tensor support",
    ),
    "of Python, one above": ("os.stat(Old())", "an old kind of path"),
    "of the rehearsal": ("torch.cuda.memory_allocated()", "memory figures are not rehearsed"),
}


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_a_warning_names_the_users_line(notebook: Notebook, call: str, text: str) -> None:
    """Each line that causes it, once, whichever language it is given in."""
    notebook.good("%load_ext taas")
    notebook.good(MADE)
    ran = notebook.good(f"#pragma taas --gpus 2\nfor _ in range(2): {call}\n{call}\nNone")
    once = "memory" in call or "Sparse" in text  # these say themselves that they warn once
    named = re.findall(rf":(\d+): \w*Warning: .*{text}", ran.stderr)
    assert named == (["2"] if once else ["2", "3"]), ran.stderr
    assert "/taas/" not in ran.stderr

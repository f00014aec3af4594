"""The same notebook in what people run notebooks with, besides JupyterLab.

These are nbconvert, papermill and IPython in a terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from blocks import block

pytestmark = pytest.mark.slow
CELLS = (
    "%load_ext taas\nimport os, torch",
    "count = 2",
    block("""
        #pragma taas --gpus 2
        import torch.distributed as dist
        dist.init_process_group('gloo')
        total = torch.full((1,), count)
        dist.all_reduce(total)
        print('ranks', dist.get_world_size())
        total
    """),
    "print('total', total.item())",
)


def _notebook(folder: Path) -> Path:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    book.cells[1].metadata["tags"] = ["parameters"]
    book.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(book, folder / "book.ipynb")
    return folder / "book.ipynb"


def _run(*words: str, folder: Path, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "total"),
    [
        (
            [
                "-m",
                "nbconvert",
                "--to",
                "notebook",
                "--execute",
                "--output",
                "out.ipynb",
                "book.ipynb",
            ],
            4,
        ),
        (["-m", "papermill", "-p", "count", "5", "book.ipynb", "out.ipynb"], 10),
    ],
    ids=["nbconvert", "papermill"],
)
def test_a_notebook_is_executed(tmp_path: Path, words: list[str], total: int) -> None:
    """With its outputs in it, the finished run's line among them."""
    if words[1] == "papermill":
        pytest.importorskip("papermill")
    _notebook(tmp_path)
    _run(*words, folder=tmp_path)
    trained, after = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-2:]
    said = "".join(output.get("text", "") for output in trained.outputs)
    shown = [output.data["text/plain"] for output in trained.outputs if "data" in output]
    assert said == "ranks 2\n"
    assert shown[0].startswith("✓ ") and shown[-1] == f"tensor([{total}])"
    assert after.outputs[0].text == f"total {total}\n"


def test_ipython_in_a_terminal(tmp_path: Path) -> None:
    """The run's beginning and end are lines; what was trained is there afterwards."""
    (tmp_path / "cells.ipy").write_text("\n\n".join(CELLS[:2]))
    given = "".join(f"get_ipython().run_cell({cell!r})\n" for cell in CELLS)
    environ = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--colors=NoColor"],
        cwd=tmp_path,
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
        env=environ,
        check=False,
    )
    assert "ranks 2\n" in done.stdout
    assert "done · 2 ranks" in done.stdout
    assert "total 4\n" in done.stdout


def test_a_script(tmp_path: Path) -> None:
    """`taas run`: with options, or its own header.

    Only rank 0 writes, and an error is the status 1 with its lines.
    """
    (tmp_path / "train.py").write_text(
        '"""Train."""\nimport os, sys\nprint(sys.argv, os.environ["WORLD_SIZE"])\nopen("who.txt",'
        ' "w").write(os.environ["RANK"])\nassert "x" not in os.environ, "asked to fail"\n'
    )
    assert "['<cell>'] 2\n" in _run(
        "-m", "taas.cli", "run", "train.py", "--gpus", "2", folder=tmp_path
    )
    assert (tmp_path / "who.txt").read_text() == "0"
    (tmp_path / "own.py").write_text(
        "#pragma taas --gpus 3\nimport os\nprint(os.environ['WORLD_SIZE'])\n"
    )
    assert "3\n" in _run("-m", "taas.cli", "run", "own.py", folder=tmp_path)
    for words, status, said in (
        (["own.py", "--gpus", "2"], 2, "a header of its own"),
        (["train.py"], 2, "no header"),
        (["none.py", "--gpus", "2"], 2, "No such file"),
        (["train.py", "--gpus", "2"], 1, "asked to fail"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "taas.cli", "run", *words],
            cwd=tmp_path,
            env={**os.environ, "x": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == status, done
        assert said in done.stdout + done.stderr

"""The examples run to their ends: the demo, the delivery example, what runs notebooks."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from taas.header.catalog import Catalog
from taas.header.grammar import find_header, parse_header
from taas.header.options import RunSpec

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.rglob("*.ipynb"))


def run(
    *arguments: str | Path, cwd: Path, seconds: float = 170
) -> subprocess.CompletedProcess[str]:
    """A program of the examples, in this Python."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_in_git_are_clean(path: Path) -> None:
    """Valid, without outputs or counts, and every cell is IPython that compiles."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
            ast.parse(TransformerManager().transform_cell(cell.source))


def headers(path: Path) -> list[RunSpec]:
    """What the headers of a notebook ask for."""
    sources = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    found = [header for header in map(find_header, sources) if header is not None]
    return [
        parse_header(header, expand=str, catalog=Catalog(), visible_gpus=0, registered=["loader"])
        for header in found
    ]


def test_demo_asks_for_eight_ranks_twice() -> None:
    """DataParallel and DDP, each on one g2.8 with 8 ranks."""
    assert headers(EXAMPLES / "mnist_ddp.ipynb") == [RunSpec(instance="g2.8", ranks_per_vm=8)] * 2


@pytest.mark.slow
def test_offline_digits_are_read_by_torchvision(tmp_path: Path) -> None:
    """What offline_mnist.py writes, torchvision's MNIST takes for its own, without a network."""
    datasets = pytest.importorskip("torchvision.datasets")
    pytest.importorskip("sklearn")
    done = run(EXAMPLES / "offline_mnist.py", "data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "handwritten digits" in done.stdout
    train = datasets.MNIST(tmp_path / "data", train=True, download=True)
    test = datasets.MNIST(tmp_path / "data", train=False, download=True)
    assert (train.data.shape, test.data.shape) == ((1440, 28, 28), (357, 28, 28))
    assert (train.data.min(), train.data.max()) == (0, 255)
    assert train.targets.bincount().min() > 100
    assert not train.data[:, :4].any(), "MNIST leaves a frame of four pixels"


def notebook(path: Path, *sources: str) -> Path:
    """A small notebook on disk."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


def test_runner_prints_and_keeps_outputs(tmp_path: Path) -> None:
    """What cells print is printed, and is in the executed copy.

    The notebook runs in its own folder.
    """
    (tmp_path / "here").mkdir()
    path = notebook(tmp_path / "here" / "n.ipynb", "import os\nprint(os.getcwd())", "6 * 7")
    done = run(EXAMPLES / "run_notebook.py", path, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "here") in done.stdout
    assert "42" in done.stdout
    executed = nbformat.read(tmp_path / "out" / "n.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].data["text/plain"] == "42"


def test_runner_fails_with_the_notebook(tmp_path: Path) -> None:
    """A failing cell ends the run with status 1 and its traceback; the copy is written."""
    path = notebook(tmp_path / "n.ipynb", "print('before')\n1 / 0", "print('never')")
    done = run(EXAMPLES / "run_notebook.py", path, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "never" not in done.stdout
    assert (
        nbformat.read(tmp_path / "out" / "n.ipynb", as_version=4).cells[0].outputs[0].text
        == "before\n"
    )


def run_example(name: str, folder: Path, *beside: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a copy of a notebook in a folder, as its reader does.

    Returns what is printed, and the outputs of its cells.

    ``beside`` are files of the examples that it needs. The notebook has to run to its end.
    """
    for file in (name, *beside):
        shutil.copy(EXAMPLES / file, folder)
    done = run(
        EXAMPLES / "run_notebook.py",
        folder / name,
        "--out",
        folder / "out",
        cwd=folder,
        seconds=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    executed = nbformat.read(folder / "out" / name, as_version=4)
    return done.stdout, [out for cell in executed.cells for out in cell.get("outputs", [])]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_trains(tmp_path: Path) -> None:
    """The demo runs to its end: both losses fall, and the notebook's model is the trained one."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    printed, outputs = run_example("mnist_ddp.ipynb", tmp_path, "offline_mnist.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+), ", printed)]
    half = len(losses) // 2
    assert half >= 3, printed
    for form in (losses[:half], losses[half:]):
        assert form == sorted(form, reverse=True), printed
    right, images = re.findall(r"DigitNet reads (\d+) of (\d+)", printed)[0]
    assert int(right) / int(images) > 0.8
    assert (tmp_path / "mnist_cnn.pt").stat().st_size > 10_000
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_data_vms_share_the_reading(tmp_path: Path) -> None:
    """Every rank reads all alone; with ``--cpus 4`` each takes half the steps.

    The waiting of both is plotted.
    """
    pytest.importorskip("matplotlib")
    printed, outputs = run_example("data_delivery.ipynb", tmp_path)
    assert re.findall(r"(\d+) steps, \d+\.\d s waited", printed) == ["32", "16"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1
    assert any("of 32 units" in out.get("data", {}).get("text/plain", "") for out in outputs)


@pytest.mark.slow(rows=1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", ["image_shards", "transformer", "evaluation", "checkpoint", "sweep"]
)
def test_an_example_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """Their last cells assert what they show; the sweep's table is there."""
    pytest.importorskip("sklearn")
    pytest.importorskip("pandas")  # of the sweep's table
    printed, _ = run_example(f"{name}.ipynb", tmp_path)
    assert name != "sweep" or len(re.findall(r"^\d +\d\.\d+ +\d\.\d+$", printed, re.M)) == 3, (
        printed
    )

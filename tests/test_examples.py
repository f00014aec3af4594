"""The examples run to their ends and show what they promise; so does what runs notebooks."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from blocks import block
from IPython.core.inputtransformer2 import TransformerManager

from taas.header.catalog import Catalog
from taas.header.grammar import find_header, parse_header
from taas.header.options import RunSpec

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.rglob("*.ipynb"))


def run(
    *arguments: str | Path, cwd: Path, seconds: float = 170
) -> subprocess.CompletedProcess[str]:
    """A program of the examples, in this Python; ``--gpus auto`` is two rehearsed ranks in it."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": ""}
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


def headers(path: Path, visible_gpus: int = 0) -> list[RunSpec]:
    """What the headers of a notebook ask for, on a machine with so many GPUs."""
    sources = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    found = [header for header in map(find_header, sources) if header is not None]
    return [
        parse_header(
            header,
            expand=str,
            catalog=Catalog(),
            visible_gpus=visible_gpus,
            registered=["loader"],
        )
        for header in found
    ]


def test_demo_asks_for_eight_ranks_twice() -> None:
    """DataParallel and DDP, each on one g2.8 with 8 ranks."""
    assert headers(EXAMPLES / "mnist_ddp.ipynb") == [RunSpec(instance="g2.8", ranks_per_vm=8)] * 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_examples_take_the_gpus_that_there_are(path: Path) -> None:
    """No example but the demo names a machine, and none but the sweep a number of GPUs."""
    if path.stem == "mnist_ddp":
        return
    specs = headers(path, visible_gpus=3)
    assert [(spec.instance, spec.world_size) for spec in specs] == [(None, 3)] * len(specs)
    calls = re.findall(r"taas\.(?:run|submit)\(.*\)", path.read_text())
    assert specs or calls, "it runs nothing in ranks"
    assert path.stem == "sweep" or not [call for call in calls if "gpus=" in call]


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


def run_example(
    name: str, folder: Path, *beside: str, then: str = ""
) -> tuple[str, list[dict[str, Any]]]:
    """Run a copy of a notebook in a folder, as its reader does.

    Returns what is printed, and the outputs of its cells.

    ``beside`` are files of the examples that it needs. ``then`` is a cell that the reader adds at
    the end. The notebook has to run to its end. The test is skipped if a library is missing.
    """
    text = "".join((EXAMPLES / file).read_text() for file in (name, *beside))
    for library in ("sklearn", "matplotlib"):
        if re.search(rf"(?:import|from) {library}\b", text):
            pytest.importorskip(library)
    for file in (name, *beside):
        shutil.copy(EXAMPLES / file, folder)
    if then:
        copy = nbformat.read(folder / name, as_version=4)
        copy.cells.append(nbformat.v4.new_code_cell(then))
        nbformat.write(copy, folder / name)
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


def pictures(outputs: list[dict[str, Any]]) -> int:
    """How many pictures the cells drew."""
    return sum("image/png" in out.get("data", {}) for out in outputs)


def numbers(printed: str, name: str) -> Any:
    """What the reader's own cell printed as ``name = JSON``."""
    return json.loads(re.findall(rf"^{name} = (.+)$", printed, re.MULTILINE)[-1])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_data_vms_share_the_reading(tmp_path: Path) -> None:
    """Every rank reads all alone; with ``--cpus 4`` each takes half the steps.

    The waiting of both is plotted.
    """
    then = "print('without =', sum(waits_without) / 32)\nprint('with =', sum(waits_with) / 16)"
    printed, outputs = run_example("data_delivery.ipynb", tmp_path, then=then)
    assert re.findall(r"(\d+) steps, \d+\.\d s waited", printed) == ["32", "16"]
    assert numbers(printed, "with") > 0
    assert numbers(printed, "without") > 0
    assert pictures(outputs) == 1
    assert any("of 32 units" in out.get("data", {}).get("text/plain", "") for out in outputs)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_is_a_loop_and_a_plot(tmp_path: Path) -> None:
    """It has at most 30 lines of code. Four runs train, and of their losses one plot is drawn."""
    cells = nbformat.read(EXAMPLES / "sweep.ipynb", as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    then = "import json\nprint('curves =', json.dumps([run.result() for run in runs]))"
    printed, outputs = run_example("sweep.ipynb", tmp_path, then=then)
    curves = numbers(printed, "curves")
    assert [len(curve) for curve in curves] == [60] * 4
    assert len({curve[0] for curve in curves}) == 1, "all begin with the same network"
    assert curves[2][-1] < curves[1][-1] < curves[0][-1], "0.03 is too small"
    assert pictures(outputs) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_lora_changes_what_the_model_writes(tmp_path: Path) -> None:
    """Both trainings learn; fine-tuning leaves the frozen weights, and changes the sample."""
    then = block("""
        import json
        print("reading =", json.dumps(reading))
        print("tuning =", json.dumps(tuning))
        print("samples =", json.dumps([before, after]))
        with torch.no_grad():
            for layer in net.modules():
                if isinstance(layer, LoRA):
                    layer.up.weight.zero_()
        print("frozen =", json.dumps(sample(net, BEGIN)))
    """)
    printed, outputs = run_example("lora.ipynb", tmp_path, then=then)
    for losses in (numbers(printed, "reading"), numbers(printed, "tuning")):
        assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    before, after = numbers(printed, "samples")
    assert before != after
    assert numbers(printed, "frozen") == before, "without its thin matrices it is what it was"
    assert pictures(outputs) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_images_come_from_a_folder(tmp_path: Path) -> None:
    """Data workers read 640 pictures in each of six epochs; the network tells others apart."""
    printed, outputs = run_example("images.ipynb", tmp_path)
    assert len(list((tmp_path / "shapes" / "train").rglob("*.png"))) == 640
    assert re.findall(r"in (\d+) steps", printed) == ["20"] * 6, "40 batches, two ranks"
    assert any("of 240 units" in out.get("data", {}).get("text/plain", "") for out in outputs)
    right, of = re.findall(r"^(\d+) of (\d+) are right$", printed, re.MULTILINE)[0]
    assert of == "160"
    assert int(right) > 120
    assert pictures(outputs) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_deadlock_is_found_and_mended(tmp_path: Path) -> None:
    """The report says where each rank waits; with equal shares nobody waits for good."""
    then = block("""
        import json
        print("steps =", json.dumps([steps, mended_steps]))
        print("losses =", json.dumps(losses))
    """)
    printed, outputs = run_example("deadlock.ipynb", tmp_path, then=then)
    assert "stuck goes on: it has not ended within" in printed
    report = printed.split("no rank has made progress for 5 s")[1]
    rank_0, rank_1 = report.split("rank 0: ")[1].split("rank 1: ")[:2]
    assert "in backward" in rank_0, report
    assert rank_1.startswith("barrier"), report
    assert "stuck was stopped from its handle" in printed
    assert numbers(printed, "steps") == [[33, 25], [29, 29]]
    losses = numbers(printed, "losses")
    assert len(losses) == 87
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "net.pt").exists()
    assert pictures(outputs) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    """The first start ends at epoch 8, where a rank is killed; the second has the rest.

    The losses are those of a training without an interruption: the optimizer's state came back.
    """
    then = block("""
        import json
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        adam, losses = torch.optim.Adam(whole.parameters(), lr=0.01), []
        for epoch in range(20):
            parts = [nn.functional.cross_entropy(whole(x[r::2]), y[r::2]) for r in range(2)]
            adam.zero_grad()
            (sum(parts) / 2).backward()
            adam.step()
            losses.append(parts[0].item())
        print("whole =", json.dumps(losses))
        print("history =", json.dumps(history))
    """)
    printed, outputs = run_example("resume.ipynb", tmp_path, then=then)
    history = numbers(printed, "history")
    starts = [start for start, _ in history]
    assert len(history) == 20
    assert starts == sorted(starts)
    assert 0 < starts.count(0) <= 8
    assert [loss for _, loss in history] == pytest.approx(numbers(printed, "whole"), rel=1e-4)
    assert "started again once" in printed
    assert pictures(outputs) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_evaluate_as_one_process(tmp_path: Path) -> None:
    """Counts summed over ranks, and predictions put together, are those of one process."""
    then = block("""
        import json
        with torch.no_grad():
            alone = net.cpu()(test_x).argmax(1)
        print("same =", json.dumps(torch.equal(alone, predicted)))
        print("right =", json.dumps([(alone == test_y).sum().item(), confusion.trace().item()]))
        print("images =", json.dumps([len(alone), confusion.sum().item()]))
    """)
    printed, outputs = run_example("evaluation.ipynb", tmp_path, then=then)
    assert numbers(printed, "same")
    alone, together = numbers(printed, "right")
    assert alone == together
    assert numbers(printed, "images") == [597, 597]
    assert pictures(outputs) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_stay_try_three_learning_rates(tmp_path: Path) -> None:
    """The model is made once, three cells use it, and ``release`` ends the ranks.

    The cell with the debugger is skipped where no person runs the notebook.
    """
    then = "import json\nprint('found =', json.dumps(found))"
    printed, outputs = run_example("interactive.ipynb", tmp_path, then=then)
    found = numbers(printed, "found")
    assert list(found) == ["0.05", "0.2", "0.8"]
    assert max(found.values()) > 0.8
    assert f"rank 0 of 2: {max(found.values()):.3f}" in printed, "the best, trained again"
    assert pictures(outputs) == 1

"""The gallery's notebooks give the numbers that torchrun gives the same script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebook_harness import Notebook

GALLERY = Path(__file__).resolve().parents[1] / "examples" / "gallery"
NOTEBOOKS = sorted(path.stem for path in GALLERY.glob("*.ipynb"))
PACKAGES = {
    "lightning_ddp": "lightning",
    "accelerate_ddp": "accelerate",
    "fastai_distributed": "fastai",
    "hf_trainer": "transformers",
    "tensorboard": "tensorboard",
}
PRELUDE = """
import os, torch, torch.distributed, taas.rehearsal
taas.rehearsal.install(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
"""
FIGURES = "[float(loss) for loss in (globals().get('losses') or model.losses)]"
REPORT = f"""
import json
if os.environ["RANK"] == "0":
    open("figures.json", "w").write(json.dumps({FIGURES}))
os._exit(0)
"""
"""Its processes leave at once: now and then torch aborts in one that ends in the ordinary way, a
thread still running.
"""


def cells(name: str) -> list[str]:
    """The code cells of a notebook."""
    nodes = nbformat.read(GALLERY / f"{name}.ipynb", as_version=4).cells
    return [node.source for node in nodes if node.cell_type == "code"]


def first_run(sources: list[str]) -> int:
    """The number of the first cell that runs in ranks."""
    return next(number for number, source in enumerate(sources) if "#pragma taas" in source)


def figures_of_torchrun(sources: list[str], folder: Path) -> list[float]:
    """The losses of the cells up to the first run as one script, in two processes of torchrun."""
    folder.mkdir()
    lines = "\n".join(sources[: first_run(sources) + 1]).splitlines()
    script = "\n".join(line for line in lines if not line.startswith(("%", "!")))
    (folder / "script.py").write_text(PRELUDE + script + REPORT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.slow(rows=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_of_the_gallery(name: str, tmp_path: Path) -> None:
    """All its cells run, the loss falls, and its figures are torchrun's to float tolerance."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{PACKAGES[name]} is not installed")
    sources = cells(name)
    project = tmp_path / "project"
    project.mkdir()
    book = Notebook(project)
    try:
        for number, source in enumerate(sources):
            book.good(source, seconds=280)
            if number == first_run(sources):
                figures = json.loads(book.value(f"__import__('json').dumps({FIGURES})"))
    finally:
        book.close()
    assert figures[-1] < 0.8 * figures[0]
    assert figures == pytest.approx(figures_of_torchrun(sources, tmp_path / "torchrun"), rel=1e-4)

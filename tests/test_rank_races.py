"""Ranks do the same to the project's files and folders: who comes after rank 0 is not failed by what it finds."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
from notebook_harness import Notebook
from storage_ranks import Run, fork, join

OTHER: dict[str, tuple[str, str, type[OSError]]] = {
    "mkdir": ("os.mkdir('d')", "os.mkdir('d')", FileExistsError),
    "open x": ("open('f', 'w').close()", "open('f', 'x')", FileExistsError),
    "its own folder": ("", "os.mkdir('d'); os.mkdir('d')", FileExistsError),
    "remove": ("os.mkdir('d')", "os.remove('d/f')", FileNotFoundError),
    "rename": ("", "os.rename('f', 'g')", FileNotFoundError),
}
"""What fails in every rank, as nobody did anything to it in this run."""


def do(run: Run, code: str) -> None:
    """Do something in the project, as rank 0 or before the run, with nothing in its way."""
    join(fork(lambda: perform(code, run.project)))


def perform(code: str, folder: Path) -> None:
    """Run code in a folder, whose imports are its own."""
    os.chdir(folder)
    source = folder.parent / "code.py"
    source.write_text(f"import os, shutil\nfrom pathlib import Path\n{code}\n")
    runpy.run_path(str(source))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("what", OTHER)
def test_what_was_so_before_the_run_is_an_error_in_every_rank(run: Run, what: str) -> None:
    """Programs look for a free name by these errors: no rank is told another thing than rank 0."""
    before, code, error = OTHER[what]
    do(run, before)
    failing = f"try: {code}\nexcept {error.__name__}: pass\nelse: raise AssertionError('no error')"
    if ";" in code:
        first, last = code.split("; ")
        failing = (
            f"{first}\ntry: {last}\nexcept {error.__name__}: pass\nelse: raise AssertionError('no error')"
        )
    run.rank(lambda guard: perform(failing, run.project), since_ns=run.now())


def test_ranks_of_a_cell_race_for_folders_and_files(notebook: Notebook) -> None:
    """Three ranks do what only one can do first: the cell ends well, and rank 0's work stands."""
    (notebook.folder / "old").mkdir()
    (notebook.folder / "old" / "log").write_text("")
    notebook.good(
        "#pragma taas --gpus 3\nimport os, shutil\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank(): dist.barrier()  # rank 0 is first\n"
        "for i in range(20):\n"
        "    if not os.path.exists(f'd{i}'): os.makedirs(f'd{i}/e')\n"
        "    open(f'd{i}/f', 'x').write(os.environ['RANK'])\n"
        "    os.rename(f'd{i}/f', f'd{i}/g')\n"
        "    os.remove(f'd{i}/g') if i % 2 else None\n"
        "if os.path.exists('old'): shutil.rmtree('old')\n"
        "os.mkdir('old')\n"
        "if dist.get_rank() == 0: dist.barrier()\n"
        "del dist, i"
    )
    left = {str(path.relative_to(notebook.folder)) for path in notebook.folder.rglob("[a-z]*")}
    assert left == {
        "old", *(f"d{i}{name}" for i in range(20) for name in ("", "/e", *(() if i % 2 else ("/g",))))
    }  # fmt: skip
    assert {(notebook.folder / f"d{i}" / "g").read_text() for i in range(0, 20, 2)} == {"0"}

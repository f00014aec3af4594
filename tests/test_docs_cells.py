"""The cells in the README and the docs run as they are written, in a real kernel and real ranks.

A block that begins with ``python`` is a cell; those of one document are one notebook, in order.
What a document does not show stands in comments, which are run, too: ``<!-- cell``, its lines,
``-->``. A cell that cannot run here stands below ``<!-- not run: why -->``. One that imports a
library which is not among taas' dependencies stands below ``<!-- needs: MODULE -->``
(``<!-- needs: MODULE cell`` where it is not shown), and runs where that library is installed.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from notebook_harness import Notebook

from taas.config import load_catalog
from taas.header.catalog import Catalog
from taas.header.grammar import find_header, is_setup, parse_header

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOORS = ("start-gpus", "start-no-gpu", "start-ray", "start-slurm")
BLOCK = re.compile(
    r"^<!-- (?:needs: (?P<hidden_needs>\w+) )?cell\n(?P<hidden>.*?)^-->$"
    r"|^(?P<not_run><!-- not run: [^\n]+ -->\n)?(?:<!-- needs: (?P<needs>\w+) -->\n)?"
    r"```(?P<info>[\w{}-]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def cells(document: Path, *, installed: bool = False) -> list[str]:
    """The cells of a document that are run; ``installed``: less those whose library is not here."""
    found = list[str]()
    for block in BLOCK.finditer(document.read_text()):
        library = block["needs"] or block["hidden_needs"]
        if installed and library and find_spec(library) is None:
            continue
        if block["hidden"] or (block["info"] == "python" and not block["not_run"]):
            found.append(block["hidden"] or block["text"])
    return found


def door(name: str) -> list[str]:
    """The cells of a page of first steps, in order, with those that need a cluster."""
    blocks = BLOCK.finditer((ROOT / "docs" / f"{name}.md").read_text())
    found = [block["hidden"] or (block["info"] == "python" and block["text"]) for block in blocks]
    return list(filter(None, found))


WITH_CELLS = [document for document in DOCUMENTS if cells(document)]


@pytest.mark.slow
@pytest.mark.parametrize("document", WITH_CELLS, ids=lambda path: path.name)
def test_cells_run_as_written(document: Path, tmp_path: Path) -> None:
    """Pasted into an empty notebook one after the other, each ends well."""
    notebook = Notebook(tmp_path)
    try:
        if document.name != "README.md":  # whose first cell shows it
            notebook.good("%load_ext taas")
        for cell in cells(document, installed=True):
            ran = notebook.run(cell, seconds=280)
            assert ran.status == "ok", f"{cell}\n{ran.stderr}{ran.traceback}"
    finally:
        notebook.close()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_looks_like_a_cell_is_one(document: Path) -> None:
    """A block with a header, or magics, says that it is Python.

    Otherwise the test above would pass it by.
    """
    text = document.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(
        re.findall(r"^```[\w{}-]*\n.*?^```$", text, re.DOTALL | re.MULTILINE)
    )
    for block in BLOCK.finditer(text):
        if block["text"] is not None and block["info"] not in ("python", "bash", "toml", "yaml"):
            assert not re.search(
                r"^(#!\S|#pragma|%+\w|import |from )", block["text"], re.MULTILINE
            ), block["text"]


@pytest.mark.parametrize("document", WITH_CELLS, ids=lambda path: path.name)
def test_headers_are_right(document: Path) -> None:
    """Each header of a document is one that the built-in instance types allow.

    Where runs are from Python there is none.
    """
    headers = [header for header in map(find_header, cells(document)) if header is not None]
    assert headers or "taas.run(" in document.read_text()
    for header in headers:
        if is_setup(header):
            continue
        parse_header(header, expand=str, catalog=Catalog(), visible_gpus=8, registered=["loader"])


def test_each_door_leads_to_the_same_training() -> None:
    """The four pages of first steps train the same network with the same function."""
    trainings = [[cell for cell in door(name) if "def train(" in cell] for name in DOORS]
    assert len(trainings[0]) == 1
    assert all(training == trainings[0] for training in trainings)


def test_configuration_files_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``toml`` block is a ``taas.toml``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    found = [
        block
        for path in DOCUMENTS
        for block in BLOCK.finditer(path.read_text())
        if block["info"] == "toml"
    ]
    assert found
    for block in found:
        (tmp_path / "taas.toml").write_text(block["text"])
        load_catalog(tmp_path)

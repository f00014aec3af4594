"""Notebooks in surroundings that most have not: modules called like Python's, variables that are no text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook_harness import Notebook, gone


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook in a project full of modules that are called like Python's."""
    folder = tmp_path_factory.mktemp("bare")
    book = Notebook(folder)
    try:
        book.good("%load_ext taas")
        for name in ("queue", "random", "secrets", "select", "socket", "tempfile", "torch"):
            (folder / f"{name}.py").write_text("raise RuntimeError('of the project')\n")
        yield book
    finally:
        found = book.processes()
        book.close()
    assert gone(found.supervisor + found.agents + found.forkservers + found.spares)


@pytest.mark.slow
def test_modules_of_the_project_called_like_pythons(notebook: Notebook) -> None:
    """taas' own processes do not take them for those; as in the notebook, what is there already is used."""
    assert (
        notebook.good("#pragma taas --gpus 2\nimport random, torch\nprint(torch.ones(1).item())").own
        == "1.0\n"
    )


@pytest.mark.slow
def test_a_variable_that_is_not_utf8(notebook: Notebook) -> None:
    """It reaches the ranks as it is, and stops no run."""
    notebook.good("import os\nos.environb[b'LATIN'] = b'\\xe9'")
    assert notebook.good("#pragma taas --gpus 1\nimport os; print(os.environb[b'LATIN'])").own == "b'\\xe9'\n"

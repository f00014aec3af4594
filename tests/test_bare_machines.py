"""Notebooks on machines that lack what most have: watches for files, a project without standard modules' names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import KernelManager
from notebook_harness import Notebook, gone
from privileges import no_user_namespaces

NO_WATCHES = 'echo 0 > /proc/sys/user/max_inotify_{what} && exec "$@"'


def without(what: str, *command: str) -> list[str]:
    """A command in a user namespace where nobody may have inotify instances, or watches."""
    return ["unshare", "--user", "--map-root-user", "sh", "-c", NO_WATCHES.format(what=what), "sh", *command]


class _Unwatched(KernelManager):
    def format_kernel_cmd(self, *args: Any, **options: Any) -> list[str]:
        return without("instances", *super().format_kernel_cmd(*args, **options))


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook in a project full of modules that are called like Python's, on a machine without watches."""
    folder = tmp_path_factory.mktemp("bare")
    if no_user_namespaces():
        pytest.skip(f"makes a user namespace: {no_user_namespaces()}")
    book = Notebook(folder, _Unwatched(kernel_name="python3"))
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
def test_no_watch_is_left(notebook: Notebook) -> None:
    """Output comes while the cell runs, and attach shows it, too."""
    notebook.start("#pragma taas --gpus 1\nimport time\nprint('half', end='')\ntime.sleep(600)")
    notebook.wait_for("half")
    notebook.interrupt()
    assert notebook.end().ename == "KeyboardInterrupt"
    notebook.good("#pragma taas --gpus 1 --background --name bare\nprint('seen')")
    assert notebook.good("%taas attach bare").own == "seen\n"


@pytest.mark.slow
def test_a_variable_that_is_not_utf8(notebook: Notebook) -> None:
    """It reaches the ranks as it is, and stops no run."""
    notebook.good("import os\nos.environb[b'LATIN'] = b'\\xe9'")
    assert notebook.good("#pragma taas --gpus 1\nimport os; print(os.environb[b'LATIN'])").own == "b'\\xe9'\n"

"""Modules that import themselves at their first use.

Whoever only looks around in sys.modules must not set that off.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blocks import block
from notebook_harness import Notebook

SPEECHBRAIN = """
import sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        asked.append((self.__name__, name))
        raise ImportError(f"{self.__name__} needs k2, which is not installed ({name})")
asked = []
NAME = sys.modules["NAME"] = Lazy("NAME")
"""
LAZY_LOADER = """
import importlib.util, sys
from pathlib import Path
Path("heavy.py").write_text("data = [1]\\nheavy_runs = True")
sys.path.insert(0, "")
spec = importlib.util.find_spec("NAME")
spec.loader = importlib.util.LazyLoader(spec.loader)
NAME = sys.modules["NAME"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(NAME)
"""
OBJECT = """
import sys
class Facade:
    def __getattr__(self, name):
        raise RuntimeError(f"{name} is not set up")
sys.modules["facade"] = Facade()
"""
NOTHING_ASKED = "assert not asked, asked"
NOT_EXECUTED = (
    "import importlib.util\nassert type(sys.modules['NAME']) is importlib.util._LazyModule"
)

ROWS = {
    "one that raises for what it does not have": ("k2_fsa", SPEECHBRAIN, NOTHING_ASKED),
    "one of the project, by importlib's LazyLoader": ("heavy", LAZY_LOADER, NOT_EXECUTED),
    "a library that taas knows, by LazyLoader": ("pandas", LAZY_LOADER, NOT_EXECUTED),
    "the one whose GPU memory the cell looks at": ("torch", LAZY_LOADER, NOT_EXECUTED),
    "an object that is no module": ("facade", OBJECT, ""),
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel of this module's own, since its rows put modules in the place of real ones."""
    book = Notebook(tmp_path_factory.mktemp("project"))
    try:
        book.good("%load_ext taas")
        yield book
    finally:
        book.close()


@pytest.mark.parametrize(("name", "made", "still"), ROWS.values(), ids=ROWS)
def test_a_lazy_module_does_not_notice_a_headed_cell(
    notebook: Notebook, name: str, made: str, still: str
) -> None:
    """The cell runs, its function without a module travels, and the module still waits."""
    notebook.good(made.replace("NAME", name))
    notebook.good(
        block("""
            import functools
            seen = []; add = seen.append
            table = {'join': ''.join, 'f': lambda x: x + 1}
        """)
    )
    ran = notebook.good(
        "#pragma taas --gpus 2\nadd(table['f'](1)); table['join'](['a']); n = len(seen)"
    )
    assert "did not come back" not in ran.stdout
    assert notebook.value("seen, n") == "[2] 1"
    notebook.good(still.replace("NAME", name))
    notebook.good(f"del sys.modules[{name!r}]")  # the next test has the same kernel


def test_a_lazy_module_that_the_cell_names_is_imported_in_the_ranks(notebook: Notebook) -> None:
    """A name that is bound to one travels by its name.

    Where it cannot be imported, its first use in a rank says so.
    """
    notebook.good(LAZY_LOADER.replace("NAME", "heavy"))
    notebook.good(SPEECHBRAIN.replace("NAME", "k2_fsa"))
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2
            found = heavy.data
            try: k2_fsa.Graph
            except ImportError as error: why = str(error)
        """)
    )
    assert "did not come back" not in ran.stdout
    assert notebook.value("found") == "[1]"
    assert "module 'k2_fsa' could not be imported here" in notebook.value("why")
    notebook.good("del sys.modules['heavy'], sys.modules['k2_fsa']")

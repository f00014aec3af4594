"""The documentation site: ``make docs`` builds it from the documents in the repository.

So links lead to the same files here and where one reads the repository, and nothing is written
twice.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ipython_pygments_lexers import IPython3Lexer
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "taas"
author = "the authors of taas"
release = version = re.findall(
    r'__version__ = "(.+)"', (ROOT / "taas" / "__init__.py").read_text()
)[0]

extensions = ["gallery", "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "taas/agents.md", "examples/**.ipynb"]
exclude_patterns = [".*", "artefacts", "build", "dist", "AGENTS.md"]
nitpicky = True
# other projects' sites are not asked, so that the documents can be built without a network
nitpick_ignore = [
    ("py:exc", "UsageError"),
    ("py:class", "collections.abc.Callable"),
    ("py:class", "concurrent.futures.Future"),
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The examples have no outputs in git. They are executed, each in an empty folder, and their outputs
# are kept by the text of their cells, beside the site (artefacts/.jupyter_cache).
nb_execution_mode = os.environ.get("TAAS_DOCS_EXECUTION", "cache")
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True  # a page that is read is not read again, nor warned of
nb_execution_show_tb = True
nb_merge_streams = True
# for the demo, which imports offline_mnist
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT / "examples"), os.environ.get("PYTHONPATH")))
)

python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"taas {version}"
html_extra_path = ["site"]  # index.html, which leads to the first page
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """A block of Python is a cell: with magics, and ``!`` for the shell."""
    app.add_lexer("python", IPython3Lexer)
    app.connect("autodoc-process-bases", _leave_out_private)
    app.connect("source-read", _show_addresses)


def _leave_out_private(
    _app: Sphinx, _name: str, _obj: object, _options: object, bases: list[type]
) -> None:
    """How an error is shown is no base class for a reader."""
    bases[:] = [base for base in bases if not base.__name__.startswith("_")]


def _show_addresses(_app: Sphinx, _page: str, source: list[str]) -> None:
    """An anchor of a row is a link to itself, so that a reader can copy the row's address."""
    shown = r'<a id="\1" class="address" href="#\1" title="Link to this row"></a>'
    source[0] = re.sub(r'<a id="([a-z0-9-]+)"></a>', shown, source[0])

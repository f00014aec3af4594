"""A cell's text on its way to Python: IPython's syntax, and a cell magic below the header lines."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["check_syntax", "python_of"]


@functools.cache
def _transformers() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()


def python_of(cell: str) -> str:
    """Turn a cell into Python.

    A cell magic (``%%time``) may stand below comments and blank lines, as the header of a taas cell is
    comments to Python; IPython itself knows it on the first line only. Line numbers stay right.
    """
    lines = cell.splitlines(keepends=True)
    first = next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), 0)
    if first and lines[first].startswith("%%"):
        above = "".join("#\n" for _ in range(first))
        text: str = above + _transformers().transform_cell("".join(lines[first:]))
        return text
    text = _transformers().transform_cell(cell)
    missing = _leading_blank(cell) - _leading_blank(text)
    return "\n" * missing + text


def _leading_blank(text: str) -> int:
    return next((count for count, line in enumerate(text.splitlines()) if line.strip()), 0)


def check_syntax(cell: str, shell: InteractiveShell | None, number: int = 0) -> None:
    """Compile a cell as IPython would, so that a typing error shows before anything starts.

    Args:
        cell: the cell as typed.
        shell: whose compiler flags (``from __future__`` of earlier cells) count.
        number: its ``In[n]``; 0 for the shell's count.

    Raises:
        SyntaxError: as IPython raises it for an ordinary cell, with the cell's lines.
    """
    import ast

    source = python_of(cell)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if shell is None:
        compile(source, "<cell>", "exec", flags, dont_inherit=True)
        return
    name = shell.compile.cache(source, number or shell.execution_count, raw_code=cell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # rank 0 shows them
        compile(source, name, "exec", flags | shell.compile.flags, dont_inherit=True)

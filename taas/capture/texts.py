"""Text that is Python here and there: magics, shell commands, strings in which names are looked up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = [
    "ALL_NAMES",
    "LOOKS_UP",
    "NOT_PYTHON",
    "RUNS_APART",
    "RUNS_HERE",
    "magic_of",
    "magic_texts",
    "strings_in",
    "words_of",
]

_IDENTIFIER = re.compile(r"[^\W\d]\w*")

LOOKS_UP = {
    "eval", "exec", "globals", "locals", "vars", "query", "getattr", "get_ipython", "run_line_magic", "timeit",
}  # fmt: skip
"""Functions and methods that look names up in strings."""
ALL_NAMES = {"globals", "locals", "vars", "dir"}
"""Functions that return all names, which a string beside them may pick from."""
RUNS_HERE = {"time", "capture", "prun", "memit", "mprun", "lprun", "debug"}
"""Magics whose Python runs as part of the cell."""
RUNS_APART = {"timeit"}
"""Magics whose Python runs in a scope of its own."""
NOT_PYTHON = {
    "bash", "sh", "script", "html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG", "writefile",
    "file", "perl", "ruby", "pypy", "python", "python2", "python3", "system", "sx", "!",
}  # fmt: skip
"""Cell magics whose body is another language."""


def words_of(text: str) -> list[str]:
    """Return everything in a text that may be a name."""
    return _IDENTIFIER.findall(text)


def magic_of(node: ast.AST) -> tuple[str, list[str]] | None:
    """Return method and text of what IPython makes of ``%magic`` and ``!command``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if node.func.attr not in ("run_line_magic", "run_cell_magic", "system", "getoutput"):
        return None
    of_shell = (
        isinstance(node.func.value, ast.Call) and getattr(node.func.value.func, "id", "") == "get_ipython"
    )
    texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return (node.func.attr, texts) if of_shell and len(texts) == len(node.args) else None


def magic_texts(node: ast.AST) -> Iterator[str]:
    """Yield the text of all magics and shell commands in a piece of code."""
    for part in ast.walk(node):
        magic = magic_of(part)
        if magic is not None:
            yield " ".join(magic[1])


def strings_in(node: ast.AST) -> Iterator[str]:
    """Yield all string constants in a piece of code."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value

"""Explains errors of C code and programs that do not find a file that this rank wrote.

A rank other than 0 writes to its scratch through Python's own functions, and only these find the
files there. C code and programs see the project as rank 0 has left it. A C library that writes
into a folder that this rank has created finds no folder (ENOENT) and so does not hit the write
protection (EROFS); one that reads a file of this rank finds no file. Both errors get the same
explanation.
"""

# Plain strings, as in the table.
# ruff: noqa: PTH118

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator

from taas.base.wording import text_of
from taas.errors import StorageDenied
from taas.project.wall.boundary import Denial
from taas.project.wall.table import Table

_NOT_THERE = re.compile(
    r"no such file|not a directory|os error 2\b|errno[ =:]*2\b|does(?: not|n't) exist|"
    r"(?:can(?:not|'t)|could not|couldn't|unable to|failed to) (?:open|find|read|write|create)",
    re.IGNORECASE,
)
_MOST = 5000
"""The most files and folders of the rank that are searched for in a text."""


def explain_missing(error: BaseException, table: Table, denial: Denial) -> str | None:
    """Explain an error about a file or folder that this rank has and C code does not find.

    Return None for other errors.
    """
    for link in _chain(error):
        if isinstance(link, StorageDenied):
            return None  # its text needs no explanation
        text = text_of(link)
        if isinstance(link, subprocess.CalledProcessError):
            text = "\n".join(_decode(said) for said in (link.stderr, link.stdout))
        if not _NOT_THERE.search(text) or _missed_by_python(link, table):
            continue
        if place := _named_in(text, table):
            line = next(line for line in text.splitlines() if _NOT_THERE.search(line))
            return denial.text_of_own(table.live(place), line.strip()[:200])
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error with its causes and contexts."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _decode(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _missed_by_python(error: BaseException, table: Table) -> bool:
    """Return whether Python's functions did not find the file, either; then it does not exist."""
    named = error.filename if isinstance(error, OSError) else None
    if not isinstance(named, str | bytes):
        return False
    place = table.locate(os.fsdecode(named), follow=True)
    return place is None or table.see(place) is None


def _own_places(table: Table) -> Iterator[str]:
    """Yield the paths at which this rank has a file or folder, and rank 0 has none."""
    tree = table.own(".")
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            place = os.path.relpath(os.path.join(folder, name), tree)
            if table.is_only_own(place):
                yield place


def _named_in(text: str, table: Table) -> str:
    """Return the longest of these paths that occurs in a text, or an empty text.

    A path beneath it counts, too.
    """
    places = sorted(itertools.islice(_own_places(table), _MOST), key=len, reverse=True)
    return next((place for place in places if _names(text, place)), "")


def _names(text: str, place: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(place)}(?![\w-])", text) is not None

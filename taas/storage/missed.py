"""Errors of C code and of programs that do not find what this rank wrote: they see the project as rank 0 has left it.

What a rank other than 0 writes with Python's own functions goes to its scratch, and only these find
it there. A library in C that writes into a folder which this rank has made finds no such folder
(ENOENT) where it would else meet the wall (EROFS); one that reads a file of this rank finds no such
file. Both get one explanation.
"""

# Plain strings: as in the table.
# ruff: noqa: PTH118

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator

from taas.errors import StorageDenied
from taas.storage.boundary import Denial
from taas.storage.table import Table
from taas.wording import text_of

_NOT_THERE = re.compile(
    r"no such file|not a directory|os error 2\b|errno[ =:]*2\b|does(?: not|n't) exist|"
    r"(?:can(?:not|'t)|could not|couldn't|unable to|failed to) (?:open|find|read|write|create)",
    re.IGNORECASE,
)
_MOST = 5000
"""So many of the rank's own files and folders are looked for in a text."""


def explain_missing(error: BaseException, table: Table, denial: Denial) -> str | None:
    """Return a sentence for an error about a file or folder that this rank has, and C code does not find; else None."""
    for link in _chain(error):
        if isinstance(link, StorageDenied):
            return None  # it speaks for itself
        text = text_of(link)
        if isinstance(link, subprocess.CalledProcessError):
            text = "\n".join(_decoded(said) for said in (link.stderr, link.stdout))
        if not _NOT_THERE.search(text) or _missed_by_python(link, table):
            continue
        if place := _named_in(text, table):
            line = next(line for line in text.splitlines() if _NOT_THERE.search(line))
            return denial.text_of_own(table.live(place), line.strip()[:200])
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it came from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _decoded(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _missed_by_python(error: BaseException, table: Table) -> bool:
    """Whether Python's own functions, which see what this rank wrote, did not find a file: it is nowhere."""
    named = error.filename if isinstance(error, OSError) else None
    if not isinstance(named, str | bytes):
        return False
    place = table.locate(os.fsdecode(named), follow=True)
    return place is None or table.see(place) is None


def _own_places(table: Table) -> Iterator[str]:
    """Yield the places of the project where this rank has files or folders that rank 0 has not."""
    tree = table.own(".")
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            place = os.path.relpath(os.path.join(folder, name), tree)
            if table.is_only_own(place):
                yield place


def _named_in(text: str, table: Table) -> str:
    """Return the longest of these places that a text names, by itself or with what is beneath it; empty where none is."""
    places = sorted(itertools.islice(_own_places(table), _MOST), key=len, reverse=True)
    return next((place for place in places if _names(text, place)), "")


def _names(text: str, place: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(place)}(?![\w-])", text) is not None

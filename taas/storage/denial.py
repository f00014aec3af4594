"""What a rank is told when it hits the wall."""

# Plain strings: a Path folds "..", which the kernel follows, and these run on every call of a rank.
# ruff: noqa: PTH110

from __future__ import annotations

import errno
import os
import re
import subprocess
from dataclasses import dataclass

from taas.errors import StorageDenied
from taas.storage.boundary import Boundary
from taas.wording import shown, text_of

_WALL_ERRNOS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV, errno.EBADF}
# What the wall makes libraries in C and programs say: glibc, HDF5, Rust, SQLite. Landlock's errno has many causes, so its
# words must end the line.
_READ_ONLY = (
    r"read-only file system|errno[ =:]*30\b|os error 30\b|readonly database|unable to open database file"
)
_SAID = re.compile(_READ_ONLY, re.IGNORECASE)
_SAID_OR_DENIED = re.compile(
    _READ_ONLY + r"|permission denied(?: \(13\))?(?:\W*|: '[^']*')$", re.IGNORECASE | re.MULTILINE
)
_COLORS = re.compile(r"\x1b\[[\d;]*m")
"""Python 3.13 and later colours tracebacks, where a kernel's environment asks for it."""
_ABSOLUTE = re.compile(r"""/[^\s:'"\u2018\u2019]+""")
_NAMED = re.compile(r"""name = '([^']+)'|["']([^"']*/[^"']*)["']""")


@dataclass(frozen=True)
class Denial:
    """Words for one rank: which rank, which project, which rule."""

    rank: int
    mode: str
    boundary: Boundary
    landlock: bool = False

    def error(self, path: str, why: str = "") -> StorageDenied:
        """A ``StorageDenied`` that names path, rank, rule and what to do."""
        return StorageDenied(errno.EROFS, self.text(path, why))

    def text(self, path: str, why: str = "") -> str:
        """The same as words."""
        cause = f" ({why})" if why else ""
        step = (
            "Write it in rank 0 only, write outside the project, or give the directory as --shared."
            if self.mode == "discard"
            else "Write it in rank 0 only, or take --rank-writes discard or --shared."
        )
        return (
            f"rank {self.rank} may not write {path}{cause}: only rank 0 writes the project "
            f"{self.boundary.project} (--rank-writes {self.mode}). {step}"
        )

    @property
    def _said(self) -> re.Pattern[str]:
        return _SAID_OR_DENIED if self.landlock else _SAID

    def explain(self, error: BaseException) -> str | None:
        """A sentence for an error that came from the wall through C code or a child; None for any other."""
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            if isinstance(link, StorageDenied):
                return None  # it speaks for itself
            named = self._project_path(link)
            text = text_of(link)
            reason = "the system said: " + (text.strip() or type(link).__name__).splitlines()[0][:200]
            if named is not None:
                return self.text(named, reason)
            if isinstance(link, subprocess.CalledProcessError):
                captured = (link.stderr or "", link.stdout or "")
                return self.explain_output(
                    "\n".join(c if isinstance(c, str) else c.decode(errors="replace") for c in captured)
                )
            # An OSError of a kind that has other causes has named its path above, if it is the project's.
            if (_SAID if isinstance(link, OSError) else self._said).search(text):
                return "If this is about the project: " + self.text("it", reason)
            link = link.__cause__ or link.__context__
        return None

    def explain_output(self, output: str) -> str | None:
        """A sentence for what the wall made a program say that the rank started; None where it said no such thing."""
        output = _COLORS.sub("", output)
        for line in output.splitlines() if self._said.search(output) else ():
            if self._said.search(line) and self._may_be_of_project(line):
                return (
                    f'"{shown(line.strip(), 200)}", said a program that ranks other than 0 started: only '
                    f"rank 0 writes the project {self.boundary.project}. Start it in rank 0 only, let it write outside "
                    "the project, or give the directory as --shared."
                )
        return None

    def _may_be_of_project(self, line: str) -> bool:
        """Whether a line names a path of the project, or none that is another's."""
        named = _ABSOLUTE.findall(line.partition(":")[2])  # before the colon is the program
        return not named or any(self.boundary.relative(os.path.realpath(path)) is not None for path in named)

    def _project_path(self, error: BaseException) -> str | None:
        """The project path that the wall refused, where the error names it."""
        if not isinstance(error, OSError) or error.errno not in _WALL_ERRNOS:
            return None
        named = error.filename
        found = [os.fsdecode(named)] if isinstance(named, str | bytes) else []
        found += [one or other for one, other in _NAMED.findall(text_of(error))]
        for path in found:
            real = os.path.realpath(path)
            unreadable = error.errno == errno.EACCES and os.path.exists(real) and not os.access(real, os.R_OK)
            if self.boundary.relative(real) is not None and not unreadable:
                return real
        return None

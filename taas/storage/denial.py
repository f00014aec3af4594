"""What a rank is told when it hits the wall."""

# Plain strings: a Path folds "..", which the kernel follows, and these run on every call of a rank.
# ruff: noqa: PTH110

from __future__ import annotations

import errno
import os
import re

import msgspec

from taas.errors import StorageDenied
from taas.storage.boundary import Boundary

__all__ = ["Denial"]

_WALL_ERRNOS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV, errno.EBADF}
# What libraries in C make of the wall's errno: glibc, HDF5, Rust, SQLite.
_WALL_TEXTS = re.compile(
    r"read-only file system|errno[ =:]*30\b|os error 30\b|readonly database|unable to open database file",
    re.IGNORECASE,
)
_NAMED = re.compile(r"""name = '([^']+)'|["']([^"']*/[^"']*)["']""")


class Denial(msgspec.Struct, frozen=True):
    """Words for one rank: which rank, which project, which rule."""

    rank: int
    mode: str
    boundary: Boundary

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

    def explain(self, error: BaseException) -> str | None:
        """A sentence for an error that came from the wall through C code or a child; None for any other."""
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            if isinstance(link, StorageDenied):
                return None  # it speaks for itself
            named = self._project_path(link)
            reason = "the system said: " + (str(link).strip() or type(link).__name__).splitlines()[0][:200]
            if named is not None:
                return self.text(named, reason)
            if _WALL_TEXTS.search(str(link)):
                return "If this is about the project: " + self.text("it", reason)
            link = link.__cause__ or link.__context__
        return None

    def _project_path(self, error: BaseException) -> str | None:
        """The project path that the wall refused, where the error names it."""
        if not isinstance(error, OSError) or error.errno not in _WALL_ERRNOS:
            return None
        named = error.filename
        found = [os.fsdecode(named)] if isinstance(named, str | bytes) else []
        found += [one or other for one, other in _NAMED.findall(str(error))]
        for path in found:
            real = os.path.realpath(path)
            unreadable = error.errno == errno.EACCES and os.path.exists(real) and not os.access(real, os.R_OK)
            if self.boundary.relative(real) is not None and not unreadable:
                return real
        return None

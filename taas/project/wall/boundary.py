"""Where the project begins and ends, and the error for a rank that may not write to it.

The rule applies to the project's directory tree with all links resolved. Beneath the project,
these stay writable: the run's ``--shared`` directories; the directories that the rank itself needs
(its scratch, its output files); and directories that never contain project files, even if the
project is a home directory or ``/``: caches, temporary and device directories.
"""

# Plain strings: a Path removes "..", which the kernel follows, and is slow in code that every call
# in a rank runs.
# ruff: noqa: PTH110, PTH111, PTH118

from __future__ import annotations

import contextlib
import errno
import os
import posix
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from taas.base.wording import first_line, refusal, shown, shown_path, text_of
from taas.errors import HeaderError, StorageDenied

_SYSTEM = ("/tmp", "/var/tmp", "/dev", "/proc", "/sys", "/run")  # noqa: S108 named, never written
_CACHES = (
    "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NUMBA_CACHE_DIR",
    "IPYTHONDIR", "TMPDIR",
)  # fmt: skip
NEVER = sys.maxsize
HOME_CACHES = (".cache", ".triton", ".nv", ".ipython")


@dataclass(frozen=True)
class Boundary:
    """The project of one run, and the paths beneath it that stay writable.

    All paths are resolved, and no writable path is beneath another one.
    """

    project: str
    open: tuple[str, ...]

    def relative(self, real: str) -> str | None:
        """Return a resolved path relative to the project; None if the rule does not apply.

        "." is the project itself.
        """
        inside = resolve_beneath(real, self.project)
        free = inside is None or any(
            resolve_beneath(real, place) is not None for place in self.open
        )
        return None if free else inside


def clock_of(folder: str) -> int:
    """Return the time (ns) by the clock of a folder's file system.

    If no file can be created there, return a time that never comes.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".taas-clock-") as touched:
            return os.fstat(touched.fileno()).st_ctime_ns
    except OSError:
        return NEVER


def changed_since(path: str, since_ns: int) -> bool:
    """Return whether a file, folder or link was certainly changed after a time of :func:`clock_of`.

    False means that it was perhaps not changed.
    """
    try:
        return posix.lstat(path).st_ctime_ns > since_ns
    except (FileNotFoundError, NotADirectoryError):
        return False


def join(root: str, inside: str) -> str:
    """Return the absolute path of a path in the project."""
    return root if inside == "." else os.path.join(root, inside)


def resolve_beneath(path: str, root: str) -> str | None:
    """Return ``path`` relative to ``root``, "." for ``root`` itself, None if it is elsewhere.

    Both are resolved paths.
    """
    if path == root:
        return "."
    prefix = root if root.endswith("/") else root + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None


def draw(project: str, shared: Iterable[str], writable: Iterable[str]) -> Boundary:
    """Resolve a project's boundary, and create ``shared`` directories that do not exist.

    They are absolute, or relative to the project.

    Raises:
        OSError: the project does not exist, or a shared directory cannot be created.
    """
    root = os.path.realpath(project, strict=True)
    places = [os.path.join(root, path) for path in shared]
    for place in places:
        Path(place).mkdir(parents=True, exist_ok=True)
    wanted = [*places, *writable, *_never_project(root)]
    inside: list[str] = []
    for real in sorted(
        {os.path.realpath(path) for path in wanted if os.path.lexists(path)}, key=len
    ):
        beneath = resolve_beneath(real, root)
        # If the project itself were a writable path, the rule would be void.
        if beneath not in (None, ".") and all(
            resolve_beneath(real, other) is None for other in inside
        ):
            inside.append(real)
    return Boundary(root, tuple(inside))


def _never_project(root: str) -> list[str]:
    """Return the caches, temporary and device directories, which never contain project files."""
    home = os.path.realpath(os.path.expanduser("~"))
    caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
    caches += [f"{home}/{name}" for name in HOME_CACHES]
    for cache in caches:
        # It is created now, because the write protection keeps C code from creating it later.
        # Python's own writes would be diverted, and C code would not find the results, such as a
        # module that Triton compiles.
        if resolve_beneath(os.path.realpath(cache), root) is not None:
            with contextlib.suppress(OSError):
                Path(cache).mkdir(mode=0o700, parents=True, exist_ok=True)
    return [*_SYSTEM, *caches]


# ----------------------------------------------------------- directories where every rank may write


def missing_shared(project: Path, shared: tuple[str, ...]) -> list[Path]:
    """Return the shared directories that still have to be created.

    Raises:
        HeaderError: one is a file, is missing outside the project, or would open all of the
            project to every rank.
    """
    root, missing = project.resolve(), []
    for path in shared:
        fact = f"--shared {shown(path)}"
        if path.startswith("~") and (home := os.path.expanduser(path)) != path:
            raise HeaderError(
                refusal(
                    f"{fact} is no path to a home directory", f"type --shared {shown_path(home)}"
                )
            )
        try:
            place = (root / path).resolve()
            if place.is_dir() and not root.is_relative_to(place):
                continue
            may_be_made = not os.path.lexists(root / path) and place.is_relative_to(root)
        except (OSError, RuntimeError) as error:
            # too long, a loop of links, a folder that may not be entered
            why = getattr(error, "strerror", None) or first_line(error)
            raise HeaderError(refusal(f"{fact}: {why}", "type --shared checkpoints")) from None
        if not may_be_made:
            allowed = (
                "a directory inside the project, there or not, or one elsewhere that is there, and"
                " neither the project nor what holds it"
            )
            raise HeaderError(refusal(fact, "type --shared checkpoints", allowed))
        missing.append(place)
    return missing


def make_shared(project: Path, shared: tuple[str, ...]) -> list[str]:
    """Create the shared directories that do not exist; return a line for the user for each.

    Raises:
        HeaderError: one cannot be created.
    """
    said = []
    for place in missing_shared(project, shared):
        name = shown(str(place.relative_to(project.resolve())))
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fact = f"--shared {name} cannot be made ({error.strerror})"
            allowed = "a directory that this user may make"
            raise HeaderError(refusal(fact, "type --shared checkpoints", allowed)) from None
        said.append(f"made the directory {name}, where every rank may write (--shared)")
    return said


# ------------------------------------------------------------------ errors for a rank

_WALL_ERRNOS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV, errno.EBADF}
# Messages of C libraries and programs that hit the write protection: glibc, HDF5, Rust, SQLite.
# Landlock's errno has many causes, so its words must end the line.
_READ_ONLY = (
    r"read-only file system|errno[ =:]*30\b|os error 30\b|readonly database|unable to open database"
    r" file"
)
WALL_SAID = re.compile(_READ_ONLY, re.IGNORECASE)
LANDLOCK_SAID = re.compile(
    _READ_ONLY + r"|permission denied(?: \(13\))?(?:\W*|: '[^']*')$", re.IGNORECASE | re.MULTILINE
)
_COLORS = re.compile(r"\x1b\[[\d;]*m")
"""Matches colours: Python 3.13 and later colour tracebacks if the kernel's environment says so."""
_ABSOLUTE = re.compile(r"""/[^\s:'"\u2018\u2019]+""")
_NAMED = re.compile(r"""name = '([^']+)'|["']([^"']*/[^"']*)["']""")


@dataclass(frozen=True)
class Denial:
    """The messages for one rank that hits the write protection."""

    rank: int
    mode: str
    boundary: Boundary
    said: re.Pattern[str] = WALL_SAID

    def error(self, path: str, why: str = "") -> StorageDenied:
        """Return a ``StorageDenied`` whose message has path, rank, rule and the next step."""
        return StorageDenied(errno.EROFS, self.text(path, why))

    def text(self, path: str, why: str = "") -> str:
        """Return the text of that error."""
        outside = "write outside the project, or give the directory as --shared"
        step = outside if self.mode == "discard" else "or take --rank-writes discard or --shared"
        return (
            f"rank {self.rank} may not write {path}{why and f' ({why})'}: only rank 0 writes the"
            f" project {self.boundary.project} (--rank-writes {self.mode}). Write it in rank 0"
            f" only, {step}."
        )

    def text_of_own(self, path: str, said: str) -> str:
        """Explain why C code or a program did not find a file that this rank wrote at ``path``."""
        return (
            f'"{said}", said C code or a program in rank {self.rank}: what ranks other than 0 write'
            f" at {path} they keep to themselves, and only Python's own functions find it there;"
            f" only rank 0 writes the project {self.boundary.project} (--rank-writes {self.mode})."
            " Write and read it in rank 0 only, outside the project, or give the directory as"
            " --shared."
        )

    def explain(self, error: BaseException) -> str | None:
        """Explain an error that the write protection caused in C code or a child.

        None for others.
        """
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            if isinstance(link, StorageDenied):
                return None  # its text needs no explanation
            named = self._project_path(link)
            text = text_of(link)
            reason = (
                "the system said: " + (text.strip() or type(link).__name__).splitlines()[0][:200]
            )
            if named is not None:
                return self.text(named, reason)
            if isinstance(link, subprocess.CalledProcessError):
                captured = (link.stderr or "", link.stdout or "")
                return self.explain_output(
                    "\n".join(
                        c if isinstance(c, str) else c.decode(errors="replace") for c in captured
                    )
                )
            # For an OSError only WALL_SAID counts: its errno may have other causes, and if its
            # path is in the project, that path was found above.
            if (WALL_SAID if isinstance(link, OSError) else self.said).search(text):
                return "If this is about the project: " + self.text("it", reason)
            link = link.__cause__ or link.__context__
        return None

    def explain_output(self, output: str) -> str | None:
        """Explain output of a program that hit the write protection.

        Return None for other output.
        """
        output = _COLORS.sub("", output)
        for line in output.splitlines() if self.said.search(output) else ():
            if self.said.search(line) and self._may_be_of_project(line):
                return (
                    f'"{shown(line.strip(), 200)}", said a program that ranks other than 0 started:'
                    f" only rank 0 writes the project {self.boundary.project}. Start it in rank 0"
                    " only, let it write outside the project, or give the directory as --shared."
                )
        return None

    def _may_be_of_project(self, line: str) -> bool:
        """Return whether a line contains a path of the project, or no path at all."""
        named = _ABSOLUTE.findall(line.partition(":")[2])  # the program's name is before the colon
        return not named or any(
            self.boundary.relative(os.path.realpath(path)) is not None for path in named
        )

    def _project_path(self, error: BaseException) -> str | None:
        """Return the project path that the write protection refused, if the error contains it.

        An attribute of the error contains it, or the error's text.
        """
        text, code, found = text_of(error), errno.EROFS, list[str]()
        if isinstance(error, OSError):
            if error.errno not in _WALL_ERRNOS:
                return None
            code = error.errno
            found += (
                [os.fsdecode(error.filename)] if isinstance(error.filename, str | bytes) else []
            )
        elif isinstance(error, subprocess.CalledProcessError) or not WALL_SAID.search(text):
            return None
        found += [one or other for one, other in _NAMED.findall(text)]
        for path in found:
            real = os.path.realpath(path)
            unreadable = (
                code == errno.EACCES and os.path.exists(real) and not os.access(real, os.R_OK)
            )
            if self.boundary.relative(real) is not None and not unreadable:
                return real
        return None

"""A spare process becomes the rank that is expected next, and imports modules in advance.

Ranks are new processes. A cell that uses transformers, trl and peft spends seconds importing them,
each time. The forkserver cannot import them for all ranks: at import, a library checks which rank
it is in and whether there is a notebook, starts threads, and creates ids that no two processes may
share. So each process imports them for itself when it already is the rank (prepared.become_rank):
after a run, the agent expects another one like it.

The next job may be a different one. One comparison (:meth:`ReadyAhead.fits`) decides: it compares
everything that becoming the rank and the imports depended on with its current state. Anything that
differs, or cannot be compared, makes the process unfit: it exits, and another one is forked in its
place. An import with a side effect that a rank would not have before its cell makes the process
unfit, too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from taas.adopt import own_gpu
from taas.base import linux
from taas.base.import_hooks import around_imports, attributes_of, is_installed
from taas.capture.environment import file_time
from taas.capture.settings.import_draws import drawing_nothing, imported_after, last_imported
from taas.capture.settings.process_state import ProcessState, seen_by_imports
from taas.capture.settings.random_states import states_of_generators
from taas.protocol.ranks import VARIABLES_OF_A_RUN, GetReady, RankStart, preparation_of
from taas.rank.shell import RankShell
from taas.rank_storage import Guard

_FEWEST = 100
"""The smallest number of modules that is worth it: they take about 0.1 s to import.

Importing fewer modules costs the next cell less than a spare process that turns out to be unfit.
"""
_NICER_BY = 10
_DRAW_FOR_THEMSELVES = ("rich.style",)
"""Modules that draw random numbers at import for themselves: the first id of rich's links."""
_LOOK_FOR_THEIR_OWN = ("fsspec.config",)
"""Modules that copy the environment at import, and search it for their own variables."""
_SETS_VARIABLES = re.compile(
    r"environ\s*\[[^\]]*\]\s*=[^=]|environ\s*\|=|\bdel\b[^\n]*environ"
    r"|environ\s*\.\s*(?:update|setdefault|pop|popitem|clear)\b|\b(?:un|set|put)env\b"
    r"|^\s*%(?:set_)?env\b|\bload_dotenv\b",
    re.MULTILINE,
)
"""Code with which a cell sets environment variables before it imports modules that read them."""


# ---------------------------------------------------------------- which modules


def installed_modules(after: str) -> tuple[str, ...]:
    """Return the installed modules imported after ``after``, in order.

    Empty if there are only a few.
    """
    names = [name for name in reversed(imported_after(after)) if _file_of_installed(name)]
    return tuple(names) if len(names) >= _FEWEST else ()


def _file_of_installed(name: str) -> str:
    """Return the file of an installed module that is imported by this name, otherwise ""."""
    spec = attributes_of(sys.modules.get(name)).get("__spec__")
    if not isinstance(spec, ModuleSpec) or spec.name != name or not spec.origin:
        return ""  # a module that a program has created, or that also has another name
    return spec.origin if is_installed(spec.origin) and not _is_ours(name) else ""


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "taas"


# ---------------------------------------------------------------- what is compared


class _Terms(NamedTuple):
    """The parts of a job that decide how a process becomes a rank, except those new in each run."""

    header: dict[str, object]
    shown: bool  # whether the cell shows this rank's output: its progress bars are widgets then
    preparation: object
    own_gpu_first: bool
    local_rank_option: str
    place: tuple[object, ...]
    gpus: tuple[str, ...]
    delivers: bool
    goes_on: bool  # in kept ranks, or after a restart
    folders: tuple[str, ...]
    environ: dict[str, str]
    path: tuple[str, ...]
    arguments: tuple[str, ...]


def terms_of(start: RankStart) -> _Terms:
    """Return the parts of a job that must be as expected."""
    order, staged, cell = start.order, start.staged, start.order.cell
    return _Terms(
        header=cell.spec.of_ranks(),
        shown=start.rank in cell.spec.shown_ranks(),
        preparation=preparation_of(order, staged),
        own_gpu_first=cell.own_gpu_first,
        local_rank_option=cell.local_rank_option,
        place=(order.vm, order.group_rank, start.local_rank, order.host, order.store.host),
        gpus=order.gpus,
        delivers=order.delivery is not None,
        goes_on=order.continues or order.restart_count > 0,
        folders=(staged.project, staged.replica, staged.on_demand, str(Path(staged.output).parent)),
        environ=start.lasting_environ,
        path=staged.at_import.path,
        arguments=staged.at_import.arguments,
    )


class _FileStatus(NamedTuple):
    """The attributes that change with a file, or with a folder's entries."""

    modified_ns: int
    changed_ns: int
    nbytes: int
    inode: int


def _status(path: str) -> _FileStatus:
    """Return the current status of a file or folder; raise OSError if it is gone."""
    found = os.stat(path)  # noqa: PTH116  thousands of them
    return _FileStatus(found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


class ReadyAhead:
    """A rank without a job so far, in its own process: what it was made from, and its imports.

    Args:
        told: the job that its agent expects.
        wall: the rank's write protection, which is already set up. Landlock grants access to the
            entries that exist when it is set up: later entries of the project's parents could not
            be written here, although a fresh rank could write them.

    Attributes:
        unfit: side effects of this process or of an import that a rank would not have before its
            cell.
    """

    def __init__(self, told: GetReady, wall: Guard) -> None:
        self._told, self._wall = told, wall
        self._terms = terms_of(told.start)
        self._settings = seen_by_imports(rank=True)
        # where the path finds a module, by the first part of its name
        self._found: dict[str, object] = {}
        self._files: dict[str, _FileStatus] = {}
        self._folders: dict[str, _FileStatus] = {}
        self.unfit: list[str] = []
        if wall.mechanism == "landlock":
            self.unfit.append("stands behind Landlock")

    # ------------------------------------------------------------ importing

    def import_modules(self, shell: RankShell, has_word: Callable[[], bool]) -> None:
        """Import the expected modules until the agent has sent a message.

        A module that cannot be imported ends the loop: the modules imported so far are as good a
        start for a rank as any.
        """
        staged = self._told.start.staged
        sent = {"sys.path": [*staged.at_import.path], "sys.argv": [*staged.at_import.arguments]}
        ProcessState(sent, None).put_early(staged.project)
        self._folders = {entry: _status(entry) for entry in sys.path if _holds_installed(entry)}
        last, began, here = last_imported(), file_time(), Path.cwd()
        drawn = states_of_generators(cuda=False)
        with (
            _noting_reads(VARIABLES_OF_A_RUN) as reads,
            around_imports(_DRAW_FOR_THEMSELVES, drawing_nothing),
            around_imports(_LOOK_FOR_THEIR_OWN, reads.unnoted),
            shell.builtin_trap,  # a cell has get_ipython among its builtins
            shell.display_trap,
        ):
            for name in self._told.modules:
                if has_word() or not self._import(name):
                    break
        new = imported_after(last)
        self._note_files(new, began)
        done = {
            "reads what each run has of its own": bool(reads.names),
            "draws random numbers": drawn != states_of_generators(cuda=False),
            "imports a module of the project": any(map(_is_of_project, new)),
            "changes the working directory": here != Path.cwd(),
            "makes a process group": dist.is_initialized(),
            "uses a GPU, and holds memory of it": bool(own_gpu.with_contexts()),
            # files that a rank other than 0 has written there are in a scratch folder that is
            # removed
            "writes into the project": self._wall.table is not None and self._wall.table.touched,
        }
        self.unfit += [what for what, is_done in done.items() if is_done]

    def _import(self, name: str) -> bool:
        """Import one module if it is found among installed ones; return whether that succeeded."""
        top = name.partition(".")[0]
        if top not in self._found:
            self._found[top] = _found_at(top)
        if name in sys.modules or self._found[top] is None:
            return True
        try:
            importlib.import_module(name)
        except BaseException:  # including SystemExit: the cell itself is to raise any error
            return False
        return True

    def _note_files(self, new: list[str], began: int) -> None:
        """Record modules' files.

        One that changed since the imports began makes the process unfit.
        """
        for file in filter(None, map(_file_of_installed, new)):
            try:
                status = _status(file)
            except OSError as error:
                self.unfit.append(f"has imported {file}: {error.strerror}")
                continue
            self._files[file] = status
            if status.changed_ns >= began:
                self.unfit.append(f"was about to read {file}, which was changed")

    # ------------------------------------------------------------ the job

    def fits(self, start: RankStart) -> bool:
        """Whether a fresh process would be the same as this one after the same imports."""
        return (
            not self.unfit
            and self._terms == terms_of(start)
            and _SETS_VARIABLES.search(start.order.cell.text) is None
            and self._has_settings(start.staged.at_import.settings)
            and self._is_installed_as_before()
        )

    def _has_settings(self, of_notebook: Mapping[str, str]) -> bool:
        """Whether modules found the settings here that a fresh rank would have applied."""
        own = self._settings
        return all(of_notebook.get(name, value) == value for name, value in own.items())

    def _is_installed_as_before(self) -> bool:
        """Whether nothing was installed, removed, edited or put in front of it on the path."""
        importlib.invalidate_caches()
        try:
            return (
                all(_status(path) == status for path, status in self._folders.items())
                and all(_status(path) == status for path, status in self._files.items())
                and all(_found_at(top) == found for top, found in self._found.items())
            )
        except OSError:
            return False


def _holds_installed(entry: str) -> bool:
    return bool(entry) and is_installed(f"{entry}/") and Path(entry).is_dir()


def _is_of_project(name: str) -> bool:
    """Whether a module's file is not installed: such files are edited, so each cell reads them."""
    file = attributes_of(sys.modules.get(name)).get("__file__")
    return isinstance(file, str) and not is_installed(file) and not _is_ours(name)


def _found_at(top: str) -> object:
    """Return where ``sys.path`` finds a module; None: nowhere, or not among installed ones."""
    if top in sys.builtin_module_names:
        return "built-in"
    spec = PathFinder.find_spec(top)
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
    return tuple(places) if all(is_installed(f"{place}/") for place in places) else None


# ---------------------------------------------------------------- reads of variables not known yet

_Environ: Any = type(os.environ)


class _Reads:
    """The variables that this process has looked up; lookups during ``unnoted`` do not count."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._notes = True

    def note(self, *names: str) -> None:
        if self._notes:
            self.names.update(names)

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        self._notes = False
        try:
            yield
        finally:
            self._notes = True


@contextlib.contextmanager
def _noting_reads(names: tuple[str, ...]) -> Iterator[_Reads]:
    """Yield which of these variables this process looks up meanwhile, and cannot find yet.

    Code that copies the whole environment looks up all of them. Code that iterates over it looks
    for variables with a prefix of its own (tqdm, pydantic).
    """
    reads = _Reads()

    class Noting(_Environ):
        def __getitem__(self, name: str) -> Any:
            if name in names:
                reads.note(name)
            return super().__getitem__(name)

        def keys(self) -> Any:  # dict(os.environ), {**os.environ}
            reads.note(*names)
            return super().keys()

        def copy(self) -> Any:
            reads.note(*names)
            return super().copy()

    environ: Any = os.environ
    environ.__class__ = Noting
    try:
        yield reads
    finally:
        environ.__class__ = _Environ


# ---------------------------------------------------------------- in the background


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Lower this process's priority if it may raise it again; new threads inherit the priority."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not _may_raise_priority(before):
        yield
        return
    linux.set_priority(os.getpid(), before + _NICER_BY)
    try:
        yield
    finally:
        linux.set_priority(os.getpid(), before)


def _may_raise_priority(before: int) -> bool:
    """Try it in a thread that then ends: RLIMIT_NICE decides for ordinary users."""
    may: list[bool] = []

    def try_it() -> None:
        own = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, own, before + 1)
            os.setpriority(os.PRIO_PROCESS, own, before)
        except OSError:
            return
        may.append(True)

    thread = threading.Thread(target=try_it, name="taas-priority")
    thread.start()
    thread.join()
    return bool(may)

"""A spare becomes the rank that is expected next, and imports, while nobody waits for it.

Ranks are new processes. A cell that uses transformers, trl and peft spends seconds on importing
them, each time. The forkserver cannot do it for all: a library looks at import which rank it is in
and whether a notebook is there, starts threads, and makes ids that no two processes may share. So
each process does it for itself, when it is the rank already (entry.become_rank): after a run the
agent expects another one like it.

The order may be another one after all. One comparison (:meth:`ReadyAhead.fits`) decides: of all
that becoming the rank and the imports depended on, as it was then and as it is now. Whatever
differs, or cannot be compared, makes the process unfit: it leaves, and another one is forked in its
place. What an import did that a rank would not have done before its cell makes it unfit, too.
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
"""So many modules are worth it: they take some 0.1 s to import. Fewer cost the next cell less than
a doubt about its ranks does.
"""
_NICER_BY = 10
_DRAW_FOR_THEMSELVES = ("rich.style",)
"""Modules that draw at import for a purpose of their own: the first id of rich's links."""
_LOOK_FOR_THEIR_OWN = ("fsspec.config",)
"""Modules that copy the environment at import, and look in it for names that are theirs."""
_SETS_VARIABLES = re.compile(
    r"environ\s*\[[^\]]*\]\s*=[^=]|environ\s*\|=|\bdel\b[^\n]*environ"
    r"|environ\s*\.\s*(?:update|setdefault|pop|popitem|clear)\b|\b(?:un|set|put)env\b"
    r"|^\s*%(?:set_)?env\b|\bload_dotenv\b",
    re.MULTILINE,
)
"""What a cell may say that sets environment variables itself, before it imports what reads them."""


# ---------------------------------------------------------------- which modules


def installed_modules(after: str) -> tuple[str, ...]:
    """Return the installed modules that were imported after one, in order; few are none."""
    names = [name for name in reversed(imported_after(after)) if _file_of_installed(name)]
    return tuple(names) if len(names) >= _FEWEST else ()


def _file_of_installed(name: str) -> str:
    """Return the file of an installed module that is imported by this name; else empty."""
    spec = attributes_of(sys.modules.get(name)).get("__spec__")
    if not isinstance(spec, ModuleSpec) or spec.name != name or not spec.origin:
        return ""  # one that a program has made, or that has another name as well
    return spec.origin if is_installed(spec.origin) and not _is_ours(name) else ""


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "taas"


# ---------------------------------------------------------------- what is compared


class _Terms(NamedTuple):
    """What of an order decides how a process becomes a rank, without what each run has anew."""

    header: dict[str, object]
    shown: bool  # whether the cell shows what this rank prints: its bars are widgets then
    preparation: object
    own_gpu_first: bool
    local_rank_option: str
    place: tuple[object, ...]
    gpus: tuple[str, ...]
    delivers: bool
    goes_on: bool  # in ranks that were kept, or after a restart
    folders: tuple[str, ...]
    environ: dict[str, str]
    path: tuple[str, ...]
    arguments: tuple[str, ...]


def terms_of(start: RankStart) -> _Terms:
    """Return what of an order has to be as it was expected."""
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
    """What changes with a file, or with a folder's entries."""

    modified_ns: int
    changed_ns: int
    nbytes: int
    inode: int


def _status(path: str) -> _FileStatus:
    """Return how a file or folder is now; OSError: it is gone."""
    found = os.stat(path)  # noqa: PTH116  thousands of them
    return _FileStatus(found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


class ReadyAhead:
    """A rank that has had no order yet, in its own process: what it was made by, and imported.

    Args:
        told: what its agent expects.
        wall: the rank's, which stands already. Landlock grants what is there when it is raised:
            later entries of the project's parents could not be written here, and in a fresh rank
            they could.

    Attributes:
        unfit: what it, or an import, does that a rank would not have done before its cell.
    """

    def __init__(self, told: GetReady, wall: Guard) -> None:
        self._told, self._wall = told, wall
        self._terms = terms_of(told.start)
        self._settings = seen_by_imports(rank=True)
        self._found: dict[str, object] = {}  # where the path leads to, by the first part of a name
        self._files: dict[str, _FileStatus] = {}
        self._folders: dict[str, _FileStatus] = {}
        self.unfit: list[str] = []
        if wall.mechanism == "landlock":
            self.unfit.append("stands behind Landlock")

    # ------------------------------------------------------------ importing

    def import_modules(self, shell: RankShell, has_word: Callable[[], bool]) -> None:
        """Import what there is to import, until the agent has something to say.

        A module that cannot be imported ends it: what is there by then is a rank's start like any.
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
            shell.builtin_trap,  # a cell has get_ipython among its built-in names
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
            # what a rank other than 0 has written there stays in a scratch that goes
            "writes into the project": self._wall.table is not None and self._wall.table.touched,
        }
        self.unfit += [what for what, is_done in done.items() if is_done]

    def _import(self, name: str) -> bool:
        """Import one module, if it is found among installed ones; return whether that went well."""
        top = name.partition(".")[0]
        if top not in self._found:
            self._found[top] = _found_at(top)
        if name in sys.modules or self._found[top] is None:
            return True
        try:
            importlib.import_module(name)
        except BaseException:  # SystemExit, too: whatever it raises, the cell shall meet it
            return False
        return True

    def _note_files(self, new: list[str], began: int) -> None:
        """Note modules' files; one that changed since the imports began makes the process unfit."""
        for file in filter(None, map(_file_of_installed, new)):
            try:
                status = _status(file)
            except OSError as error:
                self.unfit.append(f"has imported {file}: {error.strerror}")
                continue
            self._files[file] = status
            if status.changed_ns >= began:
                self.unfit.append(f"was about to read {file}, which was changed")

    # ------------------------------------------------------------ the order

    def fits(self, start: RankStart) -> bool:
        """Whether a fresh process would be this one after the same imports."""
        return (
            not self.unfit
            and self._terms == terms_of(start)
            and _SETS_VARIABLES.search(start.order.cell.text) is None
            and self._has_settings(start.staged.at_import.settings)
            and self._is_installed_as_before()
        )

    def _has_settings(self, of_notebook: Mapping[str, str]) -> bool:
        """Whether modules found here what they would in a fresh rank, which puts what is named."""
        own = self._settings
        return all(of_notebook.get(name, value) == value for name, value in own.items())

    def _is_installed_as_before(self) -> bool:
        """Whether nothing was installed, removed, edited or put before it on the path."""
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
    """Whether a module's file is not installed: such files are edited; each cell reads them."""
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


# ---------------------------------------------------------------- reads of what is not known yet

_Environ: Any = type(os.environ)


class _Reads:
    """Which variables this process has looked for; ``unnoted``: not while that lasts."""

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
    """Yield which of some variables this process looks for meanwhile, and cannot find yet.

    Who copies the whole environment looks for all of them. Who goes through it, name by name, looks
    for names that begin as its own do (tqdm, pydantic).
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


# ---------------------------------------------------------------- beside what the user does


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Lower this process's priority, if it may raise it again; new threads have it, too."""
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
    """Try it in a thread that ends with that: RLIMIT_NICE decides for ordinary users."""
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

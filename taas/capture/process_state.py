"""What cells do to their process beside making names: one table, read and written in the notebook and in its ranks.

A rank takes the notebook's state before its cell; what the cell changes of it comes back. A library that is not
imported is not imported for its state: it takes it when it is imported. Variables that describe a rank, as
torchrun's, never travel. A rank starts in the project whatever the notebook's working directory is (contract);
where the cell changes it, the notebook's changes too.

Random numbers are the states of the generators of ``random``, NumPy, torch, and the rank's CUDA device. CUDA's is a state only
once CUDA is initialised. Until then torch keeps a queue of what to do to its generators; a state that came from elsewhere waits
in it, is the state as long as nobody has seeded CUDA since, and travels on.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from taas.capture.memory import view_of
from taas.capture.settings import Row, rows, setting
from taas.import_hooks import after_import, around_import

_A_RANKS_OWN = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MPLBACKEND",
    "NODE_RANK", "PWD", "OLDPWD", "SHLVL", "_",
}  # fmt: skip
_OF_LAUNCHERS = ("--local_rank=", "--local-rank=")
_A_RANKS_OWN_PREFIXES = ("ROLE_", "TORCHELASTIC_", "TAAS_", "JPY_", "TORCH_NCCL_", "TORCHDYNAMO_")


def _told(sent: Any, before: Any, now: Any) -> Any:
    """Return what is told of a change (docs of :class:`~taas.capture.settings.Row`), of a row that a notebook ``sent``."""
    if isinstance(now, dict):
        new = {name: value for name, value in now.items() if name not in before or before[name] != value}
        return new | {name: None for name in before if name not in now}
    if not isinstance(now, list):
        return now
    beside = [item for item in before if item not in (sent or ())]
    return [item for item in now if item not in beside]


# ---------------------------------------------------------------- environment


def _inherited_variables() -> dict[str, str]:
    entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def changed_variables() -> tuple[str, ...]:
    """Return the names of environment variables that this process has set, changed or removed since it began."""
    inherited = _inherited_variables()
    names = inherited.keys() | os.environ.keys()
    return tuple(sorted(name for name in names if inherited.get(name) != os.environ.get(name)))


def sendable_variables() -> tuple[dict[str, str], list[str]]:
    """Return the environment that a message can carry, and the names of what is left out for good.

    What the notebook itself set travels with its names, in whatever bytes.
    """
    environ = {name: value for name, value in os.environ.items() if is_utf8(name + value)}
    changed = changed_variables()
    return environ, [ascii(name)[1:-1] for name in os.environ if name not in environ and name not in changed]


def is_utf8(text: str) -> bool:
    """Whether a text of the system's is what it should be; bytes that are not come as lone surrogates."""
    return text.encode(errors="ignore").decode() == text


def _own(name: str) -> bool:
    return name in _A_RANKS_OWN or name.startswith(_A_RANKS_OWN_PREFIXES)


def _put_environment(_: ModuleType, told: dict[str, str | None]) -> None:
    os.environ.update({name: value for name, value in told.items() if value is not None})
    for name in [name for name, value in told.items() if value is None]:
        os.environ.pop(name, None)


# ---------------------------------------------------------------- paths and arguments


class _PathOfRank:
    """``sys.path`` of a rank, which begins with the project."""

    _for_directory = ""  # the project, where it stands for the notebook's own working directory

    def take(self, _: ModuleType) -> list[str]:
        """Return it as the notebook would have it."""
        path = [*sys.path]
        if self._for_directory in path:
            path[path.index(self._for_directory)] = ""
        return path

    def put(self, _: ModuleType, told: list[str]) -> None:
        """Put the notebook's behind the project, and before what else is there."""
        project = sys.path[0]
        if told[:1] == [""]:
            self._for_directory, told = project, told[1:]
        first = told if told[:1] == [project] else [project, *told]
        sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]


PROGRAM = "<cell>"
"""What the program is called in ranks, which have none of the arguments that the notebook's kernel was started with."""


def _arguments(_: ModuleType) -> list[str]:
    """Return the notebook's arguments as ranks have them."""
    rest = sys.argv[1:]
    started = bool(sys.argv) and sys.orig_argv[len(sys.orig_argv) - len(rest) :] == rest
    same_program = started and (rest or sys.argv[0] in ("", "-c", "-m", *sys.orig_argv))
    return [PROGRAM] if same_program else [*sys.argv]


def _put_arguments(sys: Any, told: list[str]) -> None:
    """Put what ranks have in place of the notebook's arguments; its program's name stays."""
    sys.argv = [*(sys.argv[:1] if told[:1] == [PROGRAM] else told[:1]), *told[1:]]


def _put_arguments_of_rank(sys: Any, told: list[str]) -> None:
    """Put the notebook's arguments before that of a launcher, which is the rank's own."""
    sys.argv = [*told, *(argument for argument in sys.argv[1:] if argument.startswith(_OF_LAUNCHERS))]


def _working_directory(_: ModuleType) -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # somebody removed it
        return None


# ---------------------------------------------------------------- random numbers

_waiting: list[tuple[Callable[[], None], bytes]] = []
"""The last call that this process has queued to set a state of CUDA's generator, and the state, if any."""


def _having(name: str, attribute: str) -> Any:
    module = sys.modules.get(name)
    return module if module is not None and hasattr(module, attribute) else None


def _bytes_of(state: Any) -> bytes:
    return bytes(view_of(state.data_ptr(), state.numel()))


def states_of_generators(*, cuda: bool) -> dict[str, Any]:
    """Return the states in this process, of what is loaded.

    Args:
        cuda: whether this process may have CUDA; False for rehearsed ranks, which only pretend.
    """
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := _having("numpy.random", "get_state")) is not None:
        name, keys, position, has_gauss, cached = numpy.get_state()
        found["numpy"] = (name, keys.tobytes(), position, has_gauss, cached)
    if (torch := _having("torch", "get_rng_state")) is not None:
        found["torch"] = _bytes_of(torch.get_rng_state())
        state = _cuda_state(torch) if cuda else None  # a seed is part of it
        found |= {"torch seed": torch.initial_seed()} if state is None else {"cuda": state}
    return found


def _cuda_state(torch: Any) -> bytes | None:
    if torch.cuda.is_initialized():
        return _bytes_of(torch.cuda.get_rng_state().cpu())
    calls = torch.cuda._lazy_seed_tracker.get_calls()
    if _waiting and calls and calls[-1] and calls[-1][0] is _waiting[0][0]:
        return _waiting[0][1]
    return None


def set_generators(states: dict[str, Any], *, cuda: bool) -> None:
    """Set those that are given.

    Args:
        states: as :func:`states_of_generators` returns them; None for one that is gone.
        cuda: whether this process may have CUDA; its current device's is set.
    """
    states = {name: state for name, state in states.items() if state is not None}
    if "random" in states:
        random.setstate(states["random"])
    if "numpy seed" in states and "numpy" in sys.modules:  # its random part is loaded at the first use
        importlib.import_module("numpy.random").seed(states["numpy seed"])
    if "numpy" in states and (numpy := _having("numpy.random", "set_state")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))
    if (torch := _having("torch", "set_rng_state")) is not None:
        if "torch" in states:
            torch.set_rng_state(_byte_tensor(torch, states["torch"]))
        if cuda and "cuda" in states:
            _set_cuda_state(torch, states["cuda"])
        elif cuda and "torch seed" in states:
            torch.cuda.manual_seed_all(states["torch seed"])


_undrawing: list[bool] = []


@contextmanager
def undrawn() -> Iterator[None]:
    """Let nothing be drawn from the generators in host memory: what is, is put back."""
    if _undrawing:
        yield
        return
    before = states_of_generators(cuda=False)
    _undrawing.append(True)
    try:
        yield
    finally:
        _undrawing.clear()
        set_generators(before, cuda=False)


def _set_cuda_state(torch: Any, data: bytes) -> None:
    """Set the current device's generator; where CUDA isn't initialised, when the user does that."""
    state, seed = _byte_tensor(torch, data), torch.initial_seed()

    def set_own() -> None:
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)

    def set_all() -> (
        None
    ):  # called inside torch's lock: nothing in here may ask for it again; who initialises does not
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
        set_own()

    if torch.cuda.is_initialized():
        set_own()
        return
    # torch runs queued seeds after all other queued calls, so set_rng_state by itself would be overridden
    torch.cuda._lazy_call(set_all, seed_all=True)
    _waiting[:] = [(set_all, data)]


def _byte_tensor(torch: Any, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# ---------------------------------------------------------------- the table


def _table(*, rank: bool = False, device: str | None = None) -> tuple[Row, ...]:
    """Return all kinds of state, in the order they are put; for a rank with its CUDA device, or for a notebook."""
    path, cuda = _PathOfRank(), device is not None or not rank
    of_process = (
        Row("sys.path", "sys", path.take, path.put, early=True),
        Row("sys.argv", "sys", lambda s: [*s.argv], _put_arguments_of_rank, early=True),
    ) if rank else (
        Row("sys.path", "sys", lambda s: [*s.path], lambda s, v: operator.setitem(s.path, slice(None), v), early=True),
        Row("sys.argv", "sys", _arguments, _put_arguments, early=True),
    )  # fmt: skip
    return (
        Row("environment", "os", lambda o: {n: v for n, v in o.environ.items() if not _own(n)}, _put_environment, early=True),
        *of_process,
        Row("time zone", "time", lambda t: (t.tzname, t.timezone), lambda _, told: time.tzset(), early=True),
        Row("working directory", "os", _working_directory,
            lambda o, told: o.chdir(told) if Path(told).is_dir() else None, only_back=True),
        setting("recursion limit", "sys", "getrecursionlimit", "setrecursionlimit"),
        *rows(device, rank=rank),
        Row("random numbers", "random", lambda _: states_of_generators(cuda=cuda),
            lambda _, told: set_generators(told, cuda=cuda)),
    )  # fmt: skip


def _loaded(library: str) -> ModuleType | None:
    module = sys.modules.get(library)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def _take(table: Iterable[Row]) -> dict[str, Any]:
    found = {row.name: row.take(module) for row in table if (module := _loaded(row.library)) is not None}
    return {name: value for name, value in found.items() if value is not None}


# ---------------------------------------------------------------- there


def of_notebook() -> dict[str, Any]:
    """Return the notebook's state, for :class:`ProcessState`."""
    state = _take(row for row in _table() if not row.only_back)
    first = {name: value for name, value in _inherited_variables().items() if not _own(name)}
    state["environment"] = _told(None, first, state["environment"])
    if "numpy" not in state["random numbers"]:  # forks of one process must not all draw the same
        state["random numbers"]["numpy seed"] = int.from_bytes(os.urandom(4), "little")
    state["imported"] = [
        name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names
    ]
    return state


class ProcessState:
    """A rank's state, made the notebook's.

    Args:
        sent: what :func:`of_notebook` returned.
        device: the rank's CUDA device, or None.
    """

    def __init__(self, sent: dict[str, Any], device: str | None) -> None:
        self._sent = sent
        self._table = _table(rank=True, device=device)
        self._before: dict[str, Any] = {}

    def put_early(self, project: str) -> None:
        """Before the names are built: environment, ``sys.path``, arguments."""
        sys.path[:] = [project, *(entry for entry in sys.path if entry != project)]
        _put_rows([row for row in self._table if row.early], self._sent)

    def put(self) -> None:
        """After the names are built: everything else.

        Some libraries draw when they are imported. What the notebook has imported has drawn there.
        """
        _put_rows([row for row in self._table if not row.early], self._sent)
        imported_there = self._sent.get("imported", ())
        around_import([name for name in imported_there if name not in sys.modules], undrawn)

    def mark(self) -> None:
        """Take the state that changes are found against."""
        self._before = {**self._sent, **_take(self._table)}

    def changes(self) -> dict[str, Any]:
        """Return what is different now, for :func:`put`."""
        before = self._before
        new = {name: now for name, now in _take(self._table).items() if now != before.get(name)}
        return {n: _told(self._sent.get(n), before[n], now) if n in before else now for n, now in new.items()}


# ---------------------------------------------------------------- both


def _put_rows(table: Iterable[Row], state: dict[str, Any]) -> None:
    """Write what was told of each row, at once or when its library is imported."""
    for row in table:
        if row.name in state:
            after_import(row.library, functools.partial(_put_row, row, state[row.name]))


def _put_row(row: Row, told: Any, module: ModuleType) -> None:
    if row.take(module) != told:
        row.put(module, told)


def put(changes: dict[str, Any]) -> None:
    """In the notebook: do what the cell did to rank 0's process."""
    _put_rows(_table(), changes)


def not_brought(error: Exception) -> str:
    """Say what did not come back with the names, which have to, whatever a cell did to its process."""
    return (
        "the state of the process (environment, working directory, random numbers, settings of libraries): "
        f"{type(error).__name__}: {error}"
    )

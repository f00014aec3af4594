"""Process state that cells change: one table of settings, for the notebook and its ranks.

We never import a library just to set its state; the state is applied when the program imports it.
Variables that describe a rank, such as torchrun's, are never sent. A rank starts in the project's
directory, whatever the notebook's working directory is (contract); if the cell changes its working
directory, the notebook's changes, too.

torch has two interfaces for the precision of float32: the newer one has a setting for each backend
and kind of operation; functions of the older one raise once the newer one has set something that
they cannot express. Both are sent: the older one as far as it can be read, then the newer one if
torch has it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import operator
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from taas.base.import_hooks import after_import, attribute_of, attributes_of, loaded
from taas.capture.describe.holders import all_loggers
from taas.capture.environment import (
    file_time,
    inherited_variables,
    is_a_ranks_own,
    put_variables,
    take_out_of_processes,
)
from taas.capture.heap.heap import is_collecting, set_collecting
from taas.capture.settings.random_states import set_generators, states_of_generators

_OF_LAUNCHERS = ("--local_rank=", "--local-rank=")


def _difference(sent: Any, before: Any, now: Any) -> Any:
    """Return the changed part of a row (see :class:`Row`); ``sent`` is the notebook's value."""
    if isinstance(now, dict):
        new = {
            name: value
            for name, value in now.items()
            if name not in before or before[name] != value
        }
        return new | {name: None for name in before if name not in now}
    if not isinstance(now, list):
        return now
    beside = [item for item in before if item not in (sent or ())]
    return [item for item in now if item not in beside]


# ---------------------------------------------------------------- paths and arguments


class _PathOfRank:
    _for_directory = ""  # the project, in place of the notebook's own working directory

    def take(self, _: ModuleType) -> list[str]:
        """Return ``sys.path`` as the notebook would have it."""
        path = [*sys.path]
        if self._for_directory in path:
            path[path.index(self._for_directory)] = ""
        return path

    def put(self, _: ModuleType, told: list[str]) -> None:
        """Put the notebook's entries after the project and before this process's other entries."""
        project = sys.path[0]
        if told[:1] == [""]:
            self._for_directory, told = project, told[1:]
        first = told if told[:1] == [project] else [project, *told]
        sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]


PROGRAM = "<cell>"
"""The program's name in ranks. They do not get the arguments with which the notebook's kernel was
started.
"""


def _arguments(_: ModuleType) -> list[str]:
    rest = sys.argv[1:]
    started = bool(sys.argv) and sys.orig_argv[len(sys.orig_argv) - len(rest) :] == rest
    same_program = started and (rest or sys.argv[0] in ("", "-c", "-m", *sys.orig_argv))
    return [PROGRAM] if same_program else [*sys.argv]


def _put_arguments(sys: Any, told: list[str]) -> None:
    """Replace the notebook's arguments by those of the ranks; the program's name stays."""
    sys.argv = [*(sys.argv[:1] if told[:1] == [PROGRAM] else told[:1]), *told[1:]]


def _put_arguments_of_rank(sys: Any, told: list[str]) -> None:
    """Put the notebook's arguments before those of a launcher, which belong to the rank."""
    sys.argv = [
        *told,
        *(argument for argument in sys.argv[1:] if argument.startswith(_OF_LAUNCHERS)),
    ]


def _working_directory(_: ModuleType) -> str | None:
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        return str(Path.cwd())
    return None


class Row(NamedTuple):
    """One kind of process state, which is ``put`` when its ``library`` is imported.

    If the value is a dict, the changed entries are sent, with None for deleted ones. If it is a
    list, the items are sent, except those that a rank had in addition to the notebook's. Any other
    value is sent as a whole.
    """

    name: str
    library: str
    take: Callable[[Any], Any]  # returns plain values; None if there is nothing to send
    put: Callable[[Any, Any], Any]
    early: bool = False  # ranks need it before variables are built
    only_back: bool = False  # it is not sent to ranks


def _options(
    name: str, library: str, take: Callable[[Any], Any], put: Callable[[Any, str, Any], Any]
) -> Row:
    """Return a row of many settings; those that differ are put."""

    def put_all(module: Any, told: dict[str, Any]) -> None:
        here = take(module) or {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some settings are deprecated
            for option, value in told.items():
                if option not in here or here[option] != value:
                    put(module, option, value)

    return Row(name, library, take, put_all)


def _setting(name: str, library: str, get: str, put: str) -> Row:
    """Return a row for a library's getter and setter; its value is None if the getter raises.

    torch's getter raises if the older interface for precision cannot express the setting.
    """

    def take(module: Any) -> Any:
        with contextlib.suppress(RuntimeError):
            return operator.attrgetter(get)(module)()
        return None

    return Row(name, library, take, lambda module, value: operator.attrgetter(put)(module)(value))


# --------------------------------------------------------------- display settings

_PLAIN = (str, int, float, bool, type(None))
_UNSET = 0, True, False
_NOT_OF_RANKS = ("backend", "toolbar", "webagg", "tk.", "macosx", "savefig.directory")


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, (list, tuple)) and all(map(_is_plain, value))
    )


def _pandas_options(pandas: Any) -> dict[str, Any]:
    """Return pandas' plain options, without the warnings that some cause when they are read.

    The option that is a function is sent as data of a module.
    """
    config = pandas._config.config
    found = {
        name: functools.reduce(operator.getitem, name.split("."), config._global_config)
        for name in config._registered_options.keys() - {"display.float_format"}
    }
    return {name: value for name, value in found.items() if _is_plain(value)}


def _plot_settings(matplotlib: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: dict.get(matplotlib.rcParams, name) for name in matplotlib.rcParams
    }
    cycle = found.pop("axes.prop_cycle")
    plain = {n: v for n, v in found.items() if not n.startswith(_NOT_OF_RANKS) and _is_plain(v)}
    return {**plain, "axes.prop_cycle": tuple(cycle)}


def _put_plot_setting(matplotlib: Any, name: str, value: Any) -> None:
    if name == "axes.prop_cycle":
        value = matplotlib.cycler(**{key: [entry[key] for entry in value] for key in value[0]})
    matplotlib.rcParams[name] = value


_INLINE = "matplotlib_inline.backend_inline"


def _inline_settings(config: Any) -> dict[str, Any] | None:
    """Return ``%config InlineBackend``."""
    if not config.InlineBackend.initialized():
        return None
    backend = config.InlineBackend.instance()
    found = {name: getattr(backend, name) for name in ("print_figure_kwargs", "close_figures")}
    return found | {"figure_formats": sorted(backend.figure_formats)}


def _show_figures(*_: Any) -> None:
    """Let the shell show figures; pyplot does so itself while it is being imported."""
    pyplot = loaded("matplotlib.pyplot")
    if pyplot is None or hasattr(pyplot, "switch_backend"):
        importlib.import_module(_INLINE)


def _formats(ipython: Any) -> dict[str, Any] | None:
    """Return how IPython shows values (``%precision``, ``%pprint``), and its aliases."""
    if (shell := ipython.get_ipython()) is None:
        return None
    text = shell.display_formatter.formatters["text/plain"]
    found = {name: getattr(text, name) for name in ("float_precision", "pprint", "max_seq_length")}
    found["ast_node_interactivity"] = shell.ast_node_interactivity
    return found | {f"alias {name}": command for name, command in shell.alias_manager.aliases}


def _put_format(ipython: Any, name: str, value: Any) -> None:
    shell = ipython.get_ipython()
    _, _, alias = name.partition(" ")
    if shell is None:
        return  # a data process shows nothing
    if alias and value is None:
        shell.alias_manager.undefine_alias(alias)
    elif alias:
        shell.alias_manager.soft_define_alias(alias, value)
    else:
        text = shell.display_formatter.formatters["text/plain"]
        setattr(shell if name == "ast_node_interactivity" else text, name, value)


# ---------------------------------------------------------------- limits of the process


@functools.cache
def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _limit_of_files(_: ModuleType) -> tuple[int, str]:
    """Return the limit of open files, and the machine to which it applies."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], _machine()


def _put_limit_of_files(_: ModuleType, told: tuple[int, str]) -> None:
    """Set the limit of open files; a different machine's own limit is not lowered."""
    unlimited = resource.RLIM_INFINITY
    wanted, machine = told
    limits = (wanted, *resource.getrlimit(resource.RLIMIT_NOFILE))
    want, here, hard = (math.inf if limit == unlimited else limit for limit in limits)
    if machine != _machine():
        want = max(want, here)
    new = (min(want, hard), hard)
    soft, hard = (int(limit) if limit < math.inf else unlimited for limit in new)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _put_collection(collector: Any, told: tuple[bool, tuple[int, ...]]) -> None:
    set_collecting(told[0])
    collector.set_threshold(*told[1])


# --------------------------------------------------------------- logs and warnings


def _level_names(log: Any) -> tuple[dict[str, int], dict[int, str]]:
    """Return the numbers of all level names, and the name with which each number is shown."""
    numbers = log.getLevelNamesMapping()
    return numbers, {number: log.getLevelName(number) for number in numbers.values()}


def _put_level_names(log: Any, told: tuple[dict[str, int], dict[int, str]]) -> None:
    """Add the names; for each number, the name with which it is shown comes last."""
    numbers, shown = told
    for name, number in numbers.items():
        log.addLevelName(number, name)
    for number, name in shown.items():
        log.addLevelName(number, name)


def _log_levels(_: Any) -> dict[str, Any]:
    levels = {log.name: (log.level, log.propagate, log.disabled) for log in all_loggers()}
    return {name: told for name, told in levels.items() if told != _UNSET}


def _put_log_levels(_: Any, told: dict[str, Any]) -> None:
    here = _log_levels(None)
    for name, state in told.items():
        if here.get(name) != state:  # setting a level clears the caches of all loggers
            logger = logging.getLogger(name)
            level, logger.propagate, logger.disabled = state or _UNSET
            logger.setLevel(level)


def _warning_filters(_: Any) -> list[Any]:
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    return [
        (action, text, (c.__module__, c.__qualname__), *place)
        for action, text, c, *place in filters
    ]


def _put_warning_filters(told: list[Any], *, rank: bool) -> None:
    """Set the filters, in a rank before its own; drop those of unknown categories.

    No code here can issue a warning of a category that no module has.
    """
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    known = [(action, text, attribute_of(m, n), *place) for action, text, (m, n), *place in told]
    new = [entry for entry in known if entry[2] is not None]
    filters[:] = [*new, *(entry for entry in filters if rank and entry not in new)]
    warnings._filters_mutated()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- torch

_KERNELS_OF_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def _kernels_of_attention(cuda: Any) -> tuple[bool, ...]:
    return tuple(getattr(cuda, f"{name}_sdp_enabled")() for name in _KERNELS_OF_ATTENTION)


def _put_kernels_of_attention(cuda: Any, told: tuple[bool, ...]) -> None:
    for name, enabled in zip(_KERNELS_OF_ATTENTION, told, strict=True):
        getattr(cuda, f"enable_{name}_sdp")(enabled)


def _settings_of_compiler(config: Any) -> dict[str, Any]:
    """Return the changed settings of a module of torch's compiler, each in a tuple.

    None means that a setting was reset to its default. A rehearsal (GPUs simulated on the CPU) sets
    ``disable`` itself.
    """
    changed = {
        name: getattr(config, name) for name in config._config if not config._is_default(name)
    }
    return {
        name: (value,) for name, value in changed.items() if name != "disable" and _is_plain(value)
    }


def _put_setting_of_compiler(config: Any, name: str, told: tuple[Any] | None) -> None:
    setattr(config, name, config._config[name].default if told is None else told[0])


_PRECISIONS = (
    ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("cuda", "conv"),
    ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip
"""Backends and operations whose precision can be set. An entry for all operations precedes those
for single operations.
"""


def _precisions(torch: Any) -> tuple[str, ...] | None:
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    return None if precision is None else tuple(precision(*what) for what in _PRECISIONS)


def _put_precisions(torch: Any, told: tuple[str, ...]) -> None:
    """Set what differs; an operation without its own setting reads as the setting for all."""
    for what, precision in zip(_PRECISIONS, told, strict=True):
        if torch._C._get_fp32_precision_getter(*what) != precision:
            torch._C._set_fp32_precision_setter(*what, precision)


def _default_device(torch: Any) -> str:
    """Return the default device as it was set; torch would return the present GPU for ``cuda``."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return "cpu" if context is None else str(context.device)


def _put_default_device(torch: Any, wanted: str, own: str | None) -> None:
    """Set torch's default device to another process's, in terms of this process's devices.

    ``own`` is this rank's CUDA device; ``cuda`` if it has all of them.
    """
    number = wanted.partition(":")[2]
    if wanted.startswith("cuda"):
        if not torch.cuda.device_count():  # a rehearsed rank counts one
            wanted = "cpu"
        elif number and own not in (None, "cuda"):
            wanted = own
        elif number and int(number) >= torch.cuda.device_count():
            wanted = "cuda"
    if wanted != _default_device(torch):
        torch.set_default_device(None if wanted == "cpu" else wanted)


def _put_next_hook(hooks: Any, told: int) -> None:
    """Continue hook numbers from the larger count, so that no new hook replaces a received one."""
    hooks.RemovableHandle.next_id = max(told, hooks.RemovableHandle.next_id)


# ---------------------------------------------------------------- the table


def _of_python(*, rank: bool) -> tuple[Row, ...]:
    return (
        Row(
            "decimal context",
            "decimal",
            lambda d: d.getcontext().__reduce__()[1],
            lambda d, told: d.setcontext(d.Context(*told)),
        ),
        Row(
            "warning filters",
            "warnings",
            _warning_filters,
            lambda _, told: _put_warning_filters(told, rank=rank),
        ),
        Row("log levels", "logging", _log_levels, _put_log_levels),
        Row("names of log levels", "logging", _level_names, _put_level_names),
        Row(
            "levels of all logs",
            "logging",
            lambda m: m.root.manager.disable,
            lambda m, told: m.disable(told),
        ),
        Row("open files", "resource", _limit_of_files, _put_limit_of_files),
        Row(
            "garbage collection",
            "gc",
            lambda g: (is_collecting(), g.get_threshold()),
            _put_collection,
        ),
        _setting("digits of integers", "sys", "get_int_max_str_digits", "set_int_max_str_digits"),
        Row(
            "length of fields in CSV",
            "csv",
            lambda c: c.field_size_limit(),
            lambda c, told: c.field_size_limit(told),
        ),
        Row(
            "patience of sockets",
            "socket",
            lambda s: (s.getdefaulttimeout(),),
            lambda s, told: s.setdefaulttimeout(*told),
        ),
    )


def _of_other_libraries() -> tuple[Row, ...]:
    return (
        Row(
            "truncated images",
            "PIL.ImageFile",
            operator.attrgetter("LOAD_TRUNCATED_IMAGES"),
            lambda m, told: setattr(m, "LOAD_TRUNCATED_IMAGES", told),
        ),
        Row(
            "largest image",
            "PIL.Image",
            lambda m: (m.MAX_IMAGE_PIXELS,),
            lambda m, told: setattr(m, "MAX_IMAGE_PIXELS", *told),
        ),
        Row(
            "settings of scikit-learn",
            "sklearn",
            lambda s: s.get_config(),
            lambda s, told: s.set_config(**told),
        ),
        _options("formats and aliases of IPython", "IPython", _formats, _put_format),
        Row("errors of NumPy", "numpy", lambda n: n.geterr(), lambda n, told: n.seterr(**told)),
        Row(
            "print options of NumPy",
            "numpy",
            lambda n: {
                k: v
                for k, v in n.get_printoptions().items()
                if k not in ("formatter", "override_repr")
            },
            lambda n, told: n.set_printoptions(**told, formatter=n.get_printoptions()["formatter"]),
        ),
        _options(
            "options of pandas",
            "pandas",
            _pandas_options,
            lambda p, name, value: p.set_option(name, value),
        ),
        *_of_figures(),
    )


def _of_figures() -> tuple[Row, ...]:
    return (
        _options(
            "how figures are shown",
            "matplotlib_inline.config",
            _inline_settings,
            lambda config, name, value: setattr(config.InlineBackend.instance(), name, value),
        ),
        Row(
            "figures are shown",
            "matplotlib.figure",
            lambda _: _INLINE in sys.modules or None,
            _show_figures,
        ),
        _options("settings of matplotlib", "matplotlib", _plot_settings, _put_plot_setting),
    )


def _of_torch(device: str | None) -> tuple[Row, ...]:
    return (
        _setting("default dtype", "torch", "get_default_dtype", "set_default_dtype"),
        _setting("gradient mode", "torch", "is_grad_enabled", "set_grad_enabled"),
        _setting("anomaly detection", "torch", "is_anomaly_enabled", "autograd.set_detect_anomaly"),
        _setting("threads of torch", "torch", "get_num_threads", "set_num_threads")._replace(
            only_back=True
        ),
        Row(
            "deterministic algorithms",
            "torch",
            lambda t: (
                t.are_deterministic_algorithms_enabled(),
                t.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda t, v: t.use_deterministic_algorithms(v[0], warn_only=v[1]),
        ),
        *_of_cudnn_and_precision(),
        Row(
            "default device of torch",
            "torch",
            _default_device,
            lambda t, v: _put_default_device(t, v, device),
        ),
        Row(
            "print options of torch",
            "torch._tensor_str",
            lambda m: tuple(vars(m.PRINT_OPTS).items()),
            lambda m, told: m.set_printoptions(**dict(told)),
        ),
        _setting(
            "how processes share tensors",
            "torch.multiprocessing",
            "get_sharing_strategy",
            "set_sharing_strategy",
        ),
        Row(
            "kernels of attention",
            "torch.backends.cuda",
            _kernels_of_attention,
            _put_kernels_of_attention,
        ),
        *(
            _options(
                f"settings of torch.{name}",
                f"torch.{name}.config",
                _settings_of_compiler,
                _put_setting_of_compiler,
            )
            for name in ("_dynamo", "_inductor")
        ),
        Row(
            "numbers of hooks",
            "torch.utils.hooks",
            lambda m: m.RemovableHandle.next_id,
            _put_next_hook,
        ),
    )


def _of_cudnn_and_precision() -> tuple[Row, ...]:
    return (
        # through torch's bindings: torch.backends.cudnn.set_flags resets other settings
        _setting(
            "benchmark of cuDNN", "torch", "_C._get_cudnn_benchmark", "_C._set_cudnn_benchmark"
        ),
        _setting(
            "determinism of cuDNN",
            "torch",
            "_C._get_cudnn_deterministic",
            "_C._set_cudnn_deterministic",
        ),
        _setting("use of cuDNN", "torch", "_C._get_cudnn_enabled", "_C._set_cudnn_enabled"),
        _setting(
            "precision of matmul",
            "torch",
            "get_float32_matmul_precision",
            "set_float32_matmul_precision",
        ),
        _setting("TF32 of cuDNN", "torch", "_C._get_cudnn_allow_tf32", "_C._set_cudnn_allow_tf32"),
        Row("precisions", "torch", _precisions, _put_precisions),
    )


def _of_path_and_arguments(*, rank: bool) -> tuple[Row, ...]:
    if rank:
        path = _PathOfRank()
        return (
            Row("sys.path", "sys", path.take, path.put, early=True),
            Row("sys.argv", "sys", lambda s: [*s.argv], _put_arguments_of_rank, early=True),
        )
    return (
        Row(
            "sys.path",
            "sys",
            lambda s: [*s.path],
            lambda s, told: operator.setitem(s.path, slice(None), told),
            early=True,
        ),
        Row("sys.argv", "sys", _arguments, _put_arguments, early=True),
    )


def table(device: str | None = None, *, rank: bool = False) -> tuple[Row, ...]:
    """Return all kinds of state, in the order in which they are put, for a rank or a notebook."""
    cuda = device is not None or not rank
    return (
        Row(
            "environment",
            "os",
            lambda o: {n: v for n, v in o.environ.items() if not is_a_ranks_own(n, v)},
            put_variables,
            early=True,
        ),
        *_of_path_and_arguments(rank=rank),
        Row(
            "time zone",
            "time",
            lambda t: (t.tzname, t.timezone),
            lambda _, told: time.tzset(),
            early=True,
        ),
        Row(
            "working directory",
            "os",
            _working_directory,
            lambda o, told: o.chdir(told) if Path(told).is_dir() else None,
            only_back=True,
        ),
        _setting("recursion limit", "sys", "getrecursionlimit", "setrecursionlimit"),
        *_of_python(rank=rank),
        *_of_other_libraries(),
        *_of_torch(device),
        Row(
            "random numbers",
            "random",
            lambda _: states_of_generators(cuda=cuda),
            lambda _, told: set_generators(told, cuda=cuda),
        ),
    )


def _get_loaded(library: str) -> ModuleType | None:
    module = loaded(library)
    spec = attributes_of(module).get("__spec__")
    return None if getattr(spec, "_initializing", False) else module


def _take(table: Iterable[Row]) -> dict[str, Any]:
    found = {
        row.name: row.take(module)
        for row in table
        if (module := _get_loaded(row.library)) is not None
    }
    return {name: value for name, value in found.items() if value is not None}


def of_notebook() -> dict[str, Any]:
    """Return the notebook's state, for :class:`ProcessState`."""
    state = _take(row for row in table() if not row.only_back)
    first = {
        name: value
        for name, value in inherited_variables().items()
        if not is_a_ranks_own(name, value)
    }
    state["environment"] = _difference(None, first, state["environment"])
    if "numpy" not in state["random numbers"]:  # otherwise all forks of a process draw the same
        state["random numbers"]["numpy seed"] = int.from_bytes(os.urandom(4), "little")
    return state


_NOT_SEEN_BY_IMPORTS = frozenset({
    # compared by other means
    "environment", "sys.path", "sys.argv", "time zone", "working directory",
    # an import that draws is detected
    "random numbers", "numbers of hooks",
    # how values are shown
    "warning filters", "log levels", "names of log levels", "levels of all logs",
    "formats and aliases of IPython", "print options of NumPy", "print options of torch",
    "how figures are shown", "figures are shown",
    # ranks have their own
    "open files", "garbage collection", "threads of torch",
})  # fmt: skip
"""State that does not matter to a module at import."""


def path_and_arguments() -> tuple[list[str], list[str]]:
    """Return the notebook's ``sys.path`` and ``sys.argv`` as they are sent to ranks."""
    return [*sys.path], _arguments(sys)


def seen_by_imports(*, rank: bool) -> dict[str, str]:
    """Return the state of this process that a module may see at import, each kind as a string.

    Only loaded libraries have state. It matters because a module may create tensors of the default
    dtype, and a warning filter may turn a module's warning into an error.
    """
    found = _take(row for row in table(rank=rank) if row.name not in _NOT_SEEN_BY_IMPORTS)
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    found["warnings that are errors"] = [entry for entry in filters if entry[0] == "error"]
    return {name: repr(value) for name, value in found.items()}


class ProcessState:
    """A rank's state, set to what :func:`of_notebook` returned; ``device`` is its CUDA device."""

    def __init__(self, sent: dict[str, Any], device: str | None) -> None:
        self._sent = sent
        self._table = table(device, rank=True)
        self._before: dict[str, Any] = {}
        self._marked = file_time()
        self.stayed: list[str] = []  # for the user: changed state that stays here, and why

    def put_early(self, project: str) -> None:
        """Set environment, ``sys.path`` and arguments, before the variables are built."""
        sys.path[:] = [project, *(entry for entry in sys.path if entry != project)]
        _put_rows([row for row in self._table if row.early], self._sent)

    def put(self) -> None:
        """Set everything else, after the variables were built."""
        _put_rows([row for row in self._table if not row.early], self._sent)

    def mark(self) -> None:
        """Record the state with which :meth:`changes` compares."""
        self._before = {**self._sent, **_take(self._table)}
        self._marked = file_time()

    def changes(self) -> dict[str, Any]:
        """Return the state that differs now, for :func:`put`."""
        before = self._before
        new = {name: now for name, now in _take(self._table).items() if now != before.get(name)}
        told = {
            n: _difference(self._sent.get(n), before[n], now) if n in before else now
            for n, now in new.items()
        }
        self.stayed = take_out_of_processes(told.get("environment", {}), self._marked)
        return told


def _put_rows(table: Iterable[Row], state: dict[str, Any]) -> None:
    """Put the state of each row, at once or when its library is imported."""
    for row in table:
        if row.name in state:
            after_import(row.library, functools.partial(_put_row, row, state[row.name]))


def _put_row(row: Row, told: Any, module: ModuleType) -> None:
    if row.take(module) != told:
        row.put(module, told)


def put(changes: dict[str, Any]) -> None:
    """In the notebook: apply the changes that the cell made to rank 0's process."""
    _put_rows(table(), changes)


def not_brought(error: Exception) -> tuple[str, str]:
    """Return which process state could not be sent back, and why."""
    what = (
        "the state of the process (environment, working directory, random numbers, settings of"
        " libraries)"
    )
    return what, f"{type(error).__name__}: {error}"

"""Notebook programs run twice: in one process, and with the last cell in a process of its own.

Both are fresh forks of one forkserver, each with an IPython shell on a ``__main__`` of its own. What is left
in the notebook is described as a graph: values, types, and which object is which.
"""

from __future__ import annotations

import collections
import enum
import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path, PurePath
from typing import Any, NamedTuple

DEADLINE = 120
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "capture_processes", "torch", "torch._dynamo", "numpy", "IPython.core.interactiveshell", "taas.capture",
]  # fmt: skip


@contextmanager
def forkserver() -> Iterator[None]:
    """Run the processes' common ancestor."""
    multiprocessing.forkserver.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()
    try:
        yield
    finally:
        multiprocessing.forkserver._forkserver._stop()
        multiprocessing.forkserver.set_forkserver_preload([])


class Program(NamedTuple):
    """Cells of a notebook, the last of which runs elsewhere."""

    name: str
    earlier: tuple[str, ...]
    cell: str
    probe: str = ""
    project_files: tuple[tuple[str, str], ...] = ()
    here_also: str = ""
    device: str | None = None
    returned: tuple[str, ...] | None = None


def new_shell() -> Any:
    """Make a shell on a fresh ``__main__``, as a kernel has it."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, user_module=main, user_ns=main.__dict__)
    shell.execution_count = 1
    return shell


def run_cell(shell: Any, cell: str) -> Any:
    """Run a cell; an exception in it is raised."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        result = shell.run_cell(cell, store_history=True)
    if not result.success:
        error = result.error_in_exec or result.error_before_exec
        raise RuntimeError(f"{type(error).__name__}: {error}\n{out.getvalue()}{err.getvalue()}")
    return result.result


# ---------------------------------------------------------------- description


class _Describer:
    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._numbers: dict[Any, int] = {}
        self._keep: list[Any] = []

    def number(self, key: Any) -> tuple[int, bool]:
        known = key in self._numbers
        return self._numbers.setdefault(key, len(self._numbers)), known

    def __call__(self, value: Any) -> Any:
        if value is None or (
            isinstance(value, (bool, int, float, complex, str, bytes))
            and type(value).__module__ == "builtins"
        ):
            return repr(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        self._keep.append(value)
        number, known = self.number(id(value))
        if known:
            return f"#{number}"
        return [f"#{number}", self.kind(type(value)), *self.inside(value)]

    def kind(self, cls: type) -> Any:
        if cls.__module__ != "__main__":
            return f"{cls.__module__}.{cls.__qualname__}"
        return self(cls)

    def inside(self, value: Any) -> list[Any]:
        import numpy as np
        import torch

        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, torch.Tensor):
            return self.of_tensor(value) if value.layout is torch.strided else [value.to_dense().tolist()]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            root = value
            while isinstance(root.base, np.ndarray):
                root = root.base
            address = root.__array_interface__["data"][0]
            memory = self.number(("memory", address if root.size else id(root)))[0]
            offset = value.__array_interface__["data"][0] - address
            return [f"memory {memory}+{offset}", str(value.dtype), value.shape, value.strides, value.tolist()]
        if isinstance(value, enum.Enum):
            return [value.name]
        if isinstance(value, PurePath):  # caches what it is asked for in its slots
            return [repr(value)]
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        if isinstance(value, types.MethodType):
            return [self(value.__func__), self(value.__self__)]
        if isinstance(value, types.CellType):
            return [self(value.cell_contents)]
        if isinstance(value, (np.random.Generator, np.random.RandomState)):
            state = value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()
            return [repr(state)]
        if isinstance(value, torch.Generator):
            return [value.get_state().tolist()[:64]]
        return self.of_items(value) + self.of_attributes(value)

    def of_class(self, cls: type) -> list[Any]:
        if cls.__module__ != "__main__":
            return [f"{cls.__module__}.{cls.__qualname__}"]
        members = {
            name: self(member)
            for name, member in cls.__dict__.items()
            if isinstance(member, types.FunctionType) and member.__module__ == "__main__"
        }
        return [cls.__qualname__, [self(base) for base in cls.__bases__], sorted(members.items())]

    def of_function(self, function: types.FunctionType) -> list[Any]:
        if function.__module__ != "__main__":
            return [f"{function.__module__}.{function.__qualname__}"]
        return [
            function.__qualname__,
            "globals are the notebook's" if function.__globals__ is self._namespace else "globals of its own",
            self(function.__defaults__),
            [self(cell) for cell in function.__closure__ or ()],
            self(dict(function.__dict__)),
        ]

    def of_tensor(self, tensor: Any) -> list[Any]:
        storage = tensor.untyped_storage()
        memory = self.number(("memory", storage.data_ptr() or id(tensor)))[0]
        grad = tensor.grad if tensor.is_leaf else None
        return [
            f"memory {memory}+{tensor.storage_offset()}",
            str(tensor.dtype),
            str(tensor.device),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
            tensor.detach().tolist(),
            self(grad),
            self(dict(tensor.__dict__)),
        ]

    def of_items(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [[self(key), self(item)] for key, item in value.items()]
        if isinstance(value, (set, frozenset)):
            return sorted((self(item) for item in value), key=repr)
        if isinstance(value, (list, tuple, collections.deque)):
            return [self(item) for item in value]
        if isinstance(value, bytearray):
            return [repr(bytes(value))]
        return []

    def of_attributes(self, value: Any) -> list[Any]:
        found = {
            name: self(item)
            for name, item in getattr(value, "__dict__", {}).items()
            if name != "step" or not callable(item)
        }
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    found[name] = self(getattr(value, name))
        if not found and type(value).__module__ not in ("builtins", "collections", "__main__"):
            return [repr(value)] if " at 0x" not in repr(value) else []
        return [found]


def describe(namespace: dict[str, Any]) -> dict[str, Any]:
    """Describe all the user's names, and the random number generators."""
    import random

    import numpy as np
    import torch

    from taas.capture.ipython_names import is_of_ipython

    describer = _Describer(namespace)
    found = {name: describer(namespace[name]) for name in sorted(namespace) if not is_of_ipython(name)}
    found["(random)"] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    found["(settings)"] = [
        str(torch.get_default_dtype()),
        os.environ.get("TAAS_TEST_X"),
        os.environ.get("PROGRAM_X"),
    ]
    found["(path)"] = [entry for entry in sys.path if "program-path" in entry]
    return found


# ---------------------------------------------------------------- processes


def _prepare(program: Program, project: str) -> Any:
    import random

    import numpy as np
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    os.chdir(project)
    sys.path.insert(0, project)
    shell = new_shell()
    for cell in program.earlier:
        run_cell(shell, cell)
    return shell


def _reporting(function: Any, pipe: Any, *arguments: Any) -> None:
    try:
        function(pipe, *arguments)
    except BaseException as error:
        pipe.send(("failed", type(error).__name__, f"{error}", traceback.format_exc()))
    pipe.close()
    os._exit(0)


def _in_one_process(pipe: Any, program: Program, project: str) -> None:
    from taas.capture import python_of

    shell = _prepare(program, project)
    value = run_cell(shell, python_of(program.cell + program.here_also))
    pipe.send(("described", repr(value), *_described(shell, program)))


def _described(shell: Any, program: Program) -> tuple[Any, str]:
    found = describe(shell.user_ns)
    probe = repr(run_cell(shell, program.probe)) if program.probe else ""
    return found, probe


def _as_kernel(pipe: Any, program: Program, project: str) -> None:
    from taas.capture import capture

    shell = _prepare(program, project)
    captured = capture(program.cell, shell.user_ns, shell, project=Path(project), returned=program.returned)
    pipe.send(("captured", os.getpid(), captured.fd, captured.names, captured.left_behind, captured.notices))
    pid, answer, names = pipe.recv()
    fd = os.open(f"/proc/{pid}/fd/{answer}", os.O_RDONLY)
    applied = captured.apply(fd)
    captured.close()
    pipe.send(
        (
            "described",
            repr(applied.value),
            *_described(shell, program),
            applied.lost,
            sorted(applied.rebound),
            applied.changed,
        )
    )
    del names


def _as_rank(pipe: Any, program: Program, project: str, pid: int, payload: int) -> None:
    import torch

    from taas.capture import arrive, python_of

    torch.set_num_threads(1)
    os.chdir(project)
    shell = new_shell()
    fd = os.open(f"/proc/{pid}/fd/{payload}", os.O_RDONLY)
    arrival = arrive(fd, shell.user_ns, device=program.device)
    os.close(fd)
    arrival.dress(shell)
    arrival.mark()
    try:
        value = run_cell(shell, python_of(program.cell))
    except RuntimeError as error:
        raise RuntimeError(f"{error}\nleft behind: {arrival.left_behind}") from error
    answer = arrival.pack_answer(shell.user_ns, value)
    pipe.send(("answer", os.getpid(), answer))
    pipe.recv()


class _Process:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_reporting, args=(function, theirs, *arguments))
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[Any, ...]:
        if not self.pipe.poll(DEADLINE):
            raise TimeoutError("a process of the test doesn't answer")
        message = self.pipe.recv()
        if message[0] == "failed":
            raise ProgramError(*message[1:])
        return message[1:]

    def close(self) -> None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class ProgramError(Exception):
    """What a process of the test raised."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(trace)
        self.kind, self.message = kind, message


class Outcome(NamedTuple):
    """What is left in the notebook."""

    value: str
    names: dict[str, Any]
    probe: str
    lost: Sequence[str] = ()
    rebound: Sequence[str] = ()
    changed: int = 0
    captured: Sequence[str] = ()
    left_behind: Mapping[str, str] = types.MappingProxyType({})
    notices: Sequence[str] = ()


def here(program: Program, project: Path) -> Outcome:
    """Run all cells in one process."""
    process = _Process(_in_one_process, program, str(project))
    try:
        return Outcome(*process.receive())
    finally:
        process.close()


def elsewhere(program: Program, project: Path) -> Outcome:
    """Run the last cell in another process."""
    kernel = _Process(_as_kernel, program, str(project))
    rank = None
    try:
        pid, payload, names, left_behind, notices = kernel.receive()
        rank = _Process(_as_rank, program, str(project), pid, payload)
        kernel.pipe.send((*rank.receive(), names))
        value, described, probe, lost, rebound, changed = kernel.receive()
        rank.pipe.send("done")
        return Outcome(value, described, probe, lost, rebound, changed, names, left_behind, notices)
    finally:
        kernel.close()
        if rank is not None:
            rank.close()


def printed(program: str) -> list[str]:
    """Run a program in a fresh interpreter, which must not complain; returns the lines it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stderr == ""
    return ran.stdout.splitlines()

"""``taas.run`` and ``taas.submit``: call a function in ranks, from Python.

A call is executed as a cell with one line, ``returned = function(*arguments)``. The keyword
arguments that are options of the header form the header of this cell. Everything else is as for any
cell with a header: which variables are transferred, output, errors and interrupts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from taas.base.wording import nearest
from taas.capture.moves.collected import collected
from taas.config import load_catalog
from taas.dataloader_registry import list_registered
from taas.engines.gpus import visible_gpus
from taas.errors import CaptureError, HeaderError
from taas.header.grammar import HeaderText, parse_header
from taas.header.options import ON, OPTIONS, RunSpec
from taas.launcher import launch, turn
from taas.notebook.run_handle import RunHandle

_OF_CELLS = {
    "background": "taas.submit is what runs in the background",
    "collect": "collect=True returns every rank's value",
    "return": "what the function returns is the result",
    "setup": "head a cell of its own with #pragma taas --setup",
}
"""Options of the header that do not apply to a call, and what to use instead."""


def run(function: Callable[..., Any], /, *args: Any, collect: bool = False, **more: Any) -> Any:
    """Call a function in ranks, as a cell with a header would, and return rank 0's return value.

    If the function modifies objects of the notebook in rank 0, they are also modified in the
    notebook::

        accuracy = taas.run(train, model, lr=0.1, gpus=4)

    Args:
        function: a function of the notebook, of a script, or of a module.
        args: its positional arguments.
        collect: instead, return a list with the return value of each rank, in rank order.
        more: the options of the header that ``%%taas?`` lists (``gpus``, ``cpus``, ``units``,
            ``name``, ``max_restarts`` …), and the function's keyword arguments. If neither ``gpus``
            nor ``on`` is given, ``gpus`` is ``"auto"``.

    Raises:
        TypeError: the function does not accept these arguments. Nothing was started.
        HeaderError: an option has an invalid value. Nothing was started.
        CaptureError: an object that the function needs cannot be transferred to the ranks, or its
            return value cannot be transferred back.
        CellFailed, RunLost, EngineError: raised as by a cell with a header.
    """
    call = _Call.of(function, args, more, collect=collect)
    returned = call.returned
    with turn(), call.bound_in_notebook() as shell:
        collects = (returned,) if collect else ()
        launch(call.spec(shell, collect=collects), call.text, shell)
        if collect:
            return collected.pop(returned)
        if returned not in shell.user_ns:
            raise CaptureError(
                f"what {call.name}() returned in rank 0 cannot come back: the line above says why."
                " Return what pickle can carry, such as numbers, arrays, tensors or a state_dict."
            )
        return shell.user_ns[returned]


def submit(
    function: Callable[..., Any], /, *args: Any, collect: bool = False, **more: Any
) -> RunHandle:
    """Call a function in ranks, in the background, and return a handle at once.

    The arguments, and the errors before the start, are those of :func:`run`. ``result()`` of the
    handle returns a copy of the function's return value; nothing changes in the notebook. If other
    runs use the GPUs (on a machine without a GPU: the CPUs), the run waits for its turn, in the
    order of submission::

        runs = [taas.submit(train, lr=lr, gpus=2) for lr in (0.1, 0.01, 0.001)]
        losses = [run.result() for run in runs]
    """
    call = _Call.of(function, args, more, collect=collect)
    if call.options.get("keep"):
        raise HeaderError(
            "keep with taas.submit: ranks stay for the notebook's next cell; call taas.run, or"
            " leave it out"
        )
    with turn(), call.bound_in_notebook() as shell:
        spec = call.spec(shell, collect=(call.returned,), background=True, returned=())
        record = launch(spec, call.text, shell, queue=True)
    assert record is not None
    return RunHandle(record, call.returned, by_rank=collect)


class _Call(NamedTuple):
    """A function with its arguments, and the options of the run."""

    function: functools.partial[Any]
    options: dict[str, Any]  # by their names in the header

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        more: dict[str, Any],
        *,
        collect: bool,
    ) -> _Call:
        """Separate the options of the run from the arguments of the function.

        Raises:
            TypeError: the function does not accept these arguments.
            HeaderError: an option is for cells only.
        """
        if not callable(function):
            raise TypeError(f"taas.run takes a function, and a {type(function).__name__} is none")
        named, options = {}, {}
        own = _parameters(function)
        if collect and "collect" in own:
            raise TypeError(_meant_for_both("collect", function))
        for key, value in more.items():
            option = key.replace("_", "-")
            if option in _OF_CELLS and key not in own:
                raise HeaderError(
                    f"{key} is an option of a cell's header alone: {_OF_CELLS[option]}"
                )
            if option not in OPTIONS and option != ON.name:
                named[key] = value
            elif key in own:
                raise TypeError(_meant_for_both(key, function))
            else:
                options[option] = value
        if not {"gpus", ON.name} & options.keys():
            options["gpus"] = "auto"
        _check_arguments(function, args, named)
        return cls(functools.partial(function, *args, **named), options)

    @property
    def name(self) -> str:
        """The function's name, or ``"function"`` if the name is not an identifier."""
        name = _name_of(self.function.func)
        return name if name.isidentifier() else "function"

    @property
    def returned(self) -> str:
        """The variable that holds the function's return value in the ranks."""
        return f"_{self.name}_returned"

    @property
    def text(self) -> str:
        """The source of the cell."""
        return f"{self.returned} = _call_{self.name}()"

    @contextlib.contextmanager
    def bound_in_notebook(self) -> Iterator[Any]:
        """Bind the cell's variables in the notebook temporarily; yield the notebook's shell."""
        shell = _shell()
        namespace = shell.user_ns
        ours = {f"_call_{self.name}": self.function, self.returned: None}
        before = {name: namespace[name] for name in ours if name in namespace}
        for name in ours:
            namespace.pop(name, None)
        namespace[f"_call_{self.name}"] = self.function
        try:
            yield shell
        finally:
            for name in ours:
                namespace.pop(name, None)
            namespace.update(before)

    def spec(self, shell: Any, **fixed: Any) -> RunSpec:
        """Parse the options as those of a header; a HeaderError says what to type instead."""
        words = []
        for name, value in self.options.items():
            words += _words_of(name, value)
        spec = parse_header(
            HeaderText(options=" ".join(words), magic=True),
            expand=lambda text: text,
            catalog=load_catalog(),
            visible_gpus=len(visible_gpus()),
            registered=[loader.name for loader in list_registered(shell.user_ns)],
        )
        return replace(spec, **fixed)


def _meant_for_both(key: str, function: Callable[..., Any]) -> str:
    """Return a message: an argument may be for the run or for the function; how to decide."""
    name = _name_of(function)
    return (
        f"{key} is an option of the run, and a parameter of {name} as well: give the function its"
        f" own by functools.partial({name}, {key}=…)"
    )


def _words_of(option: str, value: Any) -> list[str]:
    """Convert a keyword argument to words of a header: ``output=[0, 3]`` to ``--output='0,3'``."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{option}"]
    if option == "shared" and not isinstance(value, str | os.PathLike):
        return [word for path in value for word in _words_of(option, str(path))]
    if isinstance(value, dict):
        value = ",".join(f"{key}={item}" for key, item in value.items())
    elif isinstance(value, (list, tuple, range)):
        value = ",".join(map(str, value))
    quote = "'" if "'" not in str(value) else '"'
    return [f"--{option}={quote}{value}{quote}"]


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters, as far as Python can determine them."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C
        return frozenset()


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Raise a TypeError if a function does not accept these arguments.

    A misspelt option is treated as an argument that the function does not accept.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # the ranks will raise the error
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        unknown = [key for key in named if key not in signature.parameters]
        near = nearest(unknown[0].replace("_", "-"), OPTIONS, 0.6) if unknown else None
        hint = f"; did you mean the option {near.replace('-', '_')}?" if near else ""
        raise TypeError(f"{_name_of(function)}{signature}: {error}{hint}") from None


def _name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def _shell() -> Any:
    """Return the notebook's shell; in a script, a shell with the script's namespace."""
    shell = get_ipython()
    if getattr(shell, "is_rank", False):
        raise HeaderError(
            "taas.run and taas.submit start ranks, and this is one: call the function itself"
        )
    if shell is None:
        config = Config(HistoryManager={"enabled": False})
        shell = InteractiveShell.instance(config=config, user_module=sys.modules["__main__"])
    return shell

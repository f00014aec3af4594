"""Rejects launchers that a rehearsed cell starts as commands.

Examples are ``!torchrun`` and ``subprocess.run(["accelerate", "launch", …])``.

A command sees the machine as it is: without GPUs, and without the ranks of this run. Its error,
some sixty lines, would mention neither. Such a command is therefore rejected when it is started,
with an error that names it; other commands run. A cell without a ``#pragma taas`` comment (the
*header*) runs launchers in the notebook.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from taas.base.import_hooks import after_import
from taas.errors import CannotRehearse
from taas.rehearsal.devices import machine

_ALONE = {"torchrun", "mpirun", "mpiexec", "horovodrun", "deepspeed", "composer"}
_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_PROCESSES = re.compile(r"--?(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|np|n)(?:=(\d+))?")
_BEFORE = {"exec", "env", "nohup", "time", "sudo", "command"}
_ASKS = {"--help", "-h", "--version", "--cpu", "--use_cpu"}
"""With one of these options a launcher starts nothing, or needs no GPU."""
_Call = Callable[..., Any]


def install() -> None:
    """Reject launchers in the functions that start programs."""
    popen: Any = subprocess.Popen
    popen.__init__ = _checking(popen.__init__, at=1, name="args")
    os.system = _checking(os.system, at=0, name="command")
    after_import("IPython.core.interactiveshell", _check_exclamation_marks)


def _check_exclamation_marks(module: Any) -> None:
    shell = module.InteractiveShell
    shell.system = _checking(shell.system, at=1, name="cmd")


def _checking(native: _Call, *, at: int, name: str) -> _Call:
    @functools.wraps(native)
    def start(*args: Any, **options: Any) -> Any:
        given = args[at] if len(args) > at else options.get(name)
        for words in _commands(given):
            _refuse_launcher(words)
        return native(*args, **options)

    return start


def _commands(given: Any) -> Iterator[list[str]]:
    """Yield the words of each command in a shell command line, or in a list of words.

    Objects of other types contain no commands.
    """
    if not isinstance(given, str):
        if isinstance(given, Sequence):
            words = [
                os.fsdecode(word) for word in given if isinstance(word, (str, bytes, os.PathLike))
            ]
            yield words
            if len(words) > 2 and words[1] == "-c":  # sh -c "…"
                yield from _commands(words[2])
        return
    lexer = shlex.shlex(given, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("();<>|&"):
                yield command
                command = []
            else:
                command.append(word)
    except ValueError:  # an open quote: the shell itself will report it
        return
    yield command


def _refuse_launcher(words: list[str]) -> None:
    while words and (words[0] in _BEFORE or re.match(r"\w+=", words[0])):
        words = words[1:]
    if not words or not _ASKS.isdisjoint(words):
        return
    program = PurePath(words[0]).name
    if (
        program.startswith("python")
        and words[1:2] == ["-m"]
        and words[2:3]
        and words[2] in _MODULES
    ):
        program = f"{program} -m {words[2]}"
    elif program == "accelerate" and words[1:2] == ["launch"]:
        program = "accelerate launch"
    elif program not in _ALONE:
        return
    raise CannotRehearse(
        f"{program} cannot be rehearsed: a command sees this machine as it is, without GPUs, and"
        f" its processes are no ranks of this run. Write #pragma taas --gpus {_processes(words)}"
        " above the training code itself (%run train.py runs a file), or start the command in a"
        " cell without a header."
    )


def _processes(words: list[str]) -> int:
    """Return how many processes a command tells its launcher to start on each machine.

    The default is the number of devices of this run, or two if there are fewer.
    """
    for option, value in zip(words, [*words[1:], ""], strict=True):
        found = _PROCESSES.fullmatch(option)
        number = (found[1] or value) if found else ""
        if number.isdecimal():
            return int(number)
    return max(2, machine.device_count)

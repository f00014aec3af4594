"""Choose the engine for the next runs of this kernel.

``%taas engine`` has precedence over TAAS_ENGINE, and TAAS_ENGINE over ``taas.toml``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from taas.base.wording import nearest, refusal, shown
from taas.config import load_catalog
from taas.engines import Engine
from taas.engines.driven import DrivenEngine
from taas.engines.ray import RayEngine
from taas.engines.slurm import SlurmEngine
from taas.errors import HeaderError
from taas.header.arguments import split_words
from taas.header.catalog import Catalog
from taas.protocol.engines import EngineChoice

_ELSEWHERE: dict[str, type[DrivenEngine]] = {"ray": RayEngine, "slurm": SlurmEngine}
_said: list[EngineChoice] = []


def read_choice(words: list[str], where: str, configured: Catalog) -> EngineChoice:
    """Parse an engine's name and the words after it; the other settings come from ``configured``.

    ``where`` describes the origin of the words, for messages.

    Raises:
        HeaderError: the words do not describe an engine.
    """
    kind, *rest = words
    if rest if kind == "local" else kind not in _ELSEWHERE:
        near = nearest(kind, ("local", *_ELSEWHERE), 0.5) or "local"
        allowed = "local, ray and its address, or slurm and its options"
        raise HeaderError(refusal(f"{where} {shown(' '.join(words))}", f"type {near}", allowed))
    address = "" if kind == "local" else _ELSEWHERE[kind].read_address(rest, where, configured)
    return EngineChoice(kind, address, configured["engine.wait"], configured["engine.idle"])


def choose(words: list[str]) -> EngineChoice:
    """Use an engine for all later runs of this kernel.

    Raises:
        HeaderError: there is no such engine.
        EngineError: a program or package that it needs is not installed.
    """
    choice = read_choice(words, "%taas engine", load_catalog())
    check_installed(choice)
    _said[:] = [choice]
    return choice


def current_engine(project: Path) -> EngineChoice:
    """Return the engine of the next run.

    Raises a HeaderError if TAAS_ENGINE or ``taas.toml`` is invalid.
    """
    configured = load_catalog(project)
    if _said:
        return _said[0]
    try:
        words = split_words(os.environ.get("TAAS_ENGINE", ""))
    except HeaderError as error:
        raise HeaderError(f"TAAS_ENGINE {error}") from None
    if words:
        return read_choice(words, "TAAS_ENGINE", configured)
    kind, address = configured["engine.default"], configured["engine.address"]
    words = [kind, address] if address and kind == "ray" else [kind]
    return read_choice(words, "[engine] in taas.toml:", configured)


def check_installed(choice: EngineChoice) -> None:
    """Raise an EngineError if this machine lacks something that an engine needs.

    The error message contains the command that installs it.
    """
    if choice.kind in _ELSEWHERE:
        _ELSEWHERE[choice.kind].check_installed()


def start_engine(choice: EngineChoice, listen: Callable[[str], str], scratch: Path) -> Engine:
    """Start a remote engine; the other arguments are those of :class:`DrivenEngine`."""
    return _ELSEWHERE[choice.kind](choice.address, listen, scratch)

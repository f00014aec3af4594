"""Which engine the next runs of this kernel take: what ``%taas engine`` said, else TAAS_ENGINE, else ``taas.toml``."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from taas.catalog import load_catalog
from taas.engines import EngineChoice
from taas.errors import EngineError, HeaderError
from taas.wording import shown

__all__ = ["check_installed", "choose", "chosen", "read_choice"]

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", re.ASCII)
_said: list[EngineChoice] = []


def read_choice(words: list[str], where: str, wait: float) -> EngineChoice:
    """Read ``local``, ``ray`` or ``ray ADDRESS``.

    Args:
        words: what was typed.
        where: where it stands, for messages.
        wait: seconds that VMs may be waited for.

    Raises:
        HeaderError: it is none of them.
    """
    kind, *rest = words
    if kind == "local" and not rest:
        return EngineChoice("local", "", wait)
    if kind != "ray" or len(rest) > 1:
        raise HeaderError(
            f"{where} {shown(' '.join(words))}: allowed is local, or ray and its address; type local"
        )
    address = "" if rest in ([], ["auto"]) else rest[0]
    if address.startswith("ray://"):
        raise HeaderError(
            f"{where} ray {shown(address)}: Ray Client addresses are not used, since other nodes have to reach this "
            "machine; make it a node (ray start --address=HEAD:6379 --num-cpus=0), and type ray HEAD:6379"
        )
    if address and not _ADDRESS.fullmatch(address):
        raise HeaderError(
            f"{where} ray {shown(address)}: allowed is HOST:PORT of the cluster's head; type ray {shown(address)}:6379"
        )
    return EngineChoice("ray", address, wait)


def choose(words: list[str]) -> EngineChoice:
    """Take an engine for all later runs of this kernel.

    Raises:
        HeaderError: there is no such engine.
        EngineError: Ray is not installed.
    """
    choice = read_choice(words, "%taas engine", load_catalog(Path.cwd()).engine.wait)
    check_installed(choice)
    _said[:] = [choice]
    return choice


def chosen(project: Path) -> EngineChoice:
    """Return the engine of the next run.

    Raises:
        HeaderError: TAAS_ENGINE or ``taas.toml`` is wrong.
    """
    configured = load_catalog(project).engine
    if _said:
        return _said[0]
    if words := os.environ.get("TAAS_ENGINE", "").split():
        return read_choice(words, "TAAS_ENGINE", configured.wait)
    address = [configured.address] if configured.address and configured.default == "ray" else []
    return read_choice([configured.default, *address], "[engine] in taas.toml:", configured.wait)


def check_installed(choice: EngineChoice) -> None:
    """Refuse the Ray engine where there is no Ray.

    Raises:
        EngineError: with the command that installs it.
    """
    if choice.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise EngineError(
            "the Ray engine needs Ray, which is not installed here. Run `pip install 'jupyter-taas[ray]'`, with the "
            "version of Ray that the cluster has, or type %taas engine local."
        )

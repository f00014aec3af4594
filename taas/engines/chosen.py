"""Which engine the next runs of this kernel take: what ``%taas engine`` said, else TAAS_ENGINE, else ``taas.toml``."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

from taas.config import Catalog, load_catalog
from taas.engines import Engine, EngineChoice
from taas.engines.ray import RayEngine
from taas.errors import EngineError, HeaderError
from taas.wording import shown

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", re.ASCII)
_said: list[EngineChoice] = []


def read_choice(words: list[str], where: str, configured: Catalog) -> EngineChoice:
    """Read ``local``, ``ray`` or ``ray ADDRESS``.

    Args:
        words: what was typed.
        where: where it stands, for messages.
        configured: what ``taas.toml`` says of its VMs.

    Raises:
        HeaderError: it is none of them.
    """
    kind, *rest = words
    times = configured["engine.wait"], configured["engine.idle"]
    if kind == "local" and not rest:
        return EngineChoice("local", "", *times)
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
    return EngineChoice("ray", address, *times)


def choose(words: list[str]) -> EngineChoice:
    """Take an engine for all later runs of this kernel.

    Raises:
        HeaderError: there is no such engine.
        EngineError: Ray is not installed.
    """
    choice = read_choice(words, "%taas engine", load_catalog())
    check_installed(choice)
    _said[:] = [choice]
    return choice


def chosen(project: Path) -> EngineChoice:
    """Return the engine of the next run.

    Raises:
        HeaderError: TAAS_ENGINE or ``taas.toml`` is wrong.
    """
    configured = load_catalog(project)
    if _said:
        return _said[0]
    if words := os.environ.get("TAAS_ENGINE", "").split():
        return read_choice(words, "TAAS_ENGINE", configured)
    kind, address = configured["engine.default"], configured["engine.address"]
    words = [kind, address] if address and kind == "ray" else [kind]
    return read_choice(words, "[engine] in taas.toml:", configured)


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


def start_engine(choice: EngineChoice, listen: Callable[[str], str], scratch: Path) -> Engine:
    """Start the engine of a choice that has its machines elsewhere.

    Args:
        choice: which.
        listen: makes the supervisor listen on an address of this machine; returns the endpoint.
        scratch: folder for its log.
    """
    assert choice.kind == "ray", choice.kind
    return RayEngine(choice.address, listen, scratch / "ray.log")

"""The engine whose VMs are nodes of a Ray cluster, as the supervisor has it; Ray itself is in a child (ray_driver)."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from taas.config import Catalog
from taas.engines.driven import DrivenEngine
from taas.errors import EngineError, HeaderError
from taas.wording import shown

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", re.ASCII)


def read_address(words: list[str], where: str, configured: Catalog) -> str:
    """Read where the cluster is, as it was typed; ``auto``, or nothing: this machine is a node of it.

    Raises:
        HeaderError: it is no such address.
    """
    del configured
    address = " ".join(words)
    if address.startswith("ray://"):
        raise HeaderError(
            f"{where} ray {shown(address)}: Ray Client addresses are not used, since other nodes have to reach this "
            "machine; make it a node (ray start --address=HEAD:6379 --num-cpus=0), and type ray HEAD:6379"
        )
    address = "" if address == "auto" else address
    if address and not _ADDRESS.fullmatch(address):
        near = words[0] if ":" in words[0] else f"{words[0]}:6379"
        raise HeaderError(
            f"{where} ray {shown(address)}: allowed is HOST:PORT of the cluster's head; type ray {shown(near)}"
        )
    return address


def check_installed() -> None:
    """Refuse this engine where there is no Ray.

    Raises:
        EngineError: with the command that installs it.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError(
            "the Ray engine needs Ray, which is not installed here. Run `pip install 'jupyter-taas[ray]'`, with the "
            "version of Ray that the cluster has, or type %taas engine local."
        )


class RayEngine(DrivenEngine):
    """VMs of the Ray cluster at an address; empty: of the one that this machine is a node of."""

    driver, kind = "taas.engines.ray_driver", "Ray"
    advice = (
        "Is it running (`ray status`), and is this machine one of its nodes (`ray start --address=HOST:PORT "
        "--num-cpus=0`)?"
    )

    def __init__(self, address: str, listen: Callable[[str], str], scratch: Path) -> None:
        self.cluster = f"the Ray cluster at {address or 'auto'}"
        super().__init__(address or "auto", listen, scratch)

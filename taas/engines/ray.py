"""The engine whose VMs are nodes of a Ray cluster; its driver (ray_driver) uses Ray itself.

Kernel and supervisor use this module, which does not need Ray. It also computes the resources to
request from the cluster, and describes what the cluster lacks.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from taas.base.wording import counted, shown
from taas.engines.driven import DrivenEngine
from taas.errors import EngineError, HeaderError
from taas.header.catalog import Catalog
from taas.protocol.engines import Demand

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", re.ASCII)
_HOW_TO_BRING = (
    "an autoscaler has to make it, or `ray start --address=… --resources='{\"%s\": 1}'` on a"
    " machine"
)
_UNCOUNTED = ("memory", "object_store_memory", "node:", "bundle_group", "accelerator_type:")


class RayEngine(DrivenEngine):
    """The VMs of the Ray cluster at an address.

    An empty address means the cluster that has this machine as a node.
    """

    driver, kind = "taas.engines.ray_driver", "Ray"
    advice = (
        "Is it running (`ray status`), and is this machine one of its nodes (`ray start"
        " --address=HOST:PORT --num-cpus=0`)?"
    )

    def __init__(self, address: str, listen: Callable[[str], str], scratch: Path) -> None:
        self.cluster = f"the Ray cluster at {address or 'auto'}"
        super().__init__(address or "auto", listen, scratch)

    @staticmethod
    def read_address(words: list[str], where: str, configured: Catalog) -> str:
        """Parse the cluster's address; ``auto``, or no word, if this machine is a node of it."""
        del configured
        address = " ".join(words)
        if address.startswith("ray://"):
            raise HeaderError(
                f"{where} ray {shown(address)}: Ray Client addresses are not used, since other"
                " nodes have to reach this machine; make it a node (ray start --address=HEAD:6379"
                " --num-cpus=0), and type ray HEAD:6379"
            )
        address = "" if address == "auto" else address
        if address and not _ADDRESS.fullmatch(address):
            near = words[0] if ":" in words[0] else f"{words[0]}:6379"
            raise HeaderError(
                f"{where} ray {shown(address)}: type ray {shown(near)}; allowed is HOST:PORT of the"
                " cluster's head"
            )
        return address

    @staticmethod
    def check_installed() -> None:
        """Raise an EngineError if Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise EngineError(
                "the Ray engine needs Ray, which is not installed here. Run `pip install"
                " 'jupyter-taas[ray]'`, with the version of Ray that the cluster has, or type %taas"
                " engine local."
            )


def bundle(demand: Demand, nodes: list[dict[str, float]]) -> dict[str, float]:
    """Return the resources that a VM requests of a node: those of its type, and GPUs.

    The type is requested if living nodes have it as a resource. GPUs are not requested if the run
    is rehearsed, which is the case if its header requests it or if none of the suitable nodes has a
    GPU. If there is no suitable node at all, one has to be added, and is expected to be as in the
    catalog.
    """
    fitting = [node for node in nodes if demand.instance is None or demand.instance in node]
    bare = bool(fitting) and not any(node.get("GPU") for node in fitting)
    gpus = 0 if demand.rehearse or bare else demand.gpus
    wanted = {"GPU": float(gpus)} if gpus else {}
    if demand.instance is not None:
        wanted[demand.instance] = 1.0
    return wanted or {"CPU": 1.0}


def _in_words(resources: Mapping[str, float]) -> str:
    """Return resources as Ray writes them, such as ``GPU 8, g2.8 1``."""
    return (
        ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) or "nothing"
    )


def count_fitting(wanted: Mapping[str, float], nodes: list[dict[str, float]]) -> int:
    """Return how many nodes have the requested resources, free or not."""
    return sum(
        all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes
    )


def what_is_missing(
    wanted: dict[str, float],
    count: int,
    nodes: list[dict[str, float]],
    free: Mapping[str, float],
    does: str = "",
) -> str:
    """Describe what is requested, what the living nodes have, and what has to happen.

    ``free`` are the free resources of the whole cluster; ``does`` is what an autoscaler does about
    the request, if there is one.
    """
    asked = f"{counted(count, 'node')} with {_in_words(wanted)}"
    counted_names = {name for node in nodes for name in node if not name.startswith(_UNCOUNTED)}
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in counted_names}
    has = f"the cluster has {counted(len(nodes), 'node')} with {_in_words(total)} in all"
    fitting = count_fitting(wanted, nodes)
    if fitting >= count:
        scarce = min(wanted, key=lambda name: free.get(name, 0.0) / wanted[name])
        why = does or "other runs or jobs have the rest"
        return f"{asked}; {has}, of {scarce} {free.get(scarce, 0.0):g} free: {why}"
    name = next((name for name in wanted if name not in ("GPU", "CPU")), "taas")
    return f"{asked}; {has}, {fitting} like that: {does or _HOW_TO_BRING % name}"

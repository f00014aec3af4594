"""A Ray cluster from outside: what a run needs of it, in words what is missing, and whether its head is there.

Ray itself is not needed here.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from taas.engines import Demand
from taas.wording import counted

_HOW_TO_BRING = (
    "an autoscaler has to make it, or `ray start --address=… --resources='{\"%s\": 1}'` on a machine"
)
_UNCOUNTED = ("memory", "object_store_memory", "node:", "bundle_group", "accelerator_type:")


def bundle(demand: Demand, nodes: list[dict[str, float]]) -> dict[str, float]:
    """Return what a VM asks of a node.

    One unit of its type's own resource, and its GPUs. No GPUs are asked for where the run is rehearsed: as its
    header says, or because none of the nodes that it could get has one. No node at all like that: one has to
    come, and it will be as the catalog says.

    Args:
        demand: what the run needs.
        nodes: the resources of each living node.
    """
    fitting = [node for node in nodes if demand.instance is None or demand.instance in node]
    bare = bool(fitting) and not any(node.get("GPU") for node in fitting)
    gpus = 0 if demand.rehearse or bare else demand.gpus
    wanted = {"GPU": float(gpus)} if gpus else {}
    if demand.instance is not None:
        wanted[demand.instance] = 1.0
    return wanted or {"CPU": 1.0}


def in_words(resources: dict[str, float]) -> str:
    """Return resources as Ray writes them, such as ``GPU 8, g2.8 1``."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) or "nothing"


def count_fitting(wanted: Mapping[str, float], nodes: list[dict[str, float]]) -> int:
    """Return how many nodes have what is asked of each, free or not."""
    return sum(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes)


def what_is_missing(
    wanted: dict[str, float],
    count: int,
    nodes: list[dict[str, float]],
    free: Mapping[str, float],
    does: str = "",
) -> str:
    """Say what is asked for, what the cluster has, and what has to happen.

    Args:
        wanted: of each node.
        count: how many nodes.
        nodes: the resources of each living node.
        free: what is free in the whole cluster.
        does: what an autoscaler does about it, if there is one.
    """
    asked = f"{counted(count, 'node')} with {in_words(wanted)}"
    total: dict[str, float] = defaultdict(float)
    for node in nodes:
        for name, amount in node.items():
            if not name.startswith(_UNCOUNTED):
                total[name] += amount
    has = f"the cluster has {counted(len(nodes), 'node')} with {in_words(total)} in all"
    fitting = count_fitting(wanted, nodes)
    if fitting >= count:
        scarce = min(wanted, key=lambda name: free.get(name, 0.0) / wanted[name])
        why = does or "other runs or jobs have the rest"
        return f"{asked}; {has}, of {scarce} {free.get(scarce, 0.0):g} free: {why}"
    name = next((name for name in wanted if name not in ("GPU", "CPU")), "taas")
    return f"{asked}; {has}, {fitting} like that: {does or _HOW_TO_BRING % name}"


# ---------------------------------------------------------------- whether the head is there


SILENCE_SECONDS = 9.0
"""How long a head may be silent before it is given up."""
_ASK_EVERY_SECONDS, _ANSWER_SECONDS = 1.5, 3.0
_ATTEMPT_SECONDS, _PAUSE_SECONDS = 3.0, 0.5


def reach(address: str, patience: float) -> None:
    """Wait until something listens where the head is; Ray's own attempt takes a minute, or ends the process.

    Args:
        address: ``HOST:PORT``; anything else is for Ray to find.
        patience: seconds; it is tried once in any case.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not host:
        return
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def watch(ask: Callable[[float], bool | None], silence: float, over: threading.Event) -> str:
    """Ask the head for signs of life until it shows none; returns in words what became of it.

    Args:
        ask: asks once, and returns within so many seconds: True, this driver's node belongs to the cluster;
            False, it does not; None, there was no answer.
        silence: seconds without an answer after which the head is given up.
        over: nobody wants to know any more; an empty text is returned then.
    """
    heard = time.monotonic()
    while not over.wait(_ASK_EVERY_SECONDS):
        left = heard + silence - time.monotonic()
        belongs = ask(min(_ANSWER_SECONDS, max(left, 0.1)))
        if belongs is False:
            return "was started anew, or counts this machine as lost"
        if belongs:
            heard = time.monotonic()
        elif time.monotonic() > heard + silence:
            return f"has not answered for {silence:g} s"
    return ""

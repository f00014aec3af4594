"""What the processes of ``mp.spawn`` give back through its arguments: here each rank has those to itself.

A queue, a manager's dict or list, a tensor in shared memory: children put their results there and the parent reads
them. Here every rank is a child and the parent. So each notes what its own function put there, and when all have
ended each gets what the others noted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing import managers, queues, synchronize
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import torch
from torch.distributed import Store

from taas.errors import CannotAdopt

PIECE_BYTES = 1 << 20  # the store takes no larger values
RESULT_BYTES = 64 << 20  # a larger tensor in shared memory is a data set: a copy of it would cost too much
Note = Callable[[], Any]
_managers: Any = managers  # its stubs lack some proxies
_ALONE = (
    *(synchronize.Barrier, synchronize.Condition, synchronize.Event, SynchronizedBase),
    *(_managers.BarrierProxy, _managers.ConditionProxy, _managers.EventProxy),
    *(_managers.NamespaceProxy, _managers.ValueProxy, _managers.ArrayProxy),
)


class Results:
    """One rank's side of the arguments in which results are collected.

    Args:
        args: what the program gave to ``mp.spawn``.
        processes: how many of them there are on all VMs.

    Raises:
        CannotAdopt: the processes would wait for each other, or count together, through an argument.
    """

    def __init__(self, args: Sequence[Any], processes: int) -> None:
        self._args = args
        for index, arg in enumerate(args):
            if isinstance(arg, _ALONE) and processes > 1:
                raise CannotAdopt(
                    f"mp.spawn was given a {type(arg).__name__} of multiprocessing (args[{index}]): each rank would "
                    "have its own. Use torch.distributed: barrier() to wait for each other, all_reduce() to count."
                )
        self._notes: dict[int, Note] = {}

    def watch(self) -> None:
        """Note from now on what this rank's function puts into the arguments."""
        for index, arg in enumerate(self._args):
            if _is_queue(arg):
                self._notes[index] = _puts(arg)
            elif isinstance(arg, managers.DictProxy):
                self._notes[index] = _entries(arg)
            elif isinstance(arg, managers.ListProxy):
                self._notes[index] = _places(arg)
            elif _is_shared_tensor(arg):
                self._notes[index] = _elements(arg)

    def publish(self, store: Store, rank: int) -> None:
        """Give the other ranks what was noted."""
        noted = {index: note() for index, note in self._notes.items()}
        if not noted:
            return
        content = pickle.dumps(noted)
        pieces = range(0, len(content), PIECE_BYTES)
        for number, start in enumerate(pieces):
            store.set(f"results/{rank}/{number}", content[start : start + PIECE_BYTES])  # type: ignore[arg-type]  # takes bytes
        store.set(f"results/{rank}", str(len(pieces)))

    def take(self, store: Store, rank: int) -> None:
        """Put what another rank noted into this one's arguments; it has published, if it does."""
        if not store.check([f"results/{rank}"]):
            return
        pieces = range(int(store.get(f"results/{rank}")))
        noted = pickle.loads(b"".join(store.get(f"results/{rank}/{number}") for number in pieces))
        for index, content in noted.items():
            _add(self._args[index], content)


def _is_queue(arg: Any) -> bool:
    of_manager = isinstance(arg, managers.BaseProxy) and hasattr(arg, "put")
    return of_manager or isinstance(arg, (queues.Queue, queues.SimpleQueue))


def _is_shared_tensor(arg: Any) -> bool:
    return (
        isinstance(arg, torch.Tensor)
        and arg.layout == torch.strided
        and arg.device.type == "cpu"
        and arg.numel() * arg.element_size() <= RESULT_BYTES
        and arg.is_shared()
    )


def _puts(queue: Any) -> Note:
    """Note each item put into a queue, as it is then."""
    items: list[bytes] = []
    native = queue.put

    def put(item: Any, *args: Any, **kwargs: Any) -> None:
        native(item, *args, **kwargs)
        items.append(pickle.dumps(item))

    def note() -> list[bytes]:
        del queue.put
        return items

    queue.put = put
    return note


def _entries(proxy: Any) -> Note:
    """Note which entries of a manager's dict are new or other ones than now."""
    before = {key: pickle.dumps(value) for key, value in proxy.copy().items()}
    return lambda: {key: v for key, v in proxy.copy().items() if before.get(key) != pickle.dumps(v)}


def _places(proxy: Any) -> Note:
    """Note which places of a manager's list hold something else than now, and what was appended."""
    before = [pickle.dumps(value) for value in proxy[:]]

    def note() -> tuple[dict[int, Any], list[Any]]:
        now = proxy[:]
        pairs = enumerate(zip(before, now, strict=False))
        return {i: v for i, (old, v) in pairs if old != pickle.dumps(v)}, now[len(before) :]

    return note


def _elements(tensor: torch.Tensor) -> Note:
    """Note which elements of a tensor are other ones than now."""
    before = tensor.detach().clone()

    def note() -> tuple[torch.Tensor, torch.Tensor]:
        now = tensor.detach()
        other = (now != before) & ~(now.isnan() & before.isnan())
        return other, now[other]

    return note


def _add(arg: Any, content: Any) -> None:
    if isinstance(arg, torch.Tensor):
        where, values = content
        arg.detach()[where] = values
    elif isinstance(arg, managers.DictProxy):
        arg.update(content)
    elif isinstance(arg, managers.ListProxy):
        changed, appended = content
        for index, value in changed.items():
            arg[index] = value
        arg.extend(appended)
    else:
        for item in content:
            arg.put(pickle.loads(item))

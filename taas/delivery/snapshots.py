"""The state of an iterable dataset between two elements, as whoever goes on with it needs it.

The convention is that of torchdata's StatefulDataLoader: a dataset, or the iterator that its ``__iter__`` returns,
that has both ``state_dict`` and ``load_state_dict`` is asked for its state. Where they are two objects, each
has its own: the dataset's is loaded before ``iter(dataset)``, the iterator's after it. The process's generators
are part of a snapshot here, and a fingerprint of the element that came next: one that goes on elsewhere with
another element is not used.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import cloudpickle

from taas.delivery.encoding import Region, encode
from taas.delivery.sampling import RngStates

__all__ = ["Snapshot", "StateUnusable", "fingerprint", "is_stateful", "said"]

_LIMIT = 16 << 20


class StateUnusable(Exception):
    """A state cannot be taken, or not be gone on from; its text says why."""


@dataclass(slots=True)
class Snapshot:
    """Pickled states of the dataset and of its iterator (None: has none), and the generators' after that was made.

    ``start``: the generators before it was made, where they go on from an iteration before.
    """

    dataset: bytes | None = None
    iterator: bytes | None = None
    rngs: RngStates | None = None
    following: bytes = b""
    start: RngStates | None = None

    @property
    def leads_on(self) -> bool:
        """Whether there is more in it than where the generators stood."""
        return not (self.dataset is None and self.iterator is None)

    @classmethod
    def take(cls, dataset: Any, iterator: Any) -> Snapshot | None:
        """Return a snapshot; None where neither object offers a state. Generators are left as they are.

        ``iterator`` is None before there is one.

        Raises:
            StateUnusable: ``state_dict`` raised, or what it returned cannot be pickled.
        """
        if not (is_stateful(dataset) or is_stateful(iterator)):
            return None
        with _generators_left_alone() as rngs:
            try:
                own = _pickled_state(None if iterator is dataset else dataset)
                inner = _pickled_state(iterator)
            except Exception as error:
                raise StateUnusable(f"state_dict() gives nothing that travels ({said(error)})") from error
        if own is None and inner is None:
            return None
        return cls(own, inner, None if iterator is None else rngs)

    def pack(self, following: bytes) -> bytes:
        """Return it as bytes, with the fingerprint of the element that came next.

        Raises:
            StateUnusable: it is too large.
        """
        self.following = following
        packed = pickle.dumps(self)
        if len(packed) > _LIMIT:
            raise StateUnusable(f"a state takes {len(packed) >> 20} MiB; up to {_LIMIT >> 20} MiB are kept")
        return packed

    def load_start(self) -> None:
        """Bring the generators where they were before the iterator was made."""
        if self.start is not None:
            self.start.apply()

    def load_dataset(self, dataset: Any) -> None:
        """Bring the dataset where it was, before its iterator is made."""
        if self.dataset is not None:
            with _generators_left_alone():
                dataset.load_state_dict(pickle.loads(self.dataset))

    def load_iterator(self, iterator: Any) -> None:
        """Bring the iterator where it was, and the generators."""
        if self.iterator is not None:
            iterator.load_state_dict(pickle.loads(self.iterator))
        if self.rngs is not None:
            self.rngs.apply()


def fingerprint(element: Any) -> bytes:
    """Return a digest of an element as it would travel; equal digests mean equal bytes."""
    region = Region(memoryview(bytearray(0)))
    while (encoded := encode(element, region)) is None:
        region = Region(memoryview(bytearray(max(region.needed, 2 * region.capacity))))
    digest = blake2b(encoded[0], digest_size=16)
    digest.update(region.buffer[: region.used])
    return digest.digest()


def _pickled_state(thing: Any) -> bytes | None:
    state = thing.state_dict() if is_stateful(thing) else None
    return None if state is None else cloudpickle.dumps(state)


def is_stateful(thing: Any) -> bool:
    """Whether an object offers its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@contextmanager
def _generators_left_alone() -> Iterator[RngStates]:
    """User code that is not called in the notebook draws nothing from the generators that elements draw from."""
    rngs = RngStates.now()
    try:
        yield rngs
    finally:
        rngs.apply()


def said(error: BaseException) -> str:
    """Return an exception's kind and first line, in words for the user."""
    if isinstance(error, StateUnusable):
        return str(error)
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].removesuffix(": ")

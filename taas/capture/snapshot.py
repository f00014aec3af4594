"""Whether memory is what it was, without a copy of it.

The system tells of most of it which pages were written to (:mod:`taas.page_watch`); a page that was written to counts as
changed, whatever is in it now. Of the rest there are checksums, numbers that stand for its parts; memory of a device is
added up there.

A part's words of 64 bits are multiplied by random numbers and added, modulo 2⁶⁴; so are their upper halves, since of a
word that differs in its highest bits only (all numbers negated) the first sum knows little. Whatever differs, both sums stay
the same with a probability below 2⁻³². The random numbers are this process's, so that nobody can make memory to match.
torch's own counter of changes is no proof: ``x.data.add_(1)`` leaves it as it is.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Container, Iterator
from ctypes import string_at
from multiprocessing.pool import ThreadPool
from typing import Any

from taas.capture.memory import Span, Stretch, view_of
from taas.capture.payload import NAME
from taas.page_watch import Watch

_PART = 1 << 18
"""Bytes: it stays in a processor's cache while it is looked at twice."""
_ON_DEVICE = 16 << 20
"""Bytes that a device adds up at once; it needs room for three times as many."""
_KEPT_BELOW = 1 << 10
"""Bytes that are kept themselves, as that is quicker."""
_SHARED_FROM = 32
"""How many parts are worth a second thread."""
_WATCHED_FROM = 1 << 20
"""Bytes that are watched rather than read."""


class MemorySnapshot:
    """What memory holds now, by region; memory that is not where it was is left out.

    Args:
        stretches: the memory.
        before: an earlier one that is not asked again, of much the same memory.
    """

    def __init__(self, stretches: dict[int, Stretch], before: MemorySnapshot | None = None) -> None:
        self._stretches = {n: stretch for n, stretch in stretches.items() if stretch.is_there()}
        large = {
            (n, span): (stretch.address + span[0], stretch.address + span[1])
            for n, stretch in self._stretches.items()
            if stretch.is_in_host_memory()
            for span in stretch.spans
            if span[1] - span[0] >= _WATCHED_FROM
        }
        self._watch: Watch = Watch(large.values(), NAME, before._watch if before is not None else None)
        self._watched: dict[int, dict[Span, Span]] = {}
        for (n, span), outer in large.items():
            if (inner := self._watch.inner.get(outer)) is not None:
                address = self._stretches[n].address
                self._watched.setdefault(n, {})[span] = inner[0] - address, inner[1] - address
        self._read = self._read_rest(self._stretches)

    def changed(self, regions: Container[int]) -> dict[int, list[Span]]:
        """Return which parts of some regions differ; memory that is no longer where it was is left out."""
        there = {n: here for n, here in self._stretches.items() if n in regions and here.is_there()}
        unwritten, now = self._watch.unwritten(), self._read_rest(there)
        found: dict[int, list[Span]] = {}
        for n, stretch in there.items():
            found[n] = [part for part, what in now[n].items() if self._read[n][part] != what]
            for low, high in self._watched.get(n, {}).values():
                written = _without((stretch.address + low, stretch.address + high), unwritten)
                found[n] += [(start - stretch.address, end - stretch.address) for start, end in written]
        return found

    def _read_rest(self, stretches: dict[int, Stretch]) -> dict[int, dict[Span, Any]]:
        """Return what is in all that is not watched: checksums, and the bytes at the edges of watched pages."""
        found = _checksums_of(stretches, self._watched)
        for n in stretches.keys() & self._watched:
            for (start, end), (low, high) in self._watched[n].items():
                for edge, edge_end in ((start, low), (high, end)):
                    if edge < edge_end:
                        found[n][edge, edge_end] = string_at(stretches[n].address + edge, edge_end - edge)
        return found


def _without(span: Span, taken: list[Span]) -> list[Span]:
    """Return what is left of a span without others, which are in order; in parts of a size worth sending."""
    found: list[Span] = []
    start, end = span
    for at in range(max(bisect.bisect(taken, (start, start)) - 1, 0), len(taken) + 1):
        low, high = taken[at] if at < len(taken) and taken[at][0] < end else (end, end)
        if start < low and found and start - found[-1][1] < _PART:
            found[-1] = (found[-1][0], low)
        elif start < low:
            found.append((start, low))
        if high >= end:
            break
        start = max(start, high)
    return found


# ---------------------------------------------------------------- what is read


def _checksums_of(
    stretches: dict[int, Stretch], but: dict[int, dict[Span, Span]]
) -> dict[int, dict[Span, Any]]:
    """Return the checksums of the parts of memory, by region, but for some spans."""
    found: dict[int, dict[Span, Any]] = {n: {} for n in stretches}
    jobs: list[tuple[int, Span, int]] = []
    for number, stretch in stretches.items():
        if not stretch.is_in_host_memory():
            found[number] = dict(_sums_on_device(stretch))
            continue
        spans = [span for span in stretch.spans if span not in but.get(number, ())]
        jobs += ((number, part, stretch.address) for span in spans for part in _parts(*span))
    _weights()
    threads = min(len(os.sched_getaffinity(0)), 8, len(jobs) // _SHARED_FROM)
    if threads > 1:
        with ThreadPool(threads) as pool:  # that of concurrent.futures ends when the cell's threads do
            shares = [jobs[at : at + _SHARED_FROM] for at in range(0, len(jobs), _SHARED_FROM)]
            done = [*itertools.chain.from_iterable(pool.map(_sums, shares))]
    else:
        done = _sums(jobs)
    for (number, part, _), checksum in zip(jobs, done, strict=True):
        found[number][part] = checksum
    return found


def _sums_on_device(stretch: Stretch) -> Iterator[tuple[Span, Any]]:
    """Yield the checksums of what a device has of memory, by parts; some of it at a time, and nothing is copied but they."""
    import torch

    for (start, nbytes), storage in stretch.storages.items():
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for low, high in stretch.spans:
            for at in range(max(low, start), end := min(high, start + nbytes), _ON_DEVICE):
                some = memory[at - start : min(at + _ON_DEVICE, end) - start]
                try:
                    sums = _sums_of_parts(some)
                except (
                    torch.OutOfMemoryError
                ):  # sums of other weights: it counts as changed where they were on the device
                    sums = _sums_of_parts(some.cpu())
                yield from zip(_parts(at, at + some.nbytes), map(tuple, sums.tolist()), strict=True)


def _sums_of_parts(memory: Any) -> Any:
    """Return both sums of each part of a flat tensor of bytes, computed where it is."""
    import torch

    weights = _weights_on(memory.device)
    padded = memory.new_zeros(-(-memory.nbytes // _PART) * _PART)
    padded[: memory.nbytes] = memory
    words = padded.view(torch.int64).view(-1, _PART // 8)
    return torch.stack([(words * weights[0]).sum(1), ((words >> 32) * weights[1]).sum(1)], 1)


@functools.cache
def _weights_on(device: Any) -> Any:
    """Return the random numbers on a device: its own, so that no library is needed for them."""
    import torch

    drawn = torch.frombuffer(bytearray(os.urandom(2 * _PART)), dtype=torch.int64)
    return drawn.view(2, -1).to(device)


def _parts(start: int, end: int) -> Iterator[Span]:
    return ((low, min(low + _PART, end)) for low in range(start, end, _PART))


def _sums(jobs: list[tuple[int, Span, int]]) -> list[Any]:
    return [_sum(view_of(address + start, end - start)) for _, (start, end), address in jobs]


def _sum(memory: memoryview) -> Any:
    if memory.nbytes < _KEPT_BELOW:
        return bytes(memory)
    import numpy as np

    whole = memory.nbytes // 8 * 8
    words = np.frombuffer(memory[:whole], np.int64)
    first, second = _weights()
    return (
        int(np.einsum("i,i", words, first[: len(words)])),
        int(np.einsum("i,i", words >> 32, second[: len(words)])),
        bytes(memory[whole:]),
    )


@functools.cache
def _weights() -> Any:
    """Return the random numbers. Asked for before there are threads: two of them cannot import some releases of NumPy at once."""
    import numpy as np

    return np.frombuffer(os.urandom(2 * _PART), np.int64).reshape(2, -1)

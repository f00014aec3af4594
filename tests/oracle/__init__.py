"""The same notebook with and without headers: what differs afterwards.

``compare`` plays a notebook twice, in two kernels forked from one process: in one, headers are
comments; in the other, taas is loaded, and each headed cell runs in real ranks, forked from the
agent's own forkserver. All that stands between is production's: the magics, the launcher, the
agent's rank group, the rank's entry; only the supervisor's place is taken by a pipe to the test, so
that a notebook takes a fraction of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from notebook_harness import Ran

from oracle.graph import differences
from oracle.program import Played, Program, in_ranks, kept, row, together
from oracle.ranks import forkservers, play

__all__ = [
    "Played",
    "Program",
    "assert_same",
    "compare",
    "each_of",
    "forkservers",
    "in_ranks",
    "kept",
    "play",
    "row",
    "together",
]

_LINES = 20
_VARYING = re.compile(
    r"[\d.e+]+ (?:ns|us|µs|μs|ms|s)\b"
    r"|\b0[xX][0-9a-fA-F]{6,}"
    r"|[\w/.-]*/ipykernel_\d+/\d+\.py|<ipython-input-[-\w]+>"
    r"|sk-container-id-\d+"
)
"""Durations, addresses, what kernels and ranks call the file of a cell, and numbers of
scikit-learn's diagrams.
"""


def each_of(programs: Iterable[Program]) -> pytest.MarkDecorator:
    """Return the mark of a test that has an argument ``program``: it runs with each of these."""
    return pytest.mark.parametrize("program", list(programs), ids=lambda one: one.name[:60])


def assert_same(program: Program, folder: Path) -> None:
    """Fail if headers change what a notebook shows or leaves, or if taas loses something."""
    different = compare(program, folder)
    assert not different, "\n".join([program.name, *different])


def compare(program: Program, folder: Path) -> list[str]:
    """Play a notebook with and without its headers, and return what differs, a line each."""
    plain = play(program, folder, plain=True)
    (folder / "project").rename(folder / "plain")
    return _compared(plain, play(program, folder, plain=False), goes_on=program.goes_on)


def _compared(plain: Played, headed: Played, *, goes_on: bool) -> list[str]:
    found = [
        line
        for pair in enumerate(zip(plain.cells, headed.cells, strict=True))
        for line in _cells(*pair)
    ]
    for (number, graph, state), (_, graph_there, state_there) in zip(
        plain.left, headed.left, strict=True
    ):
        lines = [*differences(graph, graph_there), *_states(state, state_there)]
        if lines:
            found += [f"after cell {number}: {line}" for line in lines[:_LINES]]
            break
    found += _states({"files": plain.files}, {"files": headed.files})
    if not found and not goes_on:  # a notebook that fails in both shows nothing
        found = [
            f"cell {n}: {ran.evalue} in both" for n, ran in enumerate(plain.cells) if ran.ename
        ]
    return found + [f"lost: {what}" for what in headed.lost]


def _states(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        there = found.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            names = [n for n in {**value, **there} if value.get(n) != there.get(n)]
            yield from (
                f"{name}[{n!r}]: {value.get(n)!r} expected, {there.get(n)!r} found" for n in names
            )
        elif value != there:
            yield f"{name}: {str(value)[:300]} expected, {str(there)[:300]} found"


def _cells(number: int, pair: tuple[Ran, Ran]) -> Iterator[str]:
    plain, headed = pair
    name = f"cell {number}"
    if headed.ename == "CellFailed":
        if not plain.ename or plain.ename not in headed.evalue + headed.traceback:
            yield f"{name}: {headed.evalue[:2000]} ({headed.traceback[-800:]})"
    elif (plain.ename, plain.evalue) != (headed.ename, headed.evalue):
        yield (
            f"{name}: {plain.ename or 'no error'} {plain.evalue[:300]} expected,"
            f" {headed.ename or 'no error'} {headed.evalue[:2000]} found"
        )
    expected, found = _without_taas(plain.shown), _without_taas(headed.shown)
    if expected != found:
        yield f"{name}: it shows {expected} expected, {found} found"
    expected, found = (_VARYING.sub("<varies>", ran.stderr) for ran in pair)
    if expected != found:
        yield f"{name}: standard error {expected[-500:]!r} expected, {found[-500:]!r} found"


def _without_taas(shown: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Leave out taas' own lines, durations and addresses."""
    kept: list[tuple[str, Any]] = []
    for kind, what in shown:
        if kind == "stdout":
            lines = "".join(line for line in what.splitlines(True) if not line.startswith("taas: "))
            if kept and kept[-1][0] == kind:
                kept[-1] = kind, kept[-1][1] + lines
            elif lines:
                kept.append((kind, lines))
        elif not (kind in ("display", "update") and "taas" in str(what.get("transient"))):
            kept.append((kind, what))
    return [(kind, _VARYING.sub("<varies>", str(what))) for kind, what in kept]

"""What stands in a namespace, as a graph that another process can compare with its own.

A node is one object: its type, facts (values that say what it is) and edges (what it holds). Two namespaces are
the same when one walk through both meets the same facts, and the same object again wherever the other one does.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Graph", "Node", "differences"]

Label = str


@dataclass
class Node:
    """One object: what it is, and what it holds (texts, or numbers of nodes)."""

    type: str | int
    facts: dict[str, Any] = field(default_factory=dict)
    edges: list[tuple[Label, str | int]] = field(default_factory=list)


@dataclass
class Graph:
    """Everything that can be reached from some names."""

    nodes: list[Node]
    roots: dict[str, str | int]


def differences(expected: Graph, found: Graph) -> list[str]:
    """Return what differs, a line each, with the path to it."""
    return [*_Walk(expected, found)]


class _Walk:
    def __init__(self, expected: Graph, found: Graph) -> None:
        self._graphs = expected, found
        self._pairs: tuple[dict[int, int], dict[int, int]] = {}, {}
        self._paths: tuple[dict[int, str], dict[int, str]] = {}, {}

    def __iter__(self) -> Iterator[str]:
        expected, found = self._graphs
        yield from _missing("", list(expected.roots), list(found.roots))
        waiting = collections.deque(
            (name, ref, found.roots[name]) for name, ref in expected.roots.items() if name in found.roots
        )
        while waiting:
            path, one, other = waiting.popleft()
            if isinstance(one, str) or isinstance(other, str):
                if one != other:
                    yield f"{path}: {self._text(0, one)} expected, {self._text(1, other)} found"
                continue
            met = [self._pairs[0].get(one), self._pairs[1].get(other)]
            if met == [other, one]:
                continue
            if met != [None, None]:
                yield self._alias(path, one, other, met)
                continue
            self._pairs[0][one], self._pairs[1][other] = other, one
            self._paths[0][one] = self._paths[1][other] = path
            mine, theirs = expected.nodes[one], found.nodes[other]
            if isinstance(mine.type, int) and isinstance(theirs.type, int):
                waiting.append((f"type({path})", mine.type, theirs.type))
            elif mine.type != theirs.type:
                yield f"{path}: {self._text(0, one)} expected, {self._text(1, other)} found"
                continue
            yield from _facts(path, mine, theirs)
            labels = [label for label, _ in theirs.edges]
            yield from _missing(path, [label for label, _ in mine.edges], labels)
            here = dict(theirs.edges)
            waiting.extend((path + label, ref, here[label]) for label, ref in mine.edges if label in here)

    def _alias(self, path: str, one: int, other: int, met: list[int | None]) -> str:
        if met[0] is not None:
            return f"{path}: the same object as {self._paths[0][one]} expected, another one found"
        return f"{path}: an object of its own expected, that of {self._paths[1][other]} found"

    def _text(self, side: int, ref: str | int) -> str:
        if isinstance(ref, str):
            return ref[:200]
        node = self._graphs[side].nodes[ref]
        if isinstance(node.type, int):
            return f"{self._graphs[side].nodes[node.type].facts.get('name')} object"
        name = node.facts.get("name")
        return node.type + (f" {name}" if name else "")


def _facts(path: str, mine: Node, theirs: Node) -> Iterator[str]:
    for name, value in mine.facts.items():
        if name == "requires_grad" and mine.facts["graph"]:
            continue  # a tensor comes without the graph it was computed in (README, Limits)
        if name != "graph" and theirs.facts.get(name) != value:
            yield f"{path} ({name}): {str(value)[:300]} expected, {str(theirs.facts.get(name))[:300]} found"


def _missing(path: str, expected: list[str], found: list[str]) -> Iterator[str]:
    if expected == found:
        return
    for label in expected:
        if label not in found:
            yield f"{path}{label}: missing"
    for label in found:
        if label not in expected:
            yield f"{path}{label}: not expected"
    if path and sorted(expected) == sorted(found):
        yield f"{path}: in the order {expected[:20]} expected, {found[:20]} found"

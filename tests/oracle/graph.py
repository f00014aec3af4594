"""What stands in a namespace, as a graph that another process can compare with its own.

A node is one object: its type, facts (values that say what it is) and edges (what it holds). Two
namespaces are the same when one walk through both meets the same facts, and the same object again
wherever the other one does.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oracle.atoms import atom, name_of, of_notebook
from oracle.readers import READERS

__all__ = ["Graph", "Node", "describe", "differences"]

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


def describe(roots: dict[str, Any], notebook: dict[str, Any]) -> Graph:
    """Describe values and all they hold; the notebook's names are the globals of its functions."""
    return _Describer(notebook).graph(roots)


class _Describer:
    def __init__(self, notebook: dict[str, Any]) -> None:
        self._notebook = notebook
        self._nodes: list[Node] = []
        self._numbers: dict[int, int] = {}
        self._values: list[Any] = []  # by number; also keeps them alive
        self._views: list[tuple[int, int, int]] = []
        self._unordered: set[int] = set()  # attributes of a library's objects

    def graph(self, roots: dict[str, Any]) -> Graph:
        found = {name: self.ref(value) for name, value in roots.items()}
        for number in itertools.count():
            if number == len(self._values):
                break
            self._fill(self._nodes[number], number, self._values[number])
        self._add_memory()
        return Graph(self._nodes, found)

    def ref(self, value: Any) -> str | int:
        known = atom(value)
        if known is not None:
            return known
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
            self._nodes.append(Node(""))
        return number

    def _fill(self, node: Node, number: int, value: Any) -> None:
        cls = type(value)
        node.type = self.ref(cls) if of_notebook(cls) else name_of(cls)
        for matches, read in READERS:
            if matches(value):
                facts, edges = read(self, number, value)
                node.facts = facts
                if isinstance(node.type, str):
                    self._unordered |= {id(part) for label, part in edges if not label}
                if id(value) in self._unordered:
                    edges = sorted(edges, key=lambda edge: edge[0])
                node.edges = [(label, self.ref(part)) for label, part in edges]
                return

    def view(self, number: int, low: int, high: int) -> None:
        """Note that an object looks at memory."""
        if high > low:
            self._views.append((number, low, high))

    def _add_memory(self) -> None:
        """Give views that overlap one node of memory, and each its place in it."""
        end, start = -1, 0
        for number, low, high in sorted(self._views, key=lambda view: view[1]):
            if low >= end:
                start = low
                self._nodes.append(Node("memory"))
            end = max(end, high)
            self._nodes[number].edges.append((" (memory)", len(self._nodes) - 1))
            self._nodes[number].facts["place in memory"] = low - start

    def is_of_notebook(self, namespace: dict[str, Any]) -> bool:
        return namespace is self._notebook


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
            (name, ref, found.roots[name])
            for name, ref in expected.roots.items()
            if name in found.roots
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
            waiting.extend(
                (path + label, ref, here[label]) for label, ref in mine.edges if label in here
            )

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
            yield (
                f"{path} ({name}): {str(value)[:300]} expected, {str(theirs.facts.get(name))[:300]}"
                " found"
            )


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

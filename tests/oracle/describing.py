"""A namespace as a graph."""

from __future__ import annotations

import itertools
from typing import Any

from oracle.atoms import atom, name_of, of_notebook
from oracle.graph import Graph, Node
from oracle.readers import READERS

__all__ = ["describe"]


def describe(roots: dict[str, Any], notebook: dict[str, Any]) -> Graph:
    """Describe values and all they hold.

    Args:
        roots: the values, by name.
        notebook: the namespace that functions of the notebook have as their globals.
    """
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

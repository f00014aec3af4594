"""Which states of a stream are kept: that of its start, the newest that serves all that may be asked for, later ones."""

from __future__ import annotations

from taas.delivery.messages import StreamState

__all__ = ["States"]


class States:
    """States of one stream, in their order. Three at most, where one is added only when the last has become usable."""

    def __init__(self, known: list[StreamState] | None = None) -> None:
        self.known = list(known or [])

    @property
    def last(self) -> int:
        """Position of the newest one; -1 if there is none."""
        return self.known[-1].position if self.known else -1

    def add(self, state: StreamState) -> None:
        """Keep one that was taken after all that are known."""
        if state.position > self.last:
            self.known.append(state)

    def before(self, position: int) -> list[StreamState]:
        """Return those from which the element at ``position`` can be made, the one with least to make last."""
        return [state for state in self.known if state.position <= position]

    def settle(self, floor: int) -> None:
        """Nothing below ``floor`` will be asked for, but by ``--uneven pad``, which begins at the start again."""
        usable = self.before(floor)
        if usable:
            self.known = [s for s in self.known if s.position == 0 or s.position >= usable[-1].position]

    def forget_after(self, floor: int) -> None:
        """Another owner takes over, and will take later ones itself."""
        self.known = self.before(floor)

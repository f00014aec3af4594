"""Streams whose owners die of an element: given up after three, named at its place. Pure; no process."""

from __future__ import annotations

from typing import Any

import pytest

from taas.delivery.board import NOTHING_AHEAD
from taas.delivery.ledger import Ledger
from taas.delivery.messages import (
    Announced,
    Begin,
    Doomed,
    Ended,
    Feed,
    Lease,
    LoaderFacts,
    OpenPlan,
    Planned,
    RankHello,
    Result,
    Which,
)
from taas.delivery.plan import unpack_place


class Owners:
    """Ledger, ranks, and two workers whose successors come at once; element ``deadly`` kills who makes it."""

    def __init__(
        self,
        streams: int,
        ranks: int,
        deadly: tuple[int, int],
        lost: tuple[int, int] | None = None,
        idle: bool = False,
        **config: Any,
    ) -> None:
        """``lost``: the first owner makes it, and dies with all that it has made; then it is ``deadly``.

        ``idle``: the ranks consume nothing.
        """
        self.deadly, self.lost, self.deaths, self.names = deadly, lost, 0, 0
        self.idle = idle
        self.arrived: set[int] = set()
        self.ledger = Ledger(ranks, 1 << 14, **config)
        self.got: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.doomed: list[Doomed] = []
        self.ended: list[Ended] = []
        self.busy: dict[str, dict[int, tuple[int, int]]] = {}
        self.ledger.book.hello([LoaderFacts("d", None, streams)])
        for rank in range(ranks):
            self.ledger.rank_joined(RankHello(rank, 1, "", b"", True))
        for _ in range(2):
            self.hire()
        for rank in range(ranks):
            self.ledger.book.begin(rank, Begin(0, 0, None))

    def hire(self) -> None:
        name = f"w0.{self.names}"
        self.names += 1
        self.busy[name] = {}
        self.ledger.worker_joined(name, "h0", True)

    def run(self) -> None:
        """Until nothing more happens."""
        for _ in range(1000):
            self.ledger.pump(0.0)
            messages = list(self.ledger.outbox)
            self.ledger.outbox.clear()
            for peer, message in messages:
                self.route(peer, message)
            if not messages and not self.step():
                return
        raise AssertionError("owners die without end")

    def route(self, peer: str, message: Any) -> None:
        if isinstance(message, OpenPlan):
            self.ledger.book.planned(Planned(message.plan, 5, [], False))
        elif isinstance(message, Which):
            self.ledger.lacking(message.attempts, [a for a in message.attempts if a not in self.arrived])
        elif isinstance(message, Doomed):
            self.doomed.append(message)
        elif isinstance(message, Ended):
            self.ended.append(message)
        elif isinstance(message, Lease) and peer in self.busy:
            for ticket in message.tickets:
                stream, position = unpack_place(ticket.index)
                if stream == self.deadly[0] and position >= self.deadly[1]:
                    self.die(peer, ticket.attempt)
                    return
                self.got[ticket.rank].append((stream, position))
                self.ledger.made(peer, [Result(ticket.attempt, 0, 100, 0.001, True)])
                self.arrived.add(ticket.attempt)
                if not self.idle:
                    self.ledger.book.consume(ticket.rank, ticket.plan, ticket.seq // len(self.got) + 1)
        elif isinstance(message, Feed) and peer in self.busy:
            self.busy[peer][message.stream] = (message.plan, message.upto)

    def step(self) -> bool:
        """Owners make what they were fed, up to where they die."""
        active = False
        for name, feeds in list(self.busy.items()):
            for stream, (plan, upto) in list(feeds.items()):
                del feeds[stream]
                active = True
                made = min(upto, self.deadly[1]) if stream == self.deadly[0] else upto
                self.ledger.announced(name, Announced(plan, stream, made, False))
                if made < upto:
                    self.die(name, -1, (plan, stream, made))
                    break
                if self.lost is not None:
                    self.deadly, self.lost = self.lost, None
                    self.die(name)
                    break
        return active

    def die(self, name: str, attempt: int = -1, ahead: tuple[int, int, int] = NOTHING_AHEAD) -> None:
        del self.busy[name]
        self.deaths += 1
        self.ledger.worker_lost(name, attempt, "SIGSEGV", ahead)
        self.hire()


@pytest.mark.parametrize("uneven", ["drop", "pad", "raise"])
@pytest.mark.parametrize("position", [0, 1, 7])
@pytest.mark.parametrize(("streams", "ranks"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_an_element_that_kills_its_streams_owners_ends_the_iteration_at_its_place(
    streams: int, ranks: int, position: int, uneven: Any
) -> None:
    """Whole rows before it are delivered; then every rank is told which element, of which stream, and how they died."""
    world = Owners(streams, ranks, (streams - 1, position), uneven=uneven)
    world.run()
    assert 3 <= world.deaths <= 4
    before = [(stream, at) for at in range(position + 1) for stream in range(streams)][:-1]
    steps = len(before) // ranks
    assert [sorted(got) for got in world.got] == [
        sorted(before[r : steps * ranks : ranks]) for r in range(ranks)
    ]
    assert not world.doomed
    assert len(world.ended) == ranks
    for ended in world.ended:
        assert ended.steps == steps
        assert f"element {position} of stream {streams - 1} killed" in ended.refusal
        assert "SIGSEGV" in ended.refusal


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("position", [0, 1, 2, 5, 12])
def test_owners_that_die_where_others_lived_leave_no_rank_waiting(
    ranks: int, position: int, idle: bool
) -> None:
    """What was announced already, and now kills who makes it again, is raised where the ranks wait for it."""
    world = Owners(1, ranks, (0, 99), lost=(0, position), idle=idle, prebuffer=16)
    world.run()
    for rank, got in enumerate(world.got):
        assert got == [(0, at) for at in range(rank, 99, ranks)][: len(got)]
        missing = range(len(got) * ranks + rank, world.ended[rank].steps * ranks, ranks)
        doomed = [message.seq for message in world.doomed if message.seq % ranks == rank]
        assert doomed == [seq for seq in missing if seq >= position]
        assert idle or doomed == list(missing)
    assert f"element {position} of stream 0 killed" in world.ended[0].refusal
    assert world.deaths == 4

"""What holds no socket: plan, ledger, planner.

In order, exactly once, in bounded memory under any interleaving.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas.delivery.ledger import Ledger
from taas.delivery.plan import Plan, plan_number
from taas.protocol.delivery_messages import (
    Begin,
    Cancel,
    Draw,
    Ended,
    Hello,
    LoaderFacts,
    Peer,
    Planned,
    PlanProgress,
    Progress,
    Result,
)
from taas.protocol.delivery_orders import DeliveryConfig, new_keys


@given(
    length=st.integers(0, 40),
    ranks=st.integers(1, 9),
    uneven=st.sampled_from(["drop", "pad", "raise"]),
)
def test_rows_are_whole_and_in_order(length: int, ranks: int, uneven: Any) -> None:
    """Element seq is step seq // N of rank seq % N.

    The last row is dropped, or filled up from the first.
    """
    plan = Plan(1, 0, 0, None, ranks, uneven)
    plan.extend([str(i).encode() for i in range(length)], 7)
    plan.end()
    queues = [[int(work.index) for work in view.queue] for view in plan.ranks]
    merged = [i for row in zip(*queues, strict=True) for i in row]
    whole = length // ranks * ranks
    rest = length - whole
    if uneven == "pad" and rest:
        padding = [i % length for i in range(ranks - rest)]
        assert merged == [*range(length), *padding]
    else:
        assert merged == list(range(whole))
    assert plan.rows == len(queues[0])
    assert bool(plan.refusal) == (uneven == "raise" and rest > 0)


def config_of(ranks: int, slab: int, **config: Any) -> DeliveryConfig:
    return DeliveryConfig(new_keys(), ranks, slab, "a folder", **config)


class World:
    """A ledger among simulated planner, workers and ranks, with messages in a random order."""

    def __init__(
        self, rng: random.Random, lengths: list[int], ranks: int, workers: int, **config: Any
    ) -> None:
        self.rng, self.lengths, self.n = rng, lengths, ranks
        self.ledger = Ledger(config_of(ranks, 1 << 16, **config))
        self.facts = [LoaderFacts(f"l{i}", length, epoch=0) for i, length in enumerate(lengths)]
        self.drawn: dict[int, tuple[int, int]] = {}
        self.todo: dict[Peer, deque[Any]] = {}
        self.pipes: dict[tuple[Peer, int], deque[Any]] = {}
        self.results: dict[Peer, list[Result]] = {}
        self.here: list[dict[tuple[int, int], Any]] = [{} for _ in range(ranks)]
        self.closed: list[set[int]] = [set() for _ in range(ranks)]
        self.names = 0
        self.deaths = 0
        self.asked: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.held: list[list[Any]] = [[] for _ in range(ranks)]
        self.ends: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.ledger.open_plans(Hello(loaders=tuple(self.facts)))
        for rank in range(ranks):
            self.ledger.add_rank(rank, Hello())
        for _ in range(workers):
            self.hire()
        self.pump()

    def hire(self) -> None:
        name = Peer("worker", 0, self.names)
        self.names += 1
        self.todo[name] = deque()
        self.results[name] = []
        self.ledger.add_worker(name, self.rng.random() < 0.8)
        self.pump()

    def pump(self) -> None:
        while True:
            self.ledger.pump()
            if not self.ledger.outbox:
                return
            messages = list(self.ledger.outbox)
            self.ledger.outbox.clear()
            for peer, message in messages:
                self.route(peer, message)

    def route(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Draw):
            loader, at = self.drawn.get(message.plan, (message.loader, 0))
            upto = min(at + message.count, self.lengths[loader])
            self.drawn[message.plan] = (loader, upto)
            indices = [pickle.dumps(i) for i in range(at, upto)]
            self.ledger.plans.take_planned(
                Planned(message.plan, 5, indices, upto == self.lengths[loader])
            )
        elif isinstance(message, list):
            for ticket in message:
                self.check_slot(ticket)
                self.todo[peer].append(ticket)
        elif isinstance(message, Ended):
            self.ends[peer.number][message.plan] = message.steps
        elif isinstance(message, Cancel) and peer.role == "rank":
            self.forget(peer.number, message.plan)

    def check_slot(self, new: Any) -> None:
        """Nobody writes where another one does, or where a rank reads or will read."""
        for ticket in self.in_use() if new.capacity else ():
            if ticket.capacity:
                assert (
                    new.offset >= ticket.offset + ticket.capacity
                    or new.offset + new.capacity <= ticket.offset
                )

    def in_use(self) -> Iterator[Any]:
        for todo in self.todo.values():
            yield from todo
        for (_, rank), pipe in self.pipes.items():
            yield from (ticket for ticket in pipe if self.wants(rank, ticket))
        for here, held in zip(self.here, self.held, strict=True):
            yield from (*here.values(), *held)

    def wants(self, rank: int, ticket: Any) -> bool:
        """Whether the rank has not yielded it, and will look at it."""
        return ticket.plan not in self.closed[rank] and (
            ticket.seq // self.n >= self.asked[rank].get(ticket.plan, 0)
        )

    def work(self) -> None:
        """Some worker makes one element; its bytes and its report leave on different ways."""
        busy = [name for name, todo in self.todo.items() if todo]
        if not busy:
            return
        name = self.rng.choice(busy)
        ticket = self.todo[name].popleft()
        self.pipes.setdefault((name, ticket.rank), deque()).append(ticket)
        self.results[name].append(Result(ticket.number, self.rng.randrange(1, 6000), 0.001))
        if self.rng.random() < 0.5:
            self.report(name)

    def report(self, name: Peer) -> None:
        results, self.results[name] = self.results[name], []
        self.ledger.take_results(name, results)
        self.pump()

    def arrive(self, rank: int) -> None:
        for (_, to), pipe in list(self.pipes.items()):
            if to == rank:
                while pipe:
                    ticket = pipe.popleft()
                    if self.wants(rank, ticket):
                        self.here[rank].setdefault((ticket.plan, ticket.seq), ticket)

    def kill(self) -> None:
        """A worker dies: what it had not made is gone; of what it sent, any tail may be lost."""
        name = self.rng.choice(list(self.todo))
        self.todo.pop(name)
        self.results.pop(name)
        for (of, _), pipe in self.pipes.items():
            if of == name:
                for _ in range(self.rng.randrange(len(pipe) + 1)):
                    pipe.pop()
        self.deaths += 1
        self.ledger.worker_lost(name, -1, "SIGKILL")
        self.hire()

    def take(self, rank: int, plan: int, step: int) -> int | None:
        """The rank asks for its element, which it holds for a while."""
        self.arrive(rank)
        self.asked[rank][plan] = step
        ticket = self.here[rank].pop((plan, step * self.n + rank), None)
        if ticket is None:
            return None
        self.asked[rank][plan] = step + 1
        self.held[rank].append(ticket)
        if self.rng.random() < 0.7:
            self.let_go(rank)
        return int(pickle.loads(ticket.which))

    def let_go(self, rank: int) -> None:
        """Nobody uses what the rank holds, some of it was held for long."""
        numbers = [ticket.number for ticket in self.held[rank]]
        self.held[rank].clear()
        self.ledger.take_progress(rank, Progress([], numbers, 0.0))

    def close(self, rank: int, plan: int, consumed: int) -> None:
        """The rank has ended a loop: what is here of it is dropped."""
        self.forget(rank, plan)
        self.ledger.take_progress(
            rank, Progress([PlanProgress(plan, consumed, consumed, True)], [], 0.0)
        )

    def forget(self, rank: int, plan: int) -> None:
        self.closed[rank].add(plan)
        for place in [place for place in self.here[rank] if place[0] == plan]:
            del self.here[rank][place]


def iterate(world: World, epochs: int, kills: int, budget: int = 200_000) -> list[list[list[int]]]:
    """Run every rank through ``epochs`` iterations of every loader; return what each got.

    They set epochs that nobody predicts: what was made for others is dropped.
    """
    got: list[list[list[int]]] = [
        [[] for _ in range(epochs * len(world.lengths))] for _ in range(world.n)
    ]
    at = [0] * world.n
    begun = [False] * world.n
    while any(a < epochs * len(world.lengths) for a in at):
        budget -= 1
        assert budget, "the ledger is stuck"
        for _ in range(world.rng.randrange(4)):
            world.work()
        if kills and world.rng.random() < 0.02:
            kills -= 1
            world.kill()
        for name in list(world.results):
            if world.results[name] and world.rng.random() < 0.3:
                world.report(name)
        rank = world.rng.randrange(world.n)
        if at[rank] == epochs * len(world.lengths):
            continue
        loader, iteration = at[rank] % len(world.lengths), at[rank] // len(world.lengths)
        if not begun[rank]:
            world.ledger.plans.begin(rank, Begin(loader, iteration, 2 * iteration))
            begun[rank] = True
            world.pump()
        plan = plan_number(loader, iteration, 2 * iteration)
        mine = got[rank][at[rank]]
        world.ledger.plans.consume(rank, plan, len(mine), len(mine))
        element = world.take(rank, plan, len(mine))
        if element is not None:
            mine.append(element)
        elif world.ends[rank].get(plan) == len(mine):
            world.close(rank, plan, len(mine))
            at[rank] += 1
            begun[rank] = False
        world.pump()
    return got


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    ranks=st.integers(1, 4),
    workers=st.integers(1, 4),
    kills=st.integers(0, 6),
    seed=st.integers(0, 10_000),
)
def test_exactly_once_in_order_under_any_interleaving(
    lengths: list[int], ranks: int, workers: int, kills: int, seed: int
) -> None:
    """Whatever crosses and whoever dies.

    Each rank gets its elements once, in order, no byte written twice.
    """
    world = World(random.Random(seed), lengths, ranks, workers)
    got = iterate(world, 2, kills)
    for at in range(2 * len(lengths)):
        merged = [i for row in zip(*(mine[at] for mine in got), strict=True) for i in row]
        assert merged == list(range(lengths[at % len(lengths)] // ranks * ranks))

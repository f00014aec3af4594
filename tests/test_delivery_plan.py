"""What holds no socket: plan, ledger, planner; in order, exactly once, in bounded memory under any interleaving."""

from __future__ import annotations

import pickle
import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler

from taas.delivery.config import DeliveryConfig, new_keys
from taas.delivery.ledger import Ledger
from taas.delivery.making import rngs_now
from taas.delivery.messages import (
    Begin,
    Cancel,
    Draw,
    Ended,
    FinishPlans,
    Hello,
    LoaderFacts,
    Peer,
    Planned,
    PlanProgress,
    Progress,
    Result,
)
from taas.delivery.plan import Plan, element_seed, plan_number
from taas.delivery.planner import LoaderPlans, Planner
from taas.delivery.registered import take_apart
from taas.delivery.slab import SlotTable


@given(length=st.integers(0, 40), ranks=st.integers(1, 9), uneven=st.sampled_from(["drop", "pad", "raise"]))
def test_rows_are_whole_and_in_order(length: int, ranks: int, uneven: Any) -> None:
    """Element seq is step seq // N of rank seq % N; the last row is dropped, or filled up from the first."""
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


def test_element_seeds_differ_and_depend_on_the_plan_alone() -> None:
    """A hundred thousand neighbours have as many seeds; the same element always has the same."""
    seeds = {element_seed(b, i, s) for b in range(10) for i in range(10) for s in range(1000)}
    assert len(seeds) == 100_000
    assert element_seed(3, 1, 4) == element_seed(3, 1, 4)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@given(
    steps=st.lists(st.one_of(st.integers(1, 30_000), st.just(-1)), max_size=60),
    reserved=st.one_of(st.none(), st.integers(0, 60_000)),
)
def test_slots_never_overlap_and_merge_again(steps: list[int], reserved: int | None) -> None:
    """Taken extents are disjoint and reserved; when all are given back, the table is one piece again."""
    table = SlotTable(1 << 16, lambda upto: upto if reserved is None else min(upto, reserved))
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step < 0 and taken:
            table.give(*taken.pop(len(taken) // 2))
        elif step > 0:
            offset = table.take(step)
            if offset is not None:
                assert all(offset + step <= o or o + n <= offset for o, n in taken)
                assert reserved is None or offset + step <= reserved
                taken.append((offset, step))
    for place in taken:
        table.give(*place)
    assert sum(length for _, length in table._extents) == table.size
    assert table.size == 0 or table.take(table.size) == 0 or reserved is not None


def config_of(ranks: int, slab: int, **config: Any) -> DeliveryConfig:
    return DeliveryConfig(new_keys(), ranks, slab, "a folder", **config)


class World:
    """A ledger among simulated planner, workers and ranks, whose messages cross in a random order."""

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
        self.ledger.planner_joined(Hello(loaders=tuple(self.facts)))
        for rank in range(ranks):
            self.ledger.rank_joined(rank, Hello())
        for _ in range(workers):
            self.hire()
        self.pump()

    def hire(self) -> None:
        name = Peer("worker", 0, self.names)
        self.names += 1
        self.todo[name] = deque()
        self.results[name] = []
        self.ledger.worker_joined(name, self.rng.random() < 0.8)
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
            self.ledger.plans.planned(Planned(message.plan, 5, indices, upto == self.lengths[loader]))
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
        self.ledger.made(name, results)
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
        self.ledger.progressed(rank, Progress([], numbers, 0.0))

    def close(self, rank: int, plan: int, consumed: int) -> None:
        """The rank has ended a loop: what is here of it is dropped."""
        self.forget(rank, plan)
        self.ledger.progressed(rank, Progress([PlanProgress(plan, consumed, consumed, True)], [], 0.0))

    def forget(self, rank: int, plan: int) -> None:
        self.closed[rank].add(plan)
        for place in [place for place in self.here[rank] if place[0] == plan]:
            del self.here[rank][place]


def iterate(world: World, epochs: int, kills: int, budget: int = 200_000) -> list[list[list[int]]]:
    """Run every rank through ``epochs`` iterations of every loader; return what each got.

    They set epochs that nobody predicts: what was made for others is dropped.
    """
    got: list[list[list[int]]] = [[[] for _ in range(epochs * len(world.lengths))] for _ in range(world.n)]
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
    """Whatever crosses and whoever dies: each rank gets its elements once, in order, no byte written twice."""
    world = World(random.Random(seed), lengths, ranks, workers)
    got = iterate(world, 2, kills)
    for at in range(2 * len(lengths)):
        merged = [i for row in zip(*(mine[at] for mine in got), strict=True) for i in row]
        assert merged == list(range(lengths[at % len(lengths)] // ranks * ranks))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_all_slots_come_back(seed: int) -> None:
    """When every element was released and every plan closed or dropped, all is free, and each was counted once."""
    world = World(random.Random(seed), [40, 23], 3, 3)
    iterate(world, 2, 4)
    for _ in range(1000):
        world.work()
    for name in list(world.results):
        world.report(name)
    for rank in range(3):
        world.arrive(rank)
        world.let_go(rank)
        for plan in {plan for plan, _ in world.here[rank]}:
            world.close(rank, plan, 0)
    world.pump()
    assert not world.ledger.works
    assert [book.delivered for book in world.ledger.plans.loaders] == [2 * 39, 2 * 21]
    assert not any(book.ready for book in world.ledger.plans.loaders)
    for state in world.ledger.room.ranks:
        assert sum(length for _, length in state.slots._extents) == state.slots.size


@pytest.mark.parametrize("prebuffer", [2, 4, 8])
def test_a_loader_nobody_iterates_takes_only_its_first_elements(prebuffer: int) -> None:
    """Before a rank begins, no more than ``prebuffer`` elements are leased of a loader."""
    world = World(random.Random(1), [1000], 2, 2, prebuffer=prebuffer)
    for _ in range(200):
        world.work()
        for name in list(world.results):
            world.report(name)
    assert world.ledger.plans.loaders[0].ready == prebuffer
    [book] = world.ledger.plans.loaders
    [worker, *_] = (work.leases[0].worker for work in world.ledger.works.values())
    lost = sum(work.leases[0].worker == worker for work in world.ledger.works.values())
    world.ledger.worker_lost(worker, -1, "SIGKILL")
    assert book.ready == prebuffer - lost


# ── samplers in the planner ──────────────────────────────────────────────────────────────────────────


class Raising(Sampler[int]):
    """Three indices, then an error."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise ValueError("no such index file")


def test_a_sampler_that_raises_after_the_cell_leaves_the_other_loaders_their_states() -> None:
    """It is named with what it raised; the planner goes on."""
    parts = {"late": DataLoader(range(9), sampler=Raising(), batch_size=None), "well": DataLoader(range(9))}
    plans = [LoaderPlans(name, take_apart(it), rngs_now(), 1) for name, it in parts.items()]
    planner = Planner(dict(enumerate(plans)))
    for index in range(2):
        planner.answer(Draw(index, index, 0, None, 0))
    final = planner.answer(FinishPlans([(0, 0, None), (1, 0, None)]))
    assert list(msgspec.msgpack.decode(final.states)) == ["well"]
    assert final.unknown == {"late": "its sampler raised ValueError: no such index file"}


class Epochs(Sampler[int]):
    """As many indices as its epoch says, a draw each."""

    def __init__(self) -> None:
        self.epoch, self.generator = 3, torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(9, (), generator=self.generator)) for _ in range(self.epoch))

    def __len__(self) -> int:
        return self.epoch


def test_an_epoch_that_was_planned_in_vain_leaves_no_trace_in_the_generators() -> None:
    """They end where the one that the ranks chose leaves them, also if these leave it early."""
    sampler = Epochs()
    loader = DataLoader(range(9), sampler=sampler, batch_size=None)
    planner = Planner({0: LoaderPlans("d", take_apart(loader), rngs_now(), 1)})
    start = sampler.generator.get_state()
    for message in (Draw(0, 0, 0, 3, 4), Cancel(0, 0), Draw(1, 0, 0, 5, 2)):
        planner.answer(message)
    [states] = msgspec.msgpack.decode(planner.answer(FinishPlans([(0, 0, 5)])).states).values()
    sampler.generator.set_state(start)
    sampler.set_epoch(5)
    list(loader)
    assert sampler.generator.get_state().numpy().tobytes() in states.values()


def test_an_index_that_cannot_be_pickled_fails_at_its_place() -> None:
    """Those before it are planned; one that cloudpickle can take is none of them."""

    class Key(NamedTuple):
        number: int

    keys = [Key(0), Key(1), threading.Lock(), Key(3)]
    keyed = DataLoader(range(4), sampler=keys, batch_size=None)
    planner = Planner({0: LoaderPlans("d", take_apart(keyed), rngs_now(), 1)})
    first, second = (planner.answer(Draw(0, 0, 0, None, 100)) for _ in range(2))
    assert ([pickle.loads(index) for index in first.indices], first.ended) == ([(0,), (1,)], False)
    assert (second.indices, second.ended) == ([], True)
    error, text = pickle.loads(second.failure)
    assert "cannot pickle '_thread.lock' object" in str(error)
    assert "cannot pickle '_thread.lock' object" in text

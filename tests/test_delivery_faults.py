"""Exactly once, in order, whatever dies, freezes, fills up, hoards or lags.

User errors are raised at their place.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from delivery_run import DeliveryRun, wait_for_delivery
from notebook_harness import until
from torch.utils.data import DataLoader, Dataset, IterableDataset

from taas import rehearsal
from taas.delivery.connection import Element, Holdings
from taas.delivery.pinning import PinAhead
from taas.delivery.slab import Slabs
from taas.errors import DeliveryError, RanksDisagree, UnitsExhausted
from taas.protocol.delivery_messages import ElementArrival, Failed, HostLost, Note, ProgressReport

pytestmark = pytest.mark.slow


class Slow(Dataset):
    """Ten milliseconds an element."""

    def __init__(
        self, length: int = 120, seconds: float = 0.01, shape: tuple[int, ...] = (64,)
    ) -> None:
        self.length, self.seconds, self.shape = length, seconds, shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full(self.shape, float(index)), torch.rand(1)


def values(loader: Any) -> list[Any]:
    return [(x[:, 0].tolist(), r.tolist()) for x, r in loader]


def everything(_rank: int, loaders: dict[str, Any]) -> Any:
    return values(loaders["d"])


def workers_of(run: DeliveryRun) -> list[psutil.Process]:
    """All data workers that run just now: the worker pools' children."""
    found = []
    for worker_pool in run.children[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in psutil.Process(worker_pool.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if worker.status() != psutil.STATUS_ZOMBIE:
                        found.append(worker)
    return found


def all_workers_of(run: DeliveryRun, count: int) -> list[psutil.Process]:
    """Wait until all data workers have been forked.

    The first may have made elements before the last is there.
    """
    while len(workers := workers_of(run)) < count:
        time.sleep(0.01)
    return workers


def kill_workers(run: DeliveryRun, most: int | None = None) -> set[int]:
    """SIGKILL all data workers, or so many, at least one.

    Waits for one where all are just being replaced.

    Returns their process ids.
    """
    while not (workers := workers_of(run)[:most]):
        time.sleep(0.01)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    return {worker.pid for worker in workers}


def undisturbed(loader: DataLoader, ranks: int, **config: Any) -> Any:
    with DeliveryRun({"d": loader}, ranks=ranks, **config) as run:
        return run.ranks(everything)


def slow_loader() -> DataLoader:
    return DataLoader(
        Slow(), batch_size=1, generator=torch.Generator().manual_seed(3), shuffle=True
    )


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_killed_worker_loses_and_doubles_nothing(shared: bool) -> None:
    """Workers SIGKILLed half-way: every element comes once, in order, bit-identical."""
    with DeliveryRun({"d": slow_loader()}, ranks=2, processes=3, shared=shared) as run:
        ranks = run.start_ranks(everything)
        for count in (20, 50, 80):
            wait_for_delivery(run, count)
            kill_workers(run, 1)
        disturbed = run.results(ranks)
    assert disturbed == undisturbed(slow_loader(), 2)


@pytest.mark.parametrize(
    "how", ["shared memory", "frozen", "tcp", "tcp, and the coordinator is told"]
)
def test_a_lost_data_vm_loses_and_doubles_nothing(how: str) -> None:
    """A pool SIGKILLed, its workers with it, or all of them SIGSTOPped: the other VM goes on.

    The loss is reported.
    """
    shared, silence = "tcp" not in how, 5.0 if how in ("frozen", "tcp") else 60.0
    (quarter, reached), (lost, know) = os.pipe(), os.pipe()

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        batches = iter(loaders["d"])
        got = [next(batches) for _ in range(15)]
        os.write(reached, b".")
        os.read(lost, 1)
        return values([*got, *batches])

    with DeliveryRun(
        {"d": slow_loader()}, ranks=2, vms=2, processes=2, shared=shared, silence=silence
    ) as run:
        while run.reports[-1].workers < 4:
            run.wait_for(ProgressReport)
        ranks = run.start_ranks(body)
        for _ in ranks:
            os.read(quarter, 1)
        pool = psutil.Process(run.children[1].pid)
        ended = [pool, *pool.children()]
        for process in ended if how == "frozen" else ended[:1]:
            process.suspend() if how == "frozen" else process.kill()
        if "told" in how:
            run.coordinator.send(HostLost(vm=0, cause="its node has no power"))
        assert run.wait_for(HostLost).vm == 0
        os.write(know, b"..")
        disturbed = run.results(ranks)
        until(lambda: pool.status() == psutil.STATUS_ZOMBIE)
    for fd in (quarter, reached, lost, know):
        os.close(fd)
    assert disturbed == undisturbed(slow_loader(), 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_data_vms_are_needed_no_more_when_all_units_were_consumed(number: signal.Signals) -> None:
    """Their end is no loss then, and nobody waits for one that does not answer.

    The cell goes on to its own end.
    """
    reader, writer = os.pipe()

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        got = everything(rank, loaders)
        os.read(reader, 1)  # the cell goes on without elements
        return got

    units, loader = {"*": 40}, slow_loader()
    with DeliveryRun({"d": loader}, ranks=2, vms=2, processes=2, units=units, alone=0.0) as run:
        ranks = run.start_ranks(body)
        wait_for_delivery(run, 40)
        for process in [*workers_of(run), *(psutil.Process(pool.pid) for pool in run.children[1:])]:
            process.send_signal(number)
        while number == signal.SIGKILL and run.wait_for(ProgressReport).workers:
            pass
        os.write(writer, b"..")
        got = run.results(ranks)
        states = run.finish().states
    os.close(reader), os.close(writer)
    assert [len(mine) for mine in got] == [20, 20]
    assert states
    assert not [report for report in run.reports if isinstance(report, HostLost | Failed)]


def test_a_frozen_worker_holds_nobody_up() -> None:
    """Another one takes the place of a worker that is SIGSTOPped.

    Nothing is lost, nothing comes twice.
    """
    with DeliveryRun({"d": slow_loader()}, ranks=2, processes=3) as run:
        ranks = run.start_ranks(everything)
        wait_for_delivery(run, 30)
        frozen = workers_of(run)[0]
        frozen.suspend()
        results = run.results(ranks)
        assert not frozen.is_running()
    assert results == undisturbed(slow_loader(), 2)


def until_it_fails(_rank: int, loaders: dict[str, Any]) -> tuple[list[int], str]:
    """What arrives before an error, and what that says."""
    got = []
    try:
        for x, _ in loaders["d"]:
            got.append(int(x[0, 0]))
    except DeliveryError as error:
        return got, str(error)
    return got, ""


def test_a_poisonous_index_ends_with_its_name() -> None:
    """An index that kills every worker is given up after three, and named.

    The elements before it arrive.
    """

    class Poisonous(Slow):
        def __getitem__(self, index: int) -> Any:
            if index == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with DeliveryRun({"d": DataLoader(Poisonous(40), batch_size=1)}, processes=2) as run:
        [(got, message)] = run.ranks(until_it_fails)
    assert got == list(range(17))
    assert "indices [17]" in message
    assert "SIGKILL" in message


def test_a_slab_that_cannot_be_reserved_falls_back_to_frames() -> None:
    """Where memory for a slab cannot be reserved, elements travel as frames.

    Nothing dies of SIGBUS.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    loader = DataLoader(Slow(40, 0.0, (1 << 16,)), batch_size=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # no file, no memfd may grow
    try:
        with DeliveryRun({"d": loader}, slab=64 << 20) as run:
            [got] = run.ranks(everything)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [x[0] for x, _ in got] == [float(i) for i in range(40)]


def test_a_rank_that_leaves_its_loop_harms_nobody() -> None:
    """One rank breaks out, the other goes on to the end; the next iteration is whole in both."""

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        first = []
        for x, _ in loaders["d"]:
            first.append(int(x[0, 0]))
            if rank == 0 and len(first) == 5:
                break
        return first, [int(x[0, 0]) for x, _ in loaders["d"]]

    with DeliveryRun({"d": DataLoader(Slow(60, 0.001), batch_size=1)}, ranks=2, processes=2) as run:
        results = run.ranks(body)
    assert [r[0] for r in results] == [[0, 2, 4, 6, 8], list(range(1, 60, 2))]
    assert [r[1] for r in results] == [list(range(0, 60, 2)), list(range(1, 60, 2))]


def test_a_slow_rank_starves_nobody() -> None:
    """A rank that takes nothing for a while does not keep the other from its whole epoch."""
    reader, writer = os.pipe()

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        if rank == 0:
            os.read(reader, 1)  # begins when the other has ended its epoch
        got = [int(x[0, 0]) for x, _ in loaders["d"]]
        if rank == 1:
            os.write(writer, b"!")
        return got

    loader = DataLoader(Slow(200, 0.0, (1 << 14,)), batch_size=1)
    with DeliveryRun({"d": loader}, ranks=2, slab=1 << 20) as run:
        results = run.ranks(body)
    os.close(reader), os.close(writer)
    assert results == [list(range(0, 200, 2)), list(range(1, 200, 2))]


def test_hoarded_and_changed_batches_are_never_overwritten() -> None:
    """A rank that keeps every batch gets copies once its slab is half held.

    Changes in place stay its own.
    """

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        kept = []
        for x, _ in loaders["d"]:
            x += 1000
            kept.append(x)
        return [(int(x.min()), int(x.max())) for x in kept]

    loader = DataLoader(Slow(64, 0.0, (1 << 16,)), batch_size=1)  # 256 KiB each, 16 MiB in all
    with DeliveryRun({"d": loader}, slab=4 << 20, processes=2) as run:
        [got] = run.ranks(body)
    assert got == [(1000 + i, 1000 + i) for i in range(64)]


def test_a_view_keeps_its_batch() -> None:
    """Views, NumPy arrays and what autograd saved keep the memory of a batch that was dropped."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        views, losses = [], []
        for x, _ in loaders["d"]:
            views.append(x[0, 5:7] if len(views) % 2 else x.numpy()[0, 5:7])
            weight = torch.ones_like(x, requires_grad=True)
            losses.append(((weight * x).sum(), weight, int(x[0, 0])))
            del x
        for loss, weight, value in losses:
            loss.backward()
            assert weight.grad is not None
            assert weight.grad.unique().tolist() == [float(value)]
        return [float(v[0]) for v in views]

    loader = DataLoader(Slow(60, 0.0, (1 << 12,)), batch_size=1)
    with DeliveryRun({"d": loader}, slab=1 << 20, processes=2) as run:
        [got] = run.ranks(body)
    assert got == [float(i) for i in range(60)]


class Pinnable:
    """What a ``collate_fn`` may return: it knows how it is pinned."""

    def __init__(self, items: list[Any]) -> None:
        self.value, self.pinned = int(items[0]), False

    def pin_memory(self) -> Pinnable:
        if self.value == 13:
            raise ValueError("not this one")
        self.pinned = True
        return self


def test_memory_is_pinned_as_torchs_loader_does() -> None:
    """In order; what pinning raises is raised at its own step."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        rehearsal.install(0, 1)
        got: list[Any] = []
        try:
            for batch in loaders["d"]:
                got.append((batch.value, batch.pinned))
        except ValueError as error:
            got.append(str(error))
        return got

    with DeliveryRun(
        {"d": DataLoader(torch.arange(30), collate_fn=Pinnable, pin_memory=True)}
    ) as run:
        [got] = run.ranks(body)
    assert got == [*((number, True) for number in range(13)), "not this one"]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (place, KeyError("no such image"))
        for place in ("getitem", "collate", "init", "sampler", "stream")
    ]
    + [("getitem", SystemExit(3)), ("sampler", KeyboardInterrupt()), ("stream", GeneratorExit())],
    ids=repr,
)
def test_what_user_code_raises_is_raised_at_its_place(place: str, error: BaseException) -> None:
    """As its own type, with where it happened; no worker dies of it.

    What would leave the cell without a word comes as an error.
    """

    def at(where: str, index: int) -> int:
        if where == place and index == 9:
            raise error
        return index

    class Numbers(Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return at("getitem", index)

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return (at("stream", index) for index in range(20))

    class Order(torch.utils.data.Sampler):
        def __iter__(self) -> Any:
            return (at("sampler", index) for index in range(20))

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        got = []
        try:
            for element in loaders["d"]:
                got.append(element)
        except Exception as raised:
            return got, type(raised), "".join(traceback.format_exception(raised))
        return got, None, ""

    loader = DataLoader(
        Stream() if place == "stream" else Numbers(),
        batch_size=None,
        sampler=None if place == "stream" else Order(),
        collate_fn=lambda index: at("collate", index),
        worker_init_fn=lambda _: at("init", 9),
    )
    with DeliveryRun({"d": loader}, processes=2) as run:
        before = {worker.pid for worker in all_workers_of(run, 2)}
        [(got, kind, said)] = run.ranks(body)
        assert before == {worker.pid for worker in workers_of(run)}
    assert got == ([] if place == "init" else list(range(9)))
    assert kind is (KeyError if isinstance(error, KeyError) else DeliveryError)
    assert type(error).__name__ in said
    assert "test_delivery_faults.py" in said


_taken = threading.Event()


def _interrupt_who_takes() -> None:
    """In the thread that pins: interrupt the main thread once it waits for the element."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        inner = sys._current_frames()[main]
        if inner.f_code is threading.Condition.wait.__code__:
            break
    signal.pthread_kill(main, signal.SIGINT)
    assert _taken.wait(60)


class _Interrupts:
    def __reduce__(self) -> Any:
        return _interrupt_who_takes, ()


def test_an_interrupt_while_an_element_is_pinned_costs_no_memory() -> None:
    """Its slot is given back like that of an element that was yielded."""
    fd = os.memfd_create("slabs")
    os.ftruncate(fd, 1 << 20)
    holdings = Holdings(Slabs(fd), 1 << 20)
    os.close(fd)
    stream = pickle.dumps(_Interrupts())
    element = Element(ElementArrival(7, 1, 0, 0, 4096, 64, False, len(stream)), stream, None)
    ahead = holdings.hold_ahead(element)
    assert ahead is not None
    pins = PinAhead()
    pins.begin(ahead)
    del ahead
    with pytest.raises(KeyboardInterrupt):
        pins.take(element)
    _taken.set()
    pins.end()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "taas-pins"]
    thread.join(60)
    assert holdings.take_released() == [7]


def test_units_end_the_iteration_then_the_next_one() -> None:
    """--units K gives K // N steps a rank over all epochs.

    The current loop ends, the next iter() raises.
    """

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        steps = [len(values(loaders["d"])) for _ in range(3)]
        try:
            iter(loaders["d"])
        except UnitsExhausted as error:
            return steps, str(error)
        return steps, ""

    loader = DataLoader(Slow(20, 0.0), batch_size=1)
    with DeliveryRun({"d": loader}, ranks=2, units={"*": 51}) as run:
        results = run.ranks(body)
    notes = [report.text for report in run.reports if isinstance(report, Note)]
    for steps, message in results:
        assert steps == [10, 10, 5]
        assert "--units d=NUMBER" in message
    assert any(
        "51 units over 2 ranks are 25 steps a rank; 1 units are left over" in note for note in notes
    )


def test_an_infinite_loader_ends_with_its_units() -> None:
    """A stream without end is taken for as long as the units say."""

    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            number = 0
            while True:
                yield torch.tensor([number])
                number += 1

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        return [x.tolist() for x in loaders["d"]], len(loaders["d"])

    with DeliveryRun(
        {"d": DataLoader(Endless(), batch_size=None)}, ranks=2, units={"d": 20}
    ) as run:
        results = run.ranks(body)
    assert results == [([[i] for i in range(r, 20, 2)], 10) for r in (0, 1)]


def test_ranks_that_disagree_about_the_epoch_are_told() -> None:
    """set_epoch with different numbers in different ranks is an error, not a silent mixture."""

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        loaders["d"].sampler.set_epoch(rank)
        try:
            return len(values(loaders["d"]))
        except RanksDisagree as error:
            return str(error)

    sampler = torch.utils.data.DistributedSampler(Slow(40, 0.0), num_replicas=2, rank=0)
    with DeliveryRun(
        {"d": DataLoader(Slow(40, 0.0), batch_size=1, sampler=sampler)}, ranks=2
    ) as run:
        results = run.ranks(body)
    assert sorted(isinstance(result, str) for result in results) == [False, True]


def test_a_stream_survives_its_owner() -> None:
    """The worker that owns an IterableDataset's stream dies: another one replays it.

    Nothing lost or doubled.
    """

    class Numbers(IterableDataset):
        def __iter__(self) -> Any:
            for number in range(81):
                time.sleep(0.01)
                yield torch.full((4,), float(number)), torch.rand(1)

    loader = DataLoader(Numbers(), batch_size=2)
    with DeliveryRun({"d": loader}, ranks=2, processes=3, uneven="pad") as run:
        ranks = run.start_ranks(everything)
        for count in (8, 20, 40):
            wait_for_delivery(run, count)
            kill_workers(run, 3)
        disturbed = run.results(ranks)
    assert disturbed == undisturbed(DataLoader(Numbers(), batch_size=2), 2, uneven="pad")


def test_memory_stays_within_the_slab() -> None:
    """A hundred times the buffer goes through it.

    Shared memory never grows beyond the stated bound.
    """
    slab = 2 << 20
    loader = DataLoader(Slow(200, 0.0, (1 << 18,)), batch_size=1)  # 1 MiB each

    def body(_rank: int, loaders: dict[str, Any]) -> int:
        return sum(1 for _ in loaders["d"])

    with DeliveryRun({"d": loader}, slab=slab, processes=2) as run:
        assert run.ranks(body) == [200]
        held = []
        for fd in Path(f"/proc/{run.coordinator.process.pid}/fd").iterdir():
            # the coordinator closes the ranks' connections meanwhile
            with contextlib.suppress(FileNotFoundError):
                if "taas-slab" in str(fd.readlink()):
                    held.append(fd.stat().st_blocks * 512)
    assert len(held) == 1
    assert held[0] <= slab


def test_memory_of_frames_is_bounded() -> None:
    """Between hosts a rank holds as much as a slab would, not what has passed.

    A hundred times that passes here.
    """
    slab = 4 << 20
    loader = DataLoader(Slow(400, 0.0, (1 << 18,)), batch_size=1)  # 1 MiB each

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        iterator = iter(loaders["d"])
        got = [float(next(iterator)[0][0, -1]) for _ in range(20)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        got += [float(x[0, -1]) for x, _ in iterator]
        return got, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10

    with DeliveryRun({"d": loader}, slab=slab, shared=False, processes=2) as run:
        [(got, more)] = run.ranks(body)
    assert got == [float(i) for i in range(400)]
    assert more < 16 * slab, more

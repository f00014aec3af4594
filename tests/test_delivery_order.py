"""The ranks together get what the notebook's own loader yields, in its order."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from delivery_run import DeliveryRun, wait_for_delivery
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import taas
from taas.delivery.registered import apply_final
from taas.errors import RanksDisagree, UnitsExhausted
from taas.protocol.delivery_messages import Note, ProgressReport
from taas.protocol.delivery_orders import ResumePoint

pytestmark = pytest.mark.slow

EPOCHS = 3


class Squares(Dataset):
    def __init__(self, length: int = 50) -> None:
        self.data = torch.arange(length * 3, dtype=torch.float32).view(length, 3)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return {"x": self.data[index], "at": index, "np": np.full(2, index), "text": f"no. {index}"}


class Lengths(Sampler):
    """A batch sampler of batches of different sizes, from a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __iter__(self) -> Any:
        order = list(range(50))
        self.rng.shuffle(order)
        while order:
            size = self.rng.randrange(1, 5)
            yield order[:size]
            order = order[size:]


class Counting(IterableDataset):
    """Shards itself when it sees workers; the streams have different lengths."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 37 + 6 * first, step):
            yield torch.tensor([number]), torch.rand(1) if info else torch.zeros(1)


class Changing(IterableDataset):
    """Goes on where it was left, and tells how often it was begun."""

    at = epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        while self.at < 31:
            self.at += 1
            yield torch.tensor([self.at]), torch.tensor([self.epochs])
        self.at = 0


class Eager(Sampler):
    """Draws its whole order from the process's generator when it is asked for an iterator."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch

    def __iter__(self) -> Any:
        order = torch.randperm(12)
        return iter(order.view(-1, self.batch).tolist() if self.batch else order.tolist())

    def __len__(self) -> int:
        return 12 // (self.batch or 1)


def sorted_by_value(samples: list[Any]) -> Any:
    return torch.stack([s["x"] for s in sorted(samples, key=lambda s: -s["at"])]), [
        s["at"] for s in samples
    ]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i % 5 for i in range(50)], 40, generator=generator(4))


MAKERS: dict[str, Callable[[], DataLoader]] = {
    "plain": lambda: DataLoader(Squares(), batch_size=4),
    "shuffled": lambda: DataLoader(Squares(), batch_size=4, shuffle=True, generator=generator(1)),
    "global_rng": lambda: DataLoader(Squares(), batch_size=3, shuffle=True, drop_last=True),
    "two_workers": lambda: DataLoader(
        Squares(), batch_size=4, shuffle=True, generator=generator(2), num_workers=2
    ),
    "persistent": lambda: DataLoader(
        Squares(),
        batch_size=4,
        shuffle=True,
        generator=generator(2),
        num_workers=2,
        persistent_workers=True,
    ),
    "batch_sampler": lambda: DataLoader(
        Squares(),
        batch_sampler=BatchSampler(RandomSampler(range(50), generator=generator(7)), 6, False),
    ),
    "own_sampler": lambda: DataLoader(Squares(), batch_sampler=Lengths()),
    "weighted": lambda: DataLoader(Squares(), batch_size=4, sampler=weighted()),
    "unbatched": lambda: DataLoader(
        Squares(), batch_size=None, sampler=SequentialSampler(range(50))
    ),
    "collate": lambda: DataLoader(Squares(), batch_size=5, collate_fn=sorted_by_value),
    "eager": lambda: DataLoader(range(12), batch_size=None, sampler=Eager()),
    "eager_persistent": lambda: DataLoader(
        range(12), batch_sampler=Eager(4), num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Counting(), batch_size=4),
    "streams": lambda: DataLoader(Counting(), batch_size=2, num_workers=3, generator=generator(9)),
    "changing": lambda: DataLoader(Changing(), batch_size=3),
}


def plain(value: Any) -> Any:
    """The value as comparable lists, types kept."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(item) for item in value])
    return value


def iterate(_rank: int, loaders: dict[str, Any]) -> dict[str, list[list[Any]]]:
    return {
        name: [[plain(e) for e in loader] for _ in range(EPOCHS)]
        for name, loader in loaders.items()
    }


def expected(name: str) -> list[list[Any]]:
    torch.manual_seed(11)
    loader = MAKERS[name]()
    return [[plain(e) for e in loader] for _ in range(EPOCHS)]


def merged(per_rank: list[list[Any]]) -> list[Any]:
    assert len({len(elements) for elements in per_rank}) == 1, (
        "all ranks get the same number of steps"
    )
    return [element for row in zip(*per_rank, strict=True) for element in row]


SHAPES = [
    pytest.param(1, 1, id="1vm-1rank"),
    pytest.param(3, 2, id="3vms-2ranks"),
    pytest.param(8, 3, id="8vms-3ranks"),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("vms", "ranks"), SHAPES)
def test_every_kind_of_loader_keeps_its_order(vms: int, ranks: int) -> None:
    """The concatenation over ranks is what the loader yields in the notebook, for three epochs."""
    torch.manual_seed(11)
    loaders = {name: make() for name, make in MAKERS.items()}
    with DeliveryRun(loaders, ranks=ranks, vms=vms, slab=4 << 20) as run:
        results = run.ranks(iterate)
    for name in MAKERS:
        for epoch, elements in enumerate(expected(name)):
            got = merged([result[name][epoch] for result in results])
            assert elements[: len(elements) // ranks * ranks] == got, f"{name}, epoch {epoch}"


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int


ELEMENTS: dict[str, Any] = {
    "tensor": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 5, dtype=torch.int16),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "channels_last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "strided": torch.arange(20).view(4, 5)[:, ::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "transposed": torch.arange(6).view(2, 3).t(),
    "grad": torch.ones(3, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "subclass": torch.nn.Parameter(torch.ones(2)),
    "array": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "sliced": np.arange(10)[::3],
    "objects": np.array([None, "x"], dtype=object),
    "big_endian": np.arange(3, dtype=">i4"),
    "record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "bytes": b"x" * 10_000,
    "nested": {"a": [torch.ones(2), (1, "two")], "b": Pair(torch.zeros(1), None)},
    "instance": Sample(torch.ones(2, 2), 3),
    "function": {"f": len, "t": torch.ones(1)},
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad, a.layout) == (
            b.dtype,
            b.shape,
            b.requires_grad,
            b.layout,
        )
        assert torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)
        if a.dim() == 4:
            assert a.stride() == b.stride(), "channels_last stays channels_last"
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tolist() == b.tolist()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif dataclasses.is_dataclass(a):
        same(vars(a), vars(b))
    else:
        assert a == b


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_every_kind_of_element_comes_out_as_it_went_in(shared: bool) -> None:
    """Values, types and strides arrive; so does a function that plain pickle cannot take."""
    made = [*ELEMENTS.values(), {"f": lambda x: x + 1, "t": torch.arange(4000.0)}]
    loader = DataLoader(made, batch_size=None, collate_fn=lambda element: element)
    with DeliveryRun({"d": loader}, shared=shared) as run:
        [got] = run.ranks(lambda _, loaders: list(loaders["d"]))
    *elements, last = got
    for element, arrived in zip(ELEMENTS.values(), elements, strict=True):
        same(element, arrived)
    assert last["f"](1) == 2


@pytest.mark.parametrize(("vms", "ranks"), SHAPES)
def test_distributed_sampler_streams_per_rank(vms: int, ranks: int) -> None:
    """Each rank gets its own stream of a DistributedSampler, for the epochs that the ranks set."""

    def loader(replicas: int, rank: int) -> DataLoader:
        sampler = DistributedSampler(Squares(), num_replicas=replicas, rank=rank, seed=5)
        return DataLoader(Squares(), batch_size=4, sampler=sampler)

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        epochs = []
        for epoch in (0, 1, 5):
            loaders["train"].sampler.set_epoch(epoch)
            epochs.append([plain(e) for e in loaders["train"]])
        return len(loaders["train"]), epochs

    with DeliveryRun({"train": loader(1, 0)}, ranks=ranks, vms=vms, slab=4 << 20) as run:
        results = run.ranks(body)
    note = any("built for 1 replicas" in getattr(r, "text", "") for r in run.reports)
    assert note == (ranks != 1)
    for rank, (length, epochs) in enumerate(results):
        own = loader(ranks, rank)
        assert len(own) == length
        for at, epoch in enumerate((0, 1, 5)):
            own.sampler.set_epoch(epoch)
            assert [plain(e) for e in own] == epochs[at]


@pytest.mark.parametrize("how", ["drop", "pad", "raise"])
def test_uneven_epochs_follow_the_rule(how: str) -> None:
    """Seven elements over two ranks.

    The last is left out, or filled up from the first, or refused.
    """

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        try:
            return len(loaders["d"]), [b.tolist() for b in loaders["d"]]
        except Exception as error:
            return str(error)

    loader = DataLoader(torch.arange(7), batch_size=1)
    with DeliveryRun({"d": loader}, ranks=2, uneven=how) as run:
        results = run.ranks(body)
    wanted = {
        "drop": [(3, [[0], [2], [4]]), (3, [[1], [3], [5]])],
        "pad": [(4, [[0], [2], [4], [6]]), (4, [[1], [3], [5], [0]])],
    }
    if how == "raise":
        assert all("cannot share evenly" in result for result in results)
    else:
        assert wanted[how] == results


def test_augmentation_does_not_depend_on_the_workers() -> None:
    """Random draws in the dataset do not depend on the workers' number; elements differ."""

    class Noisy(Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1).item(), random.random(), np.random.rand()

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        return [[v.tolist() for v in b] for _ in range(2) for b in loaders["d"]]

    runs = []
    for vms in (1, 3):
        loader = DataLoader(Noisy(), batch_size=2, generator=generator(5))
        with DeliveryRun({"d": loader}, vms=vms) as run:
            runs.append(run.ranks(body)[0])
    assert runs[0] == runs[1]
    assert len({str(e) for e in runs[0]}) == len(runs[0])


# ── headroom: whatever is open, unasked for or too large, nobody waits for what will never come
# ──────


class Numbers(Dataset):
    """Element i is ``nbytes`` of memory that begin with i."""

    def __init__(self, length: int, nbytes: int) -> None:
        self.length, self.nbytes = length, nbytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.nbytes // 8,), index)


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def zipped(loader: Any) -> Any:
    return [(int(a[0, 0]), int(b[0, 0])) for a, b in zip(loader, loader, strict=True)]


def nested(loader: Any) -> Any:
    outer = zip(range(2), loader, strict=False)
    return [(int(a[0, 0]), firsts(loader)) for _, a in outer]


def kept_open(loader: Any) -> Any:
    iterator = iter(loader)
    return int(next(iterator)[0, 0]), firsts(loader), firsts(iterator)


@pytest.mark.parametrize("body", [zipped, nested, kept_open])
def test_iterations_that_are_open_together_hold_up_none(body: Callable[[Any], Any]) -> None:
    """The usual ``next(iter(loader))`` before the loop among them: every iteration is whole."""

    def loader() -> DataLoader:
        return DataLoader(Numbers(300, 1 << 18), batch_size=1)

    with DeliveryRun({"d": loader()}, processes=2, slab=4 << 20) as run:
        assert run.ranks(lambda _, loaders: body(loaders["d"])) == [body(loader())]


@pytest.mark.parametrize(("prebuffer", "nbytes"), [(64, 1 << 20), (3000, 1 << 10)])
def test_prebuffering_more_than_there_is_room_for(prebuffer: int, nbytes: int) -> None:
    """The ranks start with a full buffer, or with as many small elements as they asked for."""
    loader = DataLoader(Numbers(6000, nbytes), batch_size=1)
    with DeliveryRun(
        {"d": loader}, ranks=2, processes=2, slab=8 << 20, prebuffer=prebuffer, wait=False
    ) as run:
        assert isinstance(run.wait_until_ready(), ProgressReport)
        got = run.ranks(lambda _, loaders: firsts(first_of(loaders["d"], 100)))
    assert got == [list(range(0, 200, 2)), list(range(1, 200, 2))]


def first_of(loader: Any, count: int) -> Any:
    return (batch for _, batch in zip(range(count), loader, strict=False))


# ── a run that is started again goes on where its ranks were
# ─────────────────────────────────────────

_left_behind: list[Any] = []


def stopping(iterations: int, steps: Callable[[int], int]) -> Callable[..., Any]:
    """A body that runs so many iterations whole, and takes ``steps(rank)`` of the next one.

    The last is not done.

    Rank 0 leaves its loop, as an interrupted one; the others end as killed ones do, without a word.
    """

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        for loader in loaders.values():
            for _ in range(iterations):
                list(loader)
            iterator = iter(loader)
            for _ in range(steps(rank)):
                next(iterator)
            if rank:
                _left_behind.append(iterator)

    return body


def going_on(_rank: int, loaders: dict[str, Any]) -> Any:
    resumed = taas.resume()
    places = {name: tuple(resumed[loader]) for name, loader in loaders.items()}
    return places, {
        name: [[plain(e) for e in loader] for _ in range(2)] for name, loader in loaders.items()
    }


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", ["shuffled", "persistent", "streams"])
def test_a_second_start_goes_on_at_the_lowest_step_not_done_by_all(name: str) -> None:
    """Ranks are lost in their second iteration, at different steps.

    The rest of it, and the next, are unchanged.
    """
    torch.manual_seed(11)
    with DeliveryRun({name: MAKERS[name]()}, ranks=2, slab=4 << 20) as first:
        first.ranks(stopping(1, lambda rank: 3 + rank))
        steps = len(expected(name)[0]) // 2
        wait_for_delivery(first, 2 * steps + 6)
    assert first.places == {name: ResumePoint(1, 2, steps)}
    torch.manual_seed(11)
    with DeliveryRun(
        {name: MAKERS[name]()}, ranks=2, vms=2, slab=4 << 20, places=first.places
    ) as second:
        results = second.ranks(going_on)
    assert [places for places, _ in results] == 2 * [{name: (1, 2)}]
    for at, wanted in ((0, expected(name)[1][4:]), (1, expected(name)[2])):
        got = merged([epochs[name][at] for _, epochs in results])
        assert wanted[: len(wanted) // 2 * 2] == got, f"iteration {at + 1}"


def test_units_of_both_starts_are_added_up() -> None:
    """Of 30 units in two ranks, 10 steps were taken: 5 are left."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        taas.resume()
        steps = [len(list(loaders["d"])) for _ in range(2)]
        with pytest.raises(UnitsExhausted):
            iter(loaders["d"])
        return steps

    places = {"d": ResumePoint(1, 4, 6)}
    with DeliveryRun(
        {"d": MAKERS["plain"]()}, ranks=2, places=places, units={"*": 30}, slab=4 << 20
    ) as run:
        assert run.ranks(body) == [[2, 3], [2, 3]]


def test_a_checkpoint_may_say_where_to_go_on() -> None:
    """``taas.resume(d=(iteration, step))`` begins there, also in a first start.

    Ranks have to agree.
    """

    def body(rank: int, loaders: dict[str, Any]) -> Any:
        assert taas.resume(d=(1, 3)).restart == 0
        return [plain(e) for e in loaders["d"]]

    def differing(rank: int, loaders: dict[str, Any]) -> Any:
        taas.resume(d=(0, rank))
        try:
            return len(list(loaders["d"]))
        except RanksDisagree as error:
            return str(error)

    loader = MAKERS["shuffled"]
    with DeliveryRun({"d": loader()}, ranks=2, slab=4 << 20) as run:
        assert merged(run.ranks(body)) == expected("shuffled")[1][6:12]
    with DeliveryRun({"d": loader()}, ranks=2, slab=4 << 20) as run:
        results = run.ranks(differing)
    [told] = [result for result in results if isinstance(result, str)]
    assert "Call taas.resume() in every rank, with the same places" in told


# ── the end of a run whose ranks are done
# ────────────────────────────────────────────────────────────


class Late(Sampler[int]):
    """Indices in order; long after those that a cell takes it raises."""

    def __len__(self) -> int:
        return 10_000

    def __iter__(self) -> Iterator[int]:
        yield from range(5000)
        raise ValueError("no such index file")


def left_open(_rank: int, loaders: dict[str, Any]) -> None:
    """The cell ends while an iterator of its loader is still there."""
    iterator = iter(loaders["late"])
    next(iterator)
    _left_behind.append(iterator)


def test_a_cell_ends_whose_sampler_raises_after_it() -> None:
    """The cell had what it asked for: its end is no failure, and says what is not known."""
    with DeliveryRun({"late": DataLoader(range(10_000), sampler=Late(), batch_size=None)}) as run:
        run.ranks(left_open)
        final = run.finish()
    apply_final(final.states, run.registrations)
    [said] = [report.text for report in run.reports if isinstance(report, Note)]
    assert "'late'" in said
    assert "its sampler raised ValueError: no such index file" in said

"""The ranks together get what the notebook's own loader yields, in its order, whoever makes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from delivery_run import DeliveryRun
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

from taas.delivery.parts import take_apart
from taas.delivery.sampling import LoaderPlans, RngStates

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


class Resumable(IterableDataset):
    """Goes on where it was left, in the way of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 31:
            self.at += 1
            yield torch.tensor([self.at]), torch.zeros(1)
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Shuffled(IterableDataset):
    """Draws from all generators, tells in which epoch it is, and how often ``worker_init_fn`` was called."""

    inits = epochs = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        self.epochs += 1
        order = torch.randperm(11).tolist()
        random.shuffle(order)
        for number in order:
            yield (
                number * info.num_workers + info.id,
                np.random.rand(),
                torch.rand(1),
                self.inits,
                self.epochs,
            )


def count_init(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.inits += 1
    torch.rand(3)


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
    return torch.stack([s["x"] for s in sorted(samples, key=lambda s: -s["at"])]), [s["at"] for s in samples]


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
        Squares(), batch_size=4, shuffle=True, generator=generator(2), num_workers=2, persistent_workers=True
    ),
    "batch_sampler": lambda: DataLoader(
        Squares(), batch_sampler=BatchSampler(RandomSampler(range(50), generator=generator(7)), 6, False)
    ),
    "own_sampler": lambda: DataLoader(Squares(), batch_sampler=Lengths()),
    "weighted": lambda: DataLoader(Squares(), batch_size=4, sampler=weighted()),
    "unbatched": lambda: DataLoader(Squares(), batch_size=None, sampler=SequentialSampler(range(50))),
    "collate": lambda: DataLoader(Squares(), batch_size=5, collate_fn=sorted_by_value),
    "stream": lambda: DataLoader(Counting(), batch_size=4),
    "streams": lambda: DataLoader(Counting(), batch_size=2, num_workers=3, generator=generator(9)),
    "stateful": lambda: DataLoader(Resumable(), batch_size=3),
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
    return {name: [[plain(e) for e in loader] for _ in range(EPOCHS)] for name, loader in loaders.items()}


def expected(name: str) -> list[list[Any]]:
    torch.manual_seed(11)
    loader = MAKERS[name]()
    return [[plain(e) for e in loader] for _ in range(EPOCHS)]


def merged(per_rank: list[list[Any]]) -> list[Any]:
    assert len({len(elements) for elements in per_rank}) == 1, "all ranks get the same number of steps"
    return [element for row in zip(*per_rank, strict=True) for element in row]


SHAPES = [
    pytest.param(1, 1, id="1vm-1rank"),
    pytest.param(3, 2, id="3vms-2ranks"),
    *(
        pytest.param(m, n, id=f"{m}vms-{n}ranks", marks=pytest.mark.slow)
        for m in (1, 3, 8)
        for n in (1, 2, 8)
        if (m, n) not in ((1, 1), (3, 2))
    ),
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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "lazy"])
def test_samplers_are_iterated_as_often_as_torch_iterates_them(kind: str, persistent: bool) -> None:
    """Also with workers that persist, and when the first iteration is begun again, the order is the notebook's."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "sampler": lambda: {"batch_size": None, "sampler": Eager()},
        "batch_sampler": lambda: {"batch_sampler": Eager(4)},
        "lazy": lambda: {"batch_size": 4, "shuffle": True},
    }

    def loader() -> DataLoader:
        data = torch.arange(12)
        return DataLoader(data, num_workers=1, persistent_workers=persistent, **kinds[kind]())

    torch.manual_seed(11)
    mine = loader()
    plans = LoaderPlans("d", take_apart(mine), RngStates.now(), 1)
    got = []
    plans.open(99, 0, None)
    plans.drop(99)
    for epoch in range(EPOCHS):
        plans.open(epoch, epoch, None)
        got.append(plans.draw(epoch, 1000, float("inf"), lambda: 0.0)[0])
    torch.manual_seed(11)
    theirs = loader()
    assert got == [[x.tolist() for x in theirs] for _ in range(EPOCHS)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_that_persist_are_seeded_and_initialised_once() -> None:
    """A stream that shuffles and draws goes on from epoch to epoch as in the notebook's own workers."""

    def loader() -> DataLoader:
        return DataLoader(
            Shuffled(), batch_size=2, num_workers=2, persistent_workers=True, worker_init_fn=count_init
        )

    torch.manual_seed(11)
    theirs = loader()
    wanted = [[plain(e) for e in theirs] for _ in range(EPOCHS)]
    torch.manual_seed(11)
    with DeliveryRun({"d": loader()}, ranks=2, processes=2) as run:
        results = run.ranks(iterate)
    assert wanted == [merged([result["d"][epoch] for result in results]) for epoch in range(EPOCHS)]
    assert len({str(epoch) for epoch in wanted}) == EPOCHS


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


def test_break_nested_and_zip_are_iterations_of_their_own() -> None:
    """A loop that is left, nested loops and zip of a loader with itself yield whole, valid elements."""

    def body(_rank: int, loaders: dict[str, Any]) -> Any:
        loader = loaders["d"]
        first = [b["at"].tolist() for _, b in zip(range(3), loader, strict=False)]
        nested = [(a["at"][0].item(), b["at"][0].item()) for a in loader for b in loader]
        pairs = [(a["at"].tolist(), b["at"].tolist()) for a, b in zip(loader, loader, strict=True)]
        return first, nested, pairs

    with DeliveryRun({"d": DataLoader(Squares(12), batch_size=2)}, vms=2) as run:
        [(first, nested, pairs)] = run.ranks(body)
    assert first == [[0, 1], [2, 3], [4, 5]]
    assert [(a, b) for a in range(0, 12, 2) for b in range(0, 12, 2)] == nested
    assert [([i, i + 1], [i, i + 1]) for i in range(0, 12, 2)] == pairs


@pytest.mark.parametrize("how", ["drop", "pad", "raise"])
def test_uneven_epochs_follow_the_rule(how: str) -> None:
    """Seven elements over two ranks: the last is left out, or filled up from the first, or refused."""

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
    """Random draws in the dataset are the same however many workers there are, and differ per element."""

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

"""taas.register: what it takes, what it refuses and how it says so, and what travels where."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from blocks import block
from notebook_harness import Notebook
from torch.utils.data import DataLoader, Dataset

from taas import dataloader_registry as registry
from taas.base.stand_ins import may_have_stand_in
from taas.capture import capture
from taas.capture.moves.arriving import arrive, unpack
from taas.delivery.loader import DeliveredLoader
from taas.delivery.registered import Registration, delivering
from taas.errors import DeliveryError, RegistrationError


class Plain(Dataset):
    def __init__(self, **extra: Any) -> None:
        self.tensor = torch.arange(12.0).view(4, 3)
        self.row = self.tensor[1]
        self.__dict__.update(extra)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.tensor[index]


@pytest.fixture(autouse=True)
def nothing_registered() -> Any:
    """Each test begins and ends with an empty registry."""
    yield
    for entry in registry.list_registered():
        registry.unregister(entry.loader)


def test_register_names_the_variable_and_unregister_undoes() -> None:
    """A loader goes by the variable that holds it, or by the name it was given."""
    train, valid = DataLoader(Plain()), DataLoader(Plain())
    assert registry.register(train) is train
    registry.register(valid, name="validation")
    entries = registry.list_registered({"train": train, "valid": valid})
    assert [(e.name, e.variable) for e in entries] == [("train", "train"), ("validation", "valid")]
    registry.unregister(train)
    assert [entry.name for entry in registry.list_registered({})] == ["validation"]


MAKE = "train = DataLoader([0, 1]); taas.register(train);"
NAMED = "train = DataLoader([0, 1]); taas.register(train, name='mine');"
IN_A_LOOP = """for name in ('fit', 'test'):
    train = DataLoader([0, 1])
    loaders[name] = taas.register(train, name=name)"""
# cells, and what is registered then
CELLS = {
    "run again": ([MAKE, MAKE, MAKE], ["train"]),
    "run again, with a name": ([NAMED, NAMED], ["mine"]),
    "another variable holds the one before": ([MAKE, "first = train", MAKE], ["first", "train"]),
    "other names in one variable, in two cells": ([MAKE, NAMED], ["loader_0", "mine"]),
    "a loop": ([IN_A_LOOP], ["fit", "test"]),
    "a loop that is run again": ([IN_A_LOOP, IN_A_LOOP], ["fit", "test"]),
    "a loop without names": ([IN_A_LOOP.replace(", name=name", "")], ["loader_0", "train"]),
    "one beside it": (
        ["other = DataLoader([5]); taas.register(other);", MAKE, MAKE],
        ["other", "train"],
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_that_registers_is_run_again(name: str, notebook: Notebook) -> None:
    """The loader that its variable had before goes; all others stay."""
    cells, names = CELLS[name]
    notebook.good(
        "import taas\nfrom torch.utils.data import DataLoader\n"
        "from taas.dataloader_registry import list_registered\nloaders = {}"
    )
    for cell in cells:
        notebook.good(cell)
    assert notebook.value("[one.name for one in list_registered(globals())]") == str(names)
    notebook.good("for one in list_registered():\n    taas.unregister(one.loader)\ndel one, train")
    notebook.good("for name in ('first', 'other'):\n    globals().pop(name, None)")


def test_registering_twice_is_an_error() -> None:
    """The second time says what to do instead."""
    loader = DataLoader(Plain())
    registry.register(loader, name="train")
    with pytest.raises(RegistrationError, match="train is registered already"):
        registry.register(loader)
    with pytest.raises(RegistrationError, match="another loader is registered as 'train'"):
        registry.register(DataLoader(Plain()), name="train")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "another loader is registered as 'train'"),
        (DataLoader(Plain()), r"a DataLoader is no name .* Register each loader by itself"),
        (5, "a int is no name"),
        ("my train", "'my train' cannot be typed in --units"),
        ("", "'' cannot be typed in --units"),
    ],
    ids=["a variable's", "two loaders", "number", "two words", "empty"],
)
def test_a_name_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: Any, said: str
) -> None:
    """Of two loaders of one name a run would wait for ever.

    A second loader is no name of the first.
    """
    train, valid = DataLoader(Plain()), DataLoader(Plain())
    monkeypatch.setattr(sys.modules["__main__"], "train", train, raising=False)
    registry.register(train)
    with pytest.raises(RegistrationError, match=said):
        registry.register(valid, name)
    assert [entry.loader for entry in registry.list_registered()] == [train]


class AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class Batches(list, metaclass=AnyName):
    pass


class Loader(DataLoader, metaclass=AnyName):
    pass


class Rows(metaclass=AnyName):
    def __iter__(self) -> Any:
        return iter(range(3))


class Cursor(Rows):
    def __next__(self) -> int:
        return 0


@pytest.mark.parametrize(
    "loader", [Batches([1]), Loader(Plain()), Rows()], ids=["list", "DataLoader", "own"]
)
def test_a_loader_whose_metaclass_answers_any_name_is_registered(loader: Any) -> None:
    """Only the class and its bases are asked whether it is iterable, and an iterator."""
    registry.register(loader, name="train")
    assert [entry.loader for entry in registry.list_registered()] == [loader]
    with pytest.raises(RegistrationError, match="a Cursor is an iterator"):
        registry.register(Cursor(), name="cursor")


def test_what_is_not_registered_cannot_be_unregistered() -> None:
    """Also after the variable was assigned anew."""
    with pytest.raises(RegistrationError, match="not registered"):
        registry.unregister(DataLoader(Plain()))


@pytest.mark.parametrize(
    "thing",
    [Plain(), 3, None, iter([1]), (i for i in range(3))],
    ids=lambda thing: type(thing).__name__,
)
def test_what_cannot_be_iterated_anew_is_refused(thing: Any) -> None:
    """Datasets, numbers, iterators and generators are no loaders."""
    with pytest.raises(RegistrationError):
        registry.register(thing)


@pytest.mark.parametrize(
    ("extra", "path", "what"),
    [
        ({"lock": threading.Lock()}, "train.dataset.lock", "_thread.lock"),
        ({"inner": {"db": [threading.Lock()]}}, "train.dataset.inner['db'][0]", "_thread.lock"),
        (
            {"file": open(os.devnull)},  # noqa: SIM115, PTH123
            "train.dataset.file",
            "_io.TextIOWrapper",
        ),
    ],
    ids=["lock", "nested", "file"],
)
def test_what_cannot_travel_is_named_by_its_path(
    extra: dict[str, Any], path: str, what: str
) -> None:
    """The message has the attribute path, the type, and what to do."""
    with pytest.raises(RegistrationError) as caught:
        registry.register(DataLoader(Plain(**extra)), name="train")
    assert path in str(caught.value)
    assert what in str(caught.value)
    assert "__getitem__" in str(caught.value)


@pytest.mark.gpu
def test_a_cuda_tensor_in_the_dataset_is_refused() -> None:
    """Data workers have no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    with pytest.raises(RegistrationError, match=r"train\.dataset\.extra.*cuda:0.*no GPU"):
        registry.register(DataLoader(Plain(extra=torch.zeros(1, device="cuda"))), name="train")


def test_lambdas_and_notebook_classes_travel() -> None:
    """They travel by value: nothing to refuse."""
    registry.register(DataLoader(Plain(f=lambda x: x + 1), collate_fn=lambda samples: samples[0]))


def arrived(**names: Any) -> dict[str, Any]:
    """What a cell's ranks get of these names, where the loader among them is registered."""
    found: dict[str, Any] = {}
    with (
        delivering([Registration("train", names["loader"])]),
        capture(", ".join(names), {**names}, None, project=Path.cwd()) as captured,
    ):
        arrive(captured.fd, found, device=None).close()
    return found


def test_a_registered_loader_reaches_the_ranks_as_its_delivered_self() -> None:
    """Only while a cell with data workers is captured.

    Its dataset stays the object the other names hold.
    """
    dataset = Plain()
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    found = arrived(loader=loader, dataset=dataset)
    assert not may_have_stand_in(DataLoader)
    delivered, same = found["loader"], found["dataset"]
    assert isinstance(delivered, DeliveredLoader)
    assert isinstance(delivered, DataLoader)
    assert delivered.dataset is delivered.taas_parts.dataset is same
    assert delivered.batch_size == 2
    same.tensor[1, 0] = 77
    assert same.row[0] == 77
    assert dataset.tensor[1, 0] == 3
    with pytest.raises(DeliveryError, match="--cpus"):
        iter(delivered)


def test_names_that_the_cell_binds_are_for_data_processes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank gets no last run's value under such a name.

    The loader's code finds it in a data process.
    """
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    names = vars(main)
    code = block("""
        def collate(samples): return offset * factor()
        def factor(): return 2
        offset = [3]
        model = [4]
    """)
    exec(code, names)  # a notebook's cell
    loader = names["loader"] = DataLoader(Plain(), collate_fn=names["collate"])
    cell = "offset = [5]\ndef factor(): return 0\nmodel = [6]\nloader"
    in_rank: dict[str, Any] = {}
    in_data: dict[str, Any] = {}
    with (
        delivering([Registration("train", loader)]),
        capture(cell, names, None, project=Path.cwd(), for_data=True) as captured,
    ):
        arrive(captured.fd, in_rank, device=None).close()
        [delivered] = unpack(captured.fd, in_data, Path.cwd(), DeliveredLoader)
    assert captured.names == ("loader", "collate")
    assert in_rank.keys() & {"offset", "factor", "model"} == set()
    assert in_data["offset"] == [3]
    assert "model" not in in_data
    assert delivered.taas_parts.collate_fn([1]) == [3, 3]


def test_wrappers_that_would_shard_again_find_it_done() -> None:
    """accelerate passes it through.

    Its sampler is distributed already, and yields no indices here.
    """
    accelerate = pytest.importorskip("accelerate", reason="pip install jupyter-taas[gallery]")
    delivered = arrived(loader=DataLoader(Plain(), batch_size=2))["loader"]
    assert accelerate.Accelerator(cpu=True).prepare(delivered) is delivered
    assert isinstance(delivered.sampler, torch.utils.data.DistributedSampler)
    with pytest.raises(DeliveryError, match="drawn where its data workers are"):
        next(iter(delivered.sampler))

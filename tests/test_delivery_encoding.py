"""Elements survive their way through a region: values, types, strides, and no memory held longer than used."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from taas.delivery.encoding import RawRegion, decode, encode, install_collate, stacking_into
from taas.delivery.slab import SlabFile, Slabs, lease_slot

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


@pytest.fixture
def slab() -> Iterator[Slabs]:
    """One slab of a megabyte."""
    file = SlabFile(1 << 20, 1)
    file.reserve(0, 1 << 20)
    yield Slabs(file.fd)
    os.close(file.fd)


def region_of(slab: Slabs, nbytes: int = 1 << 16) -> RawRegion:
    return RawRegion(memoryview(slab.map)[:nbytes], slot=True, address=slab.address)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad, a.layout) == (b.dtype, b.shape, b.requires_grad, b.layout)
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


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_kind_of_element_comes_out_as_it_went_in(slab: Slabs, name: str) -> None:
    """Through a slot, and through a region that had to grow first."""
    element = ELEMENTS[name]
    stream = encode(element, region_of(slab))
    same(element, decode(stream, lease_slot(slab, 0, 1 << 16, lambda: None)))
    small = RawRegion.of_size(0)
    encoded = encode(element, small)
    while encoded is None:
        small = RawRegion.of_size(max(small.needed, 1))
        encoded = encode(element, small)
    same(element, decode(encoded, small.buffer))


@pytest.mark.parametrize("name", ["tensor", "array", "nested", "fortran", "channels_last"])
def test_a_lease_ends_with_the_last_use_not_with_a_collection(slab: Slabs, name: str) -> None:
    """No cycle of ours holds an element: what is dropped is given back at once."""
    stream = encode(ELEMENTS[name], region_of(slab))
    freed: list[int] = []
    gc.disable()
    try:
        element = decode(stream, lease_slot(slab, 0, 1 << 16, lambda: freed.append(1)))
        assert freed == []
        del element
        assert freed == [1]
    finally:
        gc.enable()


def test_default_collate_stacks_in_place_and_lets_go(slab: Slabs) -> None:
    """The batch lies in the region; when it is dropped nobody holds the region; who keeps it is noticed."""
    install_collate()
    region = region_of(slab)
    gc.disable()
    try:
        with stacking_into(region):
            batch = torch.utils.data.default_collate([(torch.full((3,), float(i)), i) for i in range(4)])
        assert batch[0].data_ptr() == region.address
        assert region.is_held()
        assert encode(batch, region) is not None
        assert region.used < 256, "the batch was not copied"
        del batch
        assert not region.is_held()
    finally:
        gc.enable()

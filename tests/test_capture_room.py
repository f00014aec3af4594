"""Names for which there is no room: what fits comes, and the rest is named."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import psutil
import pytest
from test_capture_failures import Round

from taas.capture import capture, pack_answer
from taas.errors import CaptureError

MIB = 1 << 20


@contextlib.contextmanager
def _limit(what: int, nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


SMALL = "import numpy as np, torch\nclass Box: pass\nnet = [0]; small = np.zeros(8)\n"
ROWS = [
    ("new memory", "big = None", "big = np.ones(1 << 20)", "big is None", ["big"]),
    (
        "a new tensor in an object",
        "box = None",
        "box = Box(); box.w = torch.ones(1 << 20)",
        "box is None",
        ["box"],
    ),
    ("a plain container", "big = 0", "big = list(range(1 << 20))", "big == 0", ["big"]),
    ("memory changed in place", "x = np.zeros(1 << 20)", "x += 1", "x.sum() == 0", ["x"]),
    (
        "memory of an object changed in place",
        "box = Box(); box.n, box.w = 1, torch.zeros(1 << 20)",
        "box.w += 1; box.n = 2",
        "box.w.sum() == 0 and box.n == 1",
        ["box"],
    ),
    (
        "the largest of several",
        "a = b = c = None",
        "a = np.ones(1 << 12); b = np.ones(1 << 19); c = np.ones(1 << 20)",
        "a.sum() == 1 << 12 and b is None and c is None",
        ["b", "c"],
    ),
    (
        "items of a list",
        "x = [np.zeros(1 << 20), np.zeros(4)]",
        "x[0] += 1; x[1] += 1",
        "x[0].sum() == 0 and x[1].sum() == 4",
        ["x"],
    ),
]


@pytest.mark.parametrize(
    ("setup", "cell", "left", "named"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_what_may_be_written_comes_and_the_rest_is_named(
    setup: str, cell: str, left: str, named: list[str]
) -> None:
    """A limit of the size of files (``ulimit -f``) costs only the names that are too large."""
    one = Round(
        SMALL + setup,
        "net, small, Box, np, torch, " + setup.partition(" =")[0].split(";")[-1].strip(),
    )
    try:
        with _limit(resource.RLIMIT_FSIZE, 2 * MIB):
            applied = one.run(f"{cell}\nnet.append(1); small += 1; new = [2]")
        assert one.notebook["net"] == [0, 1]
        assert one.notebook["new"] == [2]
        assert one.notebook["small"].tolist() == [1] * 8
        assert eval(left, one.notebook)
        assert [line.partition(":")[0] for line in applied.lost] == named
        assert all("ulimit -f" in line for line in applied.lost)
    finally:
        one.close()


def test_names_that_may_not_be_written_stop_the_cell() -> None:
    namespace = {"__name__": "__main__", "big": bytes(4 * MIB)}
    with _limit(resource.RLIMIT_FSIZE, 2 * MIB), pytest.raises(CaptureError) as error:
        capture("big", namespace, None, project=Round.__init__.__defaults__[0])
    assert "the names of this cell have 4.2 MB: it does not fit into a file of 2.1 MB" in str(
        error.value
    )
    assert "ulimit -f" in str(error.value)


@pytest.mark.parametrize(
    "made",
    [
        "np.ones(1 << 26)",
        "torch.ones(1 << 27)",
        "{'k': [np.ones(1 << 26)]}",
        "np.ones((8, 1 << 23))[1:]",
    ],
)
def test_what_can_be_mapped_comes_and_the_rest_is_named(made: str) -> None:
    """A limit of the address space (``ulimit -v``) costs the names that are too large for it."""
    one = Round(SMALL + "big = None", "net, small, np, torch")
    try:
        exec(f"big = {made}; net.append(1); small += 1; new = [2]", one.rank)
        answer = pack_answer(one.arrival, one.rank)
        with _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + 128 * MIB):
            applied = one.captured.apply(answer)
        assert one.notebook["net"] == [0, 1]
        assert one.notebook["new"] == [2]
        assert one.notebook["small"].tolist() == [1] * 8
        assert one.notebook["big"] is None
        (line,) = applied.lost
        assert line.startswith("big: ")
        assert "ulimit -v" in line
    finally:
        one.close()

"""Flat states: what is counted and asked for to find out what an object consists of."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from blocks import block

from taas.capture.describe import flat
from taas.capture.describe.reader import Reader
from taas.capture.heap.heap import Heap


class _Asked:
    """Stands for a module in ``sys.modules``, and counts how often it is asked what it holds."""

    times = 0

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        type(self).times += 1
        return {}


@pytest.mark.parametrize(
    "made",
    [
        "box = C(); box.inner = []; box.add = box.inner.append",
        "box = C(); box.inner = {}; box.add = box.inner.update; box.get = box.inner.get",
        "box = C(); box.new = type(f'T{n}', (dict,), {}).fromkeys",
        "box = C(); box.lock = threading.Lock(); box.add = box.lock.acquire",
    ],
)
def test_other_modules_are_not_asked_for_a_method_that_is_built_in(
    made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner knows it.

    Looking through all of ``sys.modules`` for each took 42 s for 300 objects beside torch.
    """
    monkeypatch.setitem(sys.modules, "asked_for_names", _Asked())
    monkeypatch.setattr(_Asked, "times", 0)
    namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
    setup = block(f"""
        import threading
        objects = []
        class C: pass
        for n in range(300):
            {made}; objects.append(box)
    """)
    exec(setup, namespace)
    heap = Heap(Reader(namespace), [namespace])
    heap.enter(namespace["objects"])
    heap.walk()
    assert sum(type(value) is types.BuiltinFunctionType for value in heap.objects) >= 300
    assert _Asked.times == 0


def test_the_example_in_the_docstring_is_true() -> None:
    """A list that holds a tensor and itself has the states of ``flat``, and is built of them."""
    namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
    exec("import torch\ntensor = torch.zeros(3)\nbox = [tensor, 0, 'a']; box[1] = box", namespace)
    heap = Heap(Reader(namespace), [namespace])
    assert heap.enter(namespace["box"]) == 1
    heap.walk()
    ref = flat.REF
    said = [(s[0], marshal.loads(s[1]), s[2]) for s in heap.states[1:] if s is not None]
    assert said[0] == ("list", (ref, ref, "a"), (2, 1))
    arguments = (ref, ref, ref, 0, (3,), (1,), False, False, "cpu")
    assert said[1] == ("reading", (6, None, (ref, ref, ref), arguments, []), (3, 4, 5, 6, 7, 8))
    assert said[2] == ("global", ("taas.capture.describe.tensors", "_make_tensor"), ())
    assert said[5] == ("global", ("torch", "Tensor"), ())
    assert said[6] == ("memory", (namespace["tensor"].data_ptr(), 12), ())
    name = marshal.loads(heap.states[8][1])[3][1]  # type: ignore[index]
    assert getattr(torch, name) is torch.float32
    assert said[7] == ("reading", (1, None, (ref, None, None), ["torch", name], []), (9,))
    assert said[8] == ("global", ("taas.capture.describe.reading", "find"), ())
    assert len(said) == 9


_OTHER_COUNTS = """
import sys
real = sys.getrefcount
def counted(value): return {count}
sys.getrefcount = counted
from taas.capture import arrive, capture, pack_answer
from taas.capture.describe import flat
import os, pathlib, types
here, there = (types.ModuleType("__main__").__dict__ for _ in range(2))
exec('''
rows = [[n] for n in range(20)]; row = rows[3]
table = {{n: [n] for n in range(20)}}; entry = table[4]
pair = ([1], [2]); first = pair[0]
class Net: pass
net = Net(); net.seen = [[], []]; seen = net.seen[1]
''', here)
cell = "rows, row, table, entry, pair, first, net, seen"
captured = capture(cell, here, None, project=pathlib.Path("/no project"))
arrival = arrive(captured.fd, there, device=None)
arrival.mark()
exec('''
row.append("row"); table[4].append("entry"); first.append("first"); seen.append("seen")
new = [[n] for n in range(20)]; also = new[5]; also.append("new")
''', there)
answer = pack_answer(arrival, there)
assert not captured.apply(answer).lost
left = eval("rows[3], row, table[4], entry, pair[0], first, net.seen[1], seen, new[5], also", here)
assert all(one is other for one, other in zip(left[::2], left[1::2])), left
assert [one[-1] for one in left[::2]] == ["row", "entry", "first", "seen", "new"], left
os.close(answer); arrival.close(); captured.close()
print(flat.COUNTS_TELL)
"""


@pytest.mark.parametrize(
    ("count", "tells"),
    [
        ("real(value)", True),
        ("1", False),
        ("1000", False),
        ("real(value) + id(value) // 16 % 3", False),
    ],
    ids=["another calibration", "all alone", "all shared", "no rule"],
)
def test_where_references_are_counted_otherwise_every_container_has_a_number(
    count: str, tells: bool
) -> None:
    """A Python that counts in another way is found out at import.

    Names travel, and aliases hold, all the same.
    """
    program = _OTHER_COUNTS.format(count=count)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tells)


def test_this_python_counts_references_as_states_need_it() -> None:
    assert flat.COUNTS_TELL

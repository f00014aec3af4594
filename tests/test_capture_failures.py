"""What cannot travel, or cannot come back, and what the user is told."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from blocks import block
from oracle import play, row

from taas.capture import Arrival, Capture, arrive, capture, check_versions, pack_answer, peek
from taas.errors import CaptureError, VersionMismatch

pytestmark = pytest.mark.usefixtures("oracle")


NO_PROJECT = Path("/no project")


class Round:
    """Capture and arrival in one process, for what needs no second one."""

    def __init__(self, setup: str, cell: str, project: Path = NO_PROJECT, **options: Any) -> None:
        self.notebook: dict[str, Any] = types.ModuleType("__main__").__dict__
        self.rank: dict[str, Any] = types.ModuleType("__main__").__dict__
        exec(setup, self.notebook)
        self.captured: Capture = capture(cell, self.notebook, None, project=project, **options)
        self.arrival: Arrival = arrive(self.captured.fd, self.rank, device=None)
        self.arrival.mark()

    def run(self, cell: str) -> Any:
        exec(cell, self.rank)
        answer = pack_answer(self.arrival, self.rank)
        try:
            return self.captured.apply(answer)
        finally:
            os.close(answer)

    def close(self) -> None:
        self.arrival.close()
        self.captured.close()


@pytest.fixture
def rounds() -> Iterator[Any]:
    """Make rounds that are closed at the end."""
    made: list[Round] = []

    def make(setup: str, cell: str, **options: Any) -> Round:
        made.append(Round(setup, cell, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _refused(setup: str, cell: str) -> str:
    namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
    exec(setup, namespace)
    with pytest.raises(CaptureError) as error:
        capture(cell, namespace, None, project=NO_PROJECT)
    for value in namespace.values():
        if hasattr(value, "close"):
            value.close()
    return str(error.value)


class Refused(NamedTuple):
    """A name that the cell needs, and that cannot travel.

    Attributes:
        parts: of the message.
    """

    setup: str
    cell: str
    parts: tuple[str, ...]


REFUSED = [
    Refused(
        setup="""
            import threading
            class T: pass
            trainer = T()
            trainer.inner = {"conn": [1, threading.Lock()]}
        """,
        cell="trainer.inner",
        parts=(
            "the cell needs 'trainer'",
            "trainer.inner['conn'][1] is a _thread.lock",
            "Nothing was started",
        ),
    ),
    Refused(
        setup="g = (i for i in ())",
        cell="next(g)",
        parts=("'g' is a generator", "make it inside the cell, or a list of it before"),
    ),
    Refused(
        setup="f = open('/dev/null')",
        cell="f.read()",
        parts=("TextIOWrapper", "open it inside the cell"),
    ),
    Refused(
        setup="""
            import threading
            d = {"k": threading.Lock()}
            def f(x=d): return x
        """,
        cell="f()",
        parts=("f.__defaults__[0]['k']",),
    ),
    Refused(
        setup="""
            import threading
            def m():
                l = [threading.Lock()]
                return lambda: l
            f = m()
        """,
        cell="f()",
        parts=("f closure variable l[0]",),
    ),
    Refused(
        setup="""
            class S:
                __slots__ = "a"
            s = S()
            s.a = (i for i in ())
        """,
        cell="s.a",
        parts=("s.a is a generator",),
    ),
    Refused(
        setup="""
            import threading
            class B:
                locks = [threading.Lock()]
            class A(B): pass
            a = A()
            a.x = 1
        """,
        cell="a",
        parts=("a.locks[0] is a _thread.lock",),
    ),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.cell)
def test_a_surely_needed_name_that_cannot_travel(refused: Refused) -> None:
    """The variable, the path inside it, its type, and what to do."""
    message = _refused(block(refused.setup), refused.cell)
    for part in refused.parts:
        assert part in message


def test_a_maybe_needed_name_stays_behind_with_its_reason(rounds: Any) -> None:
    """The rank knows why, for a later NameError."""
    one = rounds("g = (i for i in ())\nn = 1", "if n > 3: next(g)")
    assert "g" not in one.rank
    assert "generator" in one.arrival.left_behind["g"]
    assert one.captured.names == ("n",)


OWNER = """
import threading, torch
class T: pass
t = T()
t.items = [1]
t.inner = T()
t.inner.n = 1
t.weight = torch.ones(3)
t.buffers = {"a": t.weight}
table = {"t": t, "n": 1}
others = [1]
alone = torch.zeros(2)
"""
CHANGES_OWNER = """
t.items.append(2)
t.inner.n = 2
t.inner.lock = threading.Lock()
t.weight.add_(1)
t.buffers["b"] = 1
t.new = 5
table["n"] = 2
others.append(2)
alone.add_(3)
both = [t, others]
"""


def test_an_object_of_which_a_part_is_refused_stays_whole_as_it_was(rounds: Any) -> None:
    """With its containers, other parts and memory.

    What holds it, and what lies beside it, comes.
    """
    one = rounds(OWNER, "t, table, others, alone, threading")
    applied = one.run(CHANGES_OWNER)
    t = one.notebook["t"]
    assert (t.items, vars(t.inner), t.weight.tolist(), [*t.buffers]) == (
        [1],
        {"n": 1},
        [1, 1, 1],
        ["a"],
    )
    assert not hasattr(t, "new")
    assert one.notebook["table"] == {"t": t, "n": 2}
    assert one.notebook["others"] == [1, 2]
    assert one.notebook["alone"].tolist() == [3, 3]
    assert one.notebook["both"][0] is t and one.notebook["both"][1] is one.notebook["others"]
    assert any("t.inner.lock is a _thread.lock" in line for line in applied.lost)
    assert any("t:" in line and "as it was before the cell" in line for line in applied.lost)


FAILS_AT_HOME = """
class Only:
    def __init__(self): self.x = 0
    def __hash__(self): return self.x
    def __setstate__(self, state):
        if os.getpid() == home: raise OSError("no such disk")
        self.__dict__.update(state)
class Table:
    only = Only()
class Copy:
    def __init__(self, only): self.text = f"{only!r:.9}"
    def __reduce__(self): return Copy, (Only(),)
class Made:
    def __reduce__(self): return make, ()
def make():
    if os.getpid() == home: raise OSError("no such place")
    return Made()
shared, new = [5], torch.ones(4)
a, b, c, d = Only(), [1, (Only(), shared)], Made(), {'a': Made()}
e, f, g = {Only(): 1}, functools.partial(print, Only()), lambda x=Only(): x
log.append(2); known.append(a)
h, i, j, k = np.array([Only(), 1], dtype=object), Table(), Copy(Only()), frozenset([Only()])
w += 1; after = [shared, new, Only]
b
"""


def test_what_cannot_be_rebuilt_in_the_notebook_is_lost_alone(tmp_path: Path) -> None:
    """What does not hold it comes, even if it stands behind it or shares with it."""
    program = row(
        "fails at home",
        setup="""
            import functools, os, torch, numpy as np
            home = os.getpid()
            w = torch.zeros(3)
            log = [1]
            known = []
        """,
        cell=FAILS_AT_HOME,
        check="""
            names = sorted({*"abcdefghijk", "Table"} & {*globals()})
            same = after[0] is shared, after[1] is new
            print([log, w.tolist(), known, *same, new.tolist(), names])
        """,
    )
    there = play(program, tmp_path, plain=False)
    assert there.cells[-1].own.rstrip() == repr([[1, 2], [1.0] * 3, [], True, True, [1.0] * 4, []])
    disk = "cannot be rebuilt here (OSError: no such disk)"
    place = "cannot be rebuilt here (OSError: no such place)"
    only = f"an object of Only in it {disk}"
    assert sorted(there.lost) == sorted(
        [
            f"a: it {disk}",
            f"b: {only}",
            f"c: it {place}",
            f"d: a part of it {place}",
            *(f"{name}: {only}" for name in ("e", "f", "g", "h", "i", "k", "Table")),
            f"j: it {disk}",
            f"the cell's last value: {only}",
            f"new contents of known: {only}",
        ]
    )


HALF = """
class Half:
    def __init__(self):
        self.a, self.b = [1], 2

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() == home:
            self.b = 3

h = {"k": [Half()]}
log.append(h["k"])
"""


def test_what_is_not_in_the_notebook_what_it_was_in_rank_0_is_said(tmp_path: Path) -> None:
    """One line for an object, with the shortest way to it."""
    half = row(
        "half",
        setup="""
            import os
            home = os.getpid()
            log = []
        """,
        cell=HALF,
        check="h['k'][0].b",
    )
    there = play(half, tmp_path, plain=False)
    assert there.value == "3"
    assert [line.partition(": ")[0] for line in there.lost] == ["log[0][0]"]
    assert "it is not what rank 0 had" in there.lost[0]


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("5", "globals()[5]"),
        ("(1, 'a')", "globals()[(1, 'a')]"),
        ("b'x'", "globals()[b'x']"),
        ("'loss\\ud800'", "globals()['loss\\ud800']"),
        ("type('Text', (str,), {})('x')", "globals()['x']"),
    ],
)
def test_a_key_that_is_no_name_is_left_and_named(rounds: Any, key: str, written: str) -> None:
    """One odd key of the namespace does not cost the names beside it.

    It is set in the cell, or before it in the notebook.
    """
    one = rounds("net = [0]", "net")
    applied = one.run(f"globals()[{key}] = 3; net.append(1); new = 2")
    assert one.notebook["net"] == [0, 1]
    assert one.notebook["new"] == 2
    assert applied.lost == [
        f"{written}: names are texts of UTF-8, and this key is none (bind it to an ordinary name)"
    ]
    before = rounds(f"globals()[{key}] = 3; net = [0]", "net.append(globals()[str('net')])")
    assert f"but {written} (large, or not to be pickled)" in " ".join(before.captured.notices)
    assert not before.run("net.append(1)").lost
    assert before.notebook["net"] == [0, 1]


@pytest.mark.parametrize(
    "data",
    [
        "bytearray(b'abc')",
        "b'abc'",
        "__import__('array').array('i', [1])",
        "__import__('numpy').arange(3)",
    ],
)
def test_a_memoryview_is_named_and_what_holds_it_stays_whole(rounds: Any, data: str) -> None:
    """Nothing else comes in its place, as bytes that look into nothing would."""
    one = rounds("class Box: pass\nbox = Box(); box.n = 1; net = [0]", "box, Box, net")
    applied = one.run(f"view = memoryview({data}); box.view, box.n = view, 2; net.append(1)")
    assert one.notebook["net"] == [0, 1]
    assert vars(one.notebook["box"]) == {"n": 1}
    assert "view" not in one.notebook
    assert [line.partition(":")[0] for line in applied.lost] == ["box", "view"]
    assert all("is a memoryview, which cannot be pickled" in line for line in applied.lost)
    assert "make it inside the cell, from what it looks into" in _refused(
        f"view = memoryview({data})", "view[0]"
    )


@pytest.mark.parametrize("key", ["5", "(1, 2)", "'\\ud800'", "Text('x')"])
def test_an_odd_key_among_attributes_travels(rounds: Any, key: str) -> None:
    """Attributes are a dict, and may have any keys: there and back, and of what the cell makes."""
    setup = (
        f"class Text(str): pass\nclass Net: pass\nkey = {key}\nnet = Net(); vars(net)[key] = [1]"
    )
    one = rounds(setup, "net, key, Net, Text")
    applied = one.run("vars(net)[key].append(2); new = Net(); vars(new)[key] = vars(net)[key]")
    assert not applied.lost
    net, new, key_there = (one.notebook[name] for name in ("net", "new", "key"))
    assert vars(net) == {key_there: [1, 2]}
    assert vars(new)[key_there] is vars(net)[key_there]


@pytest.mark.parametrize(
    ("returned", "a", "b", "t", "new"),
    [
        (None, [1, 2], [1, 2], 1, True),
        (("a",), [1, 2], [1], 0, False),
        (("holder",), [1], [1, 2], 1, False),
        ((), [1], [1], 0, False),
    ],
)
def test_return_narrows_what_comes_back(
    rounds: Any, returned: tuple[str, ...] | None, a: list[int], b: list[int], t: int, new: bool
) -> None:
    """Everything, some names with what is in them, nothing."""
    setup = "import torch\na = [1]; b = [1]; t = torch.zeros(2); holder = {'t': t, 'b': b}"
    one = rounds(setup, "a, b, t, holder", returned=returned)
    one.run("a.append(2); b.append(2); t += 1; c = 3")
    found = one.notebook["a"], one.notebook["b"], one.notebook["t"][0].item(), "c" in one.notebook
    assert found == (a, b, t, new)


def test_a_large_name_is_announced(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its size."""
    monkeypatch.setattr("taas.capture.moves.capturing.LARGE", 1 << 20)
    one = rounds(
        "import torch\nbig = torch.empty(3 << 20, dtype=torch.uint8); small = 1", "big, small"
    )
    assert one.captured.notices == [
        "big is 3.1 MB; it is written to shared memory once for all ranks of a machine."
    ]
    assert one.captured.nbytes < 4 << 20


def test_memory_is_checked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how much is needed, how much is free, and for what."""
    free = psutil.virtual_memory()._replace(available=1 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    message = _refused("import torch\nx = torch.empty(40 << 20, dtype=torch.uint8)", "x")
    assert "42 MB of shared memory and 1.0 MB is free (x 42 MB)" in message


def test_ranks_share_memory_and_write_privately(rounds: Any) -> None:
    """A rank's write is not seen by the notebook or by another rank, until it comes back."""
    one = rounds("import torch\nt = torch.zeros(1 << 20)", "t")
    other: dict[str, Any] = types.ModuleType("__main__").__dict__
    second = arrive(one.captured.fd, other, device=None)
    one.rank["t"][5] = 1
    assert (other["t"][5].item(), one.notebook["t"][5].item()) == (0, 0)
    second.close()
    one.run("")
    assert one.notebook["t"][5].item() == 1


def test_nobody_can_change_a_payload(rounds: Any) -> None:
    """The memfd is sealed."""
    one = rounds("x = [1]", "x")
    with pytest.raises(PermissionError):
        os.pwrite(one.captured.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(one.captured.fd, 0)


def test_what_did_not_change_is_not_sent(rounds: Any) -> None:
    """An answer to a cell that only reads is small and changes nothing."""
    one = rounds(
        "import torch\nt = torch.ones(4 << 20); rows = [{'i': i} for i in range(1000)]", "t, rows"
    )
    answer = pack_answer(one.arrival, one.rank)
    header = peek(answer)
    assert (header.patches, header.names) == ((), ())
    assert os.fstat(answer).st_size < 20_000
    os.close(answer)


def test_one_changed_page_is_sent_alone(rounds: Any) -> None:
    """Changes of memory are found by the page."""
    one = rounds("import torch\nt = torch.ones(64 << 20, dtype=torch.uint8)", "t")
    one.rank["t"][33 << 20] = 7
    answer = pack_answer(one.arrival, one.rank)
    assert os.fstat(answer).st_size < 1 << 20
    one.captured.apply(answer)
    os.close(answer)
    assert one.notebook["t"][33 << 20].item() == 7


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"versions": {"python": "2.7.1"}}, "the notebook has python 2.7.1"),
        ({"versions": {"cloudpickle": "0.1.0"}}, "the notebook has cloudpickle 0.1.0"),
        ({"versions": {"torch": "1.0.0"}}, 'pip install "torch==1.0.0"'),
    ],
)
def test_versions_are_compared_before_anything_is_unpickled(
    rounds: Any, change: dict[str, Any], part: str
) -> None:
    """What differs, and what to install."""
    header = msgspec.structs.replace(peek(rounds("x = 1", "x").captured.fd), **change)
    with pytest.raises(VersionMismatch, match=part.replace("(", r"\(")):
        check_versions(header)


def test_a_module_that_changed_on_disk(tmp_path: Path) -> None:
    """Ranks import today's file, the notebook goes on with what it imported.

    An object of a class that is gone says so.
    """
    earlier = (
        "import now\no = now.Old()",
        "written = open('now.py', 'w').write('value = \"today\"\\n')",
    )
    files = {
        "now.py": """
            value = "old"
            class Old: pass
        """
    }
    program = row("", setup=earlier, cell="v = now.value", check="v, now.value", files=files)
    assert play(program, tmp_path, plain=False).value == "('today', 'old')"
    (tmp_path / "project").rename(tmp_path / "first")
    gone = row("", setup=earlier, cell="o", files=files)
    failed = play(gone, tmp_path, plain=False).cells[-1]
    assert failed.ename == "CellFailed"
    assert "CaptureError: 'o' cannot be rebuilt in the ranks" in failed.evalue

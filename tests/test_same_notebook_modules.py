"""Modules of the project: their data, classes and code.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, play, row, together

pytestmark = pytest.mark.usefixtures("oracle")

HELPER = """
import ctypes, logging, threading
lock = threading.Lock()
log = logging.getLogger(__name__)
libc = ctypes.CDLL(None)
counter = 1
out = open("out.txt", "w")
held = {"lock": lock, "n": 1}

class Bad:
    lock, n = lock, 1

    def __reduce__(self):
        raise RuntimeError("no")

bad = Bad()
"""
ITEMS = """
counter = 0
items = []
"""
CALLS = """
def f(x):
    return x

def run(x):
    return f(x)
"""

ROWS = [
    row(
        "project module",
        setup="""
            import model
            net = model.Thing(3)
        """,
        cell="""
            net.n += 1
            other = model.Thing(net.n)
            r = model.double(2)
        """,
        check="isinstance(other, model.Thing), type(net) is model.Thing",
        files={
            "model.py": """
                class Thing:
                    def __init__(self, n):
                        self.n = n

                def double(x):
                    return 2 * x
            """
        },
    ),
    row(
        "data of a project's module",
        setup="""
            import helper
            from helper import cfg
            helper.counter = 41
            cfg["lr"] = [1]
            keep = helper.things
        """,
        cell="""
            helper.counter += 1
            cfg["lr"].append(2)
            helper.things.append(helper.lr())
            helper.new = [helper.things]
            del helper.old
            r = helper.bump()
        """,
        check="""
            (
                helper.counter,
                helper.cfg is cfg,
                cfg,
                helper.things is keep,
                keep,
                helper.new[0] is keep,
                hasattr(helper, "old"),
                helper.bump(),
            )
        """,
        files={
            "helper.py": """
                import threading
                counter = 0
                old = 1
                cfg = {}
                things = []
                lock = threading.Lock()

                def bump():
                    global counter
                    counter += 1
                    return counter

                def lr():
                    return cfg["lr"]
            """
        },
    ),
    row(
        "data of a module that an earlier cell only imported",
        setup="""
            import helper
            helper.counter = 5
            del helper
        """,
        cell="from helper import counter as r",
        check="r",
        files={"helper.py": "counter = 0"},
    ),
    row(
        "classes of the project's modules",
        setup="""
            import helper
            from helper import Counted
            m = Counted()
            helper.Other.count = 5
            helper.Other.f = lambda self: "patched"
        """,
        cell="""
            n = helper.Counted()
            r = Counted.count, helper.Other().f(), helper.Other.count
            helper.Counted.items.append(Counted)
            Counted.run = lambda self: "mine"
            Counted.__str__ = lambda self: "Me"
            helper.Other.Inner.inside += 1
            helper.Other.new = n
            del Counted.gone
            q = helper.make()
        """,
        check="""
            (
                Counted.count,
                r,
                m.run(),
                n.run(),
                str(n),
                Counted.items,
                helper.Other.Inner.inside,
                helper.Other.new is n,
                hasattr(Counted, "gone"),
                helper.Other().f(),
                Counted.p.fget(m),
                helper.Kind.A.value,
                helper.make(),
            )
        """,
        files={
            "helper.py": """
                import abc, enum

                class Kind(enum.Enum):
                    A = 1

                class Counted(abc.ABC):
                    count = gone = 0
                    items = []
                    __slots__ = ("x", "__dict__")

                    def __init__(self):
                        Counted.count += 1

                    def run(self):
                        return "run"

                    @property
                    def p(self):
                        return self.count

                class Other:
                    count = 0

                    def f(self):
                        return "f"

                    class Inner:
                        inside = 1

                def make():
                    Counted()
                    return Counted.count, Other.count
            """
        },
    ),
    row(
        "modules that hold what cannot travel",
        setup="""
            import helper
            helper.counter = 41
            here = helper.lock, helper.out, helper.held, helper.bad, helper.Bad.lock
        """,
        cell="""
            with helper.lock:
                helper.counter += helper.libc is not None
                helper.Bad.n += 1
        """,
        check="""
            (
                helper.counter,
                [
                    a is b
                    for a, b in zip(
                        here,
                        (helper.lock, helper.out, helper.held, helper.bad, helper.Bad.lock),
                    )
                ],
                helper.held["n"],
                helper.Bad.n,
                helper.out.close(),
            )
        """,
        files={"helper.py": HELPER},
    ),
    row(
        "a module of the project that the cell imports",
        setup="n = 1",
        cell="""
            import helper
            helper.counter += n
        """,
        check="helper.counter, helper.lock.locked()",
        files={"helper.py": HELPER},
    ),
    row(
        "state of a module's wrapper",
        setup="""
            from helper import counted

            @counted
            def f():
                return 1

            f()
        """,
        cell="""
            f()
            r = f.calls, f.log
        """,
        check="r, f(), f.calls, f.log",
        files={
            "helper.py": """
                def counted(f):
                    n = 0

                    def w():
                        nonlocal n
                        n += 1
                        w.calls += 1
                        w.log.append(n)
                        return f()

                    w.calls, w.log = 0, []
                    return w
            """
        },
    ),
    row(
        "module reloaded",
        setup="""
            import helper
            m = helper.Model(2)
            helper.seen.append(m.n)
        """,
        cell=r"""
            with open("helper.py", "a") as file:
                rank0 = file.write("\ndef more(): return N\n")
            import importlib
            importlib.reload(helper)
            r = helper.more(), helper.f()
            new = helper.Model(5)
        """,
        check="""
            (
                r,
                helper.more(),
                helper.seen,
                m.n,
                type(new) is helper.Model,
                type(m) is helper.Model,
            )
        """,
        files={
            "helper.py": """
                N = 3
                seen = []

                class Model:
                    def __init__(self, n):
                        self.n = n

                def f():
                    return N
            """
        },
    ),
    row(
        "names from a module that is reloaded",
        setup="""
            import helper, importlib
            from helper import f, Model, seen
            held, m = [f], Model(2)
        """,
        cell=r"""
            with open("helper.py", "a") as file:
                rank0 = file.write("\ndef f(): return 4\nseen = [4]\n")
            importlib.reload(helper)
            held.append(f)
            seen.append(1)
            r = f(), helper.f(), seen
        """,
        check="""
            (
                r,
                f(),
                helper.f(),
                f is helper.f,
                held[0] is held[1] is f,
                seen is helper.seen,
                seen,
                type(m) is Model,
                Model is helper.Model,
            )
        """,
        files={
            "helper.py": """
                seen = []

                class Model:
                    def __init__(self, n):
                        self.n = n

                def f():
                    return 3
            """
        },
    ),
    row(
        "modules that the cell reaches by others",
        setup="""
            import helper, user
            helper.counter = 41
            a = helper.A()
            helper.A.step = 2
        """,
        cell="r = a.count(), user.lazily()",
        check="r, helper.counter",
        files={
            "helper.py": """
                counter = 0

                class A:
                    step = 1

                    def count(self):
                        global counter
                        counter += self.step
                        return counter
            """,
            "user.py": """
                def lazily():
                    import helper

                    return helper.counter
            """,
        },
    ),
    row(
        "a module that is edited while the cell runs",
        setup="""
            import helper
            l = helper.items
        """,
        cell=r"""
            helper.counter += 1
            helper.items.append(2)
            with open("helper.py", "a") as file:
                rank0 = file.write("more = 1\n")
        """,
        check="helper.counter, helper.items is l, l",
        files={"helper.py": ITEMS},
    ),
    row(
        "what there is once, in a module",
        setup="""
            import torch, torch.nn as nn
            import helper, types, typing
            n = types.SimpleNamespace(a=1)
            t = typing.NamedTuple("t", [("u", int)])(1)
        """,
        cell="""
            helper.items += n, t
            g = torch.manual_seed(2)
        """,
        check="helper.items[0] is n, helper.items[1] is t, g is torch.default_generator",
        files={"helper.py": "items = []"},
    ),
    row(
        "a module that the cell does not use",
        setup="""
            import helper
            l = helper.items
        """,
        cell="x = 1",
        check="helper.counter, helper.items is l, x",
        files={"helper.py": ITEMS},
    ),
    row(
        "a module that the cell imports itself",
        setup="""
            import helper
            l = helper.items
            helper.counter = 5
        """,
        cell="""
            from helper import items, counter as c
            items.append(c)
            import helper as h
            h.new = items
        """,
        check="helper.counter, helper.items is l, l, h is helper, helper.new is l",
        files={"helper.py": ITEMS},
    ),
    row(
        "code put into a module",
        setup="""
            import helper

            def twice(x):
                return x * 2

            helper.f = twice

            class A:
                pass

            helper.A = A
        """,
        cell="""
            r = helper.run(3), isinstance(helper.A(), A)
            helper.g = lambda x: x + 1
            helper.f = helper.g

            class B(A):
                pass

            helper.B = B
        """,
        check="r, helper.run(3), helper.f is helper.g, helper.B is B, helper.A is A",
        files={"helper.py": CALLS},
    ),
    row(
        "code of a module, put back",
        setup="""
            import helper

            def twice(x):
                return x * 2

            old = helper.f
            helper.f = twice
        """,
        cell="""
            r = helper.run(3)
            helper.f = old
        """,
        check="r, helper.run(3), helper.f is old",
        files={"helper.py": CALLS},
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""


@each_of(together(ROWS))
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)


CHANGED = row(
    "changed",
    setup="""
        import helper
        lock, held = helper.lock, helper.held
    """,
    cell="""
        import threading
        helper.held["n"] = 2
        helper.bad.n = 2
        helper.counter = helper.new = helper.lock = threading.Lock()
    """,
    check="""
        (
            helper.held is held,
            held["n"],
            helper.bad.n,
            helper.counter,
            helper.lock is lock,
            hasattr(helper, "new"),
        )
    """,
    files={"helper.py": HELPER},
)


def test_data_of_a_module_that_cannot_come_back_are_named(tmp_path: Path) -> None:
    """Each that the cell changed, or put there, in a line of its own; the notebook's stays."""
    played = play(CHANGED, tmp_path, plain=False)
    assert played.value == "(True, 1, 1, 1, True, False)"
    names = {line.partition(":")[0] for line in played.lost}
    assert names == {f"helper.{name}" for name in ("held", "bad", "counter", "new", "lock")}

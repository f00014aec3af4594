"""Notebooks whose ranks stay are what they are without such ranks.

Ranks that stay hold their names; what the notebook changed between two cells reaches them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import block
from oracle import Program, assert_same, each_of, in_ranks, kept, together

pytestmark = pytest.mark.usefixtures("oracle")

NET = """
import torch, torch.nn as nn
net = nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
"""
STEP = """
opt.zero_grad()
net(torch.ones(2)).sum().backward()
opt.step()
w = net.weight.detach()
"""
VIEWS = {
    "a held array": ("np.arange(6.0)", "x[1:]"),
    "a held tensor": ("torch.arange(6.0)", "x[1:]"),
    "a held tensor, as an array": ("torch.arange(6.0)", "x.numpy()"),
    "a held array, as a tensor": ("np.arange(6.0)", "torch.from_numpy(x)"),
}
"""What ranks hold as ``x``, and the view of it that the notebook makes."""

ROWS = [
    kept(
        "nothing changed",
        """
            a = [1]
            n = 3
        """,
        in_ranks("b = [a, n]"),
        in_ranks("""
            b.append(a)
            a.append(n)
        """),
        in_ranks("c = b[0] is a, n"),
        "c, b",
    ),
    kept(
        "rebound",
        "a = [1]",
        in_ranks("""
            a.append(2)
            b = a
        """),
        "a = [5]",
        in_ranks("""
            a.append(6)
            b.append(7)
        """),
        "a, b, a is b",
    ),
    kept(
        "object changed in place",
        """
            a = [1]
            d = {"a": a}
        """,
        in_ranks("""
            a.append(2)
            b = a
        """),
        "a.append(3)",
        in_ranks("""
            a.append(4)
            n = len(b), d["a"] is a
        """),
        "a, b is a, n",
    ),
    kept(
        "attribute changed in place",
        """
            class A:
                pass

            a = A()
            a.n = 1
            k = [a]
        """,
        in_ranks("a.n += 1"),
        "a.n = 10",
        in_ranks("""
            a.n += 1
            same = k[0] is a
        """),
        "a.n, k[0] is a, same",
    ),
    kept(
        "array changed in place",
        """
            import numpy as np
            x = np.arange(6.0)
            v = x[2:]
        """,
        in_ranks("x += 1"),
        """
            x[0] = 50
            v[1] = 7
        """,
        in_ranks("""
            y = x.copy()
            x *= 2
            s = np.shares_memory(x, v)
        """),
        "x.tolist(), v.tolist(), y.tolist(), s",
    ),
    kept(
        "memory of a file",
        """
            import numpy as np
            x = np.memmap("m.bin", "i4", "w+", shape=6)
            v = x[2:]
        """,
        in_ranks("""
            x += 1
            y = np.memmap("m.bin", "i4", "r+", 4, 2)
        """),
        """
            x[0] = 50
            v[1] = 7
            y[1] = 8
        """,
        in_ranks("""
            x *= 2
            s = v.tolist(), np.shares_memory(x, v)
            x.flush()
        """),
        "y[0] += 1",
        in_ranks("""
            t = x.tolist()
            u = x.mode
        """),
        "x.tolist(), v.tolist(), y.tolist(), s, t, u",
    ),
    kept(
        "array of a cell changed in place",
        "import numpy as np",
        in_ranks("""
            x = np.arange(6.0)
            v = x[2:]
        """),
        "v[1] = 7",
        in_ranks("""
            x *= 2
            s = np.shares_memory(x, v)
        """),
        in_ranks("""
            x += 1
            y = v + 1
        """),
        "x.tolist(), v.tolist(), y.tolist(), s",
    ),
    kept(
        "tensor changed behind its counter",
        NET,
        in_ranks(STEP),
        "net.weight.data.add_(1)",
        in_ranks(STEP),
        "w, opt.state",
    ),
    kept("training goes on", NET, *[in_ranks(STEP)] * 4, "w, opt.state_dict()"),
    kept(
        "training of a model that a cell made",
        in_ranks(NET, STEP),
        *[in_ranks(STEP)] * 3,
        "w, net(torch.ones(2))",
    ),
    kept(
        "signs of all numbers",
        "import numpy as np",
        in_ranks("""
            x = np.arange(8, dtype="f8")
            y = np.arange(9, dtype="f4")
        """),
        """
            np.negative(x, out=x)
            np.negative(y, out=y)
        """,
        in_ranks("z = x.sum() + y.sum()"),
        "z",
    ),
    *[
        kept(
            f"new view of {name}",
            f"""
                import torch, numpy as np
                x = {whole}
            """,
            in_ranks("l = [x]"),
            f"v = {view}",
            in_ranks("""
                x += 1
                s = float(v.sum())
            """),
            "x, v, l, s",
        )
        for name, (whole, view) in VIEWS.items()
    ],
    kept(
        "new view of what a cell made",
        "import numpy as np",
        in_ranks("x = np.arange(6.0)"),
        "v = x[1:]",
        in_ranks("""
            x += 1
            s = v.sum()
        """),
        "x, v, s",
    ),
    kept(
        "whole of a held part",
        """
            import numpy as np, torch
            x = np.arange(6.0)
            v = torch.from_numpy(x[2:4])
        """,
        in_ranks("l = [v]"),
        "x[3] = 9",
        in_ranks("""
            x += 1
            s = v.sum().item()
        """),
        "v += 1",
        in_ranks("t = v.sum().item()"),
        "x, v, s, t",
    ),
    kept(
        "a module that no cell uses",
        """
            import helper
            l = helper.items
        """,
        in_ranks("x = 1"),
        "helper.items.append(x)",
        in_ranks("y = x"),
        "helper.counter, helper.items is l, l",
        in_ranks("""
            helper.counter += y
            del helper.gone
        """),
        'helper.counter, hasattr(helper, "gone")',
        files={
            "helper.py": """
                counter = gone = 0
                items = []
            """
        },
    ),
    kept(
        "aliases of held names",
        """
            a = [1]
            b = {"a": a}
            c = [b, a]
        """,
        in_ranks("a.append(2)"),
        "d = [a, b]",
        in_ranks("""
            d[0].append(3)
            e = d[1] is b, d[0] is a, c[0] is b
        """),
        "a, b, c, d, e, c[1] is d[0]",
    ),
    kept(
        "part of a held name",
        """
            class A:
                pass

            h = A()
            h.inner = [1]
            o = [h.inner]
        """,
        in_ranks("h.inner.append(2)"),
        "p = [h.inner, h]",
        in_ranks("""
            p[0].append(3)
            same = p[0] is h.inner is o[0], p[1] is h
        """),
        "h.inner, p, same, o[0] is p[0]",
    ),
    kept(
        "functions and classes",
        """
            n = 1

            def f():
                return n

            class A:
                k = 1

                def m(self):
                    return f() + self.k

            a = A()
        """,
        in_ranks("r = f(), a.m()"),
        """
            n = 5
            A.k = 7
        """,
        in_ranks("r2 = f(), a.m(), type(a) is A"),
        """
            def f():
                return n * 2
        """,
        in_ranks("""
            r3 = f(), a.m()
            b = A()
            b.x = 1
        """),
        in_ranks("""
            b.x += a.m()
            same = type(b) is A
        """),
        "r, r2, r3, b.x, same",
    ),
    kept(
        "attributes of a class",
        """
            class M:
                count = 0

                def __init__(self):
                    M.count += 1

                def f(self):
                    return "f"

            m = M()
        """,
        in_ranks("n = M()"),
        "o = M()",
        in_ranks("""
            p = M()
            M.f = lambda self: M.count
        """),
        in_ranks("""
            r = m.f()
            M.f = len
            del M.f
        """),
        """
            q = M()
            M.f = 3
        """,
        in_ranks("t = M.f, M.count"),
        "r, t, M.count, M.f",
    ),
    kept(
        "classes of the project's modules",
        """
            import helper
            m = helper.M()
        """,
        in_ranks("n = helper.M()"),
        "o = helper.M()",
        in_ranks("""
            p = helper.M()
            helper.M.f = lambda self: "g"
        """),
        "helper.M.count += 10",
        in_ranks("r = helper.M.count, m.f()"),
        "r, helper.M.count, m.f()",
        files={
            "helper.py": """
                class M:
                    count = 0

                    def __init__(self):
                        M.count += 1

                    def f(self):
                        return "f"
            """
        },
    ),
    kept(
        "class of a cell",
        in_ranks("""
            class B:
                def __init__(self):
                    self.l = []

            b = B()
        """),
        """
            c = B()
            c.l.append(b)
        """,
        in_ranks("""
            c.l.append(B())
            b.l.append(c)
            t = type(c) is B
        """),
        in_ranks("""
            b.l[0].l.append(3)
            u = b.l[0] is c
        """),
        "t, u, [type(x) is B for x in c.l[:2]], c.l[0] is b",
    ),
    kept(
        "large leaves",
        """
            rows = [{"n": i} for i in range(2000)]
            nums = list(range(5000))
        """,
        in_ranks("""
            rows[3]["n"] = -1
            nums[1] = 9
        """),
        'rows[4]["n"] = -2',
        in_ranks("""
            rows[5]["n"] = -3
            nums.append(1)
            one = rows[7]
        """),
        "del rows",
        'one["n"] = 70',
        in_ranks('one["m"] = nums[1]'),
        "one, len(nums)",
    ),
    kept(
        "rows of a leaf that is gone",
        """
            rows = [{"n": i} for i in range(2000)]
            one = [rows[7]]
        """,
        in_ranks('one[0]["a"] = 1'),
        "rows = None",
        in_ranks('one[0]["b"] = rows'),
        'one[0]["c"] = 2',
        in_ranks("same = dict(one[0])"),
        "one, same",
    ),
    kept(
        "what could not be changed in place",
        """
            t = (1, [2])
            d = {"t": t}
        """,
        in_ranks("""
            d["t"] = (3, t[1])
            t = d["t"]
        """),
        "t[1].append(5)",
        in_ranks("""
            t[1].append(6)
            s = d["t"] is t
        """),
        "t, d, s",
    ),
    kept(
        "data of a module",
        "import helper",
        in_ranks("""
            helper.counter += 1
            helper.seen.append(1)
        """),
        "helper.counter += 10",
        in_ranks("""
            helper.seen.append(helper.counter)
            c = helper.counter
        """),
        in_ranks("helper.counter += 1"),
        "helper.counter, helper.seen, c",
        files={
            "helper.py": """
                counter = 0
                seen = []
            """
        },
    ),
    kept(
        "inside a module's wrapper",
        """
            from helper import counted

            @counted
            def f():
                return 1
        """,
        in_ranks("f()"),
        "f()",
        in_ranks("""
            r = f()
            c = f.calls, f.log
        """),
        "f()",
        in_ranks("d = f(), f.calls"),
        "r, c, d, f(), f.calls, f.log",
        files={
            "helper.py": """
                def counted(f):
                    n = 0

                    def w():
                        nonlocal n
                        n += 1
                        w.calls += 1
                        w.log.append(n)
                        return n

                    w.calls, w.log = 0, []
                    return w
            """
        },
    ),
    kept(
        "cells in turn with the notebook",
        block(NET, "log = []"),
        *[in_ranks(STEP, "log.append(float(w.sum()))"), 'log.append("here")'] * 4,
        "log",
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""

ALONE = [
    kept(
        "deleted in the notebook",
        """
            a = [1]
            b = 2
        """,
        in_ranks("""
            a.append(b)
            c = a
        """),
        "del a",
        in_ranks('here = "a" in globals(), c'),
        "here, c",
    ),
    kept(
        "deleted in a cell",
        """
            a = [1]
            b = [2]
        """,
        in_ranks("a.append(1)"),
        in_ranks("""
            del a
            b.append(3)
        """),
        in_ranks('here = "a" in globals()'),
        "here, b",
    ),
    kept(
        "error in the middle",
        """
            a = [1]
            b = []
        """,
        in_ranks("a.append(2)"),
        in_ranks("""
            a.append(3)
            b = [a]
            1 / 0
        """),
        in_ranks("""
            a.append(4)
            n = b[0] is a
        """),
        "a, b, n",
        goes_on=True,
    ),
    kept("values of cells", in_ranks("[1, 2]"), "_.append(3)", in_ranks("v = _"), "v"),
    kept(
        "names with dots",
        'globals()["0.w"] = [1]',
        in_ranks('globals()["0.w"].append(2)'),
        """
            globals()["0.w"].append(3)
            globals()["1.w"] = 4
        """,
        in_ranks("""
            globals()["0.w"].append(globals()["1.w"])
            globals()["2.w"] = 5
        """),
        'globals()["0.w"], globals()["2.w"]',
    ),
    kept(
        "names of texts",
        """
            v1 = [1]
            v2 = [2]
        """,
        in_ranks("v1.append(0)"),
        "v2.append(5)",
        in_ranks('r = [globals()[f"v{i}"] for i in (1, 2)]'),
        "r, r[0] is v1",
    ),
    kept(
        "log in a file",
        "import logging",
        in_ranks("""
            log = logging.getLogger("file")
            log.propagate = False
            log.addHandler(logging.FileHandler("a.log", mode="w"))
            log.error("one")
            del log
        """),
        'logging.getLogger("file").error("two")',
        in_ranks('logging.getLogger("file").error("three")'),
        'logging.getLogger("file").error("four")',
        in_ranks('logging.getLogger("file").error("five")'),
        """
            log = logging.getLogger("file")
            log.handlers[0].close(), log.handlers.clear(), open("a.log").read()
        """,
    ),
]
"""Each has a notebook of its own."""


@each_of([*together(ROWS), *ALONE])
def test_a_notebook_is_what_it_is_without_ranks_that_stay(program: Program, tmp_path: Path) -> None:
    """Each headed cell runs in the processes of the one before, and nothing else differs."""
    assert_same(program, tmp_path)

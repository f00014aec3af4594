"""Names: those that IPython has, too, and those that stand in texts.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, row

pytestmark = pytest.mark.usefixtures("oracle")

ALONE = [
    row(
        "pickled by names that the cell does not say",
        setup="""
            import collections, enum, functools, pickle

            class A:
                class B:
                    pass

            class C(enum.IntEnum):
                ONE = 1

            N = collections.namedtuple("N", "x")

            class D(dict):
                pass

            @functools.cache
            def f(x):
                return x

            @functools.wraps(f)
            def g(x):
                return -x

            deep = [[[A.B(), C.ONE, N(1), D(a=1), f, A]]]
        """,
        cell="""
            again = pickle.loads(pickle.dumps(deep))
            r = again[0][0]
        """,
        check="""
            (
                [type(x).__qualname__ for x in r],
                r[4] is f,
                r[5] is A,
                type(r[0]) is A.B,
                A.B,
                r[1:4],
            )
        """,
    ),
    row(
        "names that IPython has",
        setup="""
            open = 3
            display = [1]
            exit = "no"
        """,
        cell="""
            display.append(open)
            exit += "!"
            quit = 4
        """,
        check="open, display, exit, quit",
    ),
    row(
        "a class of the user's called Out",
        setup="""
            class Out:
                n = 1

                def get(self):
                    return self.n

            out = Out()
        """,
        cell="""
            Out.n = 5
            r = isinstance(out, Out), Out().get()
        """,
        check="Out.n, r, type(out) is Out, out.get()",
    ),
    row(
        "In is the user's",
        setup='In = ["a", 1]',
        cell="""
            In.append(2)
            n = len(In)
        """,
        check="In, n, _i1 == get_ipython().history_manager.input_hist_raw[1]",
    ),
    row(
        "get_ipython and exit are the user's",
        setup="""
            def exit(code):
                return code + 1

            get_ipython = lambda: "mine"
        """,
        cell="""
            r = [exit(1), get_ipython()]
            quit = [r]
        """,
        check="r, exit(2), get_ipython(), quit[0] is r",
    ),
    row(
        "numbered names are the user's",
        setup="""
            _1, _2 = [1], [2]
            _i1 = 7
            _01 = 8
        """,
        cell="""
            _1.append(_i1)
            _3 = _2
            _2 = _01
            _i1 = "x"
        """,
        check="_1, _2, _3, _i1, _01",
    ),
    row(
        "values of cells are the user's",
        setup=("[5]", '_1 = ["mine"]'),
        cell="""
            _1.append(Out[1])
            r = _1
            __ = 6
        """,
        check="_1, r, Out[1], __",
    ),
    row(
        "__file__ and __doc__ are the user's",
        setup="""
            __file__ = "train.py"
            __doc__ = "usage"
        """,
        cell="""
            r = __file__, __doc__
            __file__ = "other.py"
        """,
        check="r, __file__, __doc__",
    ),
    row(
        "names with dots",
        setup="""
            import torch, torch.nn as nn
            net = nn.Linear(1, 1)
            globals().update(net.state_dict(prefix="0."))
            globals()["a.b"] = [1]
        """,
        cell="""
            w = globals()["0.weight"]
            same = w.data_ptr() == net.weight.data_ptr()
            globals()["a.b"].append(2)
            del globals()["0.bias"]
            globals()["c.d"] = globals()["c/d:0"] = 3
            globals().update(net.state_dict(prefix="new."))
        """,
        check="""
            (
                same,
                sorted(n for n in globals() if "." in n or ":" in n),
                globals()["a.b"],
                globals()["0.weight"] is w,
            )
        """,
    ),
    row(
        "loop over a name that IPython has",
        setup="n = 0",
        cell="""
            for _ in range(3):
                n += 1
        """,
        check="n, _",
    ),
    row(
        "names in known texts",
        setup="""
            import timeit
            a = [1]
            b = 2
            c = 3
            d = 4
            code = "r = x + y"
            x = 1
            y = 2
            z = 3

            def f():
                return z
        """,
        cell="""
            exec(code)
            exec("c += 1")
            from __main__ import z as other
            t = timeit.timeit("f()", "from __main__ import f", number=1) > 0
            if "a" not in globals():
                a = [9]
            n = eval("b + 1"), "%(d)d" % vars(), "{c}".format(**globals())
        """,
        check="a, c, n, r, other, t",
    ),
    row(
        "names in texts that are made",
        setup="""
            import __main__
            n0 = [1]
            n1 = [2]
            n2 = 3
            name = "n1"
            total = 0

            def get(i):
                return globals()[f"n{i}"]
        """,
        cell="""
            r = get(0), eval("n" + "1"), getattr(__main__, name), __main__.n2
            for i in (0, 1):
                total += globals()[f"n{i}"][0]
            globals()["n3"] = [n0, n1]
            __main__.n4 = 4
        """,
        check="r, total, n3[0] is n0, n4",
    ),
]
"""Each has a notebook of its own."""


@each_of(ALONE)
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)

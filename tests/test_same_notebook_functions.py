"""Functions, closures, statements.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, row, together

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = [
    row(
        "slices in functions",
        setup="""
            def head(rows): return rows[:2], rows[::2]
            def channel(grid): return [row[1:2] for row in grid], (lambda rows: rows[-1:])(grid)
            class Window:
                def of(self, rows, part=slice(1, 3)): return rows[part], rows[:1]
        """,
        cell="""
            def tail(rows): return rows[-2:], {"last": rows[-1:]}
            shown = head([1, 2, 3]), channel([[1, 2], [3, 4]]), Window().of([1, 2, 3, 4])
        """,
        check="shown, tail([1, 2, 3]), head('abc'), Window().of('abcd')",
    ),
    row(
        "function sees rebound global",
        setup="""
            k = 1

            def f():
                return k
        """,
        cell="""
            k = 5
            r = f(), f.__globals__ is globals()
        """,
        check="k, f()",
    ),
    row(
        "global statement",
        setup="""
            n = 0

            def bump():
                global n
                n += 1
                return n
        """,
        cell="""
            bump()
            bump()
        """,
        check="bump(), n",
    ),
    row(
        "new function sees notebook",
        setup="""
            k = 1

            def f():
                return k
        """,
        cell="""
            def g():
                return f() + k
        """,
        check="g()",
    ),
    row(
        "mutual recursion",
        setup="""
            def even(n):
                return n == 0 or odd(n - 1)

            def odd(n):
                return n != 0 and even(n - 1)
        """,
        cell="r = even(10), odd(10)",
    ),
    row(
        "closure",
        setup="""
            def make():
                n = 0

                def inc():
                    nonlocal n
                    n += 1
                    return n

                return inc

            c = make()
        """,
        cell="r = [c(), c()]",
        check="c()",
    ),
    row(
        "closures share a variable",
        setup="""
            def make():
                n = [0]
                m = 0

                def inc():
                    nonlocal m
                    m += 1
                    n.append(m)

                def get():
                    return m, n

                return inc, get

            inc, get = make()
        """,
        cell="""
            inc()
            inc()
            r = get()
        """,
        check="inc(), get()",
    ),
    row(
        "recursive closure",
        setup="""
            def make():
                def fact(n):
                    return 1 if n < 2 else n * fact(n - 1)

                return fact

            fact = make()
        """,
        cell="r = fact(5)",
        check="fact(6)",
    ),
    row(
        "function attributes and defaults",
        setup="""
            def f(x, acc=[]):
                f.calls += 1
                acc.append(x)
                return acc

            f.calls = 0
        """,
        cell="""
            f(1)
            r = f(2)
        """,
        check="f(3), f.calls",
    ),
    row(
        "decorators and partial",
        setup="""
            import functools

            def twice(g):
                @functools.wraps(g)
                def w(*a):
                    return g(g(*a))

                return w

            @twice
            def inc(x):
                return x + k

            k = 2
            p = functools.partial(inc, 3)
        """,
        cell="""
            k = 10
            r = inc(1), p()
        """,
        check="inc(1), p()",
    ),
    row(
        "lru_cache",
        setup="""
            import functools
            k = 2

            @functools.lru_cache
            def f(x):
                return x * k
        """,
        cell="r = f(3)",
        check="f(4)",
    ),
    row(
        "cached property",
        setup="""
            import functools

            class A:
                n = 0

                @functools.cached_property
                def p(self):
                    self.n += 1
                    return [self.n]

            a = A()
            b = A()
            b.p
        """,
        cell="""
            b.p.append(2)

            class B(A):
                @functools.cached_property
                def q(self):
                    return self.p + ["q"]

            c = B()
        """,
        check="a.p, b.p, b.n, c.q, c.q is c.q",
    ),
    row(
        "lambda in a list",
        setup="""
            k = 1
            fs = [lambda x: x + k, max]
        """,
        cell="""
            k = 3
            r = [f(2) if f is not max else 0 for f in fs]
        """,
        check="fs[0](1)",
    ),
    row(
        "bound method",
        setup="""
            class A:
                def __init__(self):
                    self.n = 0

                def up(self):
                    self.n += 1

            a = A()
            up = a.up
        """,
        cell="""
            up()
            up()
        """,
        check="a.n, up.__self__ is a",
    ),
    row(
        "deleted name",
        setup="""
            a = [1]
            b = a
        """,
        cell="del a",
    ),
    row(
        "only possibly used, unpicklable",
        setup="""
            import threading
            lock = threading.Lock()
            n = 1

            def f():
                if n > 5:
                    lock.acquire()
                return n
        """,
        cell="""
            r = f()
            if n > 9:
                lock.release()
        """,
    ),
    row(
        "unpicklable and not used",
        setup="""
            gen = (i for i in range(3))
            x = 1
        """,
        cell="y = x + 1",
        check="next(gen)",
    ),
    row(
        "imported in the cell",
        cell="""
            import json, os.path as osp
            from math import pi
            x = json.dumps([osp.join("a", "b"), pi])
        """,
    ),
    row(
        "match, walrus, try, with",
        setup="""
            p = {"k": [1, 2]}
            n = 2
            import contextlib
        """,
        cell="""
            match p:
                case {"k": [a, *rest]} if a < n:
                    r = rest
            if (m := n + 1) > 2:
                q = m
            try:
                1 / 0
            except ZeroDivisionError as e:
                err = str(n)
            with contextlib.suppress(KeyError):
                n = p["zz"]
        """,
    ),
    row(
        "exception object",
        setup="""
            class MyError(Exception):
                def __init__(self, a, b):
                    super().__init__(a, b)
                    self.a = a

            errors = []
        """,
        cell="""
            try:
                raise MyError(1, [2])
            except MyError as e:
                errors.append(e.args)
                kind = type(e)
        """,
        check="kind is MyError",
    ),
    row(
        "exception with its cause",
        setup="errors = []",
        cell="""
            try:
                try:
                    1 / 0
                except ZeroDivisionError as e:
                    raise ValueError("bad") from e
            except ValueError as e:
                errors.append(e)
        """,
        check="""
            import traceback
            repr(errors[0]), repr(errors[0].__cause__)
        """,
    ),
    row(
        "annotation of a name",
        setup="from typing import List",
        cell="n: List[int] = [1]",
        check="n",
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""


@each_of(together(ROWS, most=24))
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)

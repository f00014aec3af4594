"""Containers and plain values.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, row, together

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = [
    row(
        "new names",
        setup="x = 1",
        cell="""
            y = x + 1
            z = [y, x]
        """,
    ),
    row(
        "counter",
        setup="n = 0",
        cell="""
            n += 1
            n
        """,
    ),
    row(
        "list in place, alias",
        setup="""
            a = [1]
            b = a
            c = {"k": a}
        """,
        cell="a.append(2)",
    ),
    row(
        "item of a large list, list first",
        setup="""
            a = [[i] for i in range(20)]
            b = a[3]
        """,
        cell="""
            a[1].append(5)
            b.append(1)
        """,
        check="a[3], b, a[3] is b",
    ),
    row(
        "item of a large mixed list, list first",
        setup="""
            a = [[i] if i % 2 else i for i in range(20)]
            b = {"k": a[3]}
        """,
        cell="""
            a[1].append(5)
            b["k"].append(1)
        """,
        check='a[3], b, a[3] is b["k"]',
    ),
    row(
        "item of a large dict, dict first",
        setup="""
            a = {i: {i: i} for i in range(20)}
            b = [a[3]]
        """,
        cell="""
            a[1][5] = 5
            b[0]["x"] = 1
        """,
        check="a[3], b, a[3] is b[0]",
    ),
    row(
        "deep in a large list, list first",
        setup="""
            a = [[0, [i]] for i in range(20)]
            b = a[3][1]
        """,
        cell="""
            a[1].append(5)
            b.append(1)
        """,
        check="a[3], b, a[3][1] is b",
    ),
    row(
        "views of a dict",
        setup="""
            d = {"a": [1]}
            k, v, i = d.keys(), d.values(), d.items()
            box = [k]
        """,
        cell="""
            d["b"] = [2]
            r = [*k], [*v], [*i]
            e = {1: 1}
            m = e.keys()
            e[2] = 2
        """,
        check="""
            d.update(c=3)
            e.update({3: 3})
            [*k], [*v], [*i], box[0] is k, r, [*m]
        """,
    ),
    row(
        "views of an ordered dict",
        setup="""
            from collections import OrderedDict
            d = OrderedDict(a=[1])
            k, v, i = d.keys(), d.values(), d.items()
        """,
        cell="""
            d["b"] = 2
            d.move_to_end("a")
            r = [*k], [*v], [*i]
        """,
        check="""
            d.update(c=3)
            [*k], [*v], [*i], r
        """,
    ),
    row(
        "read-only views of dicts",
        setup="""
            import types, collections
            d = {"a": [1]}
            p = types.MappingProxyType(d)
            box = [p]
            q = types.MappingProxyType(collections.ChainMap(d))
        """,
        cell="""
            d["b"] = 2
            r = dict(p), dict(q)
        """,
        check="""
            d.update(c=3)
            dict(p), dict(q), box[0] is p, r
        """,
    ),
    row(
        "list rebound",
        setup="""
            a = [1]
            b = a
        """,
        cell="a = a + [2]",
    ),
    row(
        "nested containers",
        setup="""
            d = {"x": [1, {2}], "y": (3, [4])}
            inner = d["y"][1]
        """,
        cell="""
            d["x"][1].add(5)
            d["y"][1].append(6)
            d["z"] = d
        """,
    ),
    row(
        "dict order",
        setup="""
            d = {"a": 1, "b": 2}
            e = d
        """,
        cell='d["a"] = d.pop("a")',
    ),
    row(
        "set and frozenset",
        setup="""
            s = {1, 2}
            f = frozenset([s_ := 3])
            t = s
        """,
        cell="""
            s.discard(1)
            s.add("x")
            g = f | {4}
        """,
    ),
    row(
        "deque",
        setup="""
            import collections
            q = collections.deque([1, 2], maxlen=3)
            r = q
        """,
        cell="""
            q.extend([3, 4])
            q.rotate(1)
        """,
    ),
    row(
        "container classes",
        setup="""
            from collections import OrderedDict, defaultdict, Counter
            o = OrderedDict(a=1, b=2)
            f = defaultdict(list)
            c = Counter("aab")
            keep = [o, f, c]
        """,
        cell="""
            o.move_to_end("a")
            f["x"].append(1)
            c.update("bbb")
        """,
    ),
    row(
        "bytearray",
        setup="""
            b = bytearray(b"abc")
            k = [b]
        """,
        cell="""
            b += b"def"
            b[0] = 0
        """,
    ),
    row(
        "recursive list",
        setup="""
            a = []
            a.append(a)
            d = {}
            d["d"] = d
            a.append(d)
        """,
        cell="""
            a.append(len(a))
            d["a"] = a
        """,
    ),
    row(
        "strings, paths, dates, regex",
        setup="""
            import re, datetime, pathlib, decimal, fractions
            v = [
                re.compile("a+"),
                datetime.date(2020, 1, 1),
                pathlib.Path("x"),
                decimal.Decimal("1.5"),
                fractions.Fraction(1, 3),
                range(3),
                slice(1, 2),
                1j,
                b"x",
                None,
                ...,
            ]
        """,
        cell="""
            w = list(v)
            v.append(v[0].match("aa").group())
        """,
    ),
    row(
        "many small dicts",
        setup="""
            rows = [{"i": i, "s": str(i % 7)} for i in range(300)]
            r0 = rows[0]
        """,
        cell="""
            for r in rows[::50]:
                r["x"] = r["i"] * 2
            rows.append(r0)
        """,
    ),
    row(
        "files that were closed",
        setup="""
            with open("a.txt", "w", encoding="latin-1") as made:
                n = made.write("one")
            files = [made]
        """,
        cell="""
            with open("a.txt") as f:
                text = f.read()
            with open("a.txt", "rb") as g:
                size = len(g.read())
            with open("b.txt", "x") as h:
                files.append(h)
            with open("b.txt", "ab", buffering=0) as raw:
                pass
            again = made.name
        """,
        check="""
            (
                made,
                f,
                g,
                h,
                raw,
                again,
                files[0] is made,
                files[1] is h,
                [x.closed for x in (made, f, g, h, raw)],
                f.encoding,
                made.encoding,
            )
        """,
    ),
    row(
        "text and bytes in memory",
        setup="""
            import io
            s = io.StringIO("abc")
        """,
        cell="""
            s.read(1)
            s.write("x")
            t = io.StringIO("q")
            b = io.BytesIO(b"q")
        """,
        check="s.getvalue(), s.tell(), t.getvalue(), b.getvalue()",
    ),
    row(
        "namespace in a dict",
        setup="""
            import types
            ns = types.SimpleNamespace(a=[1])
            d = {}
        """,
        cell="""
            ns.b = ns.a
            ns.a.append(1)
            d["ns"] = ns
        """,
        check='ns, ns.b is ns.a, d["ns"] is ns',
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""


@each_of(together(ROWS, most=24))
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)

"""Arrays of NumPy, memory that is shared, random numbers.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, row, together

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = [
    row(
        "arrays and views",
        setup="""
            import numpy as np
            a = np.arange(6.0)
            v = a[::2]
            b = a.reshape(2, 3).T
            rev = a[::-1]
        """,
        cell="""
            v += 10
            b[0, 0] = -1
            c = a[1:]
            n = a.copy()
        """,
    ),
    row(
        "array of objects and records",
        setup="""
            import numpy as np
            o = np.array([[1], "x"], dtype=object)
            r = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
            k = [o, r]
        """,
        cell="""
            r["a"] = 3
            o[0].append(2)
        """,
    ),
    row(
        "array read-only and empty",
        setup="""
            import numpy as np
            a = np.ones(3)
            a.flags.writeable = False
            e = np.empty((0, 2))
            z = np.array(3.0)
        """,
        cell="""
            s = a.sum() + z
            z += 1
        """,
        check="a.flags.writeable",
    ),
    row(
        "recarray and its column",
        setup="""
            import numpy as np
            r = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
            col = r["a"]
        """,
        cell="""
            r.a[0] = 7
            col[1] = 8
        """,
        check="r.tolist(), col.tolist(), np.shares_memory(col, r)",
    ),
    row(
        "masked array and its data",
        setup="""
            import numpy as np
            d = np.arange(4.0)
            m = np.ma.array(d, mask=[0, 1, 0, 0], copy=False)
        """,
        cell="""
            d[0] = 5
            m[2] = np.ma.masked
            m[3] = 9
        """,
        check="m.tolist(), d.tolist(), np.shares_memory(d, m)",
    ),
    row(
        "memory of a file",
        setup="""
            import numpy as np
            mm = np.memmap("m.bin", dtype="i4", mode="w+", shape=3)
            mm[:] = 1
            mm.flush()
        """,
        cell="""
            mm[0] = 5
            mm.flush()
            s = mm.sum()
        """,
        check='mm, s, open("m.bin", "rb").read()',
    ),
    row(
        "memory of a file, opened in the cell",
        setup="""
            import numpy as np
            np.arange(24, dtype="i4").tofile("m.bin")
            a = np.memmap("m.bin", dtype="i4", mode="r+", shape=(4, 6))
            v = a[1:, ::2]
            w = v[1]
            p = np.asarray(a)
            k = [a]
        """,
        cell="""
            b = np.memmap("m.bin", dtype="i4", mode="r+", offset=8)
            c = np.memmap("n.bin", dtype="f4", mode="w+", shape=(2, 3), order="F")
            c[1] = 5
            d = c[:, 1]
            np.save("l.npy", np.ones((2, 2)))
            l = np.load("l.npy", mmap_mode="r+")
            r = np.load("l.npy", mmap_mode="r")[1]
            v[0] = 70
            w += 1
            b[0] = 90
            s = (
                a.sum().item(),
                np.shares_memory(a, v),
                np.shares_memory(v, w),
                type(v) is np.memmap,
            )
        """,
        check="""
            a[3, 5] = -1
            b[1] = -2
            c[0] = 7
            l[0] = 8
            w[2] = -3
            p[0, 0] = -4
            [x.flush() for x in (a, b, c, l)]
            (
                [x.tolist() for x in (a, v, w, b, c, d, l, r, p)],
                k[0] is a,
                np.shares_memory(a, v),
                np.shares_memory(v, w),
                np.shares_memory(p, a),
                np.shares_memory(c, d),
                s,
                [
                    (type(x).__name__, x.mode, x.offset, x.flags.writeable)
                    for x in (a, v, b, c, d, l, r)
                ],
                [open(f, "rb").read() for f in ("m.bin", "n.bin", "l.npy")],
            )
        """,
    ),
    row(
        "array and tensor share memory",
        setup="""
            import numpy as np, torch
            a = np.zeros(4)
            t = torch.from_numpy(a)
            s = torch.zeros(3)
            b = s.numpy()
        """,
        cell="""
            a[0] = 1
            t[1] = 2
            b[2] = 3
            s[0] = 4
        """,
        check="a.tolist(), t.tolist(), b.tolist(), s.tolist()",
    ),
    row(
        "new view of old memory",
        setup="""
            import numpy as np, torch
            a = np.zeros(4)
            s = torch.zeros(3)
        """,
        cell="""
            n = s.numpy()
            t = torch.from_numpy(a[1:])
            v = a[2:]
            w = s[1:]
        """,
        check="n.fill(5), t.fill_(6), a.tolist(), s.tolist(), v.tolist(), w.tolist()",
    ),
    row(
        "random generators",
        setup="""
            import random, numpy as np, torch
            r = random.Random(3)
            g = np.random.default_rng(4)
            s = np.random.RandomState(5)
            t = torch.Generator().manual_seed(6)
            k = [r, g, s, t]
        """,
        cell="x = [r.random(), g.random(), s.rand(), torch.rand(1, generator=t).item()]",
        check="[r.random(), g.random(), s.rand(), torch.rand(1, generator=t).item()]",
    ),
    row(
        "global random state",
        setup="""
            import random, numpy as np, torch
            x0 = random.random(), np.random.rand(), torch.rand(1).item()
        """,
        cell="x1 = random.random(), np.random.rand(), torch.rand(1).item()",
    ),
    row(
        "seeded in the cell",
        setup="import random, numpy as np, torch",
        cell="""
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
            x1 = random.random(), np.random.rand(), torch.rand(1).item()
        """,
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""


@each_of(together(ROWS))
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)

"""What a cell says of itself: magics, values, output.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, play, row

pytestmark = pytest.mark.usefixtures("oracle")

PLOT = """
import matplotlib.pyplot as plt
fig, ax = plt.subplots()
l = ax.plot([1, 2])
"""

ALONE = [
    row(
        "generator function and async",
        setup="""
            def g(n):
                for i in range(n):
                    yield i * k

            k = 2

            async def co(x):
                return x + k
        """,
        cell="r = list(g(3)), await co(1)",
    ),
    row(
        "magics",
        setup="""
            n = 3
            path = "."
            total = 0

            def f(x):
                return x * n
        """,
        cell="""
            %timeit -n 1 -r 1 f(n)
            files = !echo {path} $n
            print(f"{n:{n}}")
            %time y = f(n)
            files = list(files)
        """,
    ),
    row(
        "cell magic below the header",
        setup="""
            n = 3

            def f(x):
                return x * n
        """,
        cell="""
            %%time
            z = f(n)
        """,
    ),
    row("last expression", setup="n = 3", cell="[n, n + 1]"),
    row(
        "%run -i",
        setup="""
            a = [1]
            b = 2
        """,
        cell="%run -i script.py",
        check="a, b, c",
        files={
            "script.py": """
                a.append(b)
                b = 5
                c = [a]
            """
        },
    ),
    row(
        "last value and names of it", cell="[1, 2]", check='_, _2 if "_2" in globals() else _1, Out'
    ),
    row(
        "error in %run",
        setup="n = 1",
        cell="""
            %run bad.py
            n = 2
        """,
        check="n",
        files={
            "bad.py": """
                print("begin")
                1 / 0
            """
        },
        goes_on=True,
    ),
    row(
        "%%capture with an error",
        cell="""
            %%capture out
            print("x")
            3
        """,
        check="out.stdout, len(out.outputs)",
    ),
    row(
        "history of the notebook",
        setup="""
            a = 5
            a + 1
        """,
        cell="r = _, _1, Out[1], In[1]",
        check="r",
    ),
    row(
        "magic of the notebook",
        setup="""
            from IPython.core.magic import register_line_magic

            @register_line_magic
            def double(line):
                return int(line) * k

            k = 2
        """,
        cell="""
            r = %double 4
            print(r)
        """,
        check="r",
    ),
    row(
        "every value is shown",
        setup='get_ipython().ast_node_interactivity = "all"',
        cell="""
            1
            [2]
        """,
    ),
    row(
        "pandas first imported in the cell",
        setup="x = 1",
        cell="import pandas as pd",
        check='pd.get_option("display.max_columns"), pd.get_option("display.width")',
    ),
    row(
        "figure shown again",
        setup=PLOT,
        cell="""
            ax.plot([2, 3])
            display(fig)
        """,
        check="fig",
    ),
    row(
        "figure of the cell shown later",
        cell=PLOT,
        check="""
            ax.set_title("t")
            fig
        """,
    ),
    row(
        "format of figures",
        setup="%config InlineBackend.figure_format = 'retina'",
        cell="""
            import matplotlib.pyplot as plt
            plt.plot([1, 2]);
            %config InlineBackend.figure_format = 'png'
        """,
        check="plt.plot([1, 3]);",
    ),
    row(
        "functions that show numbers",
        setup="""
            import numpy as np, pandas as pd
            pd.options.display.float_format = lambda x: "%.1f!" % x
        """,
        cell="""
            a = np.ones(2)
            df = pd.DataFrame({"a": [1.25]})
            print(a, df)
            pd.options.display.float_format = lambda x: "?"
            np.set_printoptions(precision=3)
        """,
        check="print(a, df)",
    ),
    row(
        "how a class is shown",
        setup="""
            class A:
                pass

            f = (
                get_ipython()
                .display_formatter.formatters["text/html"]
                .for_type(A, lambda a: "<b>A</b>")
            )
        """,
        cell="""
            display(A())

            class B:
                pass

            f = (
                get_ipython()
                .display_formatter.formatters["text/html"]
                .for_type(B, lambda b: "<i>B</i>")
            )
        """,
        check="display(A(), B())",
    ),
]
"""Each has a notebook of its own."""


@each_of(ALONE)
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)


BAR = row(
    "bar",
    setup="from tqdm import tqdm",
    cell="""
        b = tqdm(range(3))
        for i in b:
            pass
    """,
    check="b.n, b.fp is not None, len(tqdm._instances)",
)


def test_a_bar_comes_back_whole(tmp_path: Path) -> None:
    """It writes to the notebook's stream, whose class is another one in ranks; it is not reported.

    It is over: the next bar has the line to itself.
    """
    pytest.importorskip("tqdm")
    played = play(BAR, tmp_path, plain=False)
    assert played.value == "(3, True, 0)"
    assert not played.lost

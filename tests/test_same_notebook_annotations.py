"""Annotations.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from blocks import block
from oracle import Program, assert_same, each_of, row

pytestmark = pytest.mark.usefixtures("oracle")

NOTED = "__annotate__(1)" if sys.version_info >= (3, 14) else "__annotations__"
"""The annotations of names that a cell has bound; from Python 3.14 on a function makes them."""

ALONE = [
    row(
        "annotations are evaluated",
        setup="""
            from dataclasses import dataclass, fields
            from typing import Optional, List

            class K:
                pass
        """,
        cell="""
            @dataclass
            class C:
                k: Optional[int] = None
                l: "List[K]" = None

            def f(x: K) -> K:
                return x

            import typing
            r = (
                fields(C)[0].type,
                f.__annotations__["x"] is K,
                typing.get_type_hints(C)["l"].__args__[0] is K,
            )
            del C
        """,
    ),
    row(
        "imported from the future",
        setup="""
            from __future__ import annotations
            n = 1
        """,
        cell="""
            class A:
                def copy(self, other: Missing) -> A:
                    return n

            r = A().copy(1)
        """,
        check="A.copy.__annotations__, r",
    ),
    row(
        "annotated names",
        setup="n: int = 1",
        cell=block("m: float = n / 2", f"seen = sorted({NOTED})"),
        check=NOTED,
    ),
    row(
        "annotations of a class, asked for in the cell",
        setup="""
            class K:
                pass

            class A:
                k: K

                def f(self, k: K) -> "K":
                    return k
        """,
        cell="""
            r = A.__annotations__["k"] is K, A.f.__annotations__["k"] is K

            class B(A):
                a: A
        """,
        check='r, B.__annotations__["a"] is A, A.__annotations__["k"] is K, A.f.__annotations__',
    ),
    row(
        "annotations of a class, asked for later",
        setup="""
            from typing import get_type_hints

            class K:
                pass

            class A:
                k: "K"

                def __init__(self):
                    self.n = 1

            a = A()
        """,
        cell="""
            a.n += 1

            class B:
                a: A = a
                later: "Late"

            b = B()
        """,
        check="""
            class Late:
                pass

            get_type_hints(B), get_type_hints(A), type(b.a) is A, a.n
        """,
    ),
    row(
        "annotations that the cell sets",
        setup="""
            def f(x: int):
                return x

            class A:
                n: int = 1
        """,
        cell="""
            f.__annotations__ = {"x": str}
            A.__annotations__ = {"m": float}

            def g():
                pass

            g.__annotations__["y"] = int
        """,
        check="f.__annotations__, A.__annotations__, g.__annotations__",
    ),
    row(
        "names in annotations that are texts",
        setup="""
            from __future__ import annotations
            import typing

            class Net:
                pass

            class Opt:
                pass

            def f(x: list[Net], y: "Opt" = None) -> Net:
                return x

            class Cfg:
                o: Opt
        """,
        cell="h = typing.get_type_hints(f), typing.get_type_hints(Cfg)",
        check='h[0]["x"] == list[Net], h[0]["return"] is Net, h[1]["o"] is Opt',
    ),
]
"""Each has a notebook of its own."""


@each_of(ALONE)
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)

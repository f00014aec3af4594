"""Which cells carry a header, and which only look as if they did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.header.grammar import HeaderText, find_header

HEADERS = {
    "#!g2.8\n#pragma taas --gpus 8\nprint()": ("g2.8", "--gpus 8"),
    "#!g2.8\nprint()": ("g2.8", None),
    "#pragma taas --gpus auto\nprint()": (None, "--gpus auto"),
    "\n\n# why\n#!g2.8\n\n# and\n#pragma taas --gpus 8\nprint()": ("g2.8", "--gpus 8"),
    "#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\n#!g2.8\n#pragma taas --gpus 8": (
        "g2.8",
        "--gpus 8",
    ),
    "#!g2.8\r\n#pragma taas --gpus 8\r\nprint()": ("g2.8", "--gpus 8"),
    "#!g2.8  # eight A100\n#pragma\ttaas\t--gpus 8": ("g2.8", "--gpus 8"),
    "#! g2.8\n#pragma taas": ("g2.8", ""),
    "#!g2.8\n# pragma taas --gpus 8\nprint()": ("g2.8", "--gpus 8"),
    "#!{kind}\n#pragma taas --gpus {n}": ("{kind}", "--gpus {n}"),
    "#!G2.8\nprint()": ("G2.8", None),
    "#!g2.8\n# more of it: --gpus 16\n#pragma taas --gpus 8\n# was --gpus 4\nprint()": (
        "g2.8",
        "--gpus 8",
    ),
    "#!g2-4\nprint()": ("g2-4", None),
    "#!H100\nprint()": ("H100", None),
    "#!see\n#pragma taas --gpus 8\nprint()": ("see", "--gpus 8"),
    "#! v2 of the model\n#pragma taas --gpus 8\nprint()": (None, "--gpus 8"),
    "# v1.2\n#pragma taas --gpus 8\n# g2.8\n#!odd\nprint()": (None, "--gpus 8"),
    "#!g2.8\n#pragma taas --gpus 8\n'''\n#pragma taas\n'''": ("g2.8", "--gpus 8"),
}

ORDINARY = [
    "",
    "x = 1",
    "#!/bin/bash\nls",
    "#!python3.11\nprint()",
    "#!fast\nprint()",
    "# g2.8 is quick\nprint()",
    "def f():  # pragma: no cover\n    pass",
    "# the header is #pragma taas --gpus 8\nprint()",
    "##!g2.8\n##pragma taas --gpus 8\nprint()",
    "text = '''\n#!g2.8\n#pragma taas --gpus 8\n'''",
    'text = """\n#pragma taas --gpus 8\n"""',
    r"text = 'it\'s #pragma taas --gpus 8'",
    "%%writefile cell.py\n#!g2.8\n#pragma taas --gpus 8\n",
    "\n%%bash\n#!g2.8\n",
    "#pragma omp parallel\nprint()",
    "# see taas --gpus 8 in the docs\nprint()",
    "x = 1\n# torchrun --gpus 8\n",
    "print()  #!g2.8",
]

PROBLEMS = {
    "x = 1\n#pragma taas --gpus 8": "line 2",
    "x = 1\n#!g2.8\ny = 2": "line 2",
    "'''doc'''\n#!g2.8\n#pragma taas --gpus 8": "line 2",
    "!echo don't\n%time f()\n#pragma taas --gpus 8": "line 3",
    "def f(:\n#pragma taas --gpus 8": "line 2",
    "#!g2.8\n#pragma taas --gpus 8\nx = 1\n#pragma taas --gpus 16": "leave it out",
    "#!g2.8\n#pragma taas --gpus 8\n#pragma taas --cpus 1": (
        "type #!g2.8 and below it #pragma taas --gpus 8 --cpus 1"
    ),
    "#!g2.8\n#!g2.4\n": "allowed is one #!TYPE",
    "#pragma taas --gpus 8\n#!g2.8\n": "type #!g2.8 and below it #pragma taas --gpus 8",
    "#!g2.8 --gpus 8\n": "type #!g2.8 and below it #pragma taas --gpus 8",
    "#!g2.8 #pragma taas --gpus 8\n": (
        "type #!g2.8 and below it #pragma taas --gpus 8; allowed is one #!TYPE alone"
    ),
    "#!g2.8 # taas --gpus 8\n": "alone on its line",
    "#  pragma  tass --gpus 8\n": "type #pragma taas --gpus 8",
    "#PRAGMA TAAS --gpus 8\n": "type #pragma taas --gpus 8",
    "#pragmataas --gpus 8\n": "type #pragma taas --gpus 8",
    "#pragma taas--gpus 8\n": "type #pragma taas --gpus 8",
    "#taas --gpus 8\n": "type #pragma taas --gpus 8",
    "x = 1\n# taas --gpus 4": "line 2",
    "%pragma taas --gpus 4\nx = 1": "is no magic: type #pragma taas --gpus 4",
    "\n%%pragma taas --gpus 4\nx = 1": "is no magic: type #pragma taas --gpus 4",
    "% pragma taas\nx = 1": "is no magic: type #pragma taas",
    "%PRAGMA TAAS --gpus 4 # two\nx = 1": "type #pragma taas --gpus 4 # two",
    **{  # below a right type, where all ranks but one would be missing, and alone
        f"{above}{line}\nprint()": "type #pragma taas --gpus 4"
        for above in ("#!g2.4\n", "")
        for line in (
            "#prgama taas --gpus 4",
            "# taas --gpus 4",
            "#paragma --gpus 4",
        )
    },
    "#!g2.4\n# --gpus 4\n": "type #pragma taas --gpus 4",
    "#!g2.4\n#pragma\n": "type #pragma taas, or ##pragma",
    "#!g2.4\n#!pragma taas --background\n": "type #pragma taas --background",
}


@pytest.mark.parametrize("cell", HEADERS)
def test_header_is_found(cell: str) -> None:
    """Blank lines and comments may stand above both lines.

    Transfer returns, tabs and comments do no harm.
    """
    instance, options = HEADERS[cell]
    assert find_header(cell) == HeaderText(instance=instance, options=options)


@pytest.mark.parametrize("cell", ORDINARY)
def test_ordinary_cell_has_no_header(cell: str) -> None:
    """Shebangs, other pragmas, strings, cell magics and commented headers are not headers."""
    assert find_header(cell) is None


@pytest.mark.parametrize("cell", PROBLEMS)
def test_near_miss_is_told(cell: str) -> None:
    """What was surely meant as a header is never silently a comment.

    Its problem says what to type.
    """
    found = find_header(cell)
    assert found is not None
    assert found.problem is not None
    assert PROBLEMS[cell] in found.problem
    assert len(found.problem.splitlines()) == 1


LINES = st.sampled_from(
    [
        *(line for cell in (*HEADERS, *ORDINARY, *PROBLEMS) for line in cell.split("\n")),
        "'''",
        '"""',
        "\\",
    ]
)


@given(st.lists(LINES | st.text(), max_size=8).map("\n".join))
def test_any_cell_is_either_ordinary_or_headed(cell: str) -> None:
    """Looking at it raises nothing and says at most one line.

    A right header stays the header above it.
    """
    found = find_header(cell)
    assert found is None or found.problem is None or len(found.problem.splitlines()) == 1
    above = find_header("#!g2.8\n#pragma taas --gpus 8\npass\n" + cell)
    assert above is not None and (above.instance, above.options) == ("g2.8", "--gpus 8")

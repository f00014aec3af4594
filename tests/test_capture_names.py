"""Which names a cell needs: never too few, and not what it binds itself."""

from __future__ import annotations

import builtins
import contextlib
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taas.capture import capture
from taas.capture.moves.names import Needs, needs_of

NOTEBOOK = "model opt loader batch x y z cfg old res path n Net a b data f unused lr k self i words"


def needs(cell: str, **defined: Any) -> Needs:
    namespace: dict[str, Any] = dict.fromkeys(NOTEBOOK.split(), 0)
    namespace.update(defined)
    return needs_of(cell, namespace)


@pytest.mark.parametrize(
    ("cell", "sure", "maybe"),
    [
        (
            "model = Net()\nfor batch in loader:\n    x = batch\n    res = model(x)\n",
            "Net loader",
            "",
        ),
        ("def train():\n    return model(x)\nmodel = Net()\nx = 1\ntrain()", "Net", ""),
        ("def train():\n    return model(x)\ntrain()\nmodel = 1", "", "model x"),
        ("@cfg\ndef f():\n    return x\n", "cfg", "x"),
        ("from __future__ import annotations\ndef g(q: x): pass\nclass A:\n    k: y", "", "x y"),
        ("%timeit f(n)\n!ls {path} $data\nprint(f'{cfg.x:{lr}}')", "cfg lr", "f n path data"),
        ("#!g2.8\n#pragma taas\n%%time\nz = f(n)\nz", "f n", ""),
        ("res = [i for i in data if i > k]\nimport a\nwith f as b: b", "data f", "k"),
        ("if n: model = 1\nelse: model = 2\nmodel", "n", "model"),
        ("if n: raise SystemExit\nmodel", "n", "model"),
        ("x += 1\ny: int = k\n(z := 3)\nz", "x k", ""),
        (
            "class A(Net):\n    lr = lr\n    k = 1\n    j = k\n    def g(self): return cfg",
            "Net lr",
            "k",
        ),
        ("try:\n    x\nexcept Exception as n:\n    n\nn", "", "x n"),
        ("f = lambda: x + y\nx = 1\nf()", "", "x y"),
        (
            "match x:\n    case [y, *z] if a: b\n    case cfg.K: y\n    case Net(k=k): k",
            "x",
            "a b cfg y Net",
        ),
        ("del x\nx = 1", "x", ""),
        ("with torch.no_grad(): x = 1\nx", "", ""),
        ("eval('x + y')\nglobals()['z']", "", "x y z"),
        ("data.query('a > @k')", "data", "a k"),
        ("print(In, Out, _, exit, get_ipython, __name__)", "", ""),
        ("x.attr = y\nz[k] = 1", "x y z k", ""),
        ("for i in loader:\n    if i: break\ny", "loader y", ""),
        ("for i in loader:\n    x = i\n    y = x + z\nx", "loader", "z x"),
        (
            "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x += y\n    g()\nf()",
            "",
            "y",
        ),
    ],
)
def test_names_of_a_cell(cell: str, sure: str, maybe: str) -> None:
    """Sure: read before bound, whatever happens. Maybe: in a branch, a function, a text."""
    found = needs(cell)
    assert (set(sure.split()), set(maybe.split())) == (found.sure, found.maybe)


@pytest.mark.parametrize(
    "line",
    [
        "globals()[f'n{i}']",
        "vars()[k]",
        "[globals()[w] for w in words]",
        "getattr(__main__, k)",
        "eval(f'x + {y}')",
        "import __main__ as m",
        "list(globals())",
        "exec(open(path).read())",
        "%run -i script.py",
        "k in globals()",
        "g = lambda name: eval(name)\ng(path)",
        "import sys\nm = sys.modules['__main__']",
        "for w in words: eval(w)",
        "get_ipython().ev(k)",
    ],
)
def test_a_cell_that_makes_names_may_need_all(line: str) -> None:
    """Where the cell makes a text, any name may be meant that it has not bound before."""
    found = needs(f"import __main__\nmodel = 1\n{line}", w="model")
    assert found.built
    assert {"old", "res", "f"} <= found.others | found.maybe | found.sure
    assert "model" not in found.others | found.maybe | found.sure


def _travels(cell: str, earlier: str, file: str = "<earlier>") -> set[str]:
    """Return the names that a cell takes of what an earlier one made."""
    namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
    exec(compile(earlier, file, "exec"), namespace)
    with capture(cell, namespace, None, project=Path("/no project")) as captured:
        return {*captured.names}


def test_functions_of_earlier_cells_are_looked_through() -> None:
    """What they use is needed, unless the cell binds it before it uses them.

    It may bind it in any way, and whatever they are called.
    """
    earlier = """\
model = 1; opt = 2; lr = 3; deep = 4
def inner(): return deep
def train(): return model, opt, inner()
other = [train]"""
    assert _travels("model = 5\ntrain()", earlier) == {"train", "opt", "inner", "deep"}
    assert _travels("train()\nmodel = 5", earlier) == {"train", "opt", "inner", "deep", "model"}
    assert "model" in _travels("other\nmodel = 5\ntrain()", earlier)
    assert "model" in _travels("if lr:\n    model = 5\n    train()\ntrain()", earlier)
    assert "opt" not in _travels("opt = 5\ninner()\nmodel = 5\ntrain()\nother", earlier)


# ---------------------------------------------------------------- never too few

NAMES = "abcdef"
name = st.sampled_from(NAMES)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 2) -> str:
    if not depth:
        return draw(st.one_of(name, st.integers(0, 2).map(str)))
    inner = expressions(depth=depth - 1)
    x, y, n = draw(inner), draw(inner), draw(name)
    return draw(
        st.sampled_from(
            [
                x,
                n,
                f"({x} + {y})",
                f"({x} and {y})",
                f"({x} if {y} else {n})",
                f"({n} := {x})",
                f"sum({y} for {n} in range(2) if {x})",
                f"(lambda {n}: {y})({x})",
                f"(lambda: {y})()",
                f"call({n})",
                f"eval('{n}')",
            ]
        )
    )


def _indented(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for text in lines for line in text.splitlines()) or "    pass\n"


@st.composite
def statements(draw: st.DrawFn, depth: int = 2, in_function: bool = False) -> str:
    x, y, n, m = draw(expressions()), draw(expressions()), draw(name), draw(name)
    simple = [
        f"{n} = {x}",
        f"{n} += {x}",
        f"{n}: int = {x}",
        x,
        f"{n} = {m} = {y}",
        f"assert {x} or True, {y}",
    ]
    if not in_function:
        simple += [
            f"del {n}",
            f"import math as {n}",
            f"{n} = lambda: {y}",
            f"{n}()",
            f"for {n} in (1, 2): {y}",
        ]
    if not depth or draw(st.booleans()):
        return draw(st.sampled_from(simple))
    block = _indented(
        draw(st.lists(statements(depth=depth - 1, in_function=in_function), max_size=3))
    )
    other = _indented(
        draw(st.lists(statements(depth=depth - 1, in_function=in_function), max_size=2))
    )
    body = _indented(draw(st.lists(statements(depth=depth - 1, in_function=True), max_size=3)))
    return draw(
        st.sampled_from(
            [
                f"if {x}:\n{block}else:\n{other}",
                f"for {n} in range({x}):\n{block}",
                f"for {n} in (1, 2):\n{block}    if {y}: break\nelse:\n{other}",
                f"while {x}:\n{block}    break\n",
                f"try:\n{block}except Exception as {n}:\n{other}",
                f"try:\n{block}    raise KeyError\nexcept KeyError:\n{other}finally:\n    {n}\n",
                f"def {n}({m}={x}):\n{body}    return {y}\n",
                f"def {n}():\n    global {m}\n{body}    {m} = 1\n    return {y}\n{n}()\n",
                f"@call\ndef {n}():\n{body}    return {y}\n",
                f"class {n}:\n{body}    {m} = {m}\n    def __init__(self):\n        {y}\n{n}()\n",
                f"match [{x}, 0]:\n"
                f"    case [{n}, 1]: {m} = 1\n"
                f"    case [_, *{m}] if {n}: pass\n"
                f"    case _: {n} = {m}\n",
                f"exec('{n} = {m}')\nglobals()['{m}'] = {x}\n{n}, {m}\n",
                f"{n} = lambda {m}={x}: {y}\n{m} = 1\ncall({n})\n",
            ]
        )
    )


def _call(value: Any) -> Any:
    return value() if callable(value) else value


def _outcome(code: Any, namespace: dict[str, Any], behind: dict[str, Any]) -> tuple[str, str]:
    """Run a program; return its failure and the values of all names, also those left behind."""
    try:
        exec(code, namespace)
    except RecursionError:
        return "recursion", ""
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    else:
        failure = ""
    left = {key: value for key, value in (behind | namespace).items() if key in NAMES}
    return failure, repr(
        {k: type(v).__name__ if " at 0x" in repr(v) else v for k, v in sorted(left.items())}
    )


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(statements(), min_size=1, max_size=4))
def test_a_cell_runs_the_same_with_the_names_it_needs(lines: list[str]) -> None:
    """Whatever a program does, it does with only the names that the analysis found."""
    cell = "\n".join(lines)
    try:
        code = compile(cell, "<cell>", "exec")
    except SyntaxError:
        return
    full: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    full |= {"call": _call, "suppress": contextlib.suppress}
    full |= {n: value for value, n in enumerate(NAMES)}
    found = needs_of(cell, full)
    keep = found.sure | found.maybe | {"call", "suppress", "__name__", "__builtins__"}
    restricted = {key: value for key, value in full.items() if key in keep}
    behind = {key: value for key, value in full.items() if key not in keep}
    expected, actual = _outcome(code, full, {}), _outcome(code, restricted, behind)
    assert expected == actual, cell

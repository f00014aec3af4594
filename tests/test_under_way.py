"""Objects of a training under way that an earlier cell made: bars of tqdm, scalers of gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook
from oracle import play, row, together

pytest.importorskip("tqdm")  # no dependency of taas

BARS = """
from tqdm import tqdm
how = {
    "bar_format": "{desc}{n}/{total}{postfix}",
    "mininterval": 0,
    "miniters": 1,
}
"""
SCALED = """
import torch, torch.nn as nn
torch.manual_seed(1)
net = nn.Linear(2, 1)
opt = torch.optim.SGD([net.weight], lr=0.1)
x = torch.ones(1, 2)
s = torch.amp.GradScaler("cpu", init_scale=8.0)
"""

UNDER_WAY = [
    row(
        "bar of an earlier cell, updated",
        setup=block(BARS, "a = tqdm(total=4, **how)"),
        cell="""
            a.update()
            a.update(2)
            m = a.n
        """,
        check="print(a.update(1), a.n, m, a.close())",
    ),
    row(
        "bar of an earlier cell, iterated to its end",
        setup=block(
            BARS,
            """
                b = tqdm(range(3), **how)
                k = [b]
            """,
        ),
        cell="seen = [x for x in b]",
        check="print(seen, b.n, b.disable, k[0] is b)",
    ),
    row(
        "bar that writes into a text",
        setup=block(
            BARS,
            """
                import io
                out = io.StringIO()
                c = tqdm(total=2, file=out, **how)
            """,
        ),
        cell="""
            c.update()
            c.set_description("long")
        """,
        check="""
            print(
                c.set_description(""),
                c.update(),
                out.getvalue(),
                c.fp._wrapped is out,
                c.close(),
            )
        """,
    ),
    row(
        "two bars, one below the other, and one made in the cell",
        setup=block(
            BARS,
            """
                d = tqdm(total=2, **how)
                e = tqdm(total=20, **how)
                e.update(10)
            """,
        ),
        cell="""
            e.update(5)
            d.update()
            f = tqdm(total=1, **how)
            f.close()
            e.set_postfix_str("x")
            e.n = 1
            e.refresh()
        """,
        check="print(d.pos, e.pos, e.update(), d.update(), e.close(), d.close(), f.n)",
    ),
    row(
        "scaler between unscale_ and update",
        setup=block(
            SCALED,
            """
                s.scale(net(x).sum()).backward()
                s.unscale_(opt)
                k = s
            """,
        ),
        cell="""
            s.step(opt)
            s.update()
        """,
        check="print(s.get_scale(), k is s, net.weight.tolist(), s._per_optimizer_states)",
    ),
    row(
        "scaler that found an infinity",
        setup=block(
            SCALED,
            """
                s.scale(net(x).sum()).backward()
                net.weight.grad[0, 0] = float("inf")
                s.unscale_(opt)
            """,
        ),
        cell="""
            s.step(opt)
            s.update()
        """,
        check="print(s.get_scale(), net.weight.tolist(), s._per_optimizer_states)",
    ),
    row(
        "scaler of two optimizers, one of them stepped",
        setup=block(
            SCALED,
            """
                o2 = torch.optim.SGD([net.bias], lr=0.5)
                s.scale(net(x).sum()).backward()
                s.unscale_(opt)
                s.step(opt)
            """,
        ),
        cell="""
            s.unscale_(o2)
            s.step(o2)
            s.update()
        """,
        check="""
            print(
                s.get_scale(),
                net.weight.tolist(),
                net.bias.tolist(),
                s._per_optimizer_states,
            )
        """,
    ),
    row(
        "scaler through a whole iteration",
        setup=SCALED,
        cell="""
            s.scale(net(x).sum()).backward()
            s.unscale_(opt)
            s.step(opt)
            s.update()
        """,
        check="print(s.get_scale(), net.weight.tolist())",
    ),
    row(
        "scaler unscaled in the cell, and stepped after it",
        setup=SCALED,
        cell="""
            s.scale(net(x).sum()).backward()
            s.unscale_(opt)
        """,
        check="""
            s.step(opt)
            s.update()
            print(s.get_scale(), net.weight.tolist(), s._per_optimizer_states)
        """,
    ),
]


@pytest.mark.slow
def test_a_widget_bar_is_text_where_nobody_is_shown_it(notebook: Notebook) -> None:
    """``tqdm.auto`` is a widget in the notebook and rank 0, and text in other ranks."""
    pytest.importorskip("ipywidgets")
    notebook.good(
        "from tqdm.auto import tqdm\na = tqdm(total=6)\nkind = type(a).__mro__[1].__module__"
    )
    cell = "a.update(); a.update(2)\nnow = a.n"
    for header in ("#pragma taas --gpus 2", "#pragma taas --gpus 2 --output none"):
        notebook.good(f"{header}\n{cell}")
    notebook.good("a.refresh()")
    seen = notebook.value("kind, now, a.n, a.gui, a.container.children[1].value")
    assert seen == "tqdm.notebook 6 6 True 6.0"


@pytest.mark.usefixtures("oracle")
def test_what_is_under_way_goes_on(tmp_path: Path) -> None:
    """Bars draw, and scalers step, as in a plain notebook.

    Under the header, and in the cell after it.
    """
    (program,) = together(UNDER_WAY)
    plain = play(program, tmp_path / "plain", plain=True)
    headed = play(program, tmp_path / "headed", plain=False)
    assert not headed.lost
    for there, here in zip(plain.cells, headed.cells, strict=True):
        assert (here.ename, here.evalue) == (there.ename, there.evalue) == ("", "")
        assert here.own == there.own
        assert here.stderr == there.stderr

"""Widgets and live displays in a rank.

Front end and notebook have what they have after a cell without a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blocks import block
from notebook_harness import Notebook
from test_status import executed

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
pytestmark = pytest.mark.slow
HEAD = "#pragma taas --gpus 2\n"
IMPORTS = "%load_ext taas\nimport ipywidgets as widgets\nfrom tqdm.notebook import tqdm\n"
REGISTRY = "__import__('ipywidgets.widgets.widget').widgets.widget._instances"


@pytest.fixture(scope="module")
def notebook(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook with widgets imported."""
    notebook.good(IMPORTS)
    yield notebook


def models(folder: Path, *cells: str) -> tuple[list[Any], list[Any]]:
    """What a front end has after a notebook.

    It has all models without their ids, and what cells show, without taas' lines.
    """
    book = executed(folder, IMPORTS, *cells)
    state = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    found = [
        (
            model["model_name"],
            re.sub(r"IPY_MODEL_\w+|\d+:\d+|[\d.]+ ?it/s", "", str(model["state"])),
        )
        for model in state.values()
    ]
    shown = [
        output
        for cell in book.cells
        for output in cell.get("outputs", ())
        if "taas" not in str(output) and "rehearsed" not in str(output)
    ]
    views = [sorted(output.data) for output in shown if output.output_type == "display_data"]
    return sorted(found), views


CELLS = (
    "for step in tqdm(range(5), desc='train'): pass",
    "with tqdm(total=10) as bar:\n    for step in range(4): bar.update(2)\ndel bar",
    "from tqdm.auto import tqdm as automatic\nfor step in automatic(range(5)): pass",
    block("""
        box = widgets.VBox([widgets.IntSlider(value=3), widgets.HTML('<b>x</b>')])
        box.children[0].value = 5
        display(box)
    """),
    block("""
        picture = widgets.Image(value=bytes(range(256)))
        display(picture)
        picture.value = b'x' * 1000
    """),
    block("""
        kinds = [
            widgets.Dropdown,
            widgets.RadioButtons,
            widgets.ToggleButtons,
            widgets.SelectionSlider,
        ]
        box = widgets.VBox([of(options=['a', 'b', 'c']) for of in kinds])
        for one in box.children: one.value = 'b'
        box.children[0].options = ['x']
        display(box)
    """),
    "display(widgets.interactive(lambda opt: None, opt=['a', 'b']))",
)


def test_the_front_end_has_the_same_models(tmp_path: Path) -> None:
    """Each widget stands once, in its last state, with a view where it was displayed."""
    assert models(tmp_path, *(HEAD + cell for cell in CELLS)) == models(tmp_path, *CELLS)


def test_the_notebooks_own_widgets_change(notebook: Notebook) -> None:
    """A widget of an earlier cell changes while the cell runs.

    The notebook's observers hear of it, and stay.
    """
    notebook.good(
        block("""
            seen = []
            slider = widgets.IntSlider()
            slider.observe(lambda change: seen.append(change['new']), 'value')
            button = widgets.Button()
            button.on_click(lambda _: seen.append('click'))
        """)
    )
    notebook.good(HEAD + "slider.value = 12\nbutton.description = 'changed'")
    notebook.good("slider.value += 1\nbutton.click()")
    assert (
        notebook.value("seen, slider.value, button.description") == "[12, 13, 'click'] 13 changed"
    )


OBSERVED = """
seen = []
slider = widgets.IntSlider(value=1)
slider.observe(lambda change: seen.append(("first", change["new"])), "value")
button = widgets.Button()
"""
OBSERVES = """
slider.value = 5
slider.observe(lambda change: seen.append(("second", change["new"])), "value")
made = widgets.IntSlider(value=3)
made.observe(lambda change: seen.append(("made", change["new"])), "value")
button.on_click(lambda _: seen.append("click"))
"""
MOVED = "slider.value = 7; made.value = 8; button.click()"


def test_observers_that_a_cell_adds_stay(notebook: Notebook) -> None:
    """Also those of the cell's own widgets; each hears of a change once."""
    notebook.good(OBSERVED)
    notebook.good(OBSERVES)
    notebook.good(MOVED)
    expected = notebook.value("seen")
    notebook.good(OBSERVED)
    notebook.good(HEAD + OBSERVES)
    notebook.good(MOVED)
    assert notebook.value("seen") == expected


def test_widgets_of_the_cell_are_the_notebooks_afterwards(notebook: Notebook) -> None:
    """The model in the front end is that of the name.

    It is changed here, or moved there, and asked for by a page loaded again.
    """
    notebook.good(
        HEAD + "made = widgets.IntSlider(value=3)\nmade.value = 5\ndisplay(widgets.HTML('no name'))"
    )
    assert notebook.value(f"made.value, {REGISTRY}[made.model_id] is made") == "5 True"
    assert "HTML" in notebook.value(f"[type(w).__name__ for w in {REGISTRY}.values()]")
    notebook.good(
        "made.comm.handle_msg({'content': {'data': {'method': 'update', 'state': {'value': 8}}}})"
    )
    notebook.good(HEAD + "made.value += 1\nboth = widgets.HBox([made])")
    assert notebook.value("made.value, both.children[0] is made") == "9 True"


def test_attach_shows_widgets_in_another_kernel(notebook: Notebook, tmp_path: Path) -> None:
    """There their models are made anew; where they are already, nothing is set back."""
    notebook.good(
        block("""
            #pragma taas --gpus 1 --name bars
            for step in tqdm(range(5)): pass
            kept = widgets.IntText(value=1)
        """)
    )
    notebook.good("kept.value = 7\n%taas attach bars")
    assert notebook.value("kept.value") == "7"
    other = Notebook(tmp_path)
    try:
        other.good("%load_ext taas\n%taas attach bars")
        assert (
            other.value(
                f"[w.value for w in {REGISTRY}.values() if type(w).__name__ == 'FloatProgress']"
            )
            == "[5.0]"
        )
    finally:
        other.close()


# -------------------------------------------------------- bars and tables that a library draws live

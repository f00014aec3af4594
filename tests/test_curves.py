"""Curves: which numbers of a cell's output are taken, and where people see them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from blocks import block
from hypothesis import given
from hypothesis import strategies as st
from notebook_harness import Notebook

from taas.notebook.view import drawing
from taas.protocol.run_curves import Curve, Curves
from taas.runs.curves import PrintedNumbers, Series
from taas.runs.events import Output
from taas.runs.printed_numbers import numbers_in


def curves_of(*texts: str, stream: str = "stdout") -> dict[str, list[float]]:
    """Return the curves of a rank that writes these texts."""
    numbers = PrintedNumbers()
    for text in texts:
        numbers.take([Output(0, stream, text)])
    numbers.end()
    return {name: curve.values for name, curve in numbers.curves().items()}


# ---------------------------------------------------------------- one line

TAKEN = {
    "loss 0.43": {"loss": 0.43},
    "loss=0.43": {"loss": 0.43},
    "loss: 0.43": {"loss": 0.43},
    "loss = 0.43": {"loss": 0.43},
    "loss\t0.43": {"loss": 0.43},
    "loss is 0.43.": {"loss": 0.43},
    "acc 91.2%": {"acc": 91.2},
    "acc 91.2 %": {"acc": 91.2},
    "loss 0.43, acc 91.2%": {"loss": 0.43, "acc": 91.2},
    "(loss 0.43)": {"loss": 0.43},
    "Loss/train=0.43": {"Loss/train": 0.43},
    "acc@1 75.02": {"acc@1": 75.02},
    "perte=0.43 précision=0.9": {"perte": 0.43, "précision": 0.9},
    "[rank0] loss 0.43": {"loss": 0.43},
    # signs, exponents, thousands, no number
    "lr 1e-05": {"lr": 1e-05},
    "lr: 1.0000E-04": {"lr": 1e-4},
    "scale=6.5e+04": {"scale": 6.5e4},
    "reward -1.5": {"reward": -1.5},
    "reward=+.5": {"reward": 0.5},
    "perplexity 1,234.5": {"perplexity": 1234.5},
    "perplexity 12_345.5": {"perplexity": 12345.5},
    "loss nan": {"loss": math.nan},
    "loss: -inf": {"loss": -math.inf},
    "loss=Infinity": {"loss": math.inf},
    # what programs print
    "{'loss': 0.43, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 1.0}": {
        "loss": 0.43,
        "grad_norm": 1.2,
        "learning_rate": 5e-05,
    },
    "{'loss': '0.43', 'grad_norm': '1.2'}": {"loss": 0.43, "grad_norm": 1.2},
    '{"loss": 0.43}': {"loss": 0.43},
    "loss tensor(0.4312, device='cuda:0', grad_fn=<NllLossBackward0>)": {"loss": 0.4312},
    "{'loss': np.float64(0.43)}": {"loss": 0.43},
    "step 100: loss=0.43": {"loss": 0.43},
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.30": {"Train Loss": 2.30},
    "Epoch: [0][ 10/5005]\tTime  0.438 ( 2.112)\tLoss 7.0e+00 (7.1e+00)\tAcc@1   0.39 (  0.10)": {
        "Loss": 7.0,
        "Acc@1": 0.39,
    },
    "train:  45%|####5     | 9/20 [00:03<00:04, 2.61it/s, loss=0.43, acc=91.2]": {
        "train loss": 0.43,
        "train acc": 91.2,
    },
    "Epoch 3: 100%|██| 10/10 [00:00<00:00, 33.3it/s, v_num=3, train_loss=0.43]": {
        "train_loss": 0.43
    },
    "10/10 - 0s 3ms/step - accuracy: 0.91 - loss: 0.43": {"accuracy": 0.91, "loss": 0.43},
    "train loss 0.43, val loss 0.51": {"train loss": 0.43, "val loss": 0.51},
    "epoch 3 train: loss 0.43 acc 0.9 | val: loss 0.51 acc 0.8": {
        "train loss": 0.43,
        "train acc": 0.9,
        "val loss": 0.51,
        "val acc": 0.8,
    },
    "loss 0.43 avg loss 0.50": {"loss": 0.43, "avg loss": 0.5},
    "learning rate 0.001": {"learning rate": 0.001},
    "loss 0.43 (was loss 0.50)": {"loss": 0.43},
}
NOT_TAKEN = [
    "epoch 3/10",
    "epoch 3 / 10",
    "Epoch 3:",
    "step 100",
    "global_step=100",
    "'epoch': 0.25",
    "page 3 of 10",
    "accuracy: 9842/10000",
    "torch 2.9.1",
    "torch 2.9.1+cu128",
    "torch 2.9+cu128",
    "python 3.14-rc1",
    "host 10.0.0.1",
    "host=10.0.0.1:29500",
    "date 2026-11-28",
    "on 28.11.2026",
    "at 12:30",
    "started 2026-11-28 12:30:01,123",
    "saved 12.3MB",
    "saved 12.3 MB",
    "weights 1.2 GiB",
    "wrote 512 bytes",
    "took 3.2 s",
    "forward 12.5ms",
    "ran 12.5 seconds",
    "elapsed: 12.5",
    "  45%|####5     | 9/20 [00:03<00:04, 2.61it/s]",
    "download:  45%|####5     | 9/20",
    "<b>loss</b> 0.43",
    '<i class="x">loss=0.43</i>',
    "https://a.b/c?loss=0.43",
    "/data/loss=0.43",
    "ids 0x1f",
    "commit 3e8f1c2",
    "model7b",
    "0.43",
    "loss: none",
    "loss 0.4.3",
    "loss 1,23",
    "factor 3x",
]


@pytest.mark.parametrize("line", TAKEN)
def test_a_number_behind_a_word_is_taken(line: str) -> None:
    """However programs write it."""
    found = {number.name: number.value for number in numbers_in(line)}
    assert found == pytest.approx(TAKEN[line], nan_ok=True)


@pytest.mark.parametrize("line", NOT_TAKEN)
def test_a_number_that_measures_nothing_is_left(line: str) -> None:
    """It counts, is a part of something else, or has a unit of time or size."""
    assert [*numbers_in(line)] == []


def test_a_line_of_any_length_is_read_in_time_that_grows_with_it() -> None:
    """Whatever a cell prints: no text makes the search begin again and again."""
    for hostile in ("a" * 50_000, "a." * 50_000, "a=" * 50_000, "1," * 50_000, "a  " * 50_000):
        assert [*numbers_in(hostile)] == []


# ---------------------------------------------------------------- many lines

SERIES = {
    "one value is no curve": (["loss 0.43"], {}),
    "two that differ are": (["loss 0.43", "loss 0.41"], {"loss": [0.43, 0.41]}),
    "the same value twice is not": (["torch 2.9", "torch 2.9"], {}),
    "a loss that does not move is": (["loss 0.69"] * 3, {"loss": [0.69] * 3}),
    "whole numbers that only rise count": (["seen 64", "seen 128", "seen 192"], {}),
    "whole numbers that fall do not": (["reward 9", "reward 20"], {}),
    "whole numbers that fell": (["reward 20", "reward 9"], {"reward": [20, 9]}),
    "a whole one among others": (["loss 1.5", "loss 1"], {"loss": [1.5, 1]}),
    "percent": (["acc 80%", "acc 85%"], {"acc": [80, 85]}),
    "not a number": (["loss 0.4", "loss nan"], {"loss": [0.4, math.nan]}),
    "the three that come most often": (
        ["q 0.1 b 0.2 c 0.3 d 0.4", "b 0.1 c 0.1 d 0.1", "d 0.5", "q 0.2", "q 0.3"],
        {"q": [0.1, 0.2, 0.3], "d": [0.4, 0.1, 0.5], "b": [0.2, 0.1]},
    ),
}


@pytest.mark.parametrize("case", SERIES)
def test_what_only_many_lines_tell(case: str) -> None:
    """Two values that differ, or three; whole numbers that never fall count something."""
    lines, curves = SERIES[case]
    found = curves_of("\n".join(lines))
    assert [*found] == [*curves]
    for name, values in curves.items():
        assert found[name] == pytest.approx(values, nan_ok=True)


WRITTEN = {
    "lines": "loss 0.5\nloss 0.4\nloss 0.4\n",
    "lines of Windows": "loss 0.5\r\nloss 0.4\r\nloss 0.4\r\n",
    "no end": "loss 0.5\nloss 0.4\nloss 0.4",
    "a bar": "\r 1/9 [00:01<00:02, loss=0.5]\r 2/9 [00:01<00:02, loss=0.5]"
    "\r 3/9 [00:01<00:02, loss=0.4]\r 3/9 [00:01<00:02, loss=0.4]\n loss 0.4\n",
    "colours": "\x1b[32mloss\x1b[0m 0.5\nloss \x1b[1;31m0.4\x1b[0m\nloss 0.4\n",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_text_may_come_in_any_pieces(how: str) -> None:
    """Also in the middle of a number; a bar that is drawn again says nothing new."""
    text = WRITTEN[how]
    for at in range(len(text)):
        assert curves_of(text[:at], text[at:]) == {"loss": [0.5, 0.4, 0.4]}, at
    assert curves_of(*text) == {"loss": [0.5, 0.4, 0.4]}


def test_streams_do_not_mix() -> None:
    """An open line of one stream is not continued by the other."""
    numbers = PrintedNumbers()
    for stream, text in (
        ("stdout", "loss 0.5"),
        ("stderr", "lr 0.1\n"),
        ("stdout", "1\nloss 2.5\n"),
    ):
        numbers.take([Output(0, stream, text)])
    assert {name: curve.values for name, curve in numbers.curves().items()} == {"loss": [0.51, 2.5]}


def test_a_frequent_word_outlasts_any_number_of_rare_ones() -> None:
    """The words that are held are bounded."""
    texts = [f"loss {1 / (n + 1):.4f} weird{n} 0.5\nweird{n} 0.6\n" for n in range(1000)]
    numbers = PrintedNumbers()
    for text in texts:
        numbers.take([Output(0, "stdout", text)])
    assert numbers.curves()["loss"].count == 1000
    assert len(numbers._printed) <= 64


@given(st.lists(st.floats(width=32), min_size=1, max_size=3000), st.integers(1, 40))
def test_a_long_curve_keeps_its_ends_and_its_extremes(values: list[float], times: int) -> None:
    """Its points are some hundred, in order, each a value with its number."""
    values = (values * times)[:5000]
    series = Series()
    for value in values:
        series.add(value)
    curve = series.curve()
    assert curve.count == len(values)
    assert len(curve.points) <= 520
    numbers = [number for number, _ in curve.points]
    assert numbers == sorted(set(numbers))
    assert all(repr(values[number]) == repr(value) for number, value in curve.points)
    assert (numbers[0], numbers[-1]) == (0, len(values) - 1)
    finite, kept = (
        [value for value in some if math.isfinite(value)] for some in (values, curve.values)
    )
    assert bool(finite) == bool(kept)
    if finite:
        assert (min(finite), max(finite)) == (min(kept), max(kept))
    assert len(finite) == len(values) or len(kept) < len(curve.values)
    if len(values) <= 256:
        assert numbers == [*range(len(values))]


# ---------------------------------------------------------------- pictures

ODD_CURVES = {
    "falls": [3.0, 2.0, 1.5, 1.2],
    "does not move": [0.5] * 5,
    "not finite": [1.0, math.nan, 0.5, math.inf, -math.inf, 0.4],
    "never finite": [math.nan, math.nan],
    "huge": [1.7e308, -1.7e308, 0.0],
    "tiny": [5e-324, 0.0, 5e-324],
    "two": [1.0, 2.0],
}


def curve(values: list[float], **facts: bool) -> Curve:
    """Return a curve of these values."""
    return Curve(len(values), tuple(enumerate(values)), **facts)


@pytest.mark.parametrize("how", ODD_CURVES)
def test_a_picture_of_any_values(how: str) -> None:
    """It is well-formed, within its frame, and has a text for those who do not see it."""
    curves = Curves({how: curve(ODD_CURVES[how])}, curve([0.0, 50.0, 100.0]))
    view = drawing.whole(curves, "processors busy")
    assert view is not None
    for shown in (view.html, f"<p>{drawing.numbers(curves).html}</p>", drawing.busy(curves).html):
        for picture in ElementTree.fromstring(shown).iter("svg"):
            width, height = int(picture.attrib["width"]), int(picture.attrib["height"])
            for line in picture.iter("polyline"):
                for point in line.attrib["points"].split():
                    x, y = map(float, point.split(","))
                    assert 0 <= x <= width, line.attrib
                    assert 0 <= y <= height, line.attrib
            assert f"{len(ODD_CURVES[how])} values" in picture.findtext("title", "") or (
                "3 values" in picture.findtext("title", "")
            )
    assert how in view.text.splitlines()[0]


def test_a_sparkline() -> None:
    """From the lowest to the highest block; a dot where nothing can be drawn."""
    assert drawing.sparkline(curve([1, 2, 3, 4, 5, 6, 7, 8]), 8) == "▁▂▃▄▅▆▇█"
    assert drawing.sparkline(curve([4.0, math.nan, 1.0]), 8) == "█·▁"
    assert drawing.sparkline(curve([2.0, 2.0]), 8) == "▅▅"
    assert drawing.sparkline(curve([50.0, 50.0]), 8, (0.0, 100.0)) == "▅▅"
    assert drawing.sparkline(curve([0.0, 100.0, 300.0]), 8, (0.0, 100.0)) == "▁▃█"
    assert len(drawing.sparkline(curve([float(n) for n in range(1000)]), 12)) == 12


def test_a_name_is_text() -> None:
    """Whatever the rule takes for a word: no markup of a cell's output is markup of the line."""
    view = drawing.numbers(Curves({"<script>&": curve([1.0, 2.0])}))
    assert "<script>" not in view.html
    assert "&lt;script&gt;&amp;" in view.html


@pytest.mark.parametrize(
    ("value", "digits"),
    [(0.43123, "0.4312"), (1e-05, "1e-05"), (12345.6, "12,346"), (2.0, "2"), (math.nan, "nan")],
)
def test_a_value_in_few_digits(value: float, digits: str) -> None:
    """Percent signs stay."""
    assert drawing.in_digits(value) == digits
    assert drawing.in_digits(value, percent=True) == f"{digits}%"


# ---------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Notebook:
    """A notebook that has the name ``taas``."""
    notebook.good("import taas")
    return notebook


TRAINING = """\
#pragma taas --gpus 2 --name {name}{options}
import os, time
for step in range(1, 301):
    print(f"step {{step}}: loss {{10 / step:.4f}}, acc={{step / 4}}%")
    if os.environ["RANK"] == "1":
        print("loss", -step / 2)
"""


def last_line(book: Notebook, code: str) -> tuple[str, str]:
    """Run a cell; return the last state of its line, as text and as HTML."""
    ran = book.run(code)
    shown = (ran.updates or ran.displays)[-1]["data"]
    return shown["text/plain"], shown["text/html"]


def taas(*words: str) -> str:
    """Return what ``taas`` prints in a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "taas.cli", *words], check=True, capture_output=True, text=True
    ).stdout


def test_a_run_shows_what_rank_0_prints(book: Notebook) -> None:
    """In its line, in the fold, in the history, for programs, and from Python."""
    text, html = last_line(book, TRAINING.format(name="descent", options=""))
    assert re.match(
        r"✓ descent done · loss 0\.0333 █[▁-█]{11} · acc 75% ▁[▁-█]{10}█ · 2 ranks", text
    )
    folded = html[html.index("<details") :]
    assert html.index("<svg") < html.index("<details")
    assert "curves, and each rank" in folded
    assert "loss · 10 → 0.0333, lowest 0.0333, highest 10, 300 values" in folded
    assert folded.count("<svg") >= 2
    [history] = book.good("%taas history").displays
    lines = history["data"]["text/plain"].splitlines()
    [row] = [line for line in lines if "descent " in line]
    assert "loss 0.0333 █" in row
    assert "<svg" in history["data"]["text/html"]
    [facts] = [run for run in json.loads(taas("history", "--json")) if run["name"] == "descent"]
    assert facts["curves"]["loss"][0] == 10.0
    book.good("curves = taas.history('descent').curves")
    assert book.value("[*curves]") == "['loss', 'acc']"
    assert book.value("(curves['loss'][0], curves['loss'][-1], max(curves['acc']))") == (
        "(10.0, 0.0333, 75.0)"
    )
    assert "loss 0.0333 █" in taas("history")
    assert re.search(r"^loss +█[▁-█]{59}  10 → 0.0333", taas("top", "descent"), re.MULTILINE)


def test_a_background_run_has_its_curves(book: Notebook) -> None:
    """Its handle shows them while it goes on, and who attaches to it sees them."""
    book.good(
        block("""
            #pragma taas --gpus 2 --background --name night
            from pathlib import Path
            import time
            print("loss 0.5\\nloss 0.25", flush=True)
            while not Path("end").exists(): time.sleep(0.05)
            print("loss 0.125")
        """)
    )
    waits = block("""
        import time
        handle, until = taas.history("night"), time.monotonic() + 60
        while not handle.curves and time.monotonic() < until: time.sleep(0.05)
    """)
    book.good(waits)
    assert book.value("handle.curves") == "{'loss': [0.5, 0.25]}"
    assert "loss 0.25 █▁" in book.value("handle")
    (book.folder / "end").touch()
    text, _ = last_line(book, "%taas attach night")
    assert "night done · loss 0.125 █▃▁" in text


def test_the_rank_whose_output_is_shown_is_read(book: Notebook) -> None:
    """If rank 0 is not among them, the first that is."""
    text, _ = last_line(book, TRAINING.format(name="other", options=" --output 1"))
    assert "loss 0.0333" not in text
    book.good("curves = taas.history('other').curves")
    assert book.value("min(curves['loss'])") == "-150.0"


BARS = {
    "in a terminal": "from tqdm import tqdm",
    "of a notebook": "from tqdm.auto import tqdm",
}


@pytest.mark.parametrize("bar", BARS)
def test_what_stands_behind_a_bar(book: Notebook, bar: str) -> None:
    """Of tqdm, as text and as a widget."""
    pytest.importorskip("tqdm")
    text, _ = last_line(
        book,
        block(
            f"#pragma taas --gpus 1\n{BARS[bar]}",
            """
            bar = tqdm([8.0, 4.0, 2.0])
            for loss in bar: bar.set_postfix(loss=loss, lr=1e-3)
            """,
        ),
    )
    assert "loss 2 █" in text, text
    # a bar that is slow is drawn more than once with the same value
    assert book.value("[*dict.fromkeys(taas.history().curves['loss'])]") == "[8.0, 4.0, 2.0]"


def test_comms_of_the_program_send_what_they_like(book: Notebook) -> None:
    """They are neither widgets nor a reason for the run, or for its supervisor, to fail."""
    book.good(
        block("""
            #pragma taas --gpus 1 --name own
            from comm import create_comm
            own = create_comm(target_name="own", data=[1, 2])
            for data in ([1, 2], "text", {"state": [1]}, {"state": {"value": 5}}, None):
                own.send(data)
            own.close([3])
            for loss in (3.5, 2.5, 1.5): print("loss", loss)
            del own
        """)
    )
    assert book.value("taas.history('own').curves") == "{'loss': [3.5, 2.5, 1.5]}"


FAILS = {
    "in the cell": ("x = 1\nraise ValueError('boom')", "cell line 3: ValueError: boom"),
    "in a function of the cell": (
        "def f():\n    raise ValueError('boom')\nf()",
        "cell line 3: ValueError: boom",
    ),
    "in a library": ("import json\njson.loads('{')", "cell line 3: JSONDecodeError: "),
    "in an earlier cell": ("x = 1\n\nearlier()", "cell line 4: KeyError: 'lost'"),
    "at an await": ("import asyncio\nawait asyncio.sleep('a')", "cell line 3: TypeError"),
}


@pytest.mark.parametrize("where", FAILS)
def test_a_failed_line_names_the_error_and_the_cells_line(book: Notebook, where: str) -> None:
    """The innermost line of the cell itself; the line has the colour of a failure."""
    book.good("def earlier():\n    raise KeyError('lost')")
    code, said = FAILS[where]
    text, html = last_line(book, f"#pragma taas --gpus 1 --name broken\n{code}")
    assert f"✗ broken failed: rank 0: {said}" in text, text
    assert re.search(r'<b style="color:var\(--jp-error-color1, #\w+\)">✗ broken failed', html)
    assert f"rank 0: {said}" in book.good("%taas history").displays[0]["data"]["text/plain"]
    facts = [run for run in json.loads(taas("history", "--json")) if run["name"] == "broken"]
    assert facts[-1]["first_line"] == int(said.split()[2].rstrip(":"))


def test_an_interrupted_run_keeps_its_curve(book: Notebook) -> None:
    """And has a colour of its own."""
    book.start(
        block("""
            #pragma taas --gpus 1 --name cut
            import time
            print("loss 2.5\\nloss 1.5")
            time.sleep(600)
        """)
    )
    book.wait_for("loss 1.5")
    book.interrupt()
    ran = book.end()
    shown = ran.updates[-1]["data"]
    assert "■ cut interrupted · loss 1.5 █▁" in shown["text/plain"]
    assert "var(--jp-warn-color1, " in shown["text/html"]


def test_a_run_that_starts_again_goes_on_with_its_curve(book: Notebook) -> None:
    """A restarted training continues, and so does what it prints."""
    text, _ = last_line(
        book,
        block("""
            #pragma taas --gpus 1 --max-restarts 1 --name again
            import os, signal
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                print("loss 4.5\\nloss 3.5", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            print("loss 2.5")
        """),
    )
    assert "again done · loss 2.5 █▅▁" in text
    assert book.value("taas.history('again').curves") == "{'loss': [4.5, 3.5, 2.5]}"


@pytest.mark.parametrize(("lines", "found"), [(3_000, "0.25, 5.5"), (100_000, "")])
def test_a_long_output_is_read_to_its_end(book: Notebook, lines: int, found: str) -> None:
    """The last value is in the curve, however much is printed within a moment.

    As long as the end of the run need not wait for it, the lowest and the highest are in it, too.
    """
    code = block("""
        #pragma taas --gpus 1 --name many
        odd = {1_234: 5.5, 2_001: 0.25}
        for step in range(LINES):
            print(f"loss {odd.get(step, 1 + 1 / (step + 1)):.6f}")
    """)
    book.good(code.replace("LINES", str(lines)))
    book.good("values = taas.history('many').curves['loss']")
    assert book.value("values[-1]") == f"{1 + 1 / lines:.6f}".rstrip("0")
    if found:
        assert book.value("(min(values), max(values))") == f"({found})"
    assert int(book.value("len(values)")) <= 400


def test_html_of_the_saved_notebook(book: Notebook) -> None:
    """What nbconvert exports has the pictures in it, and needs no script for them."""
    import nbformat
    from nbconvert import HTMLExporter

    text, html = last_line(book, TRAINING.format(name="export", options=""))
    shown = nbformat.v4.new_output("display_data", {"text/plain": text, "text/html": html})
    saved = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[shown])])
    page, _ = HTMLExporter().from_notebook_node(saved)
    assert "export done" in page
    assert page.count("<polyline") >= 4

"""What rank 0 prints and displays appears in the launching cell.

Whole, in order, whatever it is.
"""

from __future__ import annotations

import itertools

import pytest
from blocks import block
from notebook_harness import Notebook, Ran

from taas.notebook.view.cell_output import TerminalOutput
from taas.runs.events import Output

pytestmark = pytest.mark.slow

HEAD = "#pragma taas --gpus 1\n"


def printed(notebook: Notebook, body: str, header: str = HEAD) -> str:
    """Rank 0's standard output."""
    return notebook.good(header + body).own


TWO, NOBODY = "#pragma taas --gpus 2\n", "#pragma taas --gpus 2 --output none\n"
PRINTED = {
    "the last line need not end": (HEAD, "print('no end', end='')", "no end"),
    "a line has no limit": (HEAD, "print('x' * 10_000_000)", "x" * 10_000_000 + "\n"),
    "bytes that are not UTF-8 are replaced": (
        HEAD,
        "import sys\nsys.stdout.buffer.write(b'a\\xff\\xfeb\\xc3\\xa9\\n')\nsys.stdout.flush()",
        "a\ufffd\ufffdb\u00e9\n",
    ),
    "the bytes of one character may come in two writes": (
        HEAD,
        block(r"""
            import sys
            for b in 'é\n'.encode():
                sys.stdout.buffer.write(bytes([b])); sys.stdout.flush()
        """),
        "\u00e9\n",
    ),
    "C, a child and Python stand in the order they were made": (
        HEAD,
        block(r"""
            import ctypes, subprocess
            print('python 1')
            ctypes.CDLL(None).printf(b'C 2\n')
            print('python 3')
            subprocess.run(['echo', 'child 4'])
            print('python 5')
        """),
        "python 1\nC 2\npython 3\nchild 4\npython 5\n",
    ),
    "all lines arrive, in order, while another rank is quiet": (
        TWO,
        "for i in range(100_000): print('line', i)",
        "".join(f"line {i}\n" for i in range(100_000)),
    ),
    "nobody's output": (NOBODY, "print('loud')", ""),
}


@pytest.mark.parametrize("what", PRINTED)
def test_what_is_printed_is_shown(notebook: Notebook, what: str) -> None:
    """Whole, and in its order."""
    header, body, expected = PRINTED[what]
    assert printed(notebook, body, header) == expected


def test_an_unfinished_line_appears_while_the_cell_runs(notebook: Notebook) -> None:
    """What is printed without a newline does not wait for one."""
    notebook.start(HEAD + "import time\nprint('half', end='')\ntime.sleep(600)")
    notebook.wait_for("half")
    notebook.interrupt()
    assert notebook.end().ename == "KeyboardInterrupt"


def test_output_after_a_fork(notebook: Notebook) -> None:
    """A forked child's lines appear once, the parent's once."""
    text = printed(
        notebook,
        block("""
            import os
            print('before', end=' ')
            if os.fork() == 0:
                print('child')
                os._exit(0)
            os.wait()
            print('parent')
        """),
    )
    assert sorted(text.split()) == ["before", "child", "parent"]


def test_stderr_is_stderr(notebook: Notebook) -> None:
    """Standard error stays standard error, C's too."""
    ran = notebook.good(
        HEAD
        + "import os, sys\nprint('python', file=sys.stderr)\nos.write(2, b'C\\n')\nprint('out')"
    )
    assert ran.stderr == "python\nC\n"
    assert ran.own == "out\n"


def _kinds(ran: Ran) -> str:
    """What a cell has shown, in its order.

    A letter for each message or, of consecutive text, for all of it.
    """
    shown = [
        text if kind == "stdout" else kind[:1].upper()
        for kind, text in ran.shown
        if not _of_taas(text)
    ]
    return "".join(shown)


def _of_taas(content: object) -> bool:
    return isinstance(content, dict) and str(
        content.get("transient", {}).get("display_id")
    ).startswith("taas-")


def test_the_first_text_comes_at_once_and_the_rest_before_the_cell_goes_on_to_something_else(
    notebook: Notebook,
) -> None:
    """Text waits for more only among text.

    Displays, updates, cleared outputs and results come after what was printed before.
    """
    ran = notebook.good(
        HEAD
        + r"""
from IPython.display import clear_output
for i in range(3):
    print('a', i)
    print('b', i)
    h = display(i, display_id=f'd{i}')
print('c')
h.update('e')
print('f')
clear_output(wait=True)
print('g\rh', end='')
'value'"""
    )
    text = "a 0\nb 0\nDa 1\nb 1\nDa 2\nb 2\nDc\nUf\nCg\rhR"
    assert _kinds(ran) == text


def test_a_question_comes_after_what_was_printed_before(notebook: Notebook) -> None:
    """Also where that came within a moment after other text."""
    body = block("""
        for i in range(50): print('line', i)
        print('all read'); x = input('go on? ')
        print('got', x)
    """)
    notebook.start(HEAD + body, keyboard=True)
    assert notebook.asked() == "go on? "
    assert "all read" in notebook.wait_for("all read").own
    notebook.answer("yes")
    assert notebook.end().own.endswith("all read\ngot yes\n")


def test_the_last_expression_is_the_cells_result(notebook: Notebook) -> None:
    """It is shown as a result, and ``_`` and ``Out`` hold its value."""
    ran = notebook.good(HEAD + "[1, 2, 3]")
    assert ran.result is not None
    assert ran.result["text/plain"] == "[1, 2, 3]"
    assert notebook.value("_") == "[1, 2, 3]"


def test_display_and_its_updates(notebook: Notebook) -> None:
    """Rich output arrives with all its forms; an update changes the display it belongs to."""
    ran = notebook.good(
        HEAD
        + block("""
            from IPython.display import HTML
            handle = display(HTML('<b>first</b>'), display_id='mine')
            print('between')
            handle.update(HTML('<b>second</b>'))
        """)
    )
    assert [
        content["data"]["text/html"] for content in ran.displays if "text/html" in content["data"]
    ].count("<b>first</b>") == 1
    [update] = [
        content for content in ran.updates if content["transient"] == {"display_id": "mine"}
    ]
    assert update["data"]["text/html"] == "<b>second</b>"


def test_a_figure(notebook: Notebook) -> None:
    """A matplotlib figure of rank 0 appears as a picture."""
    pytest.importorskip("matplotlib")
    ran = notebook.good(
        HEAD + "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()", seconds=170
    )
    [figure] = [content["data"] for content in ran.displays if "image/png" in content["data"]]
    assert figure["image/png"].startswith("iVBOR")


def test_tqdm(notebook: Notebook) -> None:
    """A progress bar redraws its own line."""
    pytest.importorskip("tqdm")
    ran = notebook.good(HEAD + "from tqdm import tqdm\nfor _ in tqdm(range(100)): pass")
    assert "100/100" in ran.stderr
    assert ran.stderr.count("\n") <= 1


def test_other_ranks_are_tagged(notebook: Notebook) -> None:
    """``--output all`` shows every rank, each line with its rank."""
    text = printed(
        notebook,
        "import os\nprint('I am', os.environ['RANK'])",
        "#pragma taas --gpus 3 --output all\n",
    )
    assert sorted(text.splitlines()) == ["[rank 0] I am 0", "[rank 1] I am 1", "[rank 2] I am 2"]


BARS = {
    "two bars, the first ends first": (
        ("\r 0/2", "\r 1/2", "\r 2/2\n"),
        ("\r 0/9", "\r 9/9", "\n"),
        ["[rank 0]  2/2", "[rank 1]  9/9"],
    ),
    "bars that are never closed": (
        ("\r10%", "\r20%"),
        ("\r30%", "\r40%"),
        ["[rank 0] 20%", "[rank 1] 40%"],
    ),
    "a bar that goes, and a line": (
        ("\r10%", "\r99%", "\r   \r"),
        ("loss 1\n", "loss 2\n"),
        ["[rank 1] loss 1", "[rank 1] loss 2"],
    ),
    "a line that is open for long": (
        ("begin ", "end\n"),
        ("one\n", "two\n"),
        ["[rank 0] begin ", "[rank 0] end", "[rank 1] one", "[rank 1] two"],
    ),
    "lines with both ends": (
        ("a\r\n", "b\r\n"),
        ("c\n", "\n"),
        ["[rank 0] a", "[rank 0] b", "[rank 1] ", "[rank 1] c"],
    ),
}


def on_screen(text: str) -> list[str]:
    """What a front end shows of a text: a transfer return lets what follows write over the line."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown)
    return lines


@pytest.mark.parametrize("what", BARS)
def test_every_line_of_several_ranks_has_its_rank(
    capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Rank 0's, too, and bars, which are written over.

    None is lost, and none stands behind another rank's number.
    """
    first, second, shown = BARS[what]
    screen = TerminalOutput(None)
    for pair in itertools.zip_longest(first, second):
        for rank, text in enumerate(pair):
            screen.show([Output(rank, "stderr", text)] if text else [])
    screen.end_lines()
    lines = on_screen(capsys.readouterr().err)
    assert sorted(line.rstrip() for line in lines if line.strip()) == [
        line.rstrip() for line in shown
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%%time\nprint('timed')", "timed"),
        ("!echo shell", "shell"),
        ("files = !echo captured\nprint(files)", "['captured']"),
        ("%env TAAS_PROBE=1\n%env TAAS_PROBE", "env: TAAS_PROBE=1"),
        (
            block("""
                import asyncio
                async def f():
                    await asyncio.sleep(0)
                    return 'awaited'
                print(await f())
            """),
            "awaited",
        ),
        ("print(__name__, __import__('sys').argv)", "__main__ ['<cell>']"),
        ("if __name__ == '__main__':\n    print('guarded')", "guarded"),
        ("print(len.__doc__[:6]); len?", "Return"),
    ],
)
def test_a_body_may_be_all_that_a_cell_may_be(notebook: Notebook, body: str, expected: str) -> None:
    """Magics, shell commands, top-level await and the main guard work in a rank."""
    assert expected in printed(notebook, body)

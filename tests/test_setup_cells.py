"""Cells headed ``#pragma taas --setup``.

What they do to libraries is there in each process of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from blocks import block
from notebook_harness import Notebook
from oracle import Program, compare, play

SETUP = "#pragma taas --setup\n"


_LIBRARIES = {"tqdm.pandas": "tqdm", "a representer of yaml": "yaml"}
"""What rows need that is no dependency of taas."""


class Kept(NamedTuple):
    """What a library keeps of an earlier cell.

    How it is told, how a cell uses it, and what that raises without.
    """

    name: str
    setup: str
    use: str
    error: str


KEPT = [
    Kept(
        "an accessor of pandas",
        block("""
            import pandas as pd
            @pd.api.extensions.register_series_accessor('geo')
            class Geo:
                def __init__(self, series): self.series = series
                def twice(self): return self.series.sum() * 2
        """),
        "import pandas as pd\nr = int(pd.Series([1, 2]).geo.twice())",
        "AttributeError",
    ),
    Kept(
        "tqdm.pandas",
        "import pandas, tqdm\ntqdm.tqdm.pandas(disable=True)",
        "import pandas\nr = pandas.Series([1, 2]).progress_apply(lambda x: x + 1).tolist()",
        "AttributeError",
    ),
    Kept(
        "a representer of yaml",
        block("""
            import yaml, fractions
            yaml.SafeDumper.add_representer(
                fractions.Fraction, lambda dumper, data: dumper.represent_str(str(data)))
        """),
        "import yaml, fractions\nr = yaml.safe_dump([fractions.Fraction(1, 3)])",
        "RepresenterError",
    ),
    Kept(
        "a colormap of matplotlib",
        block("""
            import matplotlib as mpl
            mpl.colormaps.register(mpl.colors.ListedColormap(['red']), name='mine', force=True)
        """),
        "import matplotlib as mpl\nr = mpl.colormaps['mine'](0.5)",
        "KeyError",
    ),
    Kept(
        "an error handler of codecs",
        "import codecs\ncodecs.register_error('mine', lambda error: ('?', error.end))",
        "r = 'aä'.encode('ascii', 'mine')",
        "LookupError",
    ),
    Kept(
        "classes that torch may load",
        "import torch, decimal, io\ntorch.serialization.add_safe_globals([decimal.Decimal])",
        block("""
            import torch, decimal, io
            file = io.BytesIO()
            torch.save([decimal.Decimal(1)], file)
            file.seek(0)
            r = torch.load(file, weights_only=True)
            del file
        """),
        "UnpicklingError",
    ),
]


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
def test_what_a_library_keeps_is_there_in_ranks(kept: Kept, tmp_path: Path) -> None:
    """With the header the notebook is the plain one.

    Without it, the library in the rank does not know the name.
    """
    if library := _LIBRARIES.get(kept.name):
        pytest.importorskip(library)
    program = Program(kept.name, (SETUP + kept.setup, kept.use, "r"), (1,))
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)
    without = Program(kept.name, (kept.setup, kept.use), (1,))
    (tmp_path / "without").mkdir()
    assert kept.error in play(without, tmp_path / "without", plain=False).cells[1].evalue


@pytest.mark.usefixtures("oracle")
def test_it_runs_before_the_names_arrive_and_once(tmp_path: Path) -> None:
    """A name may need it to be rebuilt.

    What it prints is shown once, and what it binds is the notebook's.
    """
    setup = block("""
        import codecs
        print('registered'); seen = []
        codecs.register_error('early', lambda e: ('?', e.end))
    """)
    define = block("""
        def make(): return Early()
        class Early:
            def __init__(self): self.bytes = 'ä'.encode('ascii', 'early')
            def __reduce__(self): return make, ()
        early = Early()
        seen.append(1); alias = seen
    """)
    cell = "seen.append(early.bytes); mine = seen"
    program = Program(
        "early", (SETUP + setup, define, cell, "seen, alias is seen, mine is seen"), (2,)
    )
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)


@pytest.mark.usefixtures("oracle")
def test_one_that_fails_in_a_rank_says_so(tmp_path: Path) -> None:
    """The error is on the setup cell's line, says what the cell is, and what to type."""
    setup = f"{SETUP}import os\nif 'RANK' in os.environ:\n    raise LookupError('not here')"
    program = Program("fails", (setup, "x = 1", "%taas setup --clear", "x = 2", "x"), (1, 3))
    played = play(program, tmp_path, plain=False)
    failed = played.cells[1]
    assert "the setup cell In[1] failed, in its line 4: LookupError: not here" in failed.evalue
    assert "%taas setup --clear" in failed.evalue
    assert 'File "Cell In[1]", line 4' in failed.traceback
    assert "setup_cells.py" not in failed.traceback
    assert played.value == "2"


# ---------------------------------------------------------------- in a whole notebook


@pytest.fixture(name="cells")
def _cells(notebook: Notebook) -> Iterator[Notebook]:
    yield notebook
    notebook.run(
        "%taas release\n%taas setup --clear\nimport calendar\nvars(calendar).pop('seen', None)"
    )


ADD = "import calendar\ncalendar.seen = [*getattr(calendar, 'seen', []), {what}]"
SEEN = "import calendar\nprint(getattr(calendar, 'seen', []))"
ONE = "#!c1.4\n"


def run_as(notebook: Notebook, identity: str, code: str) -> None:
    notebook.start_cell(identity, code)
    ran = notebook.end()
    assert ran.status == "ok", ran


@pytest.mark.slow
def test_a_cell_that_is_run_again_takes_its_own_place(cells: Notebook) -> None:
    """Edited, it replaces what it was, and counts last.

    Without its header, or after an error, nothing new is noted.
    """
    run_as(cells, "a", SETUP + ADD.format(what=1))
    run_as(cells, "b", SETUP + ADD.format(what=2))
    assert cells.good(ONE + SEEN).own == "[1, 2]\n"
    run_as(cells, "a", SETUP + ADD.format(what=3))
    assert cells.good(ONE + SEEN).own == "[2, 3]\n"
    cells.start_cell("b", f"{SETUP}{ADD.format(what=4)}\n1 / 0")
    assert cells.end().ename == "ZeroDivisionError"
    assert cells.good(ONE + SEEN).own == "[2, 3]\n"
    run_as(cells, "a", ADD.format(what=5))
    assert cells.good(ONE + SEEN).own == "[2]\n"
    assert cells.good(SEEN).own == "[1, 2, 3, 4, 5]\n"


@pytest.mark.slow
def test_config_lists_them_and_clear_forgets_them(cells: Notebook) -> None:
    """Each with its number; a wrong header, or what is not plain Python, is refused."""
    assert "setup cell" not in cells.good("%taas config").displays[0]["data"]["text/plain"]
    number = cells.good(SETUP + ADD.format(what=1)).count
    assert cells.good(f"%%taas --setup\n{ADD.format(what=2)}\ncalendar.seen").result == {
        "text/plain": "[1, 2]"
    }
    listed = cells.good("%taas config").displays[0]["data"]["text/plain"]
    assert f"In[{number}]" in listed
    assert f"In[{number + 1}]" in listed
    assert cells.good("%taas setup").displays[0]["data"]["text/plain"] in listed
    for wrong, said in (
        ("#pragma taas --setup --gpus 2\nx = 1", "--setup with --gpus: leave --gpus out"),
        ("#!c1.4\n#pragma taas --setup\nx = 1", "--setup with c1.4: leave c1.4 out"),
        ("#pragma taas --setup\n", "a header and no code below it"),
        ("#pragma taas --setup\n%matplotlib inline\nx = 1", "line 2 is not plain Python"),
        ("%%taas --setup\nimport os\n!true", "line 3 is not plain Python"),
    ):
        ran = cells.run(wrong)
        assert said in ran.evalue + ran.stderr, ran
    assert cells.value("'x' in globals()") == "False"
    assert cells.good(ONE + SEEN).own == "[1, 2]\n"
    assert "2 setup cells forgotten" in cells.good("%taas setup --clear").stdout
    assert cells.good(ONE + SEEN).own == "[]\n"


@pytest.mark.slow
def test_ranks_that_stay_run_what_is_new(cells: Notebook) -> None:
    """Each setup cell once, before the next cell.

    Spare processes and background runs have them all.
    """
    keep = "#pragma taas --gpus 2 --output all --keep\n"
    seen = "import calendar, os\nprint(calendar.seen, os.environ['RANK'])"
    cells.good(SETUP + ADD.format(what=1))
    cells.good(keep + seen)
    assert sorted(cells.good(keep + seen).own.splitlines()) == ["[rank 0] [1] 0", "[rank 1] [1] 1"]
    cells.good(SETUP + ADD.format(what=2))
    assert sorted(cells.good(keep + seen).own.splitlines()) == [
        "[rank 0] [1, 2] 0",
        "[rank 1] [1, 2] 1",
    ]
    cells.good("%taas release")
    assert cells.good("#pragma taas --gpus 2\n" + seen).own == "[1, 2] 0\n"
    cells.good(
        "#pragma taas --gpus 2 --background --name apart\nimport calendar\nthere = calendar.seen"
    )
    cells.good("%taas attach apart")
    assert cells.value("there") == "[1, 2]"


@pytest.mark.slow
def test_one_that_failed_runs_again_in_ranks_that_stay(cells: Notebook, tmp_path: Path) -> None:
    """It takes effect once it succeeds: the rank does not count a failure as done."""
    keep = "#pragma taas --gpus 2 --keep\n"
    cells.good(keep + "x = 1")
    fails = (
        f"import os\nif 'RANK' in os.environ and not os.path.exists({str(tmp_path / 'there')!r}):\n"
    )
    cells.good(SETUP + fails + "    raise LookupError('not yet')\n" + ADD.format(what=1))
    assert "not yet" in cells.run(keep + SEEN).evalue
    (tmp_path / "there").touch()
    assert cells.good(keep + SEEN).own == "[1]\n"
    assert cells.good(keep + SEEN).own == "[1]\n"


@pytest.mark.slow
def test_data_processes_run_them(cells: Notebook) -> None:
    """A registered loader's dataset may need what a library keeps, wherever it is used."""
    cells.good(
        SETUP + "import codecs\ncodecs.register_error('data', lambda error: ('?', error.end))"
    )
    cells.good(
        block("""
            import taas, torch
            class Words(torch.utils.data.Dataset):
                def __len__(self): return 8
                def __getitem__(self, at): return len(('ä' * at).encode('ascii', 'data'))
            words = torch.utils.data.DataLoader(Words(), batch_size=1)
            taas.register(words)
        """)
    )
    cells.good("#pragma taas --gpus 2 --cpus 1\nseen = [int(batch[0]) for batch in words]")
    cells.good("taas.unregister(words)")
    assert cells.value("seen") == "[0, 1, 1, 1]"


@pytest.mark.slow
def test_an_exported_program_has_them(cells: Notebook) -> None:
    """The program for torchrun does the same before it loads the names."""
    cells.good(SETUP + ADD.format(what=7))
    cells.good("#pragma taas --gpus 2 --name kept_seven\nimport calendar\nseven = calendar.seen")
    cells.good("%taas export kept_seven --to exported")
    program = (cells.folder / "exported" / "train.py").read_text()
    assert "# a setup cell\nimport calendar\n" in program
    assert "--setup" not in program

"""Views of runs: the same facts as HTML and as text, longer when something is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from blocks import block
from notebook_harness import Notebook

from taas.base.places import ProcessMark
from taas.header.options import RunSpec
from taas.notebook.bug_report import public_part, without_home
from taas.notebook.view import tables
from taas.notebook.view.watched_run import _MANY_RANKS, in_full, render_run
from taas.protocol.delivery_orders import Delivered
from taas.protocol.ranks import Asking, Cell, RankUse
from taas.protocol.records import RunRecord, output_folder
from taas.protocol.stacks import StackGroup, Trouble
from taas.runs.events import EVENTS, pack_record
from taas.runs.records import find_run, make_room, new_folder, read_records, write_record
from taas.supervisor.connections import Connection, all_connections, write_connection

Make = Callable[..., RunRecord]


def prints(record: RunRecord, text: str, rank: int = 0) -> None:
    """Let a rank of the run's newest start print something."""
    folder = output_folder(record.folder, record.restarts) / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    body = text.encode()
    with (folder / EVENTS).open("ab") as file:
        file.write(pack_record(0, body, 0, 0))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes runs, in a runtime folder of the test's own."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    me = ProcessMark.of(os.getpid())

    def made(name: str | None = None, **facts: object) -> RunRecord:
        name, mark = new_folder(name)
        record = RunRecord(
            name=name,
            id=mark,
            cell=Cell(
                "#!g2.8\n#pragma taas --gpus 8\n# a comment\nmodel = train()\n",
                7,
                RunSpec(instance="g2.8", ranks_per_vm=8, background=True),
                "nocolor",
            ),
            project="/project",
            supervisor=me,
            kernel=me,
            device="8 GPUs",
            submitted=1000.0,
        )
        for fact, value in facts.items():
            setattr(record, fact, value)
        write_record(record)
        return record

    return made


def test_the_line_of_a_run_that_is_well(make: Make) -> None:
    """State, ranks, elapsed time and device; whole seconds while it goes on."""
    record = make(state="running")
    assert tables.line(record, 1075.4).text.startswith(
        "▸ r1 running · 8 ranks on g2.8 · 1 min 15 s · 8 GPUs · at "
    )
    assert "<b>▸ r1 running</b>" in tables.line(record, 1075.4).html


DELIVERED = {"delivered": Delivered(ready=1, delivered=900, planned=1000, rate=2, waited=0)}
BARS = {
    "of a loader": (DELIVERED, "", "50 s left"),
    "of a bar": ({}, "\r  3%|▎ | 1/8 [00:01<02:03,  1.0it/s]\nloss 0.5\n", "2 min 03 s left"),
    "a bar of hours": ({}, "a 2/8 [1:00:00<3:00:00, 900.0s/it]", "3 h 00 min left"),
    "a bar that is full": ({}, "\r100%|█| 18/18 [00:01<00:00,  1.0it/s]\nepoch 1\n", ""),
    "nobody tells": ({}, "epoch 1/8 [new]\n", ""),
}


@pytest.mark.parametrize("who", BARS)
def test_the_time_that_is_left(make: Make, who: str) -> None:
    """By what registered loaders have still to deliver, or rank 0's last bar of tqdm."""
    facts, printed, left = BARS[who]
    record = make(state="running", **facts)
    if printed:
        prints(record, printed)
    text = render_run(record, 1010.0).text
    assert text.startswith(
        f"▸ r1 running · 8 ranks on g2.8 · 10 s{', about ' * bool(left)}{left} · 8 GPUs"
    ), text


def test_a_row_for_each_rank(make: Make) -> None:
    """What it uses and what it said last.

    The row opens more of that, and the rows the line. The front end gets them escaped.
    """
    use = (
        RankUse(0, "running", 95, 2 << 30, 60, 8 << 30),
        RankUse(1, "stopped", 0, 1 << 30, 0, 8 << 30),
    )
    cell = Cell("", 7, RunSpec(ranks_per_vm=2), "nocolor")
    record = make(state="running", cell=cell, use=use)
    prints(record, "<first>\n\x1b[31mlast\x1b[0m\n", 1)
    text, html = in_full(record).text, render_run(record).html
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["rank", "state", "CPU", "memory", "GPU", "GPU", "memory", "last", "line"],
        ["0", "running", "95", "%", "2.1", "GB", "60", "%", "8.6", "GB"],
        ["1", "stopped", "0", "%", "1.1", "GB", "0", "%", "8.6", "GB", "last"],
    ]
    assert "<summary>30 % busy · each rank&#x27;s state, use and output</summary>" in html
    assert "<summary>last</summary><pre>&lt;first&gt;\nlast</pre>" in html
    prints(record, "more\n", 1)
    assert "<pre>&lt;first&gt;\nlast\nmore</pre>" in render_run(record).html


ODD = {
    "asks": {"questions": (Asking(7, 1, "name? "),)},
    "stopped": {"state": "stopped"},
    "ended before the others": {"state": "done"},
    "stands elsewhere": {
        "trouble": Trouble("rank 7 is not there", (StackGroup((7,), "line 3", odd=True),))
    },
    "is shown": {"output": (7,)},
}


@pytest.mark.parametrize("how", ODD)
def test_of_many_ranks_the_view_reads_only_the_odd(make: Make, how: str) -> None:
    """Other rows say that only rank 0 is read.

    Once the run is over, and for those who ask, all are read.
    """
    facts: dict[str, Any] = dict(ODD[how])
    states = dict.fromkeys(range(_MANY_RANKS), "running") | {7: facts.pop("state", "running")}
    spec = RunSpec(ranks_per_vm=_MANY_RANKS, output=facts.pop("output", "0"))
    use = tuple(RankUse(rank, state) for rank, state in states.items())
    record = make(state="running", cell=Cell("", 7, spec, "nocolor"), use=use, **facts)
    for rank in states:
        prints(record, f"said by {rank}.\n", rank)
    said = re.compile(r"said by (\d+)\.")
    assert said.findall(render_run(record).html) == ["0", "7"]
    rest = (
        f"ranks 1–6, 8–{_MANY_RANKS - 1}: state and use only, in a run of so many ranks; %taas"
        " status r1"
    )
    assert rest in render_run(record).html
    assert len(said.findall(in_full(record).text)) == _MANY_RANKS
    over = msgspec.structs.replace(record, state="over", outcome="done", ended=1010.0)
    assert len(said.findall(render_run(over).html)) == _MANY_RANKS
    assert "state and use only" not in render_run(over).html + in_full(record).text


def test_of_many_ranks_that_are_all_shown_fewer_are_read(make: Make) -> None:
    """Also where each differs from each: what a view reads in a second is bounded.

    Below that number all are read.
    """
    for count, read in ((_MANY_RANKS - 1, _MANY_RANKS - 1), (4 * _MANY_RANKS, _MANY_RANKS - 1)):
        cell = Cell("", 7, RunSpec(ranks_per_vm=count, output="all"), "nocolor")
        record = make(state="running", cell=cell)
        for rank in range(count):
            prints(record, f"said by {rank}.\n", rank)
        assert render_run(record).html.count("said by ") == read


def test_the_table_shows_live_runs_and_the_last_that_ended(make: Make) -> None:
    """Older ended runs are the history's."""
    for number in range(3):
        make(state="over", outcome="done", submitted=1000.0 + number, ended=1005.0 + number)
    make("now", state="running", submitted=1100.0)
    view = tables.status(read_records(), 1110.0)
    lines = view.text.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "now", "r3", "at"]
    assert "In[7] model = train()" in lines[1]
    assert view.html.count("<tr") == 3
    assert "delivered" not in lines[0]  # a column that nobody needs


def _of_nobody(_: list[RunRecord]) -> list[RunRecord]:
    return []


def test_runs_are_found_by_name_the_live_one_first(make: Make) -> None:
    """A name may be used again; the run that goes on is meant, else the newest."""
    make("a", state="over", outcome="done", submitted=3.0)
    live = make("a", state="running", submitted=1.0)
    newest = make("b", state="over", outcome="done", submitted=4.0)
    records = read_records()
    assert find_run("a", records, _of_nobody, live=False).id == live.id
    assert find_run(None, records, _of_nobody, live=True).id == live.id
    assert find_run(f"b-{newest.id}", records, _of_nobody, live=False).id == newest.id
    with pytest.raises(Exception, match=r"did you mean b\?"):
        find_run("bb", records, _of_nobody, live=False)
    with pytest.raises(Exception, match="run b is over"):
        find_run("b", records, _of_nobody, live=True)


def test_a_run_goes_on_when_the_clock_is_set(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sleep, or by NTP: the system then says that it was booted at another time."""
    make(state="running")
    booted = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 60)
    [record] = read_records()
    assert record.live


def test_a_run_of_another_machine_is_left_alone(make: Make) -> None:
    """Where several share a home, nobody can tell that it is over, so nothing is removed."""
    there = msgspec.structs.replace(ProcessMark.of(os.getpid()), host="another")
    run = make(state="running", supervisor=there)
    for number in range(2):
        make(state="over", outcome="done", submitted=float(number) + 1e12)
    for now in (5000.0, 5000.0 + 24 * 3600):
        make_room(runs=0, now=now)
    [record, *_] = read_records()
    assert record.id == run.id
    assert "on another, and cannot be seen from this machine" in record.message
    path = write_connection(
        Connection(
            endpoint="", server_key="", public_key="", secret_key="", supervisor=there, kernel=there
        )
    )
    assert all_connections() == []
    assert path.exists()
    month = 31 * 24 * 3600
    os.utime(path, (path.stat().st_mtime - month,) * 2)
    assert all_connections() == []
    assert not path.exists()


@pytest.mark.parametrize(
    ("home", "shown"),
    [
        ("/home/me", "~/a.py, /home/menu/b.py, /usr/c.py, ~"),
        ("/home/me/", "~/a.py, /home/menu/b.py, /usr/c.py, ~"),
        ("/", "/home/me/a.py, /home/menu/b.py, /usr/c.py, /home/me"),
        ("~", "/home/me/a.py, /home/menu/b.py, /usr/c.py, /home/me"),
    ],
)
def test_a_report_shortens_paths_below_home_only(home: str, shown: str) -> None:
    """Not those of a folder whose name begins alike; in a container the home may be the root."""
    assert without_home("/home/me/a.py, /home/menu/b.py, /usr/c.py, /home/me", home) == shown


def test_a_report_does_not_say_where_in_the_users_code_ranks_stood(make: Make) -> None:
    """The record of an interrupted run has names of the user's files and functions."""
    record = make(state="over", outcome="interrupted", waiting="rank 0: secret.py:7 in secret")
    assert "secret" not in str(public_part(record))


def test_history_says_where_the_runs_folders_are(make: Make) -> None:
    """The folder of each run is there, by its name and id; so documents and messages say."""
    records = [make(state="over", outcome="done"), make("again", state="over", outcome="lost")]
    last = tables.history(records).text.splitlines()[-1]
    root = Path(last.rpartition(" in ")[2])
    assert all((root / f"{record.name}-{record.id}").is_dir() for record in records)


def test_a_folder_of_any_depth_has_a_size(make: Make) -> None:
    """Ranks of a cell may make folders deeper in folders than Python nests calls."""
    record = make(state="over", outcome="done")
    here = os.open(record.folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        assert make_room(runs=0, nbytes=0, now=record.ended) == []
    finally:
        subprocess.run(["rm", "-rf", record.folder / "d"], check=True)


def test_old_runs_make_room(make: Make) -> None:
    """The oldest go, but none of the last day, and not the newest."""
    for number in range(4):
        make(state="over", outcome="done", submitted=float(number), ended=4000.0)
    assert make_room(runs=2, now=5000.0) == []
    removed = make_room(runs=2, now=5000.0 + 24 * 3600)
    assert [record.name for record in removed] == ["r1", "r2"]
    assert [record.name for record in read_records()] == ["r3", "r4"]
    assert [record.name for record in make_room(runs=0, nbytes=0, now=1e9)] == ["r3"]


@pytest.mark.parametrize("inside", ["", "restart-1/0", "a/b/c/d"])
def test_folders_may_change_while_room_is_made(make: Make, inside: str) -> None:
    """Folders of runs go on changing, and another supervisor removes old ones at the same time."""
    record = make(state="over", outcome="done", submitted=1.0, ended=4000.0)
    make(state="over", outcome="done", submitted=2.0, ended=4000.0)
    top = record.folder / "changing"
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            (top / inside).mkdir(parents=True, exist_ok=True)
            (top / inside / "file").write_text("some")
            shutil.rmtree(top)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            assert make_room(runs=10, now=1e9) == []
    finally:
        over.set()
        changing.join()


def test_the_live_view_is_one_display_that_is_updated(notebook: Notebook) -> None:
    """A calm run shows one line; its last state is what the notebook keeps."""
    notebook.start(
        block("""
            #pragma taas --gpus 2 --name calm
            import os, time
            print('x' * (1 + int(os.environ['RANK'])))
            while not os.path.exists('seen'): time.sleep(0.05)
        """)
    )
    notebook.wait_for("x\n")
    deadline = time.monotonic() + 120
    while not any(
        "calm running" in update["data"]["text/plain"] for update in notebook._ran.updates
    ):
        assert not notebook._next(deadline), notebook._ran
    (notebook.folder / "seen").touch()
    ran = notebook.end()
    assert ran.status == "ok", ran
    assert ran.stdout == "x\n"
    assert ran.stderr == ""
    [shown] = ran.displays
    identity = shown["transient"]["display_id"]
    assert {update["transient"]["display_id"] for update in ran.updates} == {identity}
    texts = [shown["data"]["text/plain"], *(update["data"]["text/plain"] for update in ran.updates)]
    assert all(" · at " in text for text in texts[:-1])
    assert texts[-1].startswith("✓ calm done · 2 ranks")
    assert "rehearsed on CPU (no GPU here)" in texts[-1]
    rows = re.findall(r"<tr.*?</tr>", ran.updates[-1]["data"]["text/html"])[1:]
    assert [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows] == [
        ["0", "done", "x"],
        ["1", "done", "xx"],
    ]


def executed(folder: Path, *cells: str) -> Any:
    """Return a notebook after nbclient has run it, as a front end does.

    Displays updated, output cleared.
    """
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(
        book, timeout=120, startup_timeout=120, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return book


CURVE = """\
#pragma taas --gpus 1 --name curve
from IPython.display import HTML, clear_output
for step in range(3):
    clear_output(wait={wait})
    display(HTML(f"<i>{{step}}</i>"))
    print("step", step)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook that has been run."""
    return executed(
        tmp_path_factory.mktemp("finished"),
        "%load_ext taas",
        CURVE.format(wait=False),
        CURVE.format(wait=True),
        "#pragma taas --gpus 1 --name well\nprint('shown')\nclear_output(wait=True)",
        "#pragma taas --gpus 2 --name page\nprint('trained')",
        "%taas",
    )


@pytest.mark.parametrize("number", [1, 2])
def test_the_line_comes_back_after_a_clear(finished: Any, number: int) -> None:
    """A live curve clears what its cell shows, again and again.

    The line stands above what is shown last.
    """
    line, curve, text = finished.cells[number].outputs
    assert line.data["text/plain"].startswith("✓ curve")
    assert curve.data["text/html"] == "<i>2</i>"
    assert text.text == "step 2\n"


def test_the_finished_notebook_reads_well(finished: Any) -> None:
    """On disk, and converted by nbconvert, a run is one line of HTML and its output."""
    from nbconvert import HTMLExporter, MarkdownExporter

    outputs = finished.cells[4].outputs
    assert [output.output_type for output in outputs] == ["display_data", "stream"]
    assert outputs[0].data["text/plain"].startswith("✓ page done")
    page, _ = HTMLExporter().from_notebook_node(finished)
    assert re.search(r"<b style=\"color:[^\"<]+\">✓ page done</b>", page)
    text, _ = MarkdownExporter().from_notebook_node(finished)
    assert "page done" in text
    assert "<table>" in finished.cells[5].outputs[0].data["text/html"]


def test_what_other_ranks_draw_opens_in_their_row(notebook: Notebook) -> None:
    """When the run is over; what rank 0 draws stands in the cell."""
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2
            import os, matplotlib.pyplot as plt
            plt.plot([0, int(os.environ['RANK'])])
            plt.show()
        """)
    )
    [row_0, row_1] = re.findall(r"<tr.*?</tr>", ran.updates[-1]["data"]["text/html"])[1:]
    assert "data:image/png" not in row_0
    assert row_1.count("data:image/png") == 1

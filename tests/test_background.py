"""Background runs: the prompt is back at once, the run outlives its kernel, one attaches again."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from blocks import block
from notebook_harness import Notebook, gone, terminal, until

from taas.runs.records import read_records

pytestmark = pytest.mark.slow

GATED = """
import os, time
from pathlib import Path
from typing import Any
print("ready", flush=True)
while not Path("{gate}").exists():
    time.sleep(0.02)
"""


@pytest.fixture(scope="module", autouse=True)
def earlier_runs_are_forgotten() -> None:
    """The newest run is a test's."""
    for record in read_records():
        shutil.rmtree(record.folder)


def open_notebook(project: Path) -> Notebook:
    notebook = Notebook(project)
    notebook.good("%load_ext taas")
    return notebook


def test_sigkill_of_the_kernel_leaves_the_run_and_another_kernel_takes_its_names(
    tmp_path: Path,
) -> None:
    """The run goes on without its kernel, ends, and its supervisor ends with it.

    A new kernel has its names.

    It comes first: while there is another notebook, its processes are found, too.
    """
    first = open_notebook(tmp_path)
    second = None
    try:
        first.good(
            block("""
                import torch
                class Net(torch.nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.layer = torch.nn.Linear(2, 1, bias=False)
                model = Net()
                losses = []
                lr = 0.5
            """)
        )
        first.good(
            "#pragma taas --gpus 2 --background --name night"
            + GATED.format(gate="go")
            + block("""
                losses.append(lr)
                model.layer.weight.data.fill_(7.0)
                best = model
                print('trained')
            """)
        )
        first.start("%taas attach night")
        first.wait_for("ready")
        everything = first.processes()
        first.kill()
        os.waitpid(first.pid, 0)
        assert all(process.is_running() for process in everything.supervisor)
        until(lambda: re.search("^night +running ", terminal("status").stdout, re.MULTILINE))
        (tmp_path / "go").touch()
        assert gone(everything.supervisor + everything.agents + everything.ranks)
        second = open_notebook(tmp_path)
        second.good("lr = 'mine'")
        ran = second.good("%taas attach")
        assert ran.own == "ready\ntrained\n"
        assert second.value("losses, type(best).__name__, best is model") == "[0.5] Net True"
        assert (
            second.value("model.layer.weight.tolist(), model.layer(torch.ones(2)).item()")
            == "[[7.0, 7.0]] 14.0"
        )
        assert second.value("lr") == "mine"  # the cell could not have changed it
    finally:
        first.close()
        if second is not None:
            second.close()


def test_the_cell_returns_a_handle_and_attach_changes_objects_in_place(notebook: Notebook) -> None:
    """The cell is over while the ranks go on.

    Attach shows the output from the beginning and brings the names.
    """
    notebook.good(
        block("""
            history = ['before']
            alias = history
            import torch
            weights = torch.zeros(3)
            view = weights[:1]
        """)
    )
    ran = notebook.good(
        "#pragma taas --gpus 2 --background --name train"
        + GATED.format(gate="go")
        + "history.append('run')\nweights += 1\nanswer = 42\nprint('last words')"
    )
    handle = ran.displays[-1]
    assert "%taas attach train" in handle["data"]["text/plain"]
    assert "train" in handle["data"]["text/html"]
    assert notebook.value("history") == "['before']"  # nothing is applied while the user works
    (notebook.folder / "go").touch()
    ran = notebook.good("%taas attach train")
    assert ran.own == "ready\nlast words\n"
    assert "✓ train done" in ran.updates[-1]["data"]["text/plain"]
    assert (
        notebook.value("alias, weights.tolist(), view.tolist(), answer")
        == "['before', 'run'] [1.0, 1.0, 1.0] [1.0] 42"
    )
    assert "since it was attached before" in notebook.good("%taas attach train").stdout


def test_the_cell_goes_on_saying_how_its_run_is_doing(notebook: Notebook) -> None:
    """Nobody has to ask: what is shown below the cell changes until the run is over."""
    notebook.good("#pragma taas --gpus 1 --background --name told" + GATED.format(gate="goes"))
    notebook.wait_for_line("told running")
    (notebook.folder / "goes").touch()
    notebook.wait_for_line("✓ told done")


def test_an_interrupt_while_attached_detaches(notebook: Notebook) -> None:
    """Ctrl-C gives the prompt back and leaves the run alone; stop ends it."""
    notebook.good("#pragma taas --gpus 2 --background --name long" + GATED.format(gate="never"))
    notebook.start("%taas attach long")
    notebook.wait_for("ready")
    notebook.interrupt()
    ran = notebook.end()
    assert ran.status == "ok"
    assert "detached; long goes on" in ran.stdout
    ranks = notebook.processes().ranks
    assert ranks
    assert "long stopped after" in notebook.good("%taas stop long").stdout
    assert gone(ranks)
    assert "long was stopped" in notebook.good("%taas attach long").stdout


def test_attach_raises_what_the_run_raised(notebook: Notebook) -> None:
    """A failed background run fails the cell that attaches to it, with the rank's own traceback."""
    count = notebook.good("#pragma taas --gpus 2 --background\nraise ValueError('too steep')").count
    ran = notebook.run("%taas attach")
    assert ran.ename == "CellFailed"
    assert "ValueError: too steep" in ran.evalue
    assert f"Cell In[{count}], line 2" in ran.traceback
    assert "raise ValueError('too steep')" in ran.traceback
    assert "too steep" in notebook.good("%taas history").displays[0]["data"]["text/plain"]


def test_two_background_runs_never_mix(notebook: Notebook) -> None:
    """Runs at the same time keep their own output and names, also beside a foreground cell."""
    for name in ("left", "right"):
        notebook.good(
            f"#pragma taas --gpus 1 --background --name {name}"
            + GATED.format(gate=name)
            + f"for i in range(200): print('{name}', i)\n{name}_done = 200"
        )
    assert notebook.good("#pragma taas --gpus 1\nprint('between')").own == "between\n"
    for name in ("right", "left"):
        (notebook.folder / name).touch()
        ran = notebook.good(f"%taas attach {name}")
        assert ran.own == "ready\n" + "".join(f"{name} {i}\n" for i in range(200))
        assert notebook.value(f"{name}_done") == "200"


def test_stop_without_a_name_is_for_this_notebooks_run(notebook: Notebook, tmp_path: Path) -> None:
    """Another notebook's is stopped by name only; its cell and the history then say by whom."""
    (tmp_path / "other").mkdir()
    other = Notebook(
        tmp_path / "other", environ={"JPY_SESSION_NAME": str(tmp_path / "other" / "b.ipynb")}
    )
    try:
        other.good("%load_ext taas")
        notebook.start("#pragma taas --gpus 2 --name mine" + GATED.format(gate="never"))
        notebook.wait_for("ready")
        refused = other.run("%taas stop")
        assert (
            "no run of this notebook goes on, but others do; "
            f"type %taas stop mine ({notebook.folder}/)" in refused.stderr
        )
        until(lambda: terminal("status").stdout.splitlines()[1].split()[:2] == ["mine", "running"])
        other.good("#pragma taas --gpus 1 --background --name theirs" + GATED.format(gate="never"))
        assert "2 runs go on here; type one of taas stop mine" in terminal("stop").stderr
        assert "theirs stopped after" in other.good("%taas stop").stdout
        assert "mine stopped after" in other.good("%taas stop mine").stdout
        ran = notebook.end()
        said = "stopped from other/b.ipynb"
        assert ran.ename == "KeyboardInterrupt"
        assert f"mine was {said}" in ran.evalue
        history = terminal("history").stdout
        assert history.count(f"    {said}") == 2
        assert "other/b.ipynb" in history.splitlines()[-3]
    finally:
        other.close()


def test_a_restarted_kernel_attaches_to_its_own_notebooks_run(tmp_path: Path) -> None:
    """Never to another of the same name, which began later, when this one was over.

    Two of one name never go on.
    """

    def opened(who: str) -> Notebook:
        book = Notebook(tmp_path, environ={"JPY_SESSION_NAME": str(tmp_path / f"{who}.ipynb")})
        book.good("%load_ext taas")
        return book

    books = {who: opened(who) for who in "AB"}
    try:
        for who, book in books.items():
            cell = "#pragma taas --gpus 1 --background --name twice" + GATED.format(gate="both")
            book.good(f"{cell}who = {who!r}\nprint(who)")
            refused = books["B"].run(cell)
            assert (
                f"a run called twice of {tmp_path.name}/{who}.ipynb is going on" in refused.evalue
            )
            tmp_path.joinpath("both").touch()
            book.good("%taas attach twice")
            tmp_path.joinpath("both").unlink()
        books["A"].close()
        books["A"] = opened("A")
        assert books["A"].good("%taas attach twice").own == "ready\nA\n"
        assert books["A"].value("who") == "A"
        assert terminal("logs", "twice").stdout == "ready\nB\n"
        first, second = re.findall(r"^twice-\w+", terminal("history").stdout, re.MULTILINE)
        assert terminal("logs", first).stdout == "ready\nA\n"
        assert terminal("logs", second).stdout == "ready\nB\n"
    finally:
        for book in books.values():
            book.close()


def heard(notebook: Notebook, text: str, seconds: float = 120) -> dict[str, Any]:
    """Wait for a display, of whichever cell, whose HTML has a text."""
    deadline = time.monotonic() + seconds
    while True:
        message = notebook._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        if message["msg_type"] == "display_data" and text in message["content"]["data"].get(
            "text/html", ""
        ):
            return message["content"]["data"]


def mended_at_load(notebook: Notebook) -> str:
    """Load taas; returns the script that mends lines. It may come after the end of the cell."""
    notebook.start("%load_ext taas")
    script, is_idle = "", False
    while not (script and is_idle):
        message = notebook._client.get_iopub_msg(timeout=120)
        content, asked = message["content"], message["parent_header"].get("msg_id")
        if message["msg_type"] == "display_data":
            shown = content["data"].get("text/html", "")
            script = shown if "outerHTML" in shown else script
        elif message["msg_type"] == "status" and asked == notebook._pending:
            is_idle = is_idle or content["execution_state"] == "idle"
    return script


def test_a_background_run_notifies(notebook: Notebook) -> None:
    """The browser is asked at the start, and told once at the end, but not hours later.

    It is told once though the run is attached afterwards.
    """
    notebook.start(
        block("""
            #pragma taas --gpus 1 --background --notify --name told
            import time
            from pathlib import Path
            while not Path('go-on').exists(): time.sleep(0.02)
            raise ValueError('at night')
        """)
    )
    assert "new Notification(" not in heard(notebook, "requestPermission")["text/html"]
    notebook.end()
    (notebook.folder / "go-on").touch()
    said = heard(notebook, "new Notification(")["text/html"]
    assert '["told failed", "rank 0: cell line 5: ValueError: at night"]' in said
    assert re.search(r"if\(Date\.now\(\)/1e3<\d+\)new Notification", said)
    ran = notebook.run("%taas attach told")
    assert ran.ename == "CellFailed"
    assert not [one for one in ran.displays if "Notification" in one["data"].get("text/html", "")]
    (notebook.folder / "go-on").unlink()


def test_without_the_option_nobody_is_notified(notebook: Notebook) -> None:
    """Neither in the background nor in the foreground."""
    ran = notebook.good("#pragma taas --gpus 1\npass")
    assert not [one for one in ran.displays if "Notification" in one["data"].get("text/html", "")]


CUT_OFF = {
    "the kernel killed": ("", "lost: the notebook's kernel ended"),
    "the kernel killed, beside a background run": ("", "interrupted"),
    "going on in the background": (" --background", "running"),
    # what the run shows of that, a front end that restarts its kernel does not show any more
    "interrupted by a restart": ("", "interrupted"),
    "done when the page was closed": ("", "done"),
    "failed when the page was closed": ("", "failed: rank 0: cell line 6: ValueError: at night"),
}


@pytest.mark.parametrize("run", CUT_OFF)
def test_the_next_kernel_of_a_notebook_mends_its_lines(tmp_path: Path, run: str) -> None:
    """A line that its kernel left, or that its page saved too early, says that it may be stale.

    The next kernel has the page show what became of the run.
    """
    options, said = CUT_OFF[run]
    book = tmp_path / "book.ipynb"
    environ = {"JPY_SESSION_NAME": str(book)}
    first = Notebook(tmp_path, environ=environ)
    try:
        first.good("%load_ext taas")
        if "beside" in run:
            first.good("#pragma taas --gpus 1 --background\n" + GATED.format(gate="go-on"))
        first.start(
            block(f"""
                #pragma taas --gpus 1{options} --name cut
                import time
                print('ready', flush=True)
                from pathlib import Path
                while not Path('go-on').exists(): time.sleep(0.02)
                if Path('go-on').read_text(): raise ValueError('at night')
            """)
        )
        if options:
            first.end()
            # the run of another row has the same name, and is over
            until(lambda: any(r.name == "cut" and r.state == "running" for r in read_records()))
        else:
            first.wait_for("ready")
            first.wait_for_line("running")
        shown = [*first._ran.displays, *first._ran.updates][-1]["data"]["text/html"]
        if "page" in run:
            book.write_text(json.dumps(shown))
            (tmp_path / "failing").write_text("now" if "failed" in run else "")
            (tmp_path / "failing").rename(tmp_path / "go-on")
            first.end()
        elif "interrupted" in run:
            first.interrupt()
            first.end()
        first.kill()
    finally:
        first.close()
    [run_id] = re.findall(r'data-taas-run="(\w+)"', shown)
    assert "may be stale: not updated since" in shown
    second = Notebook(tmp_path, environ=environ)
    try:
        mended = mended_at_load(second)
        assert run_id in mended
        assert f"cut {said}" in html.unescape(mended)
        (tmp_path / "go-on").touch()
        until(lambda: not any(record.live for record in read_records()))
        third = second.run("#pragma taas --gpus 1\npass")
        assert not [
            one for one in third.displays if "outerHTML" in one["data"].get("text/html", "")
        ]
        assert "stale" not in third.updates[-1]["data"]["text/html"]
    finally:
        second.close()


def test_a_line_that_waits_for_a_person_is_not_stale(notebook: Notebook) -> None:
    """It stands still until there is an answer."""
    notebook.start("#pragma taas --gpus 1\nx = input('who? ')", keyboard=True)
    notebook.asked()
    notebook.wait_for_line("asked for an answer")
    last = notebook._ran.updates[-1]["data"]["text/html"]
    notebook.answer("me")
    notebook.end()
    assert "asked for an answer" in last
    assert "stale" not in last


def test_what_a_run_was_given_is_let_go_when_nobody_attaches_it(tmp_path: Path) -> None:
    """After an hour, or beyond 2 GB, the oldest first.

    The run's names are bound to new objects then, and that is said.
    """
    book = open_notebook(tmp_path)
    try:
        book.good(
            block("""
                import gc, time, weakref
                from taas.notebook import pending
                class Model: pass
                def alive(): gc.collect(); return [ref() is not None for ref in refs]
                refs = []
            """)
        )
        for name in ("one", "two", "three"):
            book.good(
                block(f"""
                    model = Model(); model.name = {name!r}; refs.append(weakref.ref(model))
                    mine_{name} = [model.name]
                """)
            )
            book.good(
                block(f"""
                    #pragma taas --gpus 2 --background --name {name}
                    mine_{name}.append(model.name); model.trained = True
                """)
            )
            book.good("_.result(100)")
        book.good("model = None; first = mine_one; last = mine_three")
        assert book.value("alive()") == "[True, True, True]"
        # at the very time at which the first has been over for an hour, and the others have not
        book.good(
            "ended = min(pending.read_record(p.record.folder).ended for p in"
            " pending._pending.values())"
        )
        book.good("pending.let_go_of_old(now=ended + pending._SECONDS)")
        assert book.value("alive()") == "[False, True, True]"
        said = book.good("%taas attach one").stdout
        assert "the objects that one was given are not held any more" in said
        assert book.value("mine_one, mine_one is first") == "['one', 'one'] False"
        book.good("pending._BYTES = max(p.captured.held_bytes for p in pending._pending.values())")
        # by the event at the end of that cell
        assert book.value("alive()") == "[False, False, True]"
        book.good("%taas attach three")
        assert book.value("mine_three, mine_three is last") == "['three', 'three'] True"
        assert book.value("pending._pending, alive()") == "{} [False, False, False]"
        # nobody can attach a run whose folder was removed
        book.good("pending._BYTES = 1 << 40; model = Model(); refs[:] = [weakref.ref(model)]")
        book.good("#pragma taas --gpus 2 --background\nmodel.trained = True")
        book.good(
            "run = _; run.result(100); model = None\nimport shutil; shutil.rmtree(run.folder)"
        )
        assert book.value("pending._pending, alive()") == "{} [False]"
    finally:
        book.close()

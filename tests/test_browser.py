"""A person at a keyboard: real JupyterLab and Notebook 7 in Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import conftest
import pytest
from blocks import block
from notebook_harness import terminal

from taas.runs.records import read_records

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
OFFLINE_MNIST = Path(__file__).resolve().parents[1] / "examples" / "offline_mnist.py"
ARTEFACTS = Path(os.environ.get("ARTEFACTS", "artefacts")).absolute()
_PATIENCE = 90_000  # milliseconds; a loaded machine is slow, not wrong

TRAINING = """\
#pragma taas --gpus 2 --name {name}{options}
import time, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import datasets
dist.init_process_group("nccl")
torch.manual_seed(0)
mnist = datasets.MNIST("data", train=True, download=True)
images, labels = (mnist.data[:512] / 255).cuda(), mnist.targets[:512].cuda()
model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range({epochs}):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item()); print(f"epoch {{epoch}}: loss {{losses[-1]:.3f}}", flush=True)
    time.sleep(0.5)
"""


@dataclass
class Server:
    """A Jupyter server with a project."""

    url: str
    token: str
    project: Path

    def page(self, notebook: str, front: str = "lab") -> str:
        """Return where a notebook is opened, in JupyterLab or Notebook 7.

        It is made if it is not there.
        """
        path = self.project / f"{notebook}.ipynb"
        if not path.exists():
            kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
            path.write_text(
                json.dumps(
                    {
                        "cells": [],
                        "metadata": {"kernelspec": kernel},
                        "nbformat": 4,
                        "nbformat_minor": 5,
                    }
                )
            )
        way = f"lab/workspaces/{notebook}/tree" if front == "lab" else "notebooks"
        return f"{self.url}/{way}/{path.name}?token={self.token}&reset"

    def end_kernels(self) -> None:
        """End all notebooks' kernels."""
        headers = {"Authorization": f"token {self.token}"}
        with urlopen(Request(f"{self.url}/api/sessions", headers=headers)) as answer:
            sessions = json.load(answer)
        for session in sessions:
            urlopen(
                Request(
                    f"{self.url}/api/sessions/{session['id']}", headers=headers, method="DELETE"
                )
            ).close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real server on a free port, which shows notebooks in JupyterLab and in Notebook 7."""
    before = conftest.alive_below()
    project = tmp_path_factory.mktemp("project")
    subprocess.run(
        [sys.executable, str(OFFLINE_MNIST), str(project / "data")], check=True, capture_output=True
    )
    token = os.urandom(12).hex()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyter",
            "lab",
            "--no-browser",
            "--ServerApp.port=0",
            "--allow-root",
            f"--ServerApp.root_dir={project}",
            f"--IdentityProvider.token={token}",
        ],
        env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path_factory.mktemp("config"))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = (
            re.search(r"http://(?:127\.0\.0\.1|localhost):(\d+)/", line) for line in process.stderr
        )
        port = next((match[1] for match in found if match), "")
        assert port, "the server did not say where it listens"
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield Server(f"http://127.0.0.1:{port}", token, project)
    finally:
        process.terminate()
        process.wait(90)  # it ends its kernels first
        drain.wait(90)
        process.stderr.close()
    assert not conftest._left(before), "the server left processes"


def where_ranks_stand() -> str:
    """Return what taas says of each run that goes on, and the machine's load.

    A failure that cannot be repeated tells enough.
    """
    said = [f"load {os.getloadavg()}"]
    for record in read_records():
        if record.live:
            for verb in ("stacks", "logs"):
                asked = terminal(verb, record.name)
                said += [f"taas {verb} {record.name}:", asked.stdout[-4000:], asked.stderr]
    return "\n".join(said)


class Person:
    """Somebody who types into a notebook."""

    def __init__(self, page: Any, name: str) -> None:
        self.page, self._name = page, name
        self._shot = 0

    def enter(self, code: str) -> None:
        """Type a cell and run it by the keyboard."""
        cells = self.page.locator(".jp-Notebook .jp-Cell")
        count = cells.count()
        cells.last.locator(".cm-content").click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")
        sync_api.expect(cells).to_have_count(count + 1, timeout=_PATIENCE)

    def knocks(self) -> None:
        """Run the first cell until its kernel is connected and answers.

        What JupyterLab asks first is closed.
        """
        question = self.dismisses_questions()
        self.page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        self.page.keyboard.insert_text("pass")
        answered = self.page.locator(".jp-InputPrompt", has_text="[1]:").first
        for _ in range(_PATIENCE // 3000):
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(AssertionError):
                sync_api.expect(answered).to_be_visible(timeout=3000)
                break
            self.page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        self.page.remove_locator_handler(question)
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")

    def dismisses_questions(self) -> Any:
        """Close whatever JupyterLab asks from now on; returns what its questions are shown in."""
        question = self.page.locator("dialog.jp-Dialog")
        self.page.add_locator_handler(question, self._closes)
        return question

    def _closes(self, question: Any) -> None:
        print("JupyterLab asked:", question.inner_text())
        self.page.keyboard.press("Escape")

    def waits_for_the_kernel(self, status: str = "idle") -> None:
        """Wait until the toolbar shows it.

        For a cell that is typed before, JupyterLab starts another kernel.
        """
        shown = self.page.locator(f'.jp-Notebook-ExecutionIndicator[data-status="{status}"]').first
        sync_api.expect(shown).to_be_attached(timeout=_PATIENCE)

    def output(self) -> Any:
        """Return the cells' outputs."""
        return self.page.locator(".jp-Notebook .jp-CodeCell .jp-Cell-outputArea")

    def cell(self, text: str) -> Any:
        """Return the output of the last cell that has a text in it."""
        return self.output().filter(has_text=text).last

    def sees(self, text: str) -> None:
        """Wait until a text is to be seen among the outputs."""
        try:
            sync_api.expect(self.cell(text)).to_be_visible(timeout=_PATIENCE)
        except AssertionError as error:
            error.add_note(where_ranks_stand())
            raise

    def answers(self, text: str) -> None:
        """Type it at a prompt, which JupyterLab then takes away, before or after the next one."""
        prompts = self.page.locator(".jp-Stdin-input")
        sync_api.expect(prompts).to_have_count(1, timeout=_PATIENCE)
        prompt = prompts.element_handle()
        prompt.fill(text)
        prompt.press("Enter")
        prompt.wait_for_element_state("hidden", timeout=_PATIENCE)

    def restarts(self) -> None:
        """Restart the kernel by the keyboard."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("0")
        self.page.keyboard.press("0")
        self.page.locator(".jp-Dialog button", has_text="Restart").last.click(timeout=_PATIENCE)
        self.waits_for_the_kernel()

    def saves(self) -> None:
        """Save the notebook by the keyboard."""
        self.page.keyboard.press("Escape")
        with self.page.expect_response(
            lambda answer: answer.request.method == "PUT" and "/api/contents/" in answer.url,
            timeout=_PATIENCE,
        ):
            self.page.keyboard.press("Control+s")

    def photograph(self, what: str) -> None:
        """Keep a screenshot."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(ARTEFACTS / f"{self._name}-{what}.png"))


class Room:
    """Where notebooks are opened.

    Args:
        name: of the screenshots.
    """

    def __init__(self, server: Server, browser: Any, name: str) -> None:
        self._server, self._browser, self._name = server, browser, name
        self._pages: list[Any] = []
        self.project = server.project

    def opens(self, notebook: str, front: str = "lab", *, again: bool = False) -> Person:
        """Open a notebook in a browser of its own.

        It gets an idle kernel, or, opened again, the one that runs a cell.
        """
        page = self._browser.new_context(viewport={"width": 1100, "height": 720}).new_page()
        self._pages.append(page)
        page.goto(self._server.page(notebook, front), timeout=_PATIENCE)
        page.locator(".jp-Notebook .jp-Cell .cm-content").first.wait_for(timeout=_PATIENCE)
        person = Person(page, f"{self._name}-{len(self._pages)}")
        person.waits_for_the_kernel("unknown" if again else "idle")  # a busy one does not answer
        if not again:
            person.knocks()
        return person

    def close(self) -> None:
        """Keep a last screenshot of each page, close them and end all kernels."""
        for number, page in enumerate(self._pages, 1):
            if not page.is_closed():
                Person(page, f"{self._name}-{number}").photograph("last")
            page.context.close()
        self._server.end_kernels()


@pytest.fixture
def room(server: Server, request: pytest.FixtureRequest) -> Iterator[Room]:
    """A place to open notebooks in, by Chromium; what goes on in them ends with the test."""
    name = re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        found = Room(server, browser, name)
        try:
            yield found
        finally:
            found.close()
            browser.close()
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio_"):  # Playwright's, told to end and not waited for
            thread.join(30)


@pytest.mark.slow(rows=1)
@pytest.mark.parametrize("front", ["lab", "notebook"])
def test_a_day_at_the_notebook(room: Room, front: str) -> None:
    """Run, watch, interrupt, look at the table, leave, restart, come back, take the names."""
    if front == "notebook":
        pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    person = room.opens(f"training-{front}", front)
    page = person.page
    person.enter("%load_ext taas\nimport torch")
    person.enter(TRAINING.format(name="first", options="", epochs=400))
    person.sees("first running")
    person.sees("epoch 3")
    line = page.locator(".jp-OutputArea-output", has_text="first running").last
    before = line.inner_text()
    page.wait_for_function(
        "text => !document.body.innerText.includes(text)", arg=before, timeout=_PATIENCE
    )
    person.sees("rehearsed on CPU")
    rows = line.locator("details").first
    rows.locator("summary").first.click()
    rows.locator("tr", has_text="epoch 5").locator("summary").first.click()
    # the row stays open
    sync_api.expect(rows.locator("pre").first).to_contain_text("epoch 8", timeout=_PATIENCE)
    sync_api.expect(rows.locator("tr").last).to_contain_text(re.compile(r"1\s*running\s*\d+ %"))
    person.photograph("live-view")
    page.get_by_role("button", name="Interrupt the kernel").first.click()
    person.sees("KeyboardInterrupt")
    person.sees("first interrupted")
    # what is entered before a cell has ended with an error is not run
    person.waits_for_the_kernel()
    person.enter(TRAINING.format(name="night", options=" --background", epochs=8))
    person.sees("%taas attach night brings its output and its names")
    person.enter("%taas status")
    sync_api.expect(
        page.locator(".jp-RenderedHTMLCommon table td", has_text="night").first
    ).to_be_visible(timeout=_PATIENCE)
    row = page.locator(".jp-RenderedHTMLCommon table tr", has_text="night").first
    sync_api.expect(row.locator("td").nth(1)).to_have_text(
        re.compile("running|done"), timeout=_PATIENCE
    )
    person.photograph("status")
    person.restarts()
    person.enter("'model' in globals()")
    person.sees("False")
    person.enter("%load_ext taas\n%taas attach night")
    person.sees("epoch 7")
    person.sees("names here now")
    person.photograph("attached")
    person.enter("print(type(model).__name__, 'and', len(losses), 'losses')")
    person.sees("Sequential and 8 losses")


def test_a_hundred_thousand_lines(room: Room) -> None:
    """The tab shows the last of them, and then takes the next cell."""
    person = room.opens("lines")
    person.dismisses_questions()  # a page that is late asks whether the file has changed
    person.enter("%load_ext taas")
    person.enter(
        "#pragma taas --gpus 2\nfor i in range(100_000): print('line', i)\nprint('all', 'printed')"
    )
    sync_api.expect(person.cell("all printed")).to_be_visible(timeout=4 * _PATIENCE)
    person.enter("print('and', 'after')")
    person.sees("and after")
    person.photograph("lines")


def test_a_curve_and_a_bar(room: Room) -> None:
    """The live line comes back after each clear_output.

    tqdm.notebook draws its bar, also in a page loaded again.
    """
    person = room.opens("curve")
    page = person.page
    person.enter(
        "%load_ext taas\nfrom IPython.display import clear_output\nfrom tqdm.notebook import tqdm"
    )
    person.enter(
        block("""
            #pragma taas --gpus 2 --name curve
            from pathlib import Path
            import time, matplotlib.pyplot as plt
            losses = []
            for step in range(5):
                losses.append(1 / (step + 1))
                clear_output(wait=True)
                plt.plot(losses); plt.show(); print('step', step)
            print('waits')
            while not Path('go').exists(): time.sleep(0.05)
        """)
    )
    person.sees("waits")
    shown = person.cell("waits").locator(".jp-OutputArea-output")
    sync_api.expect(shown.first).to_contain_text("curve running", timeout=_PATIENCE)
    sync_api.expect(shown).to_have_count(3, timeout=_PATIENCE)
    person.photograph("curve")
    (room.project / "go").touch()
    person.sees("curve done")
    person.enter(
        block("""
            #pragma taas --gpus 2 --name bar
            for step in tqdm(range(40), desc='train'): time.sleep(0.01)
        """)
    )
    person.sees("bar done")
    bar = person.cell("bar done").locator(".widget-hbox")
    sync_api.expect(bar).to_contain_text("40/40", timeout=_PATIENCE)
    sync_api.expect(bar.locator(".progress-bar-success")).to_be_visible(timeout=_PATIENCE)
    person.photograph("bar")
    person.saves()
    page.reload()
    sync_api.expect(page.locator(".widget-hbox")).to_contain_text("40/40", timeout=_PATIENCE)


def test_a_notebook_that_is_opened_again(room: Room) -> None:
    """In the middle of a run it says where the rest is.

    Attach shows it, in this kernel and in a new one, and has the line say how the run ended.
    """
    person = room.opens("again")
    person.enter("%load_ext taas\nfrom tqdm.notebook import tqdm")
    person.enter(
        block("""
            #pragma taas --gpus 2 --name long
            import time
            from pathlib import Path
            print('begun')
            while not Path('on').exists(): time.sleep(0.05)
            for step in tqdm(range(3)): pass
            print('the rest')
        """)
    )
    person.sees("begun")
    person.sees("long running")
    person.saves()
    person.page.close()
    person = room.opens("again", again=True)
    sync_api.expect(person.cell("long running")).to_contain_text(
        re.compile(r" · at \d\d:\d\d"), timeout=_PATIENCE
    )
    person.photograph("opened")
    (room.project / "on").touch()
    person.enter("%taas attach long")
    person.sees("the names of long are in this notebook")
    sync_api.expect(person.cell("the names of long")).to_contain_text("the rest", timeout=_PATIENCE)
    started = person.output().filter(has_text="begun", has_not_text="the rest")
    sync_api.expect(started).to_contain_text("long done", timeout=_PATIENCE)
    sync_api.expect(started).not_to_contain_text("long running")
    person.photograph("attached")
    person.restarts()
    person.enter("%load_ext taas\n%taas attach long")
    person.sees("long gave its names to the notebook that started it")
    sync_api.expect(person.cell("long gave").locator(".widget-hbox")).to_contain_text(
        "3/3", timeout=_PATIENCE
    )
    person.photograph("attached-anew")


@pytest.mark.parametrize("ends", ["by the interrupt", "well", "late"])
def test_a_kernel_that_is_restarted_in_the_middle_of_a_run(room: Room, ends: str) -> None:
    """JupyterLab interrupts the run, and shows nothing of its end: the next kernel does.

    A run in the background goes on, and its line says so.
    """
    person = room.opens("restarted")
    options = " --background" if ends == "late" else ""
    swallows = "ValueError" if ends == "by the interrupt" else "KeyboardInterrupt"
    person.enter("%load_ext taas")
    person.enter(
        block(f"""
            #pragma taas --gpus 2 --name cut{options}
            import time
            from pathlib import Path
            try:
                print('begun', flush=True)
                while not Path('late').exists(): time.sleep(0.05)
            except {swallows}:
                print('saved')
        """)
    )
    person.sees("cut running")
    if not options:
        person.sees("begun")
    person.restarts()
    person.enter("%load_ext taas")
    said = {"by the interrupt": "cut interrupted", "well": "cut done", "late": "cut running"}
    person.sees(said[ends])
    lines = person.output().filter(has_text="cut ")
    sync_api.expect(lines).to_have_count(1, timeout=_PATIENCE)
    person.photograph("mended")
    if options:
        (room.project / "late").touch()
        person.enter("%taas attach cut")
        sync_api.expect(lines.first).to_contain_text("cut done", timeout=_PATIENCE)


def test_a_notification_of_the_end(room: Room) -> None:
    """The page is asked for it as the cell begins, and shows how the run ended."""
    person = room.opens("notified")
    person.page.evaluate(
        "() => { window.told = []; window.Notification = class { static permission ="
        " 'default';constructor(...said) { window.told.push(said) } static requestPermission() {"
        " window.told.push('asked');this.permission = 'granted'; return Promise.resolve('granted')"
        " } } }"
    )
    person.enter("%load_ext taas")
    person.enter("#pragma taas --gpus 1 --notify --name told\nraise ValueError('</script>')")
    person.sees("told failed")
    person.page.wait_for_function("window.told.length == 2", timeout=_PATIENCE)
    told = person.page.evaluate("window.told")
    assert told == [
        "asked",
        ["told failed", {"body": "rank 0: cell line 2: ValueError: </script>"}],
    ]


def test_a_debugger_in_a_rank(room: Room) -> None:
    """Its prompt is JupyterLab's own.

    What is typed reaches the rank, and the answers stand in the cell; so it is with %debug.
    """
    person = room.opens("debugger")
    person.enter("%load_ext taas")
    person.enter(
        block("""
            #pragma taas --gpus 4 --name looked
            import os, torch, torch.distributed as dist
            dist.init_process_group('gloo')
            x = torch.ones(1)
            if dist.get_rank() == 3:
                breakpoint()
                x += 1
            dist.all_reduce(x)
            print('sum', x.item())
        """)
    )
    sync_api.expect(person.page.locator(".jp-Stdin-prompt")).to_have_text(
        "[rank 3] (Pdb) ", timeout=_PATIENCE
    )
    person.sees("rank 3 asked for an answer in the cell")
    person.photograph("asked")
    for typed, seen in (("p 'x is', x", "('x is', tensor([1.]))"), ("n", "-> dist.all_reduce(x)")):
        person.answers(typed)
        person.sees(f"(Pdb) {typed}")
        person.sees(seen)
    person.answers("c")
    person.sees("sum 5.0")
    person.sees("looked done")
    person.photograph("done")
    person.enter(
        block("""
            #pragma taas --gpus 2 --keep --name broken
            if int(os.environ['RANK']) == 1:
                half = 0.5
                1 / 0
        """)
    )
    person.sees("broken failed")
    person.waits_for_the_kernel()
    person.enter("%debug")
    sync_api.expect(person.page.locator(".jp-Stdin-prompt")).to_contain_text(
        "[rank 1]", timeout=_PATIENCE
    )
    person.answers("p 'half is', half")
    person.sees("('half is', 0.5)")
    person.answers("q")
    person.waits_for_the_kernel()
    person.photograph("looked-into")

"""A person at a keyboard: real JupyterLab and Notebook 7 in Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


@pytest.fixture(params=["lab", "notebook"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server on a port of its own choice."""
    if request.param == "notebook":
        pytest.importorskip("notebook", reason="Notebook 7 is not installed")
    project = tmp_path_factory.mktemp("project")
    subprocess.run(
        [sys.executable, str(OFFLINE_MNIST), str(project / "data")], check=True, capture_output=True
    )
    runtime = tmp_path_factory.mktemp("runtime")
    notebook = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    notebook["metadata"] = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
    }
    (project / "training.ipynb").write_text(json.dumps(notebook))
    token = os.urandom(12).hex()
    config = tmp_path_factory.mktemp("config")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "jupyter", request.param, "--no-browser", "--ServerApp.port=0", "--allow-root",
            f"--ServerApp.root_dir={project}", f"--IdentityProvider.token={token}",
        ],
        env={**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(config)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if "http://127.0.0.1:" in line or "http://localhost:" in line:
                port = line.split("://", 1)[1].split(":", 1)[1].split("/", 1)[0]
                url = f"http://127.0.0.1:{port}"
                break
        assert url, "the server did not say where it listens"
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        page = "lab/tree" if request.param == "lab" else "notebooks"
        yield Server(f"{url}/{page}/training.ipynb?token={token}", token, project)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(90)  # it ends its kernels first
        drain.wait(90)
        process.stderr.close()
        _, alive = psutil.wait_procs(children, 15)
        for child in alive:
            child.kill()


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
        """Run the first cell until its kernel is connected and answers."""
        self.page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        self.page.keyboard.insert_text("pass")
        answered = self.page.locator(".jp-InputPrompt", has_text="[1]:").first
        for _ in range(_PATIENCE // 3000):
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(AssertionError):
                sync_api.expect(answered).to_be_visible(timeout=3000)
                break
            self.page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")

    def waits_for_the_kernel(self) -> None:
        """Wait until the toolbar shows an idle kernel."""
        idle = self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').first
        sync_api.expect(idle).to_be_attached(timeout=_PATIENCE)

    def output(self) -> Any:
        """Return the outputs of the cell that ran last."""
        return self.page.locator(".jp-Notebook .jp-CodeCell .jp-Cell-outputArea")

    def sees(self, text: str) -> None:
        """Wait until a text is to be seen among the outputs."""
        sync_api.expect(self.output().filter(has_text=text).last).to_be_visible(timeout=_PATIENCE)

    def photograph(self, what: str) -> None:
        """Keep a screenshot."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(ARTEFACTS / f"{self._name}-{what}.png"))


@pytest.fixture
def person(server: Server, request: pytest.FixtureRequest) -> Iterator[Person]:
    """A browser with the notebook open and its kernel idle."""
    name = "lab" if "/lab/" in server.url else "notebook"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 720})
        page.goto(server.url, timeout=_PATIENCE)
        page.locator(".jp-Notebook .jp-Cell .cm-content").first.wait_for(timeout=_PATIENCE)
        somebody = Person(page, name)
        try:
            somebody.waits_for_the_kernel()
            somebody.knocks()
            yield somebody
        finally:
            somebody.photograph("last")
            browser.close()


def test_a_day_at_the_notebook(person: Person) -> None:
    """Run, watch the live view change, interrupt, look at the table, leave, restart, come back, take the names."""
    page = person.page
    person.enter("%load_ext taas\nimport torch")
    person.enter(TRAINING.format(name="first", options="", epochs=400))
    person.sees("first running")
    person.sees("epoch 3")
    line = page.locator(".jp-OutputArea-output", has_text="first running").last
    before = line.inner_text()
    page.wait_for_function("text => !document.body.innerText.includes(text)", arg=before, timeout=_PATIENCE)
    person.sees("rehearsed on CPU")
    person.photograph("live-view")
    page.get_by_role("button", name="Interrupt the kernel").first.click()
    person.sees("KeyboardInterrupt")
    person.sees("first interrupted")
    person.enter(TRAINING.format(name="night", options=" --background", epochs=8))
    person.sees("%taas attach night brings its output and its names")
    person.enter("%taas status")
    sync_api.expect(page.locator(".jp-RenderedHTMLCommon table td", has_text="night").first).to_be_visible(
        timeout=_PATIENCE
    )
    row = page.locator(".jp-RenderedHTMLCommon table tr", has_text="night").first
    sync_api.expect(row.locator("td").nth(1)).to_have_text(re.compile("running|done"), timeout=_PATIENCE)
    person.photograph("status")
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.locator(".jp-Dialog button", has_text="Restart").last.click(timeout=_PATIENCE)
    person.waits_for_the_kernel()
    person.enter("'model' in globals()")
    person.sees("False")
    person.enter("%load_ext taas\n%taas attach night")
    person.sees("epoch 7")
    person.sees("names here now")
    person.photograph("attached")
    person.enter("print(type(model).__name__, 'and', len(losses), 'losses')")
    person.sees("Sequential and 8 losses")

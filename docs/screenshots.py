"""Take the pictures of the documents.

JupyterLab in Chromium, driven by Playwright (``make screenshots``).

What is in them are the cells of the README, and those below. Look at the pictures before you commit
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Locator, Page, expect, sync_playwright

DOCS = Path(__file__).parent
PATIENCE = 180_000  # milliseconds; a loaded machine is slow, not wrong
README_CELLS = re.findall(
    r"^```python\n(.*?)^```$", (DOCS.parent / "README.md").read_text(), re.DOTALL | re.MULTILINE
)
LOAD, _, DATA, TRAIN, *_ = (cell.rstrip() for cell in README_CELLS)
NIGHT = TRAIN.replace("--gpus auto", "--gpus 2 --background --name night")
HANG = """\
#pragma taas --gpus 4 --hang-timeout 5 --name hang
import time, torch, torch.distributed as dist

def validate(rank):
    time.sleep(3600 if rank == 3 else 0)

dist.init_process_group("nccl")
validate(dist.get_rank())
dist.all_reduce(torch.ones(1, device="cuda"))"""


class Notebook:
    """A notebook in JupyterLab, whose cells are there already."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        page.goto(address, timeout=PATIENCE)
        page.add_style_tag(content=".jp-cell-toolbar, .jp-Collapser { visibility: hidden }")
        page.add_locator_handler(
            page.locator("dialog.jp-Dialog"), lambda _: page.keyboard.press("Escape")
        )
        idle = page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        idle.first.wait_for(state="attached", timeout=PATIENCE)

    def cell(self, number: int) -> Locator:
        """One of its cells, from 0."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def run(self, number: int, *, until: str = "") -> None:
        """Run a cell until a text is in its output, or to its end.

        The first cell runs again if no kernel was connected yet.
        """
        cell, ran = self.cell(number), re.compile(r"\[\d+\]:")
        tries = 1 if number else 5
        for _ in range(tries):
            cell.locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(AssertionError):
                seen = (
                    cell.locator(".jp-Cell-outputArea")
                    if until
                    else cell.locator(".jp-InputPrompt")
                )
                expect(seen).to_contain_text(until or ran, timeout=PATIENCE / tries)
                return
        sys.exit(
            f"cell {number} of {self.page.url} did not come to {until or 'its end'}:"
            f" {cell.inner_text()}"
        )

    def photograph(self, name: str, *numbers: int) -> None:
        """Keep a picture of some cells, which stand one below the other."""
        self.page.mouse.move(0, 0)
        boxes = [box for number in numbers if (box := self.cell(number).bounding_box())]
        top, left = min(box["y"] for box in boxes), boxes[0]["x"]
        clip = {
            "x": left,
            "y": top,
            "width": boxes[0]["width"],
            "height": boxes[-1]["y"] + boxes[-1]["height"] - top,
        }
        path = DOCS / "images" / f"{name}.png"
        self.page.screenshot(path=str(path), clip=clip)
        sys.stdout.write(f"{path}: {path.stat().st_size // 1000} kB\n")


@contextmanager
def jupyter(project: Path) -> Iterator[str]:
    """JupyterLab on a port of its own choice; yields where a notebook is opened, less its name."""
    token = os.urandom(12).hex()
    command = ["jupyter", "lab", "--no-browser", "--ServerApp.port=0", "--allow-root"]
    options = [f"--ServerApp.root_dir={project}", f"--IdentityProvider.token={token}"]
    own = {
        f"JUPYTER_{what}_DIR": str(project / f".{what.lower()}") for what in ("CONFIG", "RUNTIME")
    }
    environment = {**os.environ, **own}  # no run of somebody else has a name that is in a picture
    server = subprocess.Popen(
        [sys.executable, "-m", *command, *options],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        found = (
            re.search(r"http://(?:127\.0\.0\.1|localhost):(\d+)/", line) for line in server.stderr
        )
        port = next(match[1] for match in found if match)
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        yield f"http://127.0.0.1:{port}/doc/tree/{{}}.ipynb?token={token}"
    finally:
        server.terminate()
        server.wait(90)
        drain.wait(90)


def write(project: Path, name: str, cells: list[str]) -> None:
    """A notebook with these cells."""
    made = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "source": cell,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for n, cell in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (project / f"{name}.ipynb").write_text(json.dumps(book))


def take(page_of: Callable[[str, list[str]], Notebook]) -> None:
    """Take all pictures."""
    training = page_of("training", [LOAD, DATA, TRAIN])
    training.run(0)
    training.run(1)
    training.run(2, until="epoch 2")
    training.photograph("live-view", 2)

    evening = page_of("evening", [LOAD, DATA, NIGHT])
    for number in range(3):
        evening.run(number)
    morning = page_of("morning", [f"{LOAD}\n%taas attach night", "net"])
    morning.run(0, until="names here now")
    morning.run(1, until="Sequential")
    morning.photograph("attach", 0, 1)

    stuck = page_of("stuck", [LOAD, HANG])
    stuck.run(0)
    stuck.run(1, until="differs")
    stuck.photograph("hang", 1)


def main() -> None:
    """Start JupyterLab and a browser, and take the pictures."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        sys.exit(
            "There is no Chromium: install it (Debian: apt-get install chromium fonts-dejavu-core)"
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyter(Path(folder)) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def page_of(name: str, cells: list[str]) -> Notebook:
            write(Path(folder), name, cells)
            page = browser.new_context(viewport={"width": 860, "height": 900}).new_page()
            return Notebook(page, address.format(name))

        take(page_of)
        browser.close()


if __name__ == "__main__":
    main()

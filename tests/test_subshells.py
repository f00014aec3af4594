"""A console beside a cell that runs.

Subshells of ipykernel 7, which JupyterLab uses for widgets' messages, too.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from notebook_harness import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        int(version("ipykernel").partition(".")[0]) < 7, reason="subshells came with ipykernel 7"
    ),
]
CELL = """#pragma taas --gpus 2 --name beside
import time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("there", flush=True)
while True:
    time.sleep(0.05)
"""


class Subshell:
    """A thread of a notebook's kernel that runs cells of its own."""

    def __init__(self, book: Notebook) -> None:
        self._book, self._client = book, book._client
        message = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(message)
        while (reply := self._client.get_control_msg(timeout=60))["parent_header"].get(
            "msg_id"
        ) != message["msg_id"]:
            pass
        self._id = reply["content"]["subshell_id"]

    def send(self, kind: str, content: dict[str, Any]) -> str:
        """Send it a message; returns its id."""
        message = self._client.session.msg(kind, content)
        message["header"]["subshell_id"] = self._id
        self._client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def run(self, code: str) -> str:
        """Run a cell in it; returns what it prints and shows."""
        sent = self.send("execute_request", {"code": code, "silent": False, "store_history": False})
        said = ""
        while True:
            heard = self._client.get_iopub_msg(timeout=60)
            content = heard["content"]
            if heard["parent_header"].get("msg_id") != sent:
                self._book.hear(heard)
                continue
            if heard["msg_type"] == "status" and content["execution_state"] == "idle":
                return said
            said += content.get("text", "") + content.get("data", {}).get("text/plain", "")


def test_a_console_beside_a_headed_cell(notebook: Notebook) -> None:
    """It sees the run, where its ranks stand, and ends it.

    A slider that was moved meanwhile has its value in the notebook.
    """
    notebook.good("import ipywidgets\nslider = ipywidgets.IntSlider(value=1)")
    console = Subshell(notebook)
    notebook.start(CELL)
    notebook.wait_for("there")
    moved = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    console.send(
        "comm_msg", {"comm_id": console.run("print(slider.comm.comm_id)").strip(), "data": moved}
    )
    assert "beside  running  2 ranks" in console.run("%taas status")
    assert "ranks 0–1: cell line 7" in console.run("%taas stacks")
    assert "beside stopped after" in console.run("%taas stop")
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    assert "was stopped from" in ran.evalue
    assert notebook.value("slider.value") == "7"

"""Run a notebook without a browser, printing what its cells print, and keep the executed copy.

    python examples/run_notebook.py examples/mnist_ddp.ipynb --out artefacts

The notebook runs in its own folder, in a kernel of the Python that runs this. The copy, with its
outputs, is written also when a cell fails; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class PrintingClient(NotebookClient):
    """An nbclient that passes outputs on to the terminal as they come.

    A line that is updated comes as it is at last.
    """

    updated = ""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Keep the newest text of what is updated in place, and print it when the cell is over."""
        if msg["msg_type"] == "update_display_data":
            self.updated = msg["content"]["data"].get("text/plain", "")
        elif (
            msg["msg_type"] == "status"
            and msg["content"]["execution_state"] == "idle"
            and self.updated
        ):
            print(self.updated, flush=True)
            self.updated = ""
        return super().process_message(msg, cell, cell_index)

    def output(self, outs: list[Any], msg: dict[str, Any], display_id: str, cell_index: int) -> Any:
        """Print one output message, then keep it in the notebook."""
        show(msg["header"]["msg_type"], msg["content"])
        return super().output(outs, msg, display_id, cell_index)


def show(kind: str, content: dict[str, Any]) -> None:
    """Print what one message shows; a picture as its one-line description."""
    if kind == "stream":
        print(content["text"], end="", flush=True)
    elif kind in ("display_data", "execute_result"):
        print(content["data"].get("text/plain", ""), flush=True)
    elif kind == "error":
        text = "\n".join(content["traceback"])
        print(text if sys.stdout.isatty() else ANSI.sub("", text), flush=True)


def announce(cell: Any, cell_index: int) -> None:
    """Print the first lines of a cell of code, before it runs: enough to recognise it."""
    if cell.cell_type == "code":
        head = cell.source.splitlines()[:2]
        print("\n".join([f"\n── cell {cell_index} " + "─" * 60, *head, "…"]), flush=True)


def run(path: Path, out: Path, timeout: float | None) -> bool:
    """Run the notebook; whether all its cells ended well."""
    notebook = nbformat.read(path, as_version=4)
    client = PrintingClient(
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=announce,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors: what is printed is the cells' own
    )
    try:
        client.execute()
    except (CellExecutionError, DeadKernelError, TimeoutError) as failure:
        # the traceback of a failed cell has been printed as an output
        if not isinstance(failure, CellExecutionError):
            print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        return False
    else:
        return True
    finally:
        out.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, out / path.name)
        print(f"\nThe executed notebook is {out / path.name}", flush=True)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("artefacts"), help="folder of the executed copy"
    )
    parser.add_argument("--timeout", type=float, help="seconds that a cell may take (no limit)")
    options = parser.parse_args()
    return 0 if run(options.notebook.resolve(), options.out, options.timeout) else 1


if __name__ == "__main__":
    sys.exit(main())

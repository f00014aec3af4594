"""Shows what ranks write, in a notebook's cell or in a terminal.

A front end is slow for each message, not for each character: 900 messages keep JupyterLab busy for
a minute and a half. So text that comes soon after other text waits in ipykernel's streams for more,
as a plain cell's does.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from taas.notebook.view.comms import KernelEnds
from taas.protocol.records import RunRecord
from taas.runs.events import Output, plain_form, read_arguments
from taas.runs.reader import LOOK_SECONDS, RunReader

_TOGETHER_SECONDS = 0.005
"""For that long after something was shown, output is collected, and then shown together."""
_LONGEST_BAR = 1000
"""The longest line, in characters, that is treated as a progress bar."""
_MESSAGE_SECONDS = 0.2
"""For that long ipykernel lets text of a stream wait for more; the first text here never waits."""


def follow(
    reader: RunReader,
    screen: Screen,
    look: Callable[[RunRecord], None] = lambda _: None,
    wait: Callable[[float], None] | None = None,
    ask: Callable[[RunRecord], bool] = lambda _: False,
) -> RunRecord:
    """Show what ranks have written, and what they go on writing, until the run is over.

    Args:
        reader: the run.
        screen: where the output is shown.
        look: called with the run's current record, several times a second, and after each piece
            of output.
        wait: waits so many seconds, or until there may be new output; None: as the reader does.
        ask: asks the person a rank's question, once all earlier output is shown; returns whether
            there was one.

    Returns:
        The run's last record.

    Raises:
        KeyboardInterrupt: the person at the keyboard has seen enough; the run goes on.
    """
    try:
        while True:
            look(reader.look())
            if items := reader.read():
                screen.show(items)
                time.sleep(_TOGETHER_SECONDS)
            elif reader.over:  # it was over before the files were read, so all of them was read
                screen.end_lines()
                return reader.record
            elif not ask(reader.record):
                (wait or reader.wait)(LOOK_SECONDS)
    finally:
        screen.send()


def say(*lines: str) -> None:
    """Print a message to the user that is not the cell's own output."""
    for line in lines:
        sys.stdout.write(f"taas: {line}\n")
    sys.stdout.flush()


def plain_among(record: RunRecord) -> int | None:
    """Return the rank whose lines carry no number; None if several ranks are shown."""
    return None if len(record.cell.spec.shown_ranks()) > 1 else 0


class _TaggedLines:
    """The lines of several ranks on one stream, each after its rank's number.

    Lines that are written over, such as progress bars, have it, too. A front end has one open line.
    While another rank writes, a rank's bar is taken off that line; it comes back with the rank's
    next text, or at the end. An open line that is no bar is ended, and continues as a new one.
    """

    def __init__(self) -> None:
        self._open: dict[int, str] = {}  # by rank, the text of its open line
        self._bars: set[int] = set()  # the ranks whose open lines were written over
        self._on_screen = -1  # the rank whose open line the front end shows

    def add(self, rank: int, text: str) -> str:
        """Return the text that makes the stream show this rank's next text."""
        is_shown = self._on_screen == rank
        out = [self._make_way(rank)]
        tag, line = f"[rank {rank}] ", self._open.pop(rank, "")
        if not is_shown:  # another rank's text has taken its bar off the screen
            out.append(line)
        for piece in re.split(r"(\r?\n|\r)", text):
            if piece == "\r":
                self._bars.add(rank)
                out.append(piece)
                line = ""
            elif piece.endswith("\n"):
                out.append(piece if line or rank in self._bars else f"{tag}{piece}")
                self._bars.discard(rank)
                line = ""
            elif not piece.strip() and rank in self._bars and not line:  # this clears a bar
                out.append(f"{' ' * len(tag + piece)}\r")
            elif piece:
                out.append(piece if line else f"{tag}{piece}")
                line = f"{line or tag}{piece}"
        if line:
            self._open[rank] = line
        self._on_screen = rank if line else -1
        return "".join(out)

    def _make_way(self, rank: int) -> str:
        """Take another rank's open line off the screen."""
        other, self._on_screen = self._on_screen, -1
        if other in (rank, -1):
            return ""
        if other in self._bars and len(self._open[other]) <= _LONGEST_BAR:
            return f"\r{' ' * len(self._open[other])}\r"
        del self._open[other]
        self._bars.discard(other)
        return "\n"

    def end(self) -> str:
        """Return the text that shows the hidden bars again, when no rank will write any more."""
        hidden = [line for rank, line in self._open.items() if rank != self._on_screen]
        self._open.clear()
        return "".join(f"\n{line}" for line in hidden)


class Screen:
    """Where ranks' output is shown: on streams like this process's own; with messages of taas.

    Args:
        plain: the rank whose lines have no number; None: all lines have one.
        pause: seconds after a message in which text waits for more.
    """

    def __init__(self, plain: int | None = 0, pause: float = 0.0) -> None:
        self._plain, self._pause = plain, pause
        self._lines = {stream: _TaggedLines() for stream in ("stdout", "stderr")}
        self._next = 0.0

    def show(self, items: Iterable[Output]) -> None:
        """Show consecutive output of ranks: text now, or together with what follows soon."""
        for item in items:
            if item.kind not in ("clear", "update", "comm"):
                self.settle()
            if item.kind in ("stdout", "stderr"):
                self._write_of(item.rank, item.kind, item.text)
            elif item.kind == "note":
                say(item.text)
            else:
                self._display(item.rank, item.kind, read_arguments(item.body))
        if time.monotonic() >= self._next:
            self.send()

    def _write(self, stream: str, text: str) -> None:
        (sys.stdout if stream == "stdout" else sys.stderr).write(text)

    def send(self) -> None:
        """Send the text that waits."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._next = time.monotonic() + self._pause

    def _write_of(self, rank: int, stream: str, text: str) -> None:
        """Write a rank's text, with its number before each line unless it is the plain one."""
        self._write(stream, text if rank == self._plain else self._lines[stream].add(rank, text))

    def end_lines(self) -> None:
        """Show the last state of bars, once their ranks write no more."""
        for stream, lines in self._lines.items():
            if rest := lines.end():
                self._write(stream, rest)

    def _display(self, rank: int, kind: str, arguments: dict[str, Any]) -> None:
        """Show a display, with the arguments of IPython's publisher."""
        raise NotImplementedError

    def settle(self) -> None:
        """Do now what was put off until the next output, which follows."""


class CellOutput(Screen):
    """Output as the cell's own: streams, displays, the last expression's value.

    Args:
        shell: the notebook's.
        plain: as in `Screen`.
        live: the output is shown while it is written.

    Attributes:
        above: shows again the view above the output, which vanishes when a rank clears the cell's
            output.
    """

    def __init__(self, shell: Any, plain: int | None = 0, *, live: bool = False) -> None:
        super().__init__(plain, _MESSAGE_SECONDS if hasattr(shell, "kernel") else 0.0)
        self._shell = shell
        self._clears_with_next = False
        self._ends = KernelEnds(live=live, say=say) if hasattr(shell, "kernel") else None
        self.above: Callable[[], None] = lambda: None

    def _display(self, rank: int, kind: str, arguments: dict[str, Any]) -> None:
        if kind == "clear":
            self._clear(**arguments)
        elif kind == "comm":
            if self._ends is not None:  # without a front end there are no widget models
                self._ends.take(arguments)
        elif kind == "result":
            hook = self._shell.displayhook
            hook.start_displayhook()
            hook.write_output_prompt()
            hook.write_format_data(arguments["data"], arguments["metadata"])
            hook.finish_displayhook()
        elif kind == "error":  # IPython showed an error, and the cell goes on
            etype = type(arguments["ename"], (Exception,), {})
            self._shell._showtraceback(etype, arguments["evalue"], arguments["traceback"])
        else:
            self._shell.display_pub.publish(update=kind == "update", **arguments)

    def _clear(self, wait: bool) -> None:
        """Clear the cell's output: now, or with the next output, so that nothing flickers."""
        self._shell.display_pub.clear_output(wait=wait)
        self._clears_with_next = True
        if not wait:
            self.settle()

    def names_came(self) -> None:
        """Give the notebook the widgets among the names that came back."""
        if self._ends is not None:
            self._ends.settle()

    def settle(self) -> None:
        """Clear now, if a clear was put off until the next output, which follows."""
        if self._clears_with_next:
            self._clears_with_next = False
            self.above()


class TerminalOutput(Screen):
    """Output as text; displays in their plain form."""

    def _display(self, rank: int, kind: str, arguments: dict[str, Any]) -> None:
        if text := plain_form(kind, arguments):
            self._write_of(rank, "stderr" if kind == "error" else "stdout", text)

"""What ranks wrote, shown where a person looks: in a notebook's cell or in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from taas.messages.ranks import Output

__all__ = ["CellOutput", "Screen", "TerminalOutput", "say"]

_read_output = msgspec.msgpack.Decoder(dict[str, Any])


class Screen(Protocol):
    """Where output is shown."""

    def show(self, rank: int, items: Iterable[Output]) -> None:
        """Show consecutive output of a rank."""


def say(*lines: str) -> None:
    """Tell the user something that is not the cell's own output."""
    for line in lines:
        sys.stdout.write(f"taas: {line}\n")
    sys.stdout.flush()


def say_lost(lost: Sequence[str]) -> None:
    """Tell the user in one line what of the ranks' names could not come back, each with its reason."""
    if lost:
        say(f"did not come back: {'; '.join(lost)}")


class _Tags:
    """The rank's number before each of its lines."""

    def __init__(self, plain: int | None) -> None:
        self._plain = plain
        self._line_open: dict[int, bool] = {}

    def __call__(self, rank: int, text: str) -> str:
        if rank == self._plain:
            return text
        tag = f"[rank {rank}] "
        open_line = self._line_open.get(rank, False)
        self._line_open[rank] = not text.endswith("\n")
        body = text[:-1] if text.endswith("\n") else text
        return (
            ("" if open_line else tag)
            + body.replace("\n", "\n" + tag)
            + ("\n" if text.endswith("\n") else "")
        )


class CellOutput:
    """Output as the cell's own: streams, displays, the last expression's value.

    Args:
        shell: the notebook's.
        plain: the rank whose lines carry no number; None: all carry one.
    """

    def __init__(self, shell: Any, plain: int | None = 0) -> None:
        self._shell, self._tagged = shell, _Tags(plain)

    def show(self, rank: int, items: Iterable[Output]) -> None:
        """Show consecutive output of a rank."""
        for item in items:
            if item.kind in ("stdout", "stderr"):
                stream = sys.stdout if item.kind == "stdout" else sys.stderr
                stream.write(self._tagged(rank, item.text))
            else:
                sys.stdout.flush()
                _publish(self._shell, item.kind, _read_output.decode(item.body))
        sys.stdout.flush()
        sys.stderr.flush()


def _publish(shell: Any, kind: str, arguments: dict[str, Any]) -> None:
    """Publish a rank's display message as this cell's own."""
    if kind == "clear":
        shell.display_pub.clear_output(wait=arguments["wait"])
    elif kind == "result":
        hook = shell.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(arguments["data"], arguments["metadata"])
        hook.finish_displayhook()
    else:
        shell.display_pub.publish(update=kind == "update", **arguments)


class TerminalOutput:
    """Output as text; of displays their plain form."""

    def __init__(self, plain: int | None = 0) -> None:
        self._tagged = _Tags(plain)

    def show(self, rank: int, items: Iterable[Output]) -> None:
        """Show consecutive output of a rank."""
        for item in items:
            stream = sys.stderr if item.kind == "stderr" else sys.stdout
            if item.kind in ("stdout", "stderr"):
                stream.write(self._tagged(rank, item.text))
            elif item.kind != "clear":
                text = _read_output.decode(item.body)["data"].get("text/plain", "")
                stream.write(self._tagged(rank, f"{text}\n"))
        sys.stdout.flush()
        sys.stderr.flush()

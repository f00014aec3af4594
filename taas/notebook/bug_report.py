"""``taas doctor --report RUN``: a text file about a run, to be attached to a bug report.

The file contains the run's record, the logs of its supervisor and agents, and the findings of
``taas doctor`` on this machine. It contains no user data: no variable names or values, no text of a
cell, of its output or of an error, and no environment variables. Paths below the home directory
begin with ``~``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from taas.base.process_log import log_files
from taas.errors import EngineError
from taas.notebook.doctor import Finding
from taas.protocol.records import RunRecord

_WITH_NAMES = frozenset({"returned", "collect", "shared", "name"})
"""Header options whose values are the user's names or paths."""
_FRAME = re.compile(r'^\s*(?:File )?"?([^\s"]*[/\\][^\s":]+\.py)"?(?::|, line )(\d+)')
"""A line of a traceback that contains a file name, in Python's or IPython's format."""


def write_report(record: RunRecord, findings: Iterable[Finding], folder: Path) -> list[str]:
    """Write the report of a run into a folder; return lines for the user.

    Raises:
        EngineError: the file cannot be written there.
    """
    path = folder / f"taas-report-{record.name}.txt"
    text = "\n".join(_sections(record, findings))
    try:
        home = os.path.expanduser("~")  # noqa: PTH111  unlike Path.home it never raises
        path.write_text(without_home(text, home), encoding="utf-8")
    except OSError as error:
        raise EngineError(
            f"the report cannot be written to {path}: {error.strerror}. Run `taas doctor --report "
            f"{record.name}` in a folder that can be written."
        ) from None
    return [
        (
            f"{path} has the record of {record.name}, the logs of its processes, and what this"
            " machine has."
        ),
        (
            "It has no values, no text of the cell, of its output or its errors, and no variables"
            " of the environment. Read it before you attach it to a bug report, and add what you"
            " may show: the cell, and its error."
        ),
    ]


def _sections(record: RunRecord, findings: Iterable[Finding]) -> Iterator[str]:
    yield f"# The run {record.name}"
    yield msgspec.json.format(msgspec.json.encode(public_part(record)), indent=2).decode()
    for path in log_files(record.supervisor.pid):
        yield f"\n# {path.name}"
        yield path.read_text(encoding="utf-8", errors="replace")
    yield "\n# This machine now"
    for finding in findings:
        yield f"{finding.verdict:5} {finding.what}: {finding.fact}"


def without_home(text: str, home: str) -> str:
    """Return a text in which paths below the home directory begin with ``~``.

    In a container, the home directory may be ``/`` or unknown; then nothing is replaced.
    """
    if home in ("/", "~"):
        return text
    return re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w-]|\.\w)", "~", text)


def public_part(record: RunRecord) -> dict[str, Any]:
    """Return the facts of a record, without any user data."""
    facts: dict[str, Any] = msgspec.to_builtins(record)
    cell = facts.pop("cell")
    spec = cell["spec"]
    facts["header"] = {
        name: value for name, value in spec.items() if name not in _WITH_NAMES and value
    }
    facts["lines of the cell"] = len(record.cell.text.splitlines())
    for name in ("project", "notebook", "questions", "notices", "message", "waiting"):
        facts.pop(name)  # they contain the user's names, paths or texts
    facts["losses"] = len(record.losses)
    facts["use"] = [
        {k: v for k, v in use.items() if not isinstance(v, str)} for use in facts["use"]
    ]
    if record.trouble is not None:
        facts["trouble"] = type(record.trouble).__name__
    if record.first is not None:
        facts["first"] = {
            "rank": record.first.rank,
            "outcome": record.first.outcome,
            "etype": record.first.etype,
            "frames": _frames(record.first.traceback),
        }
    return facts


def _frames(traceback: Iterable[str]) -> list[str]:
    """Return the files and line numbers in a traceback that are in installed packages."""
    found = [_FRAME.match(line) for line in traceback]
    places = [f"{match[1]}:{match[2]}" for match in found if match is not None]
    return [place for place in places if "site-packages" in place or "/taas/" in place]

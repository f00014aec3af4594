"""The lines of the table in docs/rehearsal.md as programs, named ``line_0``, ``line_1``, …"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parent.parent / "docs" / "rehearsal.md"


@dataclass(frozen=True)
class Line:
    """A call, what the table says of it, and the tutorial it is from."""

    code: str
    outcome: str
    seen_in: str


def lines() -> list[Line]:
    """The table's lines, in order."""
    found = re.findall(
        r"^\| `(.+?)` \| ([^|`]+) \| (?:`([^`]*)`)? ?\|$", DOCUMENT.read_text(), re.MULTILINE
    )
    return [Line(*columns) for columns in found]


_namespace: dict[str, Any] = {}


def _execute(line: Line) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from taas.errors import CannotRehearse, RehearsalWarning

    _namespace.setdefault("path", str(Path(tempfile.mkdtemp()) / "model.pt"))
    _namespace.update(torch=torch, nn=nn, dist=dist, x=torch.ones(4, 2), model=nn.Linear(2, 2))
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(line.code, _namespace)
        except Exception as raised:
            error = raised
    told = [warning for warning in caught if issubclass(warning.category, RehearsalWarning)]
    assert bool(told) == line.outcome.endswith("warns"), told
    if line.outcome == "refused":
        assert isinstance(error, CannotRehearse), error
    elif line.outcome.startswith("raises "):
        name, text = re.match(r"raises (\w+): (.*)", line.outcome).groups()
        assert name in {cls.__name__ for cls in type(error).__mro__}, error
        assert text in str(error) or text == "tensors are honest", error
    elif error is not None:
        raise error


def __getattr__(name: str) -> Callable[[], None]:
    if not name.startswith("line_"):
        raise AttributeError(name)
    return lambda: _execute(lines()[int(name.removeprefix("line_"))])

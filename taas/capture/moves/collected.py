"""Copy each rank's values to ``taas.collected``, as ``--collect`` requests.

The copies are plain pickles. Classes and functions are pickled by reference, so that the values are
instances of the notebook's own classes. Tensors are copied to host memory, detached from their
graphs.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from taas.base.import_hooks import loaded
from taas.base.wording import fitting, ranks_in_words, text_of
from taas.capture.heap.payload import check_room
from taas.errors import CaptureError
from taas.protocol.framing import MessageReader, Unreadable
from taas.runs.events import COLLECTED

collected: dict[str, list[Any]] = {}
"""By variable, the values of all ranks in the last run with ``--collect``, in rank order; None for
a value that could not be collected.
"""


_Value = tuple[bytes, str]
"""A variable's value in one rank: its pickle, or, if there is none, the reason."""
_read_values = MessageReader(dict[str, _Value])


class _CopyPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = loaded("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        return value.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def pack(names: Sequence[str], namespace: Mapping[str, Any], folder: Path) -> None:
    """Write a rank's values into its folder."""
    values = {name: _pack(namespace[name]) for name in names if name in namespace}
    (folder / COLLECTED).write_bytes(msgspec.msgpack.encode(values))


def _pack(value: Any) -> _Value:
    file = io.BytesIO()
    try:
        _CopyPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # its class may raise anything; the notebook shows the reason
        return b"", _reason(error)
    return file.getvalue(), ""


def _reason(error: Exception) -> str:
    """Return an error as text that is the same in each rank."""
    return re.sub(" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {fitting(text_of(error), 200)}")


def collect(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Put the values of all ranks into :data:`collected`; return lines about missing values."""
    values, lines = values_of(names, folders)
    collected.update(values)
    return lines


def values_of(
    names: Sequence[str], folders: Sequence[Path]
) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the values of all ranks, read from their folders, and lines about missing ones."""
    lost: dict[tuple[str, str], list[int]] = {}
    values: dict[str, list[Any]] = {name: [None] * len(folders) for name in names}
    for rank, folder in enumerate(folders):
        packed = _read(folder / COLLECTED)
        for name in names:
            missing = (
                "there is none at its end" if packed is not None else "it ended before it gave it"
            )
            pickled, why = (packed or {}).get(name, (b"", missing))
            try:
                values[name][rank] = None if why else pickle.loads(pickled)
            except Exception as error:  # its class may raise anything
                why = _reason(error)
            if why:
                lost.setdefault((name, why), []).append(rank)
    told = ((name, ranks_in_words(ranks), why) for (name, why), ranks in lost.items())
    return values, [f"{name!r} of {ranks} was not collected: {why}" for name, ranks, why in told]


def _read(path: Path) -> dict[str, _Value] | None:
    """Read what a rank wrote; return None if the file is missing or incomplete."""
    with suppress(OSError, Unreadable, CaptureError):
        check_room({path.parent.name: path.stat().st_size})
        values: dict[str, _Value] = _read_values(path.read_bytes())
        return values
    return None

"""Open files do not travel; of a closed one, which every ``with open(…) as f`` leaves behind, there is its name."""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

from taas.capture.reading import Reading

FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
"""What ``open`` returns."""


def read_file(file: Any) -> Reading | None:
    """Read a file; those of standard output and error output go by their names.

    Raises:
        pickle.PicklingError: it is open.
    """
    if file.closed:
        settings = (file.encoding, file.errors) if isinstance(file, io.TextIOWrapper) else (None, None)
        buffering = 0 if isinstance(file, io.FileIO) else -1
        mode = getattr(file, "mode", "r" if isinstance(file, io.TextIOWrapper) else "rb")
        return Reading(_closed_file, (getattr(file, "name", None), mode, buffering, *settings))
    if file not in (sys.stdout, sys.stderr):
        raise pickle.PicklingError(f"{getattr(file, 'name', file)!r} is an open file")
    return None


def _closed_file(name: Any, mode: str, buffering: int, encoding: str | None, errors: str | None) -> Any:
    """Return a closed file, without looking for anything that its name may mean here."""
    file: Any = open(os.devnull, mode.replace("x", "w"), buffering, encoding, errors)  # noqa: PTH123, SIM115
    with file:
        buffer = getattr(file, "buffer", file)
        getattr(buffer, "raw", buffer).name = name
        if encoding is not None:
            file.mode = mode
    return file

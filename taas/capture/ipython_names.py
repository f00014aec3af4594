"""Names that belong to IPython or Python rather than to the user: they neither travel nor come back."""

from __future__ import annotations

import re

__all__ = ["NOT_CAPTURED", "is_of_ipython"]

NOT_CAPTURED = frozenset(
    [
        "In",
        "Out",
        "_",
        "__",
        "___",
        "_i",
        "_ii",
        "_iii",
        "_ih",
        "_oh",
        "_dh",
        "exit",
        "quit",
        "get_ipython",
        "open",
        "display",
    ]
)
"""Names that IPython puts into every namespace, the rank's too."""

_HISTORY = re.compile(r"_i?\d+")


def is_of_ipython(name: str) -> bool:
    """Tell whether a name belongs to IPython or Python rather than to the user."""
    if name in NOT_CAPTURED or (name.startswith("__") and name.endswith("__")):
        return True
    return _HISTORY.fullmatch(name) is not None

"""The folder of taas's own code, by which its frames differ from those of users and libraries."""

from __future__ import annotations

from pathlib import Path

FOLDER = f"{Path(__file__).parents[1]}/"
"""The folder of the package as in ``co_filename`` of its code objects, with a trailing slash."""

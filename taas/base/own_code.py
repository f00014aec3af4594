"""Where the code of taas lies: what tells its frames from those of the user and of libraries."""

from __future__ import annotations

from pathlib import Path

FOLDER = f"{Path(__file__).parents[1]}/"
"""The folder of the package as ``co_filename`` of its code objects has it, with a slash at the end.
"""

"""Programs in an interpreter of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def printed(program: str, folder: Path | None = None) -> list[str]:
    """Run a program in a fresh interpreter, which must not complain; returns the lines it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, cwd=folder
    )
    assert ran.stderr == ""
    return ran.stdout.splitlines()

"""Try each wall on this machine, in a process of its own that writes a project of its own.

``python -m taas.storage.probe MECHANISM FOLDER`` raises one wall round ``FOLDER/project`` and tries to write
past it, in Python and from a shell.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from taas import rank_storage
from taas.errors import StorageDenied
from taas.storage.walls import LIMITS, NO_WALL

_SECONDS = 30


def verdicts(mechanisms: Sequence[str] = rank_storage.MECHANISMS) -> list[str]:
    """One line for the wall that ranks get here, its limits, and one line for each stronger one refused."""
    refused: list[str] = []
    for mechanism in mechanisms:
        done = _try(mechanism)
        said = (done.stdout.strip() or done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        if done.returncode == 0:
            limits = [f"  limit: {limit}" for limit in LIMITS.get(mechanism, ())]
            return [f"write rule: {mechanism} ({said})", *limits, *refused]
        refused.append(f"  {mechanism}: {said}")
    return [f"write rule: nothing of {', '.join(mechanisms)} works here", *refused]


def _try(mechanism: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "project").mkdir()
        Path(folder, "scratch").mkdir()
        command = [sys.executable, "-m", "taas.storage.probe", mechanism, folder]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)


def main(mechanism: str, folder: str) -> int:
    """Raise the wall and test it; what is printed last is the verdict."""
    project, scratch = Path(folder, "project"), Path(folder, "scratch")
    policy = rank_storage.Policy(project=str(project), rank=1, scratch=str(scratch), mode="deny")
    try:
        guard = rank_storage.guard(policy, (mechanism,))
    except StorageDenied as error:
        print((error.strerror or "").partition(f"{mechanism}: ")[2])  # noqa: T201 the verdict
        return 1
    held = mechanism == NO_WALL or not _shell_writes(project)
    try:
        (project / "python").touch()
        held = False
    except StorageDenied:
        pass
    print(guard.how if held else "it was raised, but a write passed it")  # noqa: T201 the verdict
    return 0 if held else 1


def _shell_writes(project: Path) -> bool:
    done = subprocess.run(["/bin/sh", "-c", ": >shell"], cwd=project, capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

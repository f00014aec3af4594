"""No attack of the table changes the project, whatever the wall, the user and the mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import storage_attacks
from privileges import no_other_users, no_user_namespaces

from taas import rank_storage
from taas.project.wall import walls

NOBODY = 65534
USERS = (os.getuid(),) if os.getuid() or no_other_users() else (0, NOBODY)


def run_table(mechanism: str, mode: str, uid: int) -> dict[str, tuple[str, list[str]]]:
    command = [sys.executable, storage_attacks.__file__, mechanism, mode, str(uid)]
    environ = {**os.environ, "PYTHONPATH": str(Path(rank_storage.__file__).parents[1])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=380, env=environ, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def refused(mechanism: str) -> str:
    """Why this machine does not give a wall; empty when it does."""
    lines = walls.verdicts((mechanism,))
    return "" if lines[0].startswith(f"write rule: {mechanism}") else " ".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("uid", USERS, ids=lambda uid: "root" if uid == 0 else "ordinary")
@pytest.mark.parametrize("mode", ["discard", "deny"])
@pytest.mark.parametrize("mechanism", rank_storage.MECHANISMS)
def test_every_attack_is_diverted_or_denied(mechanism: str, mode: str, uid: int):
    """Bytes and metadata of the project stay.

    What passes a weaker wall is exactly what its limits say.
    """
    why = refused(mechanism)
    if mechanism == "mount" and uid:
        why = why or no_user_namespaces()  # refused() asked as root, who mounts without
    if why:
        pytest.skip(why)
    results = run_table(mechanism, mode, uid)
    wrong = {}
    for one in storage_attacks.ATTACKS:
        if one.name not in results:
            assert one.kernel and mechanism == "diversion"
            continue
        outcome, changed = results[one.name]
        if mechanism in one.passes:
            if not changed:
                wrong[one.name] = "is listed as a limit of this wall, but was held"
        elif changed or outcome != (one.discard if mode == "discard" else "denied"):
            wrong[one.name] = (outcome, changed)
    assert wrong == {}

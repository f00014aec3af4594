"""Folders of taas on this machine, which nobody else can enter."""

from __future__ import annotations

from pathlib import Path

from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir


def runtime_folder(name: str) -> Path:
    """Return a folder for what belongs to processes that run: connections, run records, locks."""
    return _private(Path(jupyter_runtime_dir()) / "taas", name)


def data_folder(name: str) -> Path:
    """Return a folder for what outlives them: writes kept for ``%taas recover``."""
    return _private(Path(jupyter_data_dir()) / "taas", name)


def crash_report(pid: int) -> Path:
    """Return where the supervisor with this process id writes why it broke, should it break."""
    return runtime_folder("crashes") / f"supervisor-{pid}.log"


def _private(root: Path, name: str) -> Path:
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    (root / name).mkdir(mode=0o700, exist_ok=True)
    return root / name

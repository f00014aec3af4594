"""Checkpoints with a file of each rank: rank 0 puts the others' files beside its own before it says that one is complete.

``torch.distributed.checkpoint`` has every rank write its part; when all have, rank 0 writes the list of them (``finish``).
Ranks of this VM have written theirs to their scratch, from where rank 0, which writes the project, takes them: the
checkpoint is whole, and loads in the same cell. What ranks of other VMs wrote is out of its reach.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from taas.import_hooks import after_import
from taas.storage.boundary import resolve_beneath
from taas.storage.table import TREE
from taas.wording import shown


def install(project: str, run_scratch: Callable[[], Path]) -> None:
    """Let this process, rank 0, complete checkpoints that ranks write together.

    Args:
        project: the notebook's directory, as this VM has it.
        run_scratch: returns where the ranks of this VM have their scratch folders in the run that goes on.
    """
    root = os.path.realpath(project)

    def change(module: ModuleType) -> None:
        writer: Any = module.FileSystemWriter
        native = writer.finish

        @functools.wraps(native)
        def finish(self: Any, metadata: Any, results: Any) -> None:
            files = isinstance(self.fs, module.FileSystem)  # others write to places of another kind
            place = resolve_beneath(os.path.realpath(self.path), root) if files else None
            if place is not None:
                names = {str(result.storage_data.relative_path) for of_rank in results for result in of_rank}
                _gather(Path(root, place), place, names, run_scratch())
            native(self, metadata, results)

        writer.finish = finish

    after_import("torch.distributed.checkpoint.filesystem", change)


def _gather(folder: Path, place: str, names: Iterable[str], run_scratch: Path) -> None:
    for name in names:
        for source in run_scratch.glob(f"rank*/{TREE}"):
            if (written := source / place / name).is_file():
                put(written, folder / name, shutil.move)
    lacking = [name for name in sorted(names) if not (folder / name).exists()]
    if lacking:
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        print(  # noqa: T201  the cell shows it
            f"taas: the checkpoint {shown(place)} lacks {shown(lacking[0])}{more}: only rank 0 writes the project, and it "
            f"reaches no rank of another VM. Give the directory to all ranks: --shared {shown(place)}"
        )


def put(source: Path, target: Path, by: Callable[[Path, Path], object]) -> None:
    """Copy or move a file into a project, complete or not at all; folders that lack are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name[:200]}.partial")
    try:
        by(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)

"""One rank downloads, and the other ranks find the files.

When several ranks download MNIST into one folder, half of the runs break: the second rank finds
the half-written files of the first one. Here torchvision's datasets with ``download=True``, the
download functions of ``torchvision.datasets.utils``, and those of ``torch.hub`` take turns.

For files inside the project rank 0 goes first, because only rank 0 writes there; for others, the
first rank of each VM does. The other ranks wait through the run's store until its turn has ended.
Then they continue together or, if the first rank failed or wrote to a path that they cannot see,
one after another. Meanwhile a lock keeps out other runs of the same user. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock
from jupyter_core.paths import jupyter_runtime_dir

from taas.adopt.rendezvous import Membership
from taas.base.import_hooks import after_import

TO_FOLDER = ("download_url", "download_and_extract_archive", "download_file_from_google_drive")
BEGIN_SECONDS = 30.0  # for the first rank to begin; if it never does, the others have to continue
END_SECONDS = 3600.0


def install(membership: Membership) -> None:
    """Let downloads in this process take turns; adopt torchvision when it is imported."""
    turns = Turns(membership)
    hub = sys.modules["torch.hub"]
    _adopt_functions(hub, ("download_url_to_file",), turns)
    _adopt_repositories(hub, turns)
    after_import(
        "torchvision.datasets.utils", lambda module: _adopt_functions(module, TO_FOLDER, turns)
    )
    after_import(
        "torchvision.datasets.vision", lambda module: _adopt_datasets(module.VisionDataset, turns)
    )


def _adopt_functions(module: ModuleType, names: Iterable[str], turns: Turns) -> None:
    """Let functions take turns; their first two arguments are source and target."""

    def adopted(native: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(native)

        def download(*args: Any, **kwargs: Any) -> Any:
            source, target, *_ = signature.bind(*args, **kwargs).arguments.values()
            place = Path(target).expanduser()
            with turns.take(place, f"the download of {source}") as done:
                # Do not even extract them again: the first rank may already be reading the files.
                return None if done and place.exists() else native(*args, **kwargs)

        return turns.membership.in_rank(native, download)

    vars(module).update({name: adopted(getattr(module, name)) for name in names})


def _adopt_repositories(hub: Any, turns: Turns) -> None:
    native = hub._get_cache_or_reload

    def get_cache_or_reload(github: str, force_reload: bool, *args: Any, **kwargs: Any) -> Any:
        with turns.take(Path(hub.get_dir()), f"the download of {github}") as done:
            return native(github, force_reload and not done, *args, **kwargs)

    hub._get_cache_or_reload = turns.membership.in_rank(native, get_cache_or_reload)


def _adopt_datasets(base: Any, turns: Turns) -> None:
    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _adopt_dataset(cls, turns)

    base.__init_subclass__ = classmethod(init_subclass)
    found = base.__subclasses__()
    for cls in found:  # the loop appends to it
        _adopt_dataset(cls, turns)
        found += cls.__subclasses__()


def _adopt_dataset(cls: Any, turns: Turns) -> None:
    """Make the whole ``__init__`` one turn, because it looks for the files before the download."""
    native = cls.__dict__.get("__init__")
    if native is None or "download" not in (signature := inspect.signature(native)).parameters:
        return

    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["download"]:
            native(*args, **kwargs)
            return
        plain = {
            name: value
            for name, value in given.items()
            if isinstance(value, (bool, int, str, Path))
        }
        with turns.take(
            Path(given.get("root") or ".").expanduser(), f"{cls.__qualname__}({plain})"
        ):
            native(*args, **kwargs)

    cls.__init__ = turns.membership.in_rank(native, init)


class Turns:
    """The turns of this rank."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._own = threading.local()

    @contextlib.contextmanager
    def take(self, place: Path, what: str) -> Iterator[bool]:
        """Wait for this rank's turn at ``place``.

        Yield whether ``what`` is done and visible there.

        ``what`` describes the download in words that are the same on every rank.

        Raises:
            TimeoutError: another process has had its turn for an hour.
        """
        if hasattr(self._own, "done"):  # within another turn of this thread
            yield self._own.done
            return
        me, place = self.membership, Path(os.path.realpath(place))
        leader = 0 if _is_inside(place, me.project) else me.node * me.local_world_size
        name = me.next_prefix(f"turn/{leader}/{zlib.crc32(f'{place}: {what}'.encode()):08x}")
        leads, done, ended = me.rank == leader, False, "failed"
        if leads:
            me.store(name).set("begun", "")
        else:
            near = leader // me.local_world_size == me.node
            done = self._await(name, leader, what) and (near or place.exists())
        try:
            with contextlib.nullcontext() if done else _lock(place, me.project):
                self._own.done = done
                yield done
            ended = "done"
        finally:
            vars(self._own).clear()
            if leads:
                me.store(name).set("ended", ended)

    def _await(self, name: str, leader: int, what: str) -> bool:
        """Wait until the first rank has ended, or will not come; return whether it succeeded."""
        me = self.membership
        if not me.wait_for(name, "begun", BEGIN_SECONDS):
            return False
        if not me.wait_for(name, "ended", END_SECONDS):
            raise TimeoutError(
                f"Rank {leader} has not finished {what} within an hour. Stop the run and look"
                " at it."
            )
        return me.store(name).get("ended") == b"done"


def _is_inside(place: Path, project: Path) -> bool:
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(project))


def _lock(place: Path, project: Path) -> contextlib.AbstractContextManager[Any]:
    """Return the lock of a path.

    It is outside the project, because not every rank may write there.
    """
    folder = Path(jupyter_runtime_dir(), "taas-locks")
    if _is_inside(folder, project):
        folder = Path(tempfile.gettempdir(), f"taas-locks-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # another user may have created it in /tmp before
        raise PermissionError(
            f"{folder}, where your runs wait for each other's downloads, was made by another user,"
            " who could hold them up. Have it removed, or set TMPDIR or JUPYTER_RUNTIME_DIR to a"
            " folder of your own."
        )
    return FileLock(folder / f"{zlib.crc32(str(place).encode()):08x}.lock", END_SECONDS, 0o600)

"""One rank downloads, the others find it there.

Half of the runs break in which several ranks download one MNIST into one folder: the second finds the files
of the first half written. Here the datasets of torchvision that are made with ``download=True``,
``torchvision.datasets.utils``' download functions, and those of ``torch.hub`` take turns.

Inside the project the first is rank 0, the only rank that writes there; outside it is the first rank of each VM. The others
wait until it has ended, through the run's store; then they go on together, or, if it failed or wrote where they cannot see,
one after another. A lock file keeps other runs of this user out meanwhile. It is held with ``flock``, which ends with the
process that holds it, however that ends. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from taas.adopt.membership import Membership
from taas.import_hooks import after_import

TO_FOLDER = ("download_url", "download_and_extract_archive", "download_file_from_google_drive")


def install(membership: Membership) -> None:
    """Take turns at downloads in this process; torchvision's when it is imported."""
    turns = Turns(membership)
    _adopt_hub(turns)
    after_import("torchvision.datasets.utils", lambda module: _adopt_functions(module, turns))
    after_import("torchvision.datasets.vision", lambda module: _adopt_datasets(module.VisionDataset, turns))


def _adopt_hub(turns: Turns) -> None:
    hub: Any = sys.modules["torch.hub"]
    native_file, native_repository = hub.download_url_to_file, hub._get_cache_or_reload

    def download_url_to_file(url: str, dst: str, *args: Any, **kwargs: Any) -> None:
        with turns.take(Path(dst), f"the download of {url}") as done:
            if not (done and Path(dst).exists()):
                native_file(url, dst, *args, **kwargs)

    def get_cache_or_reload(github: str, force_reload: bool, *args: Any, **kwargs: Any) -> Any:
        with turns.take(Path(hub.get_dir()), f"the download of {github}") as done:
            return native_repository(github, force_reload and not done, *args, **kwargs)

    hub.download_url_to_file = turns.membership.in_rank(native_file, download_url_to_file)
    hub._get_cache_or_reload = turns.membership.in_rank(native_repository, get_cache_or_reload)


def _adopt_functions(module: ModuleType, turns: Turns) -> None:
    for name in TO_FOLDER:
        native = getattr(module, name)
        ours = turns.membership.in_rank(native, _to_folder(native, turns))
        # Modules that were imported before have names of their own for it.
        users = [m for n, m in list(sys.modules.items()) if n.startswith("torchvision.datasets")]
        for user in (module, *users):
            if getattr(user, name, None) is native:
                setattr(user, name, ours)


def _to_folder(native: Callable[..., Any], turns: Turns) -> Callable[..., Any]:
    signature = inspect.signature(native)

    def download(*args: Any, **kwargs: Any) -> Any:
        source, folder, *_ = signature.bind(*args, **kwargs).arguments.values()
        place = Path(folder).expanduser()
        with turns.take(place, f"the download of {source}") as done:
            # Not even a second extraction: the first rank may be reading the files already.
            return None if done and place.exists() else native(*args, **kwargs)

    return download


def _adopt_datasets(base: Any, turns: Turns) -> None:
    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _adopt_dataset(cls, turns)

    base.__init_subclass__ = classmethod(init_subclass)
    for cls in _subclasses(base):
        _adopt_dataset(cls, turns)


def _subclasses(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _adopt_dataset(cls: Any, turns: Turns) -> None:
    """Let the whole of ``__init__`` be a turn: it looks for the files before it downloads them."""
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
        plain = {name: value for name, value in given.items() if isinstance(value, (bool, int, str, Path))}
        with turns.take(Path(given.get("root") or ".").expanduser(), f"{cls.__qualname__}({plain})"):
            native(*args, **kwargs)

    cls.__init__ = turns.membership.in_rank(native, init)


# ---------------------------------------------------------------- turns

BEGIN_SECONDS = 30.0  # for the first rank to come; one that never does must not hold up the others
END_SECONDS = 3600.0
LONGEST_PAUSE = 0.1


class Turns:
    """Takes this rank's turns."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._counts: Counter[str] = Counter()
        self._own = threading.local()

    @contextlib.contextmanager
    def take(self, place: Path, what: str) -> Iterator[bool]:
        """Wait for this rank's turn at ``place``, and have it inside; gives whether it is done already, where it is seen.

        Args:
            place: the file or folder that is about to be written.
            what: what is done there, in words that are the same on every rank.

        Raises:
            TimeoutError: somebody has held the place for an hour.
        """
        if hasattr(self._own, "done"):  # within another turn of this thread
            yield self._own.done
            return
        me, place = self.membership, Path(os.path.realpath(place))
        inside = place.is_relative_to(os.path.realpath(me.project))
        leader = 0 if inside else me.node * me.local_world_size
        name = f"turn/{leader}/{zlib.crc32(f'{place}: {what}'.encode()):08x}"
        self._counts[name] += 1
        name += f"/{self._counts[name]}"
        if me.rank == leader:
            with self._led(name), self._locked(place, fcntl.LOCK_EX):
                yield from self._have(done=False)
            return
        near = leader // me.local_world_size == me.node
        ready = self._await(name, leader, what) and (near or place.exists())
        with self._locked(place, fcntl.LOCK_SH if ready else fcntl.LOCK_EX):
            yield from self._have(done=ready)

    def _have(self, done: bool) -> Iterator[bool]:
        self._own.done = done
        try:
            yield done
        finally:
            del self._own.done

    @contextlib.contextmanager
    def _led(self, name: str) -> Iterator[None]:
        """Tell the others when the first rank begins and how it ended."""
        store, ended = self.membership.store(name), "failed"
        store.set("begun", "")
        try:
            yield
            ended = "done"
        finally:
            store.set("ended", ended)

    def _await(self, name: str, leader: int, what: str) -> bool:
        """Whether the first rank has done it, when it has ended or nothing more is to be expected of it."""
        me = self.membership
        if not me.wait_for(name, "begun", BEGIN_SECONDS):
            return False
        if not me.wait_for(name, "ended", END_SECONDS):
            raise TimeoutError(
                f"Rank {leader} has not finished {what} within an hour. Stop the run and look at it."
            )
        return me.store(name).get("ended") == b"done"

    @contextlib.contextmanager
    def _locked(self, place: Path, kind: int) -> Iterator[None]:
        file = _lock_file(place, self.membership.project)
        until, pause = time.monotonic() + END_SECONDS, 0.001
        try:
            while not _try_lock(file, kind):
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"Another process has been writing {place} for an hour. End it, or wait."
                    )
                time.sleep(pause)  # a blocking flock cannot be given a limit
                pause = min(2 * pause, LONGEST_PAUSE)
            yield
        finally:
            os.close(file)  # and with it the lock


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_file(place: Path, project: Path) -> int:
    """Open the lock file of a place, which lies outside of the project: not every rank may write there."""
    from jupyter_core.paths import jupyter_runtime_dir

    folders = (Path(jupyter_runtime_dir()), Path(tempfile.gettempdir()) / f"taas-{os.getuid()}")
    outside = [f for f in folders if not Path(os.path.realpath(f)).is_relative_to(os.path.realpath(project))]
    top = (outside or folders)[0]
    folder = top / "taas-locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    checked = (top, folder) if top == folders[1] else (folder,)
    if any(made.lstat().st_uid != os.getuid() for made in checked):  # anybody may make a name in /tmp first
        raise PermissionError(
            f"{folder}, where your runs wait for each other's downloads, was made by another user, who could hold them "
            "up. Have it removed, or set TMPDIR or JUPYTER_RUNTIME_DIR to a folder of your own."
        )
    return os.open(folder / f"{zlib.crc32(str(place).encode()):08x}.lock", os.O_RDWR | os.O_CREAT, 0o600)

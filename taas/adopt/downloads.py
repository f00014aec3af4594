"""One rank downloads, the others find it there.

Half of the runs break in which several ranks download one MNIST into one folder: the second finds the files
of the first half written. Here the datasets of torchvision that are made with ``download=True``,
``torchvision.datasets.utils``' download functions, and those of ``torch.hub`` take turns.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from taas.adopt.import_hooks import after_import
from taas.adopt.membership import Membership
from taas.adopt.turns import Turns

TO_FOLDER = ("download_url", "download_and_extract_archive", "download_file_from_google_drive")


def install(membership: Membership) -> None:
    """Take turns at downloads in this process; torchvision's when it is imported."""
    turns = Turns(membership)
    active = _when_member(membership)
    _adopt_hub(turns, active)
    after_import("torchvision.datasets.utils", lambda module: _adopt_functions(module, turns, active))
    after_import(
        "torchvision.datasets.vision", lambda module: _adopt_datasets(module.VisionDataset, turns, active)
    )


Adopt = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]


def _when_member(membership: Membership) -> Adopt:
    """Replace a function in the rank itself; its children keep the native one."""

    def adopt(native: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(native)
        def function(*args: Any, **kwargs: Any) -> Any:
            return (ours if membership.active else native)(*args, **kwargs)

        return function

    return adopt


def _adopt_hub(turns: Turns, active: Adopt) -> None:
    hub: Any = sys.modules["torch.hub"]
    native_file, native_repository = hub.download_url_to_file, hub._get_cache_or_reload

    def download_url_to_file(url: str, dst: str, *args: Any, **kwargs: Any) -> None:
        with turns.take(Path(dst), f"the download of {url}") as turn:
            if not (turn.ready and Path(dst).exists()):
                native_file(url, dst, *args, **kwargs)

    def get_cache_or_reload(github: str, force_reload: bool, *args: Any, **kwargs: Any) -> Any:
        with turns.take(Path(hub.get_dir()), f"the download of {github}") as turn:
            return native_repository(github, force_reload and not turn.ready, *args, **kwargs)

    hub.download_url_to_file = active(native_file, download_url_to_file)
    hub._get_cache_or_reload = active(native_repository, get_cache_or_reload)


def _adopt_functions(module: ModuleType, turns: Turns, active: Adopt) -> None:
    for name in TO_FOLDER:
        native = getattr(module, name)
        ours = active(native, _to_folder(native, turns))
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
        with turns.take(place, f"the download of {source}") as turn:
            # Not even a second extraction: the first rank may be reading the files already.
            return None if turn.ready and place.exists() else native(*args, **kwargs)

    return download


def _adopt_datasets(base: Any, turns: Turns, active: Adopt) -> None:
    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _adopt_dataset(cls, turns, active)

    base.__init_subclass__ = classmethod(init_subclass)
    for cls in _subclasses(base):
        _adopt_dataset(cls, turns, active)


def _subclasses(base: type) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _adopt_dataset(cls: Any, turns: Turns, active: Adopt) -> None:
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

    cls.__init__ = active(native, init)

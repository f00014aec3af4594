"""A mount namespace of this process's own: what is mounted in it nobody else sees, and it goes with the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from taas import _linux

__all__ = ["own_mounts"]


@contextlib.contextmanager
def own_mounts(give_up: Sequence[int]) -> Iterator[bool]:
    """Enter a new mount namespace; in the body this process may mount, afterwards it may not.

    The process has one thread. As root the right to mount is there; an ordinary user gets it by a user namespace,
    with all other capabilities, and loses them all at the end, also when the body fails.

    Args:
        give_up: the capabilities that root loses at the end.

    Yields:
        Whether this is root.

    Raises:
        OSError: refused here; the text says by what. The process may then be in a namespace of its own.
    """
    signal = _linux.parent_death_signal()
    as_root = _linux.has_capability(_linux.CAP_SYS_ADMIN)
    uid, gid = os.geteuid(), os.getegid()
    if as_root:
        _linux.unshare(_linux.CLONE_NEWNS)
    else:
        _linux.unshare(_linux.CLONE_NEWUSER | _linux.CLONE_NEWNS)
        _linux.map_own_ids(uid, gid)
    try:
        _linux.mount(None, "/", _linux.MS_REC | _linux.MS_PRIVATE)
        yield as_root
    finally:
        if give_up or not as_root:
            _linux.drop_capabilities(give_up if as_root else None)
        if _linux.parent_death_signal() != signal:
            _linux.set_parent_death_signal(signal)  # the kernel clears it when credentials change

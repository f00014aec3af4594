#!/usr/bin/env python3
"""Run a command as in a container: ``.ci/container.py make test`` is root without CAP_SYS_ADMIN.

``.ci/container.py strict make test`` has no user namespaces either, as with Docker's seccomp
profile (on x86-64; numbers and layouts are those of seccomp(2) and bpf(4)). So has an ordinary
user.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CLONE, _UNSHARE, _CLONE3 = 56, 272, 435
_CLONE_NEWUSER = 0x10000000
_LOAD, _IF_EQUAL, _IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16  # in struct seccomp_data
_ALLOW, _FAIL, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000, 1, 38
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2

# (operation, skip if so, skip if not, operand)
PROGRAM = (
    (_LOAD, 0, 0, _NUMBER),
    # its flags lie in memory, which a filter cannot read: libc then calls clone
    (_IF_EQUAL, 6, 0, _CLONE3),
    (_IF_EQUAL, 1, 0, _UNSHARE),
    (_IF_EQUAL, 0, 2, _CLONE),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_IF_SET, 1, 0, _CLONE_NEWUSER),
    (_RETURN, 0, 0, _ALLOW),
    (_RETURN, 0, 0, _FAIL | _EPERM),
    (_RETURN, 0, 0, _FAIL | _ENOSYS),
)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def main(*command: str) -> None:
    """Give up what a container does not have, and become the command."""
    if command[0] == "strict":
        _refuse_user_namespaces()
        command = command[1:]
    if not os.geteuid():
        command = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *command)
    os.execvp(command[0], command)  # noqa: S606 what was asked for


def _refuse_user_namespaces() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("HBBI", *line) for line in PROGRAM)
    filter_ = ctypes.byref(_Filter(len(PROGRAM), code))
    if os.geteuid():  # sudo and the like are lost to an ordinary user
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, filter_, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(*sys.argv[1:])

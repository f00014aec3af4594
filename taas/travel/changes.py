"""What crosses between a watcher and an applier: changes to a directory tree, in pieces of bounded size.

Paths are relative to the tree's root, in bytes, as the file system has them. The pieces of one file follow
each other: the one with offset 0 begins it, the one that reaches its size completes it, and nothing of it is
seen before. Another change of the same path in between gives it up. Pieces of other files may come in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

__all__ = [
    "PIECE",
    "Change",
    "DirectoryMade",
    "FileAbandoned",
    "FilePiece",
    "LinkMade",
    "Removed",
    "decode_all",
    "encode",
]

PIECE = 1 << 20
"""Bytes of a file in one message."""


class _Change(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    path: bytes


class DirectoryMade(_Change, frozen=True):
    """A directory is there.

    Attributes:
        mode: its permission bits.
    """

    mode: int


class FilePiece(_Change, frozen=True):
    """Some bytes of a regular file that is to stand at the path.

    Attributes:
        mode: its permission bits.
        size: bytes of the whole file.
        offset: where these are; each piece begins where the one before it ended.
        data: at most :data:`PIECE` bytes; empty only where the file is.
    """

    mode: int
    size: int
    offset: int
    data: bytes


class FileAbandoned(_Change, frozen=True):
    """The file changed while it was read: what was sent of it does not count. It will be sent anew."""


class LinkMade(_Change, frozen=True):
    """A symbolic link is there."""

    target: bytes


class Removed(_Change, frozen=True):
    """Nothing is there any more; of a directory, all that was beneath it was removed before."""


Change = DirectoryMade | FilePiece | FileAbandoned | LinkMade | Removed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Change] = msgspec.msgpack.Decoder(Change)
_LENGTH = 4


def encode(change: Change) -> bytes:
    """Return a change as bytes that say their own length."""
    data = _encoder.encode(change)
    return len(data).to_bytes(_LENGTH, "big") + data


def decode_all(data: memoryview | Iterable[bytes]) -> Iterator[Change]:
    """Read what :func:`encode` made, one after the other.

    Raises:
        msgspec.DecodeError: it is something else, or ends within a change.
    """
    whole = data if isinstance(data, memoryview) else memoryview(b"".join(data))
    offset = 0
    while offset < len(whole):
        size = int.from_bytes(whole[offset : offset + _LENGTH], "big")
        offset += _LENGTH
        yield _decoder.decode(whole[offset : offset + size])
        offset += size

"""Whether what stands in the notebook is what rank 0 had: the structure of all that was sent, as short numbers.

Rank 0 walks through what it sends, and the notebook through what it has then. Objects that both know count by their
number, others by class, insides, and where they were met before; memory by its ends. The two walks give the same
numbers, or the first that differs says where. What is under way as a whole, a class or a module, counts by its name.

Equal fingerprints prove little: that the first 10,000 parts of a value, and 20,000 parts of all values, have the same structure
and the same plain values, by 32 bits each. Of an array 4,096 elements count that are spread over it, of a tensor its first 4,096
if it is dense in host memory, of a set only plain values; of classes, modules and builtin functions names only, of a figure its
class. What a class's own protocol leaves out is seen by none of it.
"""

from __future__ import annotations

import array
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from taas.capture.arrays import is_array
from taas.capture.looking import Glance, Looker, labelled
from taas.capture.reader import Reader, what_comes_back
from taas.capture.reading import ATOMS

_MOST = 10_000
"""Parts of a value that are looked at; one with more is checked as far as that."""
_IN_ALL = 20_000
_VALUES = ATOMS | {tuple, slice, range}
"""Whose objects cannot be told from equal ones: libraries that rebuild theirs make new ones of them."""
_PLAIN = ATOMS | {list, tuple, dict, set, frozenset}


class Fingerprints:
    """Walks through values in one process.

    Args:
        namespace: the globals of the notebook's functions.
        project: the folder whose modules hold data of the notebook.
        number_of: the numbers of objects that both sides know, by their ids.
        contents: whether the contents of memory count; not where it may lie on a device.
    """

    def __init__(
        self, namespace: dict[str, Any], project: str, number_of: dict[int, int], *, contents: bool
    ) -> None:
        reader = Reader(namespace, project=project)
        self._looker = Looker(reader, number_of, sample="some" if contents else "none")
        self._numbers = number_of
        self._asked = False
        self._left = _IN_ALL

    def of(self, value: Any, *, opened: bool) -> bytes | None:
        """Return the fingerprint of a value that was sent (``opened``: what is in it was).

        None where it is another one each time it is asked, or enough was looked at.
        """

        def tokens() -> array.array[int]:
            return array.array("I", (token for token, _ in self._walk(value, "", opened=opened)))

        if self._left <= 0:
            return None
        found = tokens()
        self._left -= len(found)
        return None if self._asked and found != tokens() else found.tobytes()

    def difference(self, value: Any, name: str, theirs: bytes, *, opened: bool) -> str | None:
        """Return how to write the first part of a value that is not what it was where ``theirs`` is from; or None."""
        expected = array.array("I", theirs)
        count = 0
        for count, (token, path) in enumerate(self._walk(value, name, opened=opened, expected=expected), 1):
            if count > len(expected) or token != expected[count - 1]:
                return "".join(path)
        return None if count == len(expected) else name

    def _walk(
        self, value: Any, name: str, *, opened: bool, expected: Sequence[int] = ()
    ) -> Iterator[tuple[int, list[str]]]:
        """Yield tokens, and the way there; an object of a library, which rank 0 does not know as ours, is opened."""
        met: dict[int, int] = {}
        kept: list[Any] = []
        path: list[str] = []
        waiting: list[Iterator[tuple[str, Any]]] = [iter([(name, value)])]
        count = 0
        while waiting and count < _MOST:
            label, part = next(waiting[-1], (None, None))
            if label is None:
                waiting.pop()
                path = path[:-1]
                continue
            if type(part) not in _PLAIN:
                part = what_comes_back(part)
            here, cls = [*path, label], type(part)
            number = None if cls in ATOMS or (opened and part is value) else self._numbers.get(id(part))
            count += 1
            known = _token("known", number)
            if number is not None and (
                not expected or expected[count - 1 : count] == array.array("I", [known])
            ):
                yield known, here
            elif id(part) in met and cls not in ATOMS:
                yield _token("again", met[id(part)]), here
            else:
                if cls not in _VALUES:
                    met[id(part)] = len(met)
                    kept.append(part)
                look = self._look(part)
                self._asked |= look.asked
                yield _token(*look.what), here
                waiting.append(iter(look.parts))
                path = here

    def _look(self, part: Any) -> Glance:
        """Look at a part; libraries make views of arrays that arrive, and drawing changes what is in a figure.

        Bytes that a protocol makes are what it has pickled by itself: of the same objects, not always the same.
        """
        if is_array(part) and part.dtype.hasobject:
            return Glance((type(part).__qualname__, part.shape), labelled("[]", part.ravel().tolist()))
        look = self._looker.look(part)
        if look.asked:
            parts = ((label, bytes if type(inner) is bytes else inner) for label, inner in look.parts)
            look = look._replace(parts=parts)
        return look._replace(parts=()) if type(part).__module__.startswith("matplotlib.") else look


def _token(*parts: Any) -> int:
    return zlib.crc32("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))

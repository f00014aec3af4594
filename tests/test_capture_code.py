"""cloudpickle's private parts are as the one module that uses them expects."""

from __future__ import annotations

import marshal

import cloudpickle

from taas.capture.describe import code_by_value
from taas.capture.describe.code_constants import with_slices, without_slices


def test_this_cloudpickle_was_tested() -> None:
    """A new series may shape its private parts differently.

    Run the suite, then raise TESTED_CLOUDPICKLE.
    """
    assert ".".join(cloudpickle.__version__.split(".")[:2]) == code_by_value.TESTED_CLOUDPICKLE


def test_slices_among_the_constants_of_code() -> None:
    """Python 3.14 has them there; marshal's version 2 cannot write them."""

    def plain(rows: list[int]) -> object:
        return rows, ("a", 1)

    inner = plain.__code__.replace(co_consts=(None, slice(3, None), ("a", (slice(1, 2, 3), ...))))
    code = plain.__code__.replace(co_consts=(slice(None, 1), inner, (inner, slice(4)), "\0slice"))
    read = with_slices(marshal.loads(marshal.dumps(without_slices(code), 2)))
    assert read.co_consts[0] == slice(None, 1)
    assert [part.co_consts for part in (read.co_consts[1], read.co_consts[2][0])] == [
        inner.co_consts,
        inner.co_consts,
    ]
    assert read.co_consts[2][1:] == (slice(4),)
    assert read.co_consts[3] == "\0slice"
    assert without_slices(plain.__code__) is plain.__code__

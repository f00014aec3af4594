"""cloudpickle's private parts are as the one module that uses them expects."""

from __future__ import annotations

import cloudpickle

from taas.capture.describe import code_by_value


def test_this_cloudpickle_was_tested() -> None:
    """A new series may shape its private parts differently.

    Run the suite, then raise TESTED_CLOUDPICKLE.
    """
    assert ".".join(cloudpickle.__version__.split(".")[:2]) == code_by_value.TESTED_CLOUDPICKLE

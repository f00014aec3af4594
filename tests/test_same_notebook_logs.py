"""Loggers, their handlers and formatters.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, play, row, together

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = [
    row(
        "log in a buffer",
        setup="""
            import io, logging
            buffer = io.StringIO()
            log = logging.getLogger("train")
            h = logging.StreamHandler(buffer)
            log.addHandler(h)
            log.setLevel("INFO")
            log.propagate = False
        """,
        cell="""
            log.info("one")
            log.addHandler(logging.StreamHandler(buffer))
            log.info("two")
        """,
        check="""
            (
                buffer.getvalue(),
                log.info("three"),
                buffer.getvalue(),
                log.handlers[0] is h,
                log.removeHandler(h),
                len(log.handlers),
            )
        """,
    ),
    row(
        "log in a file of the notebook",
        setup="""
            import logging
            h = logging.FileHandler("a.log", mode="w")
            log = logging.getLogger("file")
            log.addHandler(h)
            log.propagate = False
            log.error("one")
        """,
        cell="""
            log.error("two")
            h.setLevel("CRITICAL")
            log.error("no")
            log.critical("three")
        """,
        check="""
            (
                log.error("no"),
                log.critical("four"),
                log.handlers == [h],
                log.removeHandler(h),
                h.close(),
                open("a.log").read(),
            )
        """,
    ),
    row(
        "handler of the cell, removed later",
        setup="""
            import logging, sys
            log = logging.getLogger("out")
            log.propagate = False
            out = sys.stdout
        """,
        cell="""
            h = logging.StreamHandler(sys.stdout)
            log.addHandler(h)
            log.error("one")
            print("two", file=out)
            same = out is sys.stdout
        """,
        check="""
            (
                log.error("three"),
                log.handlers == [h],
                same,
                out is sys.stdout,
                log.removeHandler(h),
                log.handlers,
            )
        """,
    ),
    row(
        "handlers that are alike",
        setup="""
            import logging, sys
            log = logging.getLogger("twice")
            log.propagate = False
            log.addHandler(logging.StreamHandler(sys.stdout))
        """,
        cell="""
            log.addHandler(logging.StreamHandler(sys.stdout))
            log.error("one")
        """,
        check="""
            (
                log.error("two"),
                len(log.handlers),
                log.removeHandler(log.handlers[0]),
                log.error("three"),
                len(log.handlers),
            )
        """,
    ),
    row(
        "formatter of a class of its own",
        setup="""
            import logging, sys

            class Loud(logging.Formatter):
                def format(self, record):
                    return super().format(record).upper()

            log = logging.getLogger("loud")
            h = logging.StreamHandler(sys.stdout)
            h.setFormatter(Loud("%(message)s"))
            log.addHandler(h)
            log.propagate = False
        """,
        cell='log.error("one")',
        check='log.error("two"), log.handlers == [h]',
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""


@each_of(together(ROWS))
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)


DEAF = row(
    "handler with a lock",
    setup="""
        import logging, threading

        class Own(logging.Handler):
            def __init__(self):
                super().__init__()
                self.own = threading.Lock()
                self.seen = []

            def emit(self, record):
                self.seen.append(record.getMessage())

        h = Own()
        log = logging.getLogger("own")
        log.addHandler(h)
        log.propagate = False
    """,
    cell='log.error("one")',
    check='log.error("two"), h.seen, log.handlers == [h]',
)


def test_a_handler_that_cannot_travel_is_named(tmp_path: Path) -> None:
    """Whatever the cell logs: that does not reach the handler, which stays."""
    played = play(DEAF, tmp_path, plain=False)
    assert played.value == "(None, ['two'], True)"
    assert [line for line in played.said if "logging.getLogger('own').handlers[0].own is a" in line]

r"""The rule by which numbers in a line of text are taken for measurements: ``loss 0.43``.

A number is taken if it stands behind a word: ``loss 0.43``, ``loss=0.43``, ``loss: 0.43``,
``'loss': 0.43``, ``loss is 0.43``, ``loss tensor(0.43)``. It may have a sign, thousands separators,
an exponent with a sign (``1e-05``) and a percent sign, or be ``nan`` or ``inf``.

* A number is not taken if something is joined to it, since it is then a part of something else: a
  letter (``12GB``, ``0.4s``, ``2.9+cu128``, ``2.9-rc1``), another number (a version ``2.9.1``, an
  address ``10.0.0.1``, a date ``2026-11-28``, a time ``12:30``), ``/`` or ``of`` (``3/10``,
  ``3 of 10``), or ``|`` (``45%|###``, the bar of tqdm). Nor is one with a unit of time or of size
  behind it (``3.2 s``, ``12.3 MB``).
* The word is a word, not markup or a part of a path: a space, a comma, a semicolon, a bracket, a
  quote, ``|``, or the beginning of the line stands before it.
* Words that count, measure time or size, or only join words are not taken: ``epoch``, ``step``,
  ``rank``, ``seed``, ``time``, ``size``, ``in`` (all of them are in :data:`_NOT_MEASURED`). Of a
  word of several parts the last one decides: ``global_step`` counts, ``epoch_loss`` does not.
* Words that say of what the measurement is belong to the name: one of :data:`_QUALIFIERS` right
  before the word (``best acc 91.2``), and the words for training, validation and test before it in
  the line (``train loss 0.43, val loss 0.51``; ``val: loss 0.51 acc 0.88``).

:mod:`taas.runs.curves` adds what only many numbers tell: whole numbers that never fall count
something, and what comes once is no curve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

_LONGEST_NAME = 40
_QUALIFIERS = (
    "average|avg|best|ema|final|grad|gradient|learning|max|mean|median|min|running|smoothed|total"
    "|weight"
)
_PHASES = "train|training|valid|validation|val|test|testing|eval|evaluation|dev"
_COUNTING = """
    attempt batch count cuda device ep episode epoch example fold generation gpu i id idx index it
    iter iteration item level line minibatch n no node num number page part pid port progress rank
    round sample seed shard step token total trial try update v version worker year
"""
_TIME_AND_SIZE = """
    byte clock date day duration elapsed eta gb hour kb mb min minute month ms runtime s sec second
    shape size time timestamp took
"""
_JOINING = """
    a about after an and are around at by for from has in is of on or over since than the to until
    was with
"""
_NOT_MEASURED = frozenset(f"{_COUNTING} {_TIME_AND_SIZE} {_JOINING}".split())
_UNITS = (
    "B|bytes?|[kMGTP]i?B|[kMGT]?bits?|ns|us|µs|ms|s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?"
    "|days?"
)
_FINDER = re.compile(
    rf"""
    (?<![^\s,;|(\[{{"'])                           # nothing is joined to the word
    (?:
        (?:(?P<qualifier>{_QUALIFIERS})[ \t]+)?
        (?P<word>[^\W\d](?>[\w@]*)(?>(?:[-./][\w@]+)*))
        ["']?
        (?:[ \t]{{0,20}}[:=][ \t]{{0,20}}|[ \t]{{1,20}})
        (?:(?:is|was|of)[ \t]+)?
        (?:tensor\(|(?:np\.)?float\d+\(|["'])?
        (?P<number>(?>
            [-+]?(?:
                (?:[0-9]{{1,3}}(?:[,_][0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?(?:e[-+][0-9]+)?
                |\.[0-9]+(?:e[-+][0-9]+)?
                |nan|inf(?:inity)?
            )
        ))
        (?P<percent>(?>[ \t]?%)?+)
        (?!
            [\w%|/]|[-+:]\w|[.,][0-9]              # it is a part of something else
            |[ \t]+/|[ \t]+of\b
            |[ \t]+(?-i:{_UNITS})(?!\w)            # it has a unit; "b" may be the next word
        )
        |(?P<phase>{_PHASES})(?![\w/])
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)

_MAY_HAVE_ONE = re.compile(r"[0-9]|[nN][aA][nN]|[iI][nN][fF]")


class Number(NamedTuple):
    """A number that a line has behind a word.

    Attributes:
        name: the word, with those that say of what it is.
        whole: it is written without a fraction and without an exponent.
        percent: a percent sign stands behind it.
    """

    name: str
    value: float
    whole: bool
    percent: bool


def numbers_in(line: str) -> Iterator[Number]:
    """Find the measurements in a line without colours; of equal names only the first one."""
    if _MAY_HAVE_ONE.search(line) is None:  # most lines of text, in a tenth of the time
        return
    phase, seen = "", set[str]()
    for found in _FINDER.finditer(line):
        qualifier, word, text, percent, of_phase = found.groups()
        if of_phase is not None:
            phase = of_phase
            continue
        if not _is_measured(word):
            continue
        name = " ".join(filter(None, (phase, qualifier, word)))[:_LONGEST_NAME]
        if name in seen:
            continue
        seen.add(name)
        value = float(text.replace(",", "").replace("_", ""))
        yield Number(name, value, text.lstrip("+-").rstrip(".").isdigit(), bool(percent))


@lru_cache(maxsize=1024)
def _is_measured(word: str) -> bool:
    last = re.split(r"[-_./]", word.lower().rstrip("_"))[-1]
    return last not in _NOT_MEASURED and last.removesuffix("s") not in _NOT_MEASURED

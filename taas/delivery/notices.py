"""What a delivery tells its user: a line each, with the loader's name and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from taas.delivery.config import DeliveryConfig
from taas.delivery.planbook import LoaderBook
from taas.delivery.reports import Note


def of_registration(book: LoaderBook, config: DeliveryConfig) -> Iterator[Note]:
    """What is known before the first element is made."""
    if book.facts.note:
        yield Note(book.facts.note)
    ranks, units = config.ranks, config.units.get(book.facts.name, config.units.get("*"))
    if units is not None and units % ranks:
        yield Note(
            f"'{book.facts.name}': {units} units over {ranks} ranks are {units // ranks} steps a rank; "
            f"{units % ranks} units are left over"
        )


def prebuffer_is_too_large(book: LoaderBook, lacks: int) -> Note:
    """The ranks begin with fewer elements than ``--prebuffer`` asks for."""
    return Note(
        f"'{book.facts.name}': the ranks began with {book.prepared} elements made, not with "
        f"{book.prepared + lacks}: the buffer holds no more ([delivery] buffer in taas.toml)"
    )


def stream_is_read_again(book: LoaderBook, reason: str) -> Note:
    """A stream cannot be taken up where a dead worker left it."""
    return Note(
        f"'{book.facts.name}': {reason}; where a data worker dies, another one reads its stream again from "
        "the start, and skips what was delivered"
    )


def ranks_are_held_up(book: LoaderBook) -> Note:
    """A rank that takes nothing of a common stream lets the others wait."""
    return Note(
        f"'{book.facts.name}' is one stream for all ranks: some ranks wait for one that does not take its elements, "
        "as many as a rank's buffer holds. Let every rank iterate it, or make the buffer larger "
        "([delivery] buffer in taas.toml)"
    )


def generator_stays(name: str, why: str) -> Note:
    """A loader's generator is not where the run has left it."""
    return Note(
        f"'{name}': {why}; so its generator stands in the notebook where it stood before the cell. Seed it "
        "anew if the order of the next cell's elements matters"
    )

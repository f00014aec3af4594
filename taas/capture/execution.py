"""In which order code runs: what is surely bound before each of its instructions, and which of them run whatever happens.

The compiler has made jumps of every statement that chooses, and a table of what catches exceptions. So two passes over a
code object say for all of them what a reading of the syntax tree would have to say for each.

Taken for granted: the body of a ``for`` runs once, and nothing raises but ``raise``.
"""

from __future__ import annotations

import dis
import functools
import heapq
import operator
import types
from typing import NamedTuple


class Step(NamedTuple):
    """An instruction; the names that are bound before it on every way, those that may be; and whether it runs in any case."""

    instruction: dis.Instruction
    bound: frozenset[str]
    touched: frozenset[str]
    sure: bool


def steps_of(code: types.CodeType) -> list[Step]:
    """Return the instructions of a module's or a class's code that can be reached."""
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: number for number, instruction in enumerate(instructions)}
    following = [_following(number, instruction, places) for number, instruction in enumerate(instructions)]
    handlers: _Ways = [[] for _ in instructions]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        for number in range(places[entry.start], places.get(entry.end, len(instructions))):
            handlers[number].append(places[entry.target])
    names = _names_before(instructions, following, handlers)
    loops = {number for number, instruction in enumerate(instructions) if instruction.opname == "FOR_ITER"}
    sure = _surely_run([_in_one_round(number, following, loops) for number in range(len(instructions))])
    return [Step(instructions[n], *held, n in sure) for n, held in enumerate(names) if held is not None]


def codes_in(code: types.CodeType) -> list[types.CodeType]:
    """Return the functions, classes and comprehensions right inside a code."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def words_in(code: types.CodeType) -> set[str]:
    """Return the names and attributes that occur in a code."""
    return {*code.co_names}.union(*map(words_in, codes_in(code)))


@functools.lru_cache(maxsize=1024)
def bound_by(code: types.CodeType, *stores: str) -> frozenset[str]:
    """Return the globals that a code, or a function in it, may bind; of a module's code, with ``"STORE_NAME"``."""
    own = (i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", *stores))
    return frozenset(own).union(*map(bound_by, codes_in(code)))


_Ways = list[list[int]]


def _following(number: int, instruction: dis.Instruction, places: dict[int, int]) -> list[int]:
    """Return which instructions may come after one, unless something raises."""
    name = instruction.opname
    if name.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")):
        return []
    if instruction.opcode not in dis.hasjrel and instruction.opcode not in dis.hasjabs:
        return [number + 1]
    always = name.startswith("JUMP_") and "_IF_" not in name
    return [places[instruction.argval]] if always else [number + 1, places[instruction.argval]]


# ---------------------------------------------------------------- forwards: names

_Held = tuple[frozenset[str], frozenset[str]]


def _names_before(
    instructions: list[dis.Instruction], following: _Ways, handlers: _Ways
) -> list[_Held | None]:
    """Return which names are surely, and which may be, bound before each instruction; None where no way leads."""
    before: list[_Held | None] = [None] * len(instructions)
    before[0] = frozenset(), frozenset()
    waiting = [0]
    while waiting:
        number = heapq.heappop(waiting)
        held = before[number]
        assert held is not None
        after = _run(instructions[number], held)
        ways = [*((place, after) for place in following[number]), *((p, held) for p in handlers[number])]
        for place, new in ways:
            known = before[place]
            merged = new if known is None else (known[0] & new[0], known[1] | new[1])
            if merged != known:
                before[place] = merged
                heapq.heappush(waiting, place)
    return before


def _run(instruction: dis.Instruction, held: _Held) -> _Held:
    bound, touched = held
    kind, _, where = instruction.opname.partition("_")
    if isinstance(instruction.argval, types.CodeType):  # a function that may run from now on
        return bound, touched | bound_by(instruction.argval)
    if where not in ("NAME", "GLOBAL") or kind not in ("STORE", "DELETE"):
        return held
    name = {instruction.argval}
    return (bound | name, touched | name) if kind == "STORE" else (bound - name, touched)


# ---------------------------------------------------------------- backwards: what runs in any case


def _in_one_round(number: int, following: _Ways, loops: set[int]) -> list[int]:
    """Return what follows an instruction, if the body of a ``for`` runs once."""
    if number in loops:
        return following[number][:1]
    return [following[n][1] if n in loops and n < number else n for n in following[number]]


def _surely_run(following: _Ways) -> set[int]:
    """Return which instructions all ways have in common; loops that nothing leaves have all that is in them."""
    reached, waiting = {0}, [0]
    while waiting:
        new = set(following[waiting.pop()]) - reached
        reached |= new
        waiting += new
    run = [-1] * len(following)  # sets of instructions, as bits
    before: list[int] = []
    while run != before:
        before = [*run]
        for number in sorted(reached, reverse=True):
            ways = [run[place] for place in following[number]] or [0]
            run[number] = functools.reduce(operator.and_, ways) | 1 << number
    return {number for number in reached if run[0] >> number & 1}

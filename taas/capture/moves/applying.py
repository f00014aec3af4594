"""Apply rank 0's answer to a notebook: change objects in place and rebind variables."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taas.base.import_hooks import is_edited, note_files
from taas.base.wording import first_line
from taas.capture.cells import users_names
from taas.capture.describe.flat import How, Lost
from taas.capture.describe.holders import apart, loaded_as
from taas.capture.describe.libraries import join_devices
from taas.capture.describe.memory import MemoryTable, Stretch
from taas.capture.describe.process_bound import (
    named_shares,
    remember_shares,
    remember_unwrapped,
    settle,
)
from taas.capture.describe.reader import Reader
from taas.capture.describe.reading import MissingModule, keeps_all_attributes
from taas.capture.describe.tensors import ONLY_A_SHARD
from taas.capture.heap.building import Builder, Loss, change
from taas.capture.heap.heap import CONSTANT, Heap, no_collection
from taas.capture.heap.payload import Payload
from taas.capture.settings import process_state
from taas.capture.settings.import_draws import drawing_nothing, note_imported

NOTHING: Any = object()
"""Sentinel for a value that does not exist or could not be sent."""
_FEW = 20
AS_BEFORE = ", so all of it is as it was before the cell"


@dataclass
class Applied:
    """The effects of an answer."""

    rebound: list[str] = field(default_factory=list)  # variables that are new or have a new object
    deleted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # what could not be restored, one line each
    value: Any = NOTHING  # of the last expression
    cells: dict[str, int] = field(default_factory=dict)  # ``In[n]`` by file, of new functions
    there: list[str] = field(default_factory=list)  # variables that rank 0 has
    own: list[str] = field(default_factory=list)  # those of them whose value there is different
    # variables whose value has a parallel wrapper, or shards, in rank 0
    wrapped: list[str] = field(default_factory=list)
    ranks: int = 1
    # new loaders and samplers that have one rank's share of data
    shares: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # places that received values
    numbers: set[int] = field(default_factory=set, repr=False)  # of objects that are new or changed
    patched: set[int] = field(default_factory=set, repr=False)  # regions that were written to
    # memory that both sides have now, by region
    memory: dict[int, Stretch] = field(default_factory=dict, repr=False)
    next_region: int = 0


def apply_answer(
    fd: int,
    namespace: dict[str, Any],
    heap: Heap,
    known: dict[int, Stretch],
    loaded: Mapping[str, Any] | None = None,
) -> Applied:
    """Apply an answer: build new objects and change existing ones in place; update ``heap``.

    ``loaded`` has the specs that the project's modules had when the variables were sent. If it is
    None, only variables are restored. New variables are bound one by one as they are built, because
    methods that rebuild other objects may use them.
    """
    with no_collection():
        answer = _Incoming(fd, namespace, heap, known)
        answer.set_apart(loaded)
        note_imported(answer.imported)
        with drawing_nothing():  # the answer contains what rank 0 drew
            answer.build()
        return answer.apply()


class _Incoming:
    def __init__(
        self, fd: int, namespace: dict[str, Any], heap: Heap, known: dict[int, Stretch]
    ) -> None:
        self._fd, self._namespace, self._heap, self._known = fd, namespace, heap, known
        self._payload = Payload(fd)
        self._contents = contents = self._payload.contents
        self._memory = self._payload.copy_memory(known)
        self._made = dict(enumerate(heap.objects))
        self._builder = Builder(
            contents["states"], self._made, self._memory, namespace, tolerant=True
        )
        self._applied = Applied(cells=contents["cells"])
        self._lost = [Lost(*told) for told in contents["lost"]]

    @property
    def imported(self) -> list[str]:
        """The modules that rank 0 has imported in this cell."""
        return self._contents["imported"]  # type: ignore[no-any-return]

    def set_apart(self, loaded: Mapping[str, Any] | None) -> None:
        """Skip the modules that were edited or reloaded here while the cell ran, and report them.

        If ``loaded`` is None, only variables are restored, and everything else is skipped.
        """
        contents = self._contents
        if loaded is None:
            contents |= {"reloaded": [], "process state": None}
            return
        here, reloaded = loaded_as(contents["project"]), contents["reloaded"]
        values = (self._made[n] for n in contents["changed"])
        changed = [value.__name__ for value in values if isinstance(value, types.ModuleType)]
        others = [n for n in changed if n in here and loaded.get(n, here[n]) is not here[n]]
        others += [n for n in here if f"the module {n}" in contents["places"] and is_edited(n)]
        for name in others:
            if name not in reloaded:
                apart.add(f"the module {name}")
                why = "the module is another one here, edited or reloaded while the cell ran"
                self._lose(f"data of {name}", why)

    def build(self) -> None:
        """Build all new objects; leave out and report those that cannot be built completely."""
        contents, builder = self._contents, self._builder
        self._payload.take_sources()
        for name in contents["reloaded"]:
            try:
                importlib.reload(sys.modules[name])
            except BaseException as error:  # code of a module may raise anything
                self._lose(f"the reload of {name}", f"{type(error).__name__}: {error}")
        if contents["reloaded"]:
            note_files()
        for name, n in contents["roots"].items():
            value = builder.build(n)
            if n in builder.lost:
                self._lose(name or "the cell's last value", self._reason(n, n), name)
            elif not name:
                self._applied.value = value
            elif isinstance(value, MissingModule):
                self._lose(name, value.reason, name)
            else:
                self._namespace[name] = value
                self._applied.rebound.append(name)
        for name, n in contents["places"].items():
            builder.build(n)
            if n in builder.lost:
                self._lose(name, self._reason(n, n))
            else:
                self._applied.places.append(name)
        for state, _ in contents["changed"].values():
            for child in state[2]:
                if child not in self._made:
                    builder.build(child)

    def _lose(self, what: str, why: str = "", name: str = "") -> None:
        self._lost.append(Lost(what, why, name))

    def _reason(self, n: int, whole: int) -> str:
        loss: Loss = self._builder.lost[n]
        what = "it" if loss.number == whole else loss.what
        return f"{what} cannot be rebuilt here ({loss.reason})"

    def apply(self) -> Applied:
        """Apply everything that was built, and compare the result with what rank 0 had."""
        applied, header, contents = self._applied, self._payload.header, self._contents
        held_back = self._held_back()
        memories = self._heap.memories_among(self._heap.only_among(held_back, self._heap.states))
        as_before = MemoryTable(self._known, ()).regions_of(memories.values())
        applied.patched = {patch.region for patch in header.patches}
        for patch in header.patches:
            why = (
                None
                if patch.region in as_before
                else self._known[patch.region].patch(patch, self._fd)
            )
            if why is not None and Lost(why) not in self._lost:
                self._lose(why)
        changed = self._change_in_place(held_back)
        self._settle(changed)
        for name in contents["deleted"]:
            self._namespace.pop(name, None)
        applied.deleted += contents["deleted"]
        if contents["process state"] is not None:
            try:
                process_state.put(contents["process state"])
            except Exception as error:  # an earlier cell may have replaced anything that is set
                self._lose(*process_state.not_brought(error))
        known = [*self._heap.objects]
        self._learn(changed)
        if any(stretch.device != "cpu" for stretch in self._known.values()):
            self._join_devices(known)
        applied.lost = _in_few_lines(self._lost, contents["sharded"])
        applied.ranks = contents["ranks"]
        if applied.ranks > 1:
            applied.shares = named_shares(
                applied.rebound, self._namespace, self._heap, applied.ranks
            )
        applied.there = contents["there"]
        applied.wrapped = [*contents["wrapped"], *contents["sharded"]]
        unbound = {name for name in contents["roots"] if name} - {*applied.rebound}
        applied.own = [*contents["own"], *unbound]
        applied.numbers = {*contents["states"], *changed}
        applied.memory, applied.next_region = self._memory.stretches, self._payload.next_region
        return applied

    def _settle(self, changed: list[int]) -> None:
        """Settle new objects here; record which were rank 0's shares, and which had a wrapper."""
        made, contents, lost = self._made, self._contents, self._builder.lost
        new = [made[n] for n in (*contents["states"], *changed) if n in made and n not in lost]
        try:
            settle(new)
        except Exception as error:
            self._lose("what a library keeps of its process", f"{type(error).__name__}: {error}")
        remember_shares(new, contents["ranks"])
        there = [
            (o, m, name)
            for o, m, name in contents["unwrapped"]
            if {o or m, m} <= made.keys() - lost.keys()
        ]
        found = ((None if o is None else made[o], made[m], name) for o, m, name in there)
        named = {
            name: self._namespace[name] for name in contents["wrapped"] if name in self._namespace
        }
        remember_unwrapped(found, named)

    def _held_back(self) -> set[int]:
        """Return the objects that keep their state because a part cannot be built; report them."""
        lost = self._builder.lost
        changed = self._contents["changed"].items()
        parts = {n: [c for c in state[2] if c in lost] for n, (state, _) in changed}
        refused = {n: among[0] for n, among in parts.items() if among}
        number = self._heap.number
        roots = [number[id(value)] for value in self._namespace.values() if id(value) in number]
        held_back = self._heap.held_back({*refused}, roots)
        as_before = "" if held_back == refused.keys() else AS_BEFORE
        for n, part in refused.items():
            self._lose(f"new contents of {self._path_to(n)}", self._reason(part, n) + as_before)
        return held_back

    def _change_in_place(self, held_back: set[int]) -> list[int]:
        done = []
        for n, (state, how) in self._contents["changed"].items():
            if n in held_back:
                continue
            value = self._made[n]
            try:
                before = self._heap.states[n] or state
                children = [self._made[c] for c in state[2]]
                change(value, before, state, children, How(how))
            except BaseException as error:
                # a user's __setstate__ may raise anything, including SystemExit
                what = f"a {type(value).__qualname__} of the notebook refused its new contents"
                self._lose(what, f"{type(error).__name__}: {error}")
            else:
                done.append(n)
        return done

    def _path_to(self, n: int) -> str:
        number, names = self._heap.number, users_names(self._namespace)
        roots = {name: number[id(value)] for name, value in names.items() if id(value) in number}
        found = self._heap.shortest_path((n,), roots)
        return found[0] if found else f"a {type(self._made[n]).__qualname__}"

    def _join_devices(self, known: list[Any]) -> None:
        try:
            join_devices([*known, *(self._namespace[name] for name in self._applied.rebound)])
        except RuntimeError as error:  # a full GPU
            self._lose(
                f"new state beside parameters on the GPU, which is elsewhere ({first_line(error)})"
            )

    def _learn(self, changed: list[int]) -> None:
        """Number the new objects, read them, and report differences from rank 0's.

        Memory is compared by its location, not by its contents. State that an object's protocol
        does not reveal cannot be compared.
        """
        heap, contents = self._heap, self._contents
        lost = self._builder.lost
        whole = {n: value for n, value in self._made.items() if n not in lost}
        heap.learn(whole, contents["states"], contents["next"])
        for n in changed:
            heap.states[n] = contents["changed"][n][0]
        new = [n for n in contents["states"] if n in whole and self._is_comparable(n)]
        again = [n for n in changed if contents["changed"][n][0][0] != "reading"]
        heap.describe_after((*new, *again), Reader(self._namespace, project=contents["project"]))
        others = [n for n in (*new, *again) if n not in heap.failed and not heap.is_same(n)]
        for n in others[:_FEW]:
            self._lose(
                self._path_to(n),
                "it is not what rank 0 had, for the way its class is pickled does not bring all of"
                " it (give what you need of it a name of its own)",
            )
        if others[_FEW:]:
            self._lose(f"{len(others) - _FEW} objects more", "they are not what rank 0 had, either")
        heap.take_back(contents["next"])

    def _is_comparable(self, n: int) -> bool:
        kind, value = self._contents["states"][n][0], self._made[n]
        if kind in CONSTANT:
            return False
        if isinstance(value, type):  # Python orders a class's attributes as they are set
            return False
        if self._heap.number.get(id(value)) != n:  # rank 0 has a wrapper in its place
            return False
        own = type(value).__module__ == "__main__" and keeps_all_attributes(type(value))
        return kind != "reading" or own


def _in_few_lines(lost: Iterable[Lost], sharded: Collection[str]) -> list[str]:
    """Return the lines for what is lost; variables whose values are sharded there share one line.

    Whichever part of such a variable could not be sent, the shards are the reason.
    """
    shards: dict[str, None] = {}
    others: list[str] = []
    for one in lost:
        if one.name in sharded or ONLY_A_SHARD in one.why:
            shards[one.name or one.what] = None
        else:
            others.append(one.line)
    once = [f"{', '.join(shards)}: {ONLY_A_SHARD}"] if shards else []
    return once + others

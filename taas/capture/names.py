"""Which names of the notebook a cell needs.

The cell is spelled out (:mod:`~taas.capture.spelled_out`) and compiled, and its code is read in the order of execution
(:mod:`~taas.capture.execution`). A name that is surely bound before its first read is not needed: else the second run of a
cell would ship the first run's model. A name that is read whatever happens is *surely* needed; one that is read in a branch,
in a function or by a text, *maybe*. The body of a function counts where its name is read, as it can run from there on;
the same holds for functions and classes of earlier cells. What an object holds of them has its name with it: pickle looks
it up by that.
"""

from __future__ import annotations
import __future__

import ast
import collections
import functools
import gc
import inspect
import linecache
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from taas.capture.code_by_value import global_names, names_of
from taas.capture.execution import bound_by, codes_in, steps_of, words_in
from taas.capture.of_ipython import is_of_ipython, python_of
from taas.capture.spelled_out import ANY, SpelledOut

_BINDS_ANY = {"eval", "exec", "globals", "locals", "vars", "setattr", "get_ipython", "__main__"}
"""What a cell may bind names with that its code does not say."""
_LOOKS_UP = {
    "globals", "locals", "vars", "dir", "eval", "exec", "ex", "ev", "run_cell", "query", "timeit", "repeat", "Timer",
    "compile", "__main__", "modules", "user_ns", "get_ipython", "__import__", "import_module",
}  # fmt: skip
"""Functions without any of these names and attributes look nothing up."""
_FUTURE = __future__.annotations.compiler_flag
_NAMELESS = ("<", "__annotate__")
"""Begin what code is called that no name is bound to: lambdas, comprehensions, annotations."""
_Names = frozenset[str]
_NONE: _Names = frozenset()


@dataclass
class Needs:
    """Names of the namespace that a cell needs.

    Attributes:
        sure: read before they are bound, whatever happens.
        maybe: possibly read before they are bound.
        settled: used by functions, and surely bound by the cell before.
        others: names that are meant perhaps, since the cell makes texts that it looks names up by.
        built: where it does so; empty if it does not.
        words: names, attributes and magics that occur in the cell at all.
        binds: names that the cell may bind; None if it may be any, as the code does not say (a star, ``exec``).
    """

    sure: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    built: str = ""
    words: set[str] = field(default_factory=set)
    binds: set[str] | None = None


def needs_of(cell: str, namespace: Mapping[str, Any], flags: int = 0) -> Needs:
    """Find the names of ``namespace`` that ``cell`` needs.

    Args:
        cell: the cell as typed; magics and header comments allowed.
        namespace: the notebook's names; only functions and classes among them are looked into.
        flags: compiler flags that earlier cells set by ``from __future__ import …``.

    Raises:
        SyntaxError: the cell is wrong.
    """
    program = SpelledOut(ast.parse(python_of(cell)), namespace, lazy=bool(flags & _FUTURE))
    reader = _Reader(namespace)
    reader.read_code(program.code)
    needs = reader.needs
    needs.words = words_in(program.code) | program.magics
    if not (program.star or program.magics or needs.words & _BINDS_ANY):
        needs.binds = set(bound_by(program.code, "STORE_NAME"))
    needs.maybe -= needs.sure
    needs.settled -= needs.sure | needs.maybe
    needs.others -= needs.sure | needs.maybe
    return needs


class _Reader:
    """Reads code in the order of execution."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.needs = Needs()
        self._namespace = namespace
        self._of_earlier: dict[str, _Names] = {}
        self._later: dict[str, _Names] = {}
        """What functions and classes of the cell read when they run."""

    def read_code(
        self, code: types.CodeType, bound: _Names = _NONE, touched: _Names = _NONE, *, sure: bool = True
    ) -> None:
        """Read the code of the cell, or of a class in it, before which names are surely, and may be, bound."""
        in_class = code.co_name != "<module>"
        outer, self._later = self._later, self._later | _later_in(code)
        for instruction, own, own_touched, runs in steps_of(code):
            what, kind = instruction.argval, instruction.opname
            here, here_touched, certain = bound | own, touched | own_touched, sure and runs
            if isinstance(what, types.CodeType):  # it sees no names of a class around it
                nested = (bound, touched) if in_class else (here, here_touched)
                if not _is_function(what):
                    self.read_code(what, *nested, sure=certain)
                    continue
                for name in global_names(what):
                    if what.co_name.startswith(_NAMELESS) or name.startswith(ANY):
                        self._read(name, nested[0])
            elif kind in ("LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL"):
                self._read(what, here, sure=certain and what not in here_touched)
                if kind.startswith("DELETE") and not in_class:
                    self._read(what, here - {what})  # so that its absence can come back
        self._later = outer

    def _read(self, name: str, bound: _Names, *, sure: bool = False) -> None:
        """Note that a name is read, and with it what its functions read."""
        needs = self.needs
        waiting, seen = [(name, False)], set()
        while waiting:
            name, of_function = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name.startswith(ANY):
                needs.built = needs.built or name.removeprefix(ANY)
                needs.others |= {
                    n for n, v in self._namespace.items() if n not in bound and not is_of_ipython(n, v)
                }
            waiting += [(inner, True) for inner in self._later.get(name, ())]
            if name not in self._namespace or is_of_ipython(name, self._namespace[name]):
                continue
            if name in bound:
                needs.settled |= {name} if of_function else set()
                continue
            (needs.sure if sure and not of_function else needs.maybe).add(name)
            waiting += [(inner, True) for inner in self._used_by(name)]

    def _used_by(self, name: str) -> _Names:
        if name not in self._of_earlier:
            self._of_earlier[name] = _names_used_by(self._namespace[name], self._namespace)
        return self._of_earlier[name]


def _is_function(code: types.CodeType) -> bool:
    """Tell it from the body of a class."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _later_in(code: types.CodeType) -> dict[str, _Names]:
    """Return what functions and classes in a code read when they, or their methods, run."""
    found: dict[str, _Names] = {}
    for inner in codes_in(code):
        parts = [inner] if _is_function(inner) else codes_in(inner)
        found[inner.co_name] = found.get(inner.co_name, _NONE).union(*map(global_names, parts))
    return found


# ---------------------------------------------------------------- functions and classes of earlier cells

_PARTS = 1_000
"""How many objects are looked at for one name; the pickler finds what lies deeper."""
_ITEMS = 100
_NO_CODE = (types.ModuleType, types.CodeType, str, bytes, int, float, complex, type(None))


def _names_used_by(value: Any, namespace: Mapping[str, Any]) -> _Names:
    """Return the names that functions and classes of the notebook in a value use, and that pickle finds them by."""
    names: set[str] = set()
    seen = {id(namespace)}
    waiting = collections.deque([value])
    for _ in range(_PARTS):
        part = waiting.popleft() if waiting else None
        if isinstance(part, _NO_CODE) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, type) and part.__module__ == "__main__":
            names |= names_of(part) | _words_in_annotations(part)
        if isinstance(part, types.FunctionType):
            if part.__globals__ is namespace:
                names |= names_of(part) | _looked_up_by(part.__code__) | _words_in_annotations(part)
            waiting += (part.__closure__, part.__dict__, part.__defaults__, part.__kwdefaults__)
        else:
            waiting += _parts(part)
    return frozenset(names)


def _words_in_annotations(code: types.FunctionType | type) -> set[str]:
    """Return the words of annotations that are texts: ``typing.get_type_hints`` looks them up as names."""
    if getattr(code, "__annotate__", None) is not None:  # made where somebody asks (Python 3.14), by code
        return set()
    annotations = vars(code).get("__annotations__") if isinstance(code, type) else code.__annotations__
    texts = [text for text in (annotations or {}).values() if isinstance(text, str)]
    return {*re.findall(r"\w+", " ".join(texts))}


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, type) and value.__module__ != "__main__":
        return ()
    own = (type(value),) if type(value).__module__ == "__main__" else ()
    if isinstance(value, dict):
        return (*own, *islice(value.values(), _ITEMS))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (*own, *islice(value, _ITEMS))
    return gc.get_referents(value)


def _looked_up_by(code: types.CodeType) -> _Names:
    """Return the names that a function looks up by texts; its own text IPython keeps for tracebacks."""
    if words_in(code).isdisjoint(_LOOKS_UP):
        return _NONE
    text = "".join(linecache.cache.get(code.co_filename, (0, 0, [], ""))[2])  # type: ignore[misc]
    return _names_in_text(text, code.co_firstlineno) or frozenset({f"{ANY}{code.co_name}()"})


@functools.lru_cache(maxsize=1024)
def _names_in_text(text: str, line: int) -> _Names:
    """Return the names that the function in a line of a text uses; empty if there is none."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return _NONE
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min((d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno)
            if first == line:
                statement = ast.Expr(node) if isinstance(node, ast.Lambda) else node
                return global_names(SpelledOut(ast.Module([statement], []), {}, lazy=False).code)
    return _NONE

"""``taas export``: writes the cell of a run as a torchrun script that does not depend on taas.

The run's folder contains the variables that the cell was given. A separate process unpacks them, as
a rank does, and writes two files. The program contains the cell, preceded by the imports, plain
values and definitions that the cell needs, as they are written in the notebook's cells. All other
variables, and the states of the random generators, are pickled in the second file, as they were
when the cell began.
"""

from __future__ import annotations

import ast
import math
import operator
import os
import pickle
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from taas.base.import_hooks import loaded
from taas.base.wording import counted, shown, shown_path
from taas.capture.cells import python_of
from taas.capture.settings.setup_cells import SetupCell
from taas.errors import EngineError
from taas.protocol.records import RunRecord
from taas.runs.records import PAYLOAD, read_record

PROGRAM, DATA = "train.py", "train.pickle"
_PLAIN = (bool, int, str, type(None))
_LONGEST = 200
"""The longest plain value, in characters, that is written into the program."""
_COMPOUND = (ast.If, ast.Try, ast.ExceptHandler, ast.With, ast.For, ast.While)
_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORT = (ast.Import, ast.ImportFrom)

_HEADER = re.compile(r"\A(?:\s*(?:#|%%taas).*\n)+")
_MAGIC = re.compile(r"^([ \t]*)([%!].*)$", re.MULTILINE)

_TOP = '''\
"""{title}

    torchrun {shape} {program}

Written by `taas export {run}`; taas is not needed. Start it in the project's folder.{notes}
"""

'''
_BEGIN = """
sys.path.insert(0, os.getcwd())  # the project's modules
_rank, _world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
_SHARE = '''

class _Share:
    """A rank's share of some elements: each is one rank's, and all ranks have equally many."""

    def __init__(self, elements, units=None):
        self.elements, self.left = elements, units if units is None else units // _world_size

    def __iter__(self):
        for row in zip(*[iter(self.elements)] * _world_size):
            if self.left == 0:
                return
            if self.left is not None:
                self.left -= 1
            yield row[_rank]

    def __len__(self):
        return len(self.elements) // _world_size


def _shared_loader(units, sampler=None, batch_sampler=None, elements=None, **parts):
    if batch_sampler is not None:
        return DataLoader(batch_sampler=_Share(batch_sampler, units), **parts)
    if sampler is not None:
        return DataLoader(sampler=_Share(sampler, units), **parts)
    return _Share(DataLoader(**parts) if elements is None else elements, units)

'''
_LOAD = """
with open(Path(__file__).with_name("{data}"), "rb") as _file:  # what the notebook had
    _names, _generators = pickle.load(_file)
"""
_GENERATORS = {
    "random": ("getstate", "setstate"),
    "numpy": ("random.get_state", "random.set_state"),
    "torch": ("get_rng_state", "set_rng_state"),
}
"""For each library: the functions that return and set the state of its generator."""


def export(record: RunRecord, folder: str) -> list[str]:
    """Write a run's program into a folder; return lines for the user.

    ``folder`` may be empty; then the folder is named after the run.
    """
    to = Path(folder or record.name)
    if not (record.folder / PAYLOAD).exists():
        raise EngineError(
            f"the names that {record.name} was given are not there any more: they are kept up to 64"
            " MB (of background runs always), and while the run is in %taas history. Run the cell"
            " again, with less data in the notebook's names: let the cell load it."
        )
    if not Path(record.project).is_dir():
        raise EngineError(
            f"the folder of {record.name}, {shown_path(record.project)}, is not there any more, and"
            " its modules are needed: put it back, or make a link to where it is now"
        )
    if (to / PROGRAM).exists():
        raise EngineError(f"{to / PROGRAM} is there already: name another folder with --to")
    command = "import sys; from taas.notebook.export import main; main(*sys.argv[1:])"
    arguments = [sys.executable, "-P", "-c", command, str(record.folder), str(to.absolute())]
    done = subprocess.run(
        arguments, cwd=record.project, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EngineError(
            f"{record.name} cannot be exported: {(done.stderr.splitlines() or ['?'])[-1]}"
        )
    return done.stdout.splitlines()


def main(folder: str, to: str) -> None:
    """Unpack a run's variables into a new ``__main__``, and write the files.

    Print a line for each variable that is left out.
    """
    from taas.capture.heap.payload import Payload
    from taas.capture.moves.arriving import unpack
    from taas.delivery.loader import DeliveredLoader

    record, home = read_record(Path(folder)), types.ModuleType("__main__")
    assert record is not None
    sys.modules["__main__"] = home
    fd = os.open(Path(folder, PAYLOAD), os.O_RDONLY)
    unpack(fd, vars(home), Path(record.project), DeliveredLoader)
    payload, there = Payload(fd), vars(home)
    names = {name: there[name] for name in payload.header.names if name in there}
    typed = payload.contents["history"].get("typed", [])
    setup = [_HEADER.sub("", SetupCell._make(cell).text) for cell in payload.contents["setup"]]
    written = _Program(record, names, _bindings(typed), os.path.relpath(to, record.project), setup)
    written.notes += [
        f"{name}: not exported, {why}" for name, why in payload.contents["left behind"].items()
    ]
    text = written.text()
    try:
        compile(text, PROGRAM, "exec")
    except SyntaxError as error:  # for example, an await in the cell
        written.notes.append(f"line {error.lineno} of the program is not Python: {error.msg}")
    Path(to).mkdir(parents=True, exist_ok=True)
    Path(to, DATA).write_bytes(written.data())
    Path(to, PROGRAM).write_text(text)
    said = f"{Path(to, PROGRAM)} is written, with {counted(len(written.pickled), 'name')} in {DATA}"
    sys.stdout.write("\n".join([said, *written.notes]) + "\n")


# -------------------------------------------------------------- bindings of cells


class _Bound(NamedTuple):
    """The statement that last bound a variable, and its position in the notebook."""

    node: ast.stmt
    source: str
    place: tuple[int, int]


def _bindings(cells: Iterable[str]) -> dict[str, _Bound]:
    found: dict[str, _Bound] = {}
    for number, cell in enumerate(cells):
        try:
            text = python_of(cell)
            statements = [*_statements(ast.parse(text))]
        except SyntaxError:
            continue  # this cell never ran
        lines = text.splitlines(keepends=True)
        for node in statements:
            for name, own in _binds(node):
                if isinstance(own, _IMPORT):
                    before, source = found.get(name), ast.unparse(own)
                    if before and isinstance(before.node, ast.Import):  # import a.b, after import a
                        source = "\n".join(dict.fromkeys([*before.source.splitlines(), source]))
                else:
                    first = min(
                        (d.lineno for d in getattr(node, "decorator_list", ())), default=node.lineno
                    )
                    source = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
                found[name] = _Bound(own, source.rstrip(), (number, node.lineno))
    return found


def _statements(block: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that bind variables of a cell, but none inside functions and classes."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, _COMPOUND):
            yield from _statements(node)
        elif isinstance(node, ast.stmt):
            yield node


def _binds(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(node, _DEFINITION):
        yield node.name, node
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], ast.Import([alias])
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, ast.ImportFrom(node.module, [alias], node.level)
    else:
        parts = (part for part in ast.walk(node) if isinstance(part, ast.Name))
        yield from ((part.id, node) for part in parts if isinstance(part.ctx, ast.Store))


# ---------------------------------------------------------------- the program


def _generators() -> dict[str, Any]:
    """Return the states of the random generators, by library."""
    there = [library for library in _GENERATORS if loaded(library) is not None]
    return {
        library: operator.attrgetter(_GENERATORS[library][0])(sys.modules[library])()
        for library in there
    }


def _is_plain(value: Any) -> bool:
    known = type(value) in _PLAIN or (type(value) is float and math.isfinite(value))
    return known and len(repr(value)) <= _LONGEST


class _Program:
    """A cell with everything that it needs.

    Attributes:
        pickled: the variables whose values are in the data file.
        loaders: those of them that are registered loaders.
        notes: lines about what is left out.
    """

    def __init__(
        self,
        record: RunRecord,
        names: Mapping[str, Any],
        bound: Mapping[str, _Bound],
        folder: str,
        setup: Sequence[str] = (),
    ) -> None:
        self._record, self._names, self._bound, self._folder = record, names, bound, folder
        self._setup = setup
        self._generators = _generators()
        self._imports: list[str] = []
        self._plain: dict[str, str] = {}
        self._defined: dict[str, _Bound] = {}
        self.pickled: dict[str, Any] = {}
        self.loaders = set[str]()
        self.notes: list[str] = []
        self._body = _MAGIC.sub(self._without_magic, _HEADER.sub("", record.cell.text)).strip()
        if "display(" in self._body:
            self._plain["display"] = "print"
        self._waiting = [*names]
        for name in self._waiting:  # `_define` appends to it
            is_defined = name in bound and isinstance(bound[name].node, (*_DEFINITION, *_IMPORT))
            # any other name is a builtin, or local to the code that reads it
            if name in names or is_defined:
                self._place(name, bound.get(name), names.get(name))

    def _without_magic(self, found: re.Match[str]) -> str:
        self.notes.append(f"{shown(found[2])}: not exported, it is IPython's")
        return f"{found[1]}pass  # {found[2]}"

    def _place(self, name: str, bound: _Bound | None, value: Any) -> None:
        """Choose the part of the program in which a variable is defined."""
        here = bound.node if bound else None
        if (parts := getattr(value, "taas_parts", None)) is not None:
            self._place_loader(name, parts)
        elif bound and isinstance(here, _IMPORT):
            self._imports += bound.source.splitlines()
        elif isinstance(value, types.ModuleType):
            alias = ast.alias(value.__name__, name if name != value.__name__ else None)
            self._imports.append(ast.unparse(ast.Import([alias])))
        elif bound and isinstance(here, _DEFINITION):
            self._define(name, bound)
        elif _is_plain(value):
            self._plain[name] = repr(value)
        elif (why := self._keep(name, value)) and bound and callable(value):
            self._define(name, bound)  # a closure or a lambda is written as the line that made it
        elif why:
            self.notes.append(why)

    def _define(self, name: str, bound: _Bound) -> None:
        self._defined[name] = bound
        read = {part.id for part in ast.walk(bound.node) if isinstance(part, ast.Name)}
        self._waiting += read - {*self._waiting}

    def _keep(self, name: str, value: Any) -> str:
        """Add a value to the data file; return the reason if that fails, else an empty string."""
        try:
            pickle.dumps(value)
        except Exception as error:  # its own methods may raise anything
            return f"{name}: not exported, {shown(f'{type(error).__name__}: {error}', 120)}"
        self.pickled[name] = value
        return ""

    def _place_loader(self, name: str, parts: Any) -> None:
        """Take a registered loader apart: as in the run, batch i goes to rank ``i % N``."""
        names = (
            "dataset",
            "num_workers",
            "collate_fn",
            "worker_init_fn",
            "persistent_workers",
            "generator",
        )
        given: dict[str, Any] = {key: getattr(parts, key) for key in names}
        if parts.plain:
            given = {"elements": parts.dataset}
        elif parts.iterable:
            given |= {"batch_size": parts.batch_size, "drop_last": parts.drop_last}
        elif parts.auto_collation:
            given["batch_sampler"] = parts.index_sampler
        else:
            given |= {"sampler": parts.index_sampler, "batch_size": None}
        units = self._record.cell.spec.units
        given["units"] = units.get(name) if isinstance(units, dict) else units
        if why := self._keep(name, given):
            self.notes.append(why)
            return
        self.loaders.add(name)
        if parts.generator is None and not parts.plain:
            self.notes.append(
                f"{name}: it has no generator of its own, so the program draws another order"
            )

    def data(self) -> bytes:
        """The data file: the pickled variables, and the states of the random generators."""
        return pickle.dumps((self.pickled, self._generators))

    def text(self) -> str:
        """The program."""
        defined = sorted(self._defined.values(), key=lambda bound: bound.place)
        early = [bound for bound in defined if isinstance(bound.node, _DEFINITION)]
        # a line that makes a closure may need the data
        late = [bound for bound in defined if bound not in early]
        parts = [f"# a setup cell\n{text.strip()}\n" for text in self._setup]
        parts += [_SHARE] if self.loaders else []
        parts += ["\n".join(f"{name} = {value}" for name, value in self._plain.items())]
        parts += [f"\n\n{bound.source}\n" for bound in early]
        parts += [_LOAD.format(data=DATA), "\n".join(map(self._load_line, self.pickled))]
        parts += [f"\n\n{bound.source}\n" for bound in late]
        parts += [f'{of}.{_GENERATORS[of][1]}(_generators["{of}"])' for of in self._generators]
        below = "\n".join([*filter(None, parts), "", "# the cell", self._body, ""])
        return self._top() + re.sub(r"\n{4,}", "\n\n\n", self._begin() + below)

    def _top(self) -> str:
        record, spec = self._record, self._record.cell.spec
        notes = "".join(f"\n{note}" for note in ("", *self.notes)) if self.notes else ""
        notes = notes.replace("\\", "/").replace('"', "'")
        vms = f"--nnodes {spec.vms} " if spec.vms > 1 else ""
        return _TOP.format(
            title=f"Cell In[{record.cell.execution_count}] of {record.owner}, as a program.",
            shape=f"{vms}--nproc-per-node {spec.ranks_per_vm}",
            program=f"{self._folder}/{PROGRAM}",
            run=record.name,
            notes=notes,
        )

    def _begin(self) -> str:
        """Return the imports, and the lines that determine which rank this is."""
        needed = {f"import {name}" for name in ("os", "pickle", "sys", "torch", *self._generators)}
        needed |= {"from pathlib import Path", *self._imports}
        needed |= {"from torch.utils.data import DataLoader"} if self.loaders else set()
        ordered = sorted(
            needed, key=lambda line: ("__future__" not in line, line.startswith("from "), line)
        )
        return "\n".join([*ordered, _BEGIN])

    def _load_line(self, name: str) -> str:
        return (
            f'{name} = _shared_loader(**_names["{name}"])'
            if name in self.loaders
            else f'{name} = _names["{name}"]'
        )

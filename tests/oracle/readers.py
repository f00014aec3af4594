"""How the insides of each kind of object are read.

Facts that say what it is, edges to what it holds.
"""

from __future__ import annotations

import array
import collections
import enum
import functools
import hashlib
import io
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Protocol

from oracle.atoms import ADDRESS, ATOMS, atom, name_of, of_notebook, source

__all__ = ["READERS"]

_IDENTITY = 1 << 32  # an integer above it is an object's id, in matplotlib's registries
_SHOWN = 64  # items of an array that a difference shows
_NOT_OF_CLASSES = {
    "__dict__",
    "__weakref__",
    "__module__",
    "__doc__",
    "_abc_impl",
    "__static_attributes__",
    "__firstlineno__",
    "__slotnames__",
    "__abstractmethods__",
}
Edges = list[tuple[str, Any]]
Read = tuple[dict[str, Any], Edges]


class Describer(Protocol):
    """Who asks how an object is read."""

    def view(self, number: int, low: int, high: int) -> None:
        """Note that an object looks at the memory between two addresses."""

    def is_of_notebook(self, namespace: dict[str, Any]) -> bool:
        """Whether these are the notebook's names."""


def _class(describer: Describer, number: int, cls: type) -> Read:
    if not of_notebook(cls):
        return {"name": name_of(cls)}, _items(cls.__bases__)
    members = [
        (f".{name}", part)
        for name, part in sorted(vars(cls).items())
        if name not in _NOT_OF_CLASSES
    ]
    return {"name": cls.__qualname__, "doc": cls.__doc__}, [
        *_items(cls.__bases__, " base "),
        *members,
    ]


def _code(code: types.CodeType) -> list[Any]:
    constants = [
        _code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts
    ]
    return [
        code.co_name, code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars,
        code.co_firstlineno, code.co_flags,
    ]  # fmt: skip


def _constant(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _function(describer: Describer, number: int, function: types.FunctionType) -> Read:
    facts = {
        "name": function.__qualname__,
        "code": hashlib.sha1(repr(_code(function.__code__)).encode()).hexdigest(),
        "globals": (
            "the notebook's"
            if describer.is_of_notebook(function.__globals__)
            else function.__globals__.get("__name__")
        ),
        "doc": function.__doc__,
        "source": source(function),
    }
    edges = [
        (".__defaults__", function.__defaults__),
        (".__kwdefaults__", function.__kwdefaults__),
        (".__annotations__", function.__annotations__),
        *(
            (f" closure {n}", c)
            for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if n != "__classdict__"  # the dict of a class, which is described by itself
        ),
        *_attributes(function),
    ]
    return facts, edges


def _cell(describer: Describer, number: int, cell: types.CellType) -> Read:
    try:
        return {}, [("", cell.cell_contents)]
    except ValueError:
        return {"empty": True}, []


def _method(describer: Describer, number: int, method: Any) -> Read:
    return {"name": method.__qualname__}, [
        (".__self__", method.__self__),
        (".__func__", getattr(method, "__func__", None)),
    ]


def _tensor(describer: Describer, number: int, tensor: Any) -> Read:
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return {}, _attributes(tensor)
    if tensor.is_nested:
        return {"values": [part.tolist() for part in tensor.unbind()]}, _attributes(tensor)
    facts = {"dtype": str(tensor.dtype), "device": str(tensor.device), "shape": tuple(tensor.shape)}
    if tensor.layout is not torch.strided:
        return facts | {"values": tensor.to_dense().tolist()}, []
    plain = tensor.detach()
    if tensor.is_quantized:
        return facts | {"values": repr(tensor)}, []
    if not tensor.is_meta:
        start = plain.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        describer.view(
            number, start, start + (extent * tensor.element_size() if tensor.numel() else 0)
        )
        facts["values"] = _values(plain)
    facts |= {
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "conjugate": tensor.is_conj(),
        "graph": tensor.grad_fn is not None,
        "requires_grad": tensor.requires_grad,
    }
    edges = [
        (".grad", tensor.grad if tensor.is_leaf or tensor.retains_grad else None),
        *_attributes(tensor),
    ]
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        edges.append((f".{hooks}", [*(getattr(tensor, hooks, None) or {}).values()]))
    return facts, edges


def _values(array: Any) -> Any:
    """Return few values as they are shown, many as a hash."""
    count = array.numel() if hasattr(array, "numel") else array.size
    if count <= _SHOWN:
        return repr(array.tolist())
    if hasattr(array, "numel"):
        import torch

        flat = array.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    return hashlib.sha1(array.tobytes()).hexdigest()


def _ndarray(describer: Describer, number: int, value: Any) -> Read:
    import numpy as np

    plain = (
        np.asarray(value)
        if not isinstance(value, np.ma.MaskedArray)
        else value.data.view(np.ndarray)
    )
    facts = {
        "dtype": str(value.dtype),
        "shape": value.shape,
        "strides": value.strides if value.size else (),  # of nothing
        "writeable": bool(value.flags.writeable),
    }
    edges = _attributes(value)
    if not value.dtype.hasobject:  # views of objects are copies in ranks (docs/names.md)
        describer.view(number, *np.lib.array_utils.byte_bounds(plain))
    if value.dtype.hasobject:
        edges += _items(plain.ravel().tolist())
    else:
        facts["values"] = _values(plain)
    return facts, edges


def _generator(describer: Describer, number: int, value: Any) -> Read:
    if hasattr(value, "bit_generator"):
        return {"state": repr(value.bit_generator.state)}, []
    if hasattr(value, "getstate"):
        return {"state": repr(value.getstate())}, []
    return {"state": repr(value.get_state())}, []


def _torch_generator(describer: Describer, number: int, value: Any) -> Read:
    return {"state": value.get_state().numpy().tobytes()}, []


def _frame(describer: Describer, number: int, value: Any) -> Read:
    """pandas: blocks with their arrays, and whether a write to one has to copy it first."""
    edges: Edges = [(f".axes[{n}]", axis) for n, axis in enumerate(value.axes)]
    blocks = value._mgr.blocks
    edges += [(f".block {n}", block.values) for n, block in enumerate(blocks)]
    facts = {
        "place": [str(getattr(block.mgr_locs, "as_array", None)) for block in blocks],
        "shared": [block.refs.has_reference() for block in blocks],
        "name": repr(getattr(value, "name", None)),
    }
    return facts, [
        *edges,
        (".attrs", value.attrs),
        *[(".flags", value.flags.allows_duplicate_labels)],
    ]


def _type_only(describer: Describer, number: int, value: Any) -> Read:
    """matplotlib: counters and registries by id, which every plot moves on."""
    return {}, []


def _artist(describer: Describer, number: int, value: Any) -> Read:
    """matplotlib: what a figure looks like, and what is in it.

    The rest moves on with every plot.
    """
    facts = {}
    if hasattr(value, "savefig"):
        shown = io.BytesIO()
        value.savefig(shown, format="rgba", dpi=30)
        facts["shown"] = hashlib.sha1(shown.getvalue()).hexdigest()
    held = [
        (".figure", value.figure),
        (".axes", value.axes),
        (".note", getattr(value, "note", None)),
    ]
    return facts, [*held, *_items(value.get_children())]


def _optimizer(describer: Describer, number: int, value: Any) -> Read:
    """All but the mark by which a scheduler knows that ``step`` was called.

    A wrapper, and taas makes its own.
    """
    return {}, [
        (f"[{name!r}]", part) for name, part in sorted(vars(value).items()) if name != "step"
    ]


def _logger(describer: Describer, number: int, value: Any) -> Read:
    return {"name": value.name, "level": value.level, "on": not value.disabled}, [
        (".handlers", value.handlers)
    ]


def _index(describer: Describer, number: int, value: Any) -> Read:
    facts = {"dtype": str(value.dtype), "values": [repr(entry) for entry in value.tolist()[:10000]]}
    return facts, [(".names", list(value.names))]


def _extension_array(describer: Describer, number: int, value: Any) -> Read:
    return {
        "dtype": str(value.dtype),
        "values": [repr(entry) for entry in value.tolist()[:10000]],
    }, []


def _exception(describer: Describer, number: int, error: BaseException) -> Read:
    """Read what an exception says and why; where it was raised stays in its process."""
    edges = [
        (".args", error.args),
        (".__cause__", error.__cause__),
        (".__context__", error.__context__),
    ]
    return {"suppress": error.__suppress_context__}, [*edges, *_attributes(error)]


def _lru_cache(describer: Describer, number: int, value: Any) -> Read:
    """Its cache is left out, which nobody can put into another one (README, Limits)."""
    return {"parameters": repr(value.cache_parameters())}, _attributes(value)


def _enum_member(describer: Describer, number: int, value: enum.Enum) -> Read:
    return {"name": value.name}, [(".value", value._value_), *_attributes(value)]


def _dict(describer: Describer, number: int, value: Any) -> Read:
    return {}, [*_entries(value), *_rest(value)]


def _sequence(describer: Describer, number: int, value: Any) -> Read:
    facts = {"maxlen": value.maxlen} if isinstance(value, collections.deque) else {}
    return facts, [*_items(value), *_rest(value)]


def _set(describer: Describer, number: int, value: Any) -> Read:
    atoms = sorted(known for part in value if (known := atom(part)) is not None)
    others = [part for part in value if atom(part) is None]
    others.sort(key=lambda part: ADDRESS.sub("", repr(part)))
    return {"items": atoms}, [*_items(others), *_rest(value)]


def _bytes(describer: Describer, number: int, value: Any) -> Read:
    return {"bytes": bytes(value)}, _rest(value)


def _subclass_of_atom(describer: Describer, number: int, value: Any) -> Read:
    base = next(cls for cls in (float, *ATOMS) if isinstance(value, cls))
    return {"value": base.__repr__(value)}, _rest(value)


def _weakref(describer: Describer, number: int, value: Any) -> Read:
    return {}, [(" (referent)", value())]


def _descriptor(describer: Describer, number: int, value: Any) -> Read:
    names = ("__func__", "fget", "fset", "fdel", "__wrapped__")
    return {"doc": value.__doc__ if isinstance(value, property) else None}, [
        (f".{name}", getattr(value, name)) for name in names if hasattr(value, name)
    ]


def _shown(describer: Describer, number: int, value: Any) -> Read:
    return {"shown": ADDRESS.sub("", repr(value))}, _attributes(value)


def _instance(describer: Describer, number: int, value: Any) -> Read:
    """Read what is in ``__dict__`` and slots.

    Of an object that has neither, read what pickle would be told.
    """
    attributes = _rest(value)
    if attributes or hasattr(value, "__dict__") or of_notebook(type(value)):
        return {}, attributes
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled: its text is all there is
        return _shown(describer, number, value)
    if isinstance(reduced, str):
        return {"global": reduced}, []
    made, arguments, state, items, entries = (*reduced, None, None, None)[:5]
    return {"made by": getattr(made, "__qualname__", "")}, [
        *_items(arguments, " argument "),
        (" (state)", state),
        *_items(list(items or ())),
        *_entries(dict(entries or ())),
    ]


def _items(values: Any, label: str = "") -> Edges:
    return [(f"{label}[{n}]", part) for n, part in enumerate(values)]


def _entries(mapping: Any) -> Edges:
    found: Edges = []
    items = (
        collections.OrderedDict.items
        if isinstance(mapping, collections.OrderedDict)
        else dict.items
    )
    for number, (key, value) in enumerate(items(mapping)):
        name = atom(key)
        if type(key) is int and key > _IDENTITY:
            found.append((f"[id {number}]", value))
            continue
        if name is None:
            found.append((f" key {number}", key))
        found.append((f"[{name or f'key {number}'}]", value))
    return found


def _attributes(value: Any) -> Edges:
    """Return the object's ``__dict__`` as an object of its own: ``vars(x)`` may stand elsewhere."""
    own = getattr(value, "__dict__", None)
    return [("", own)] if isinstance(own, dict) else []


def _rest(value: Any) -> Edges:
    """Return attributes and slots, and what classes of the library add to a container."""
    found = _attributes(value)
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if hasattr(value, name):
                found.append((f".{name}", getattr(value, name)))
    if isinstance(value, collections.defaultdict):
        found.append((".default_factory", value.default_factory))
    return found


def _from(module: str, *names: str) -> Callable[[Any], bool]:
    """Return a test for instances of classes of a module, which is not imported for it."""

    def matches(value: Any) -> bool:
        found = sys.modules.get(module)
        classes = tuple(getattr(found, name) for name in names if hasattr(found, name))
        return bool(classes) and isinstance(value, classes)

    return matches


def _kinds(*classes: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, classes)


READERS: list[tuple[Callable[[Any], bool], Callable[..., Read]]] = [
    (_kinds(type), _class),
    (_kinds(types.FunctionType), _function),
    (_kinds(types.CellType), _cell),
    (_kinds(types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType), _method),
    (_kinds(staticmethod, classmethod, property), _descriptor),
    (_kinds(functools._lru_cache_wrapper), _lru_cache),
    (_kinds(enum.Enum), _enum_member),
    (_kinds(BaseException), _exception),
    # paths and patterns cache in slots
    (_kinds(PurePath, re.Pattern, re.Match), lambda d, n, v: ({"shown": repr(v)}, [])),
    (_kinds(weakref.ReferenceType), _weakref),
    (_kinds(logging.Logger), _logger),
    (_from("torch.optim", "Optimizer"), _optimizer),
    (_from("torch", "Tensor"), _tensor),
    (_from("torch", "Generator"), _torch_generator),
    (_from("numpy", "ndarray"), _ndarray),
    (_from("numpy.random", "Generator", "RandomState"), _generator),
    (_from("random", "Random"), _generator),
    (_from("pandas", "DataFrame", "Series"), _frame),
    (_from("pandas", "Index"), _index),
    (_from("matplotlib.artist", "Artist"), _artist),
    (_from("matplotlib.transforms", "TransformNode"), _type_only),
    (_from("matplotlib.cbook", "CallbackRegistry"), _type_only),
    (_from("pandas.api.extensions", "ExtensionArray"), _extension_array),
    (_kinds(types.MappingProxyType), lambda d, n, v: ({}, _entries(dict(v)))),
    (_kinds(dict), _dict),
    (_kinds(list, tuple, collections.deque), _sequence),
    (_kinds(set, frozenset), _set),
    (_kinds(bytearray, array.array, memoryview), _bytes),
    (_kinds(float, *ATOMS), _subclass_of_atom),
    (lambda value: True, _instance),
]

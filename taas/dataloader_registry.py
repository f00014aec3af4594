"""``taas.register``, ``taas.unregister`` and ``taas.resume``; this module never imports torch."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from taas.delivery.registered import Registration, take_apart
from taas.errors import DeliveryError, RegistrationError


class _Entry(NamedTuple):
    """A registered loader, and how it was registered."""

    loader: Any
    name: str | None  # the name that the user gave
    variable: str | None  # the variable that held the loader then
    cell: int  # the number of cells that had run


_registry: dict[int, _Entry] = {}
"""The registered loaders, by ``id(loader)``."""


def register(loader: Any, name: str | None = None) -> Any:
    """Let data workers prepare the batches of this loader in every run with ``--cpus``.

    If an earlier cell registered a loader from the same variable and with the same name, and no
    variable holds that loader any more, its registration is replaced: this happens when the cell is
    run again.

    Args:
        loader: a DataLoader, or any iterable that starts from the beginning each time it is
            iterated.
        name: the loader's name in ``--units NAME=…`` and in the live view; by default the name of
            the variable that holds the loader.

    Returns:
        The loader itself.

    Raises:
        RegistrationError: the loader is already registered, is not iterable or cannot be sent to
            data workers, or the name cannot be used.
    """
    if id(loader) in _registry:
        known = _registry[id(loader)].name or _variable_of(loader) or "this loader"
        raise RegistrationError(
            f"{known} is registered already. Register a loader once; taas.unregister(loader)"
            " undoes it"
        )
    variable = _variable_of(loader)
    cell = _cells_run()
    replaced = _replaced_in(variable, name, cell)
    if name is not None:
        _check_name(name, replaced)
    _check_iterable(loader)
    _check_travels(loader, name or variable or "loader")
    for old in replaced:
        del _registry[old]
    _registry[id(loader)] = _Entry(loader, name, variable, cell)
    return loader


def _replaced_in(variable: str | None, name: str | None, cell: int) -> list[int]:
    """Return the keys of registered loaders that a new loader replaces: its cell is run again.

    Loaders of the current cell are not replaced, because a loop may register several loaders from
    one variable. When such a cell is run again, all of its earlier loaders are returned. Loaders
    with another name are not replaced, because several cells may use the same variable.
    """
    if variable is None:
        return []
    return [
        key
        for key, entry in _registry.items()
        if (entry.variable, entry.name) == (variable, name)
        and entry.cell != cell
        and _variable_of(entry.loader) is None
    ]


def _cells_run() -> int:
    """Return the number of cells that this notebook has run; 0 outside a notebook."""
    from taas.capture.cells import typed_cells  # imported here to keep `import taas` fast

    return len(typed_cells())


def unregister(loader: Any) -> None:
    """Undo :func:`register`.

    Raises:
        RegistrationError: the loader is not registered.
    """
    if _registry.pop(id(loader), None) is None:
        raise RegistrationError(
            "this loader is not registered. If its variable was assigned anew since, the old object"
            " is: taas.unregister() takes that one"
        )


def list_registered(namespace: Mapping[str, Any] | None = None) -> list[Registration]:
    """Return the registered loaders in order, with their current names in ``namespace``."""
    named: list[Registration] = []
    taken = {entry.name for entry in _registry.values() if entry.name is not None}
    for number, entry in enumerate(_registry.values()):
        variable = _variable_of(entry.loader, namespace)
        free = (f"loader_{count}" for count in itertools.count(number))
        name = entry.name or next(
            name for name in itertools.chain([variable], free) if name and name not in taken
        )
        taken.add(name)
        named.append(Registration(name, entry.loader, variable))
    return named


def _variable_of(loader: Any, namespace: Mapping[str, Any] | None = None) -> str | None:
    if namespace is None:
        namespace = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    for variable, value in list(namespace.items()):
        if value is loader and isinstance(variable, str) and not variable.startswith("_"):
            return variable
    return None


# ---------------------------------------------------------------- checks


def _check_name(name: Any, replaced: Collection[int]) -> None:
    """Check that a name is free and can be typed in ``--units``.

    A run would treat two loaders with the same name as one loader.
    """
    if not isinstance(name, str):
        raise RegistrationError(
            f"a {type(name).__qualname__} is no name for a loader. Register each loader by itself: "
            "taas.register(train), then taas.register(valid)"
        )
    if not name.isidentifier():
        raise RegistrationError(
            f"{name!r} cannot be typed in --units. Choose a name= such as 'train'"
        )
    if any(name == entry.name and id(entry.loader) not in replaced for entry in list_registered()):
        raise RegistrationError(
            f"another loader is registered as '{name}'. Choose a different name="
        )


def _check_iterable(loader: Any) -> None:
    """Check that a loader is iterable and not an iterator.

    The check looks at the class of the loader, so that no iteration begins, and ignores the
    metaclass, whose code may raise exceptions.
    """
    from taas.capture.describe.reading import (
        attribute_of_class,  # imported here to keep `import taas` fast
    )

    if attribute_of_class(type(loader), "__iter__") is None:
        raise RegistrationError(
            f"a {type(loader).__qualname__} cannot be iterated. Register the DataLoader, not its"
            " dataset or sampler"
        )
    if attribute_of_class(type(loader), "__next__") is not None:
        raise RegistrationError(
            f"a {type(loader).__qualname__} is an iterator: it yields once and cannot begin anew on"
            " a data worker. Register the DataLoader (or the iterable) that it came from"
        )


def _check_travels(loader: Any, name: str) -> None:
    from taas.capture.describe.reader import Reader
    from taas.capture.heap.heap import culprit_of  # imported here to keep `import taas` fast

    reader = Reader(vars(sys.modules["__main__"]))
    found = culprit_of(name, take_apart(loader), reader, without_gpu=True)
    if found is not None:
        raise RegistrationError(
            f"{found.path} cannot travel to a data worker: it is a {found.kind} ({found.reason})."
            " Make it where it is used (in __getitem__, or in worker_init_fn), or leave it out by"
            " __getstate__"
        )


# ---------------------------------------------------------------- resuming


class Position(NamedTuple):
    """The position at which a registered loader begins."""

    iteration: int  # the number of loops over the loader that precede the first loop of the cell
    step: int  # the step of that iteration at which the loop begins, in each rank


_START = Position(0, 0)


class Resumed:
    """The positions at which the loaders of a cell begin.

    ``resumed[loader]``, or ``resumed[name]``, is a ``Position``. A loader that data workers do not
    deliver starts from the beginning, at ``Position(0, 0)``. ``restart`` is the number of restarts
    of this run so far; it is 0 in the first start, in the notebook, and in a plain script.
    """

    def __init__(self, restart: int, places: Mapping[str, Position]) -> None:
        self.restart = restart
        self._places = dict(places)

    def __getitem__(self, loader: Any) -> Position:
        name = loader if isinstance(loader, str) else getattr(loader, "taas_name", "")
        return self._places.get(name, _START)

    def __repr__(self) -> str:
        places = ", ".join(f"{name}: {tuple(place)}" for name, place in self._places.items())
        return f"Resumed(restart={self.restart}{', ' if places else ''}{places})"


def resume(**places: tuple[int, int]) -> Resumed:
    """Let registered loaders continue where the last start was lost; call this before any loop.

    After a restart of the ranks (``--max-restarts``), each loader continues at the first step that
    not all ranks had completed. In the first start, or if the cell has no data workers, every
    loader starts from the beginning, and this function only returns these positions.

    Args:
        places: ``name=(iteration, step)`` for registered loaders that should continue at another
            position, such as that of the checkpoint that the cell loads. All ranks have to pass the
            same positions.

    Returns:
        The position at which each loader begins now.

    Raises:
        DeliveryError: a loop over a registered loader has already begun, or ``places`` names a
            loader that data workers do not deliver.
    """
    loader = sys.modules.get("taas.delivery.loader")
    found = loader.resume(places) if loader is not None else {}
    if places and not found:
        raise DeliveryError(
            f"taas.resume({next(iter(places))}=…): this process has no data workers, and a loader"
            " that they do not deliver begins at its start. Give the cell --cpus, or skip in the"
            " loop what was seen"
        )
    return Resumed(
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        {name: Position(place.iteration, place.step) for name, place in found.items()},
    )

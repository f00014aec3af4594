"""Objects of a training run in progress: tqdm bars and gradient scalers.

A bar writes through functions that refer to a stream of its process. Its state says which stream
this is, and how long the last line was. A bar that already exists at the receiver keeps its stream.

Between ``unscale_`` and ``update``, a scaler stores what it has found in each optimizer's gradients
under the optimizer's address, and then refuses to be pickled. The optimizers are sent in place of
their addresses. At other times, the scale is sent as a number, as in the scaler's pickle: the
scaler makes a new tensor from it on the device where it is used.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import defaultdict
from typing import Any

from taas.base.import_hooks import attribute_of
from taas.capture.describe.process_own import keep_own
from taas.capture.describe.reading import Reading, make_plain, turn_into

# ---------------------------------------------------------------- bars

_STREAMS = ("stderr", "stdout")


def read_bar(bar: Any) -> Reading:
    """Read a tqdm bar: its attributes, and the stream that it writes to."""
    attributes = {**vars(bar)}
    writes_to = _stream_of(attributes.pop("fp", None))
    printer = _lengths(attributes.get("sp"))
    if printer is not None:
        del attributes["sp"]
    last = printer[0] if printer is not None else None
    if "container" in attributes and not _is_widget(bar):  # it was a widget in the notebook
        attributes["gui"], last = True, None
        attributes.pop("colour", None)  # for a widget, a property
    return Reading(make_plain, (type(bar),), _set_bar, (attributes, writes_to, last), turn_into)


def _stream_of(written: Any) -> Any:
    """Return the stream below tqdm's wrapper: the name of a standard stream, or a file."""
    file = vars(written).get("_wrapped", written) if _is_wrapper(written) else written
    return next((name for name in _STREAMS if file is getattr(sys, name)), file)


def _is_wrapper(written: Any) -> bool:
    return isinstance(written, sys.modules["tqdm.utils"].DisableOnWriteError)


def _is_widget(bar: Any) -> bool:
    """Tell whether ipywidgets draws a bar; ``tqdm.auto`` has two classes."""
    kind = attribute_of("tqdm.notebook", "tqdm_notebook")
    return kind is not None and isinstance(bar, kind)


def _lengths(printer: Any) -> list[int] | None:
    """Return the list in which a printer stores the length of its last line, or None.

    The printer is that of ``tqdm.status_printer``.
    """
    if (
        not isinstance(printer, types.FunctionType)
        or "last_len" not in printer.__code__.co_freevars
    ):
        return None
    cells = dict(zip(printer.__code__.co_freevars, printer.__closure__ or (), strict=True))
    lengths: list[int] = cells["last_len"].cell_contents
    return lengths


def _set_bar(bar: Any, state: tuple[dict[str, Any], Any, int | None]) -> None:
    """Set a bar's state. A finished bar has no line, though its class counts it when it is made."""
    attributes, writes_to, last = state
    here = vars(bar)
    before = {name: here[name] for name in ("fp", "sp") if name in here}
    own = keep_own(bar, attributes)
    here.clear()
    here.update(attributes, **own)
    if writes_to is not None:
        here["fp"] = before.get("fp")
        if "fp" not in before or _stream_of(before["fp"]) is not writes_to:
            before.pop("sp", None)
            file = getattr(sys, writes_to) if isinstance(writes_to, str) else writes_to
            here["fp"] = sys.modules["tqdm.utils"].DisableOnWriteError(file, tqdm_instance=bar)
    if attributes.get("gui") and not _is_widget(bar):
        here |= {"gui": False, "colour": None}
        last = 0
    if last is not None:
        kept = _lengths(before.get("sp"))
        here["sp"] = before["sp"] if kept is not None else bar.status_printer(here["fp"])
        lengths = _lengths(here["sp"])
        if lengths is not None:
            lengths[0] = last
    if bar.disable:
        type(bar)._instances.discard(bar)


# ---------------------------------------------------------------- gradient scalers

_FOUND = "_per_optimizer_states"
_TENSORS = {"_scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}
"""For each tensor of a scaler: the number from which the scaler makes it."""


def read_scaler(scaler: Any) -> Reading:
    """Read a ``GradScaler`` at any point of an iteration."""
    attributes = {**vars(scaler)}
    found: dict[int, Any] = attributes.pop(_FOUND, {})
    of_optimizers = [(optimizer, found[id(optimizer)]) for optimizer in _optimizers_at(found)]
    if not of_optimizers and attributes.get("_scale") is not None:
        attributes["_init_scale"] = scaler.get_scale()
        attributes["_init_growth_tracker"] = scaler._get_growth_tracker()
        attributes |= dict.fromkeys(_TENSORS)
    return Reading(
        make_plain,
        (type(scaler),),
        _set_scaler,
        (attributes, of_optimizers, _FOUND in vars(scaler)),
        turn_into,
    )


def _optimizers_at(addresses: dict[int, Any]) -> list[Any]:
    """Return the optimizers at some addresses; this searches all objects."""
    if not addresses:
        return []
    kind = sys.modules["torch.optim"].Optimizer
    there = [
        one for one in gc.get_objects() if id(one) in addresses and issubclass(type(one), kind)
    ]
    return sorted(there, key=lambda one: [*addresses].index(id(one)))


def _set_scaler(scaler: Any, state: tuple[dict[str, Any], list[tuple[Any, Any]], bool]) -> None:
    attributes, of_optimizers, is_enabled = state
    own = keep_own(scaler, attributes)
    vars(scaler).clear()
    vars(scaler).update(attributes, **own)
    if is_enabled:
        anew = sys.modules["torch.amp.grad_scaler"]._refresh_per_optimizer_state
        found = {id(optimizer): what for optimizer, what in of_optimizers}
        setattr(scaler, _FOUND, defaultdict(anew, found))

"""Widgets of ranks in the kernel: the kernel's ends of their comms.

The cell passes on the messages of a rank's widget (rank/comms.py) as the kernel's own. The rank
ends with the cell. So the kernel makes a *twin* of each widget, as it does of a widget that the
front end opens: a reloaded page asks the kernel for all states, and users move sliders when the
rank is gone. A twin has its model's state and does nothing of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import comm
from comm.base_comm import BaseComm

from taas.base.import_hooks import loaded
from taas.base.wording import shown, text_of
from taas.rank.comms import end_of_comm
from taas.runs.events import widget_state

_WIDGETS = "jupyter.widget"
"""The comm target of ipywidgets."""
_CLASS = tuple(
    f"_{of}_{what}" for of in ("model", "view") for what in ("module", "module_version", "name")
)
"""Keys of a model's state that name its class, in the order in which ipywidgets asks for them."""


class KernelEnds:
    """Passes on the messages of one run's widgets.

    Args:
        live: the messages come now, and are not read later: widgets of the notebook that the run
            changes are changed here, too.
        say: tells the user a line.
    """

    def __init__(self, *, live: bool, say: Callable[[str], None]) -> None:
        self._live, self._say = live, say
        self._opened: set[str] = set()
        self._failed: set[str] = set()

    def take(self, said: dict[str, Any]) -> None:
        """Pass a message on to the front end, and to the widget's twin.

        Args:
            said: the arguments that :func:`taas.rank.comms.open_comms_to` gave to ``publish``.
        """
        comm_id, opens = said["comm_id"], said["msg_type"] == "comm_open"
        known = comm_id in comm.get_comm_manager().comms
        if opens and not known:
            self._opened.add(comm_id)
        elif opens or not known or not (self._live or comm_id in self._opened):
            return  # it was shown before, and may be shown elsewhere now; or it is closed
        end = end_of_comm(comm_id, said["keys"].get("target_name", ""))
        if said["msg_type"] == "comm_close":
            with self._report_errors(said):
                (_widget_of(end) or end).close()
            return
        end.publish_msg(
            said["msg_type"], said["data"], said["metadata"], said["buffers"], **said["keys"]
        )
        if end.target_name != _WIDGETS:
            return  # a program's own comm: its data may be anything
        with self._report_errors(said):
            if opens:
                _make_twin(end, said)
            elif said["data"].get("method") == "update" and (twin := _widget_of(end)) is not None:
                _set_state(twin, said)

    @contextlib.contextmanager
    def _report_errors(self, said: dict[str, Any]) -> Iterator[None]:
        """Report an error of a widget's library, once for each kind of widget; the run goes on."""
        try:
            yield
        except Exception as error:
            known, told = _all_widgets().get(said["comm_id"]), widget_state(said)
            kind = getattr(known, "_model_name", told.get("_model_name", "widget")).removesuffix(
                "Model"
            )
            if kind not in self._failed:
                self._failed.add(kind)
                why = f"{type(error).__name__}: {shown(text_of(error), 200)}"
                self._say(
                    f"a page that is loaded again may not draw this {kind} as it is now: {why}"
                )

    def settle(self) -> None:
        """Replace twins by the widgets that came back with the run's names."""
        widgets = _all_widgets()
        for comm_id in self._opened & widgets.keys():
            twin, widget = widgets[comm_id], _widget_of(widgets[comm_id].comm)
            if widget not in (twin, None):
                twin.comm = None  # otherwise the end of the twin would close the widget's comm
                widgets[comm_id] = widget


def _make_twin(end: BaseComm, said: dict[str, Any]) -> None:
    """Make a widget on this end of a comm, without its constructor, as unpickling does.

    Constructors, and the observers of a class, need more than a model has.
    """
    state = said["data"]["state"]
    # A class that only the ranks have gets no twin: its model is shown until the page is closed.
    with contextlib.suppress(ImportError, KeyError):
        registry = importlib.import_module("ipywidgets.widgets.widget")._registry
        of_class = registry.get(*(state[name] for name in _CLASS))
        twin = of_class.__new__(of_class)
        twin._trait_notifiers, twin._trait_validators = {}, {}
        _set_state(twin, said)
        twin.comm, twin._model_id = end, end.comm_id
        end.on_msg(twin._handle_msg)
        _all_widgets()[end.comm_id] = twin


def _set_state(widget: Any, said: dict[str, Any]) -> None:
    """Set a widget's state to its model's; the ranks have called its observers already."""
    state = said["data"]["state"]
    put_buffers = sys.modules["ipywidgets.widgets.widget"]._put_buffers
    put_buffers(state, said["data"].get("buffer_paths", ()), said["buffers"])
    observers, widget._trait_notifiers = widget._trait_notifiers, {}
    try:
        widget.set_state(state)
    finally:
        widget._trait_notifiers = observers


def _widget_of(end: Any) -> Any:
    """Return the widget that a comm belongs to, if any."""
    widget = getattr(end._msg_callback, "__self__", None)
    return widget if hasattr(widget, "_handle_msg") else None


def _all_widgets() -> dict[str, Any]:
    module = loaded("ipywidgets.widgets.widget")
    return module._instances if module is not None else {}

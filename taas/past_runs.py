"""``taas.history``: earlier runs, from Python."""

from __future__ import annotations

from IPython.core.getipython import get_ipython

from taas.frontend import NotebookFrontend
from taas.notebook.run_handle import RunHandle
from taas.notebook.steering import Frontend
from taas.runs.records import find_run, read_records


def history(name: str | None = None) -> RunHandle:
    """Return the handle of a run, which goes on or has ended: its output, its curves, its folder.

    ::

        losses = taas.history("r5").curves["loss"]

    Args:
        name: its name, as ``%taas history`` lists it; None: the newest run of this notebook. The
            notebook's own runs come before others of the same name.

    Raises:
        HeaderError: there is no such run.
    """
    shell = get_ipython()
    own = (Frontend() if shell is None else NotebookFrontend(shell)).own
    return RunHandle(find_run(name, read_records(), own, live=False))

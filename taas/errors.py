"""All exceptions of taas, in one tree.

::

    TaasError
    ├── HeaderError               a cell's header or a %taas line is invalid; nothing was started
    │   └── ConfigError           taas.toml is invalid
    ├── CaptureError              a variable cannot be transferred
    ├── EngineError               the engine cannot provide the requested machines
    │   ├── NotEnoughDevices      fewer GPUs than ranks
    │   └── RanksGone             the ranks that the notebook kept have ended
    ├── VersionMismatch           the versions of Python or of a library differ between machines
    ├── RunFailed                 a run ended without success
    │   ├── CellFailed            the cell raised an exception in a rank, or a rank died
    │   ├── RunLost               a process of taas itself was killed (agent, supervisor, VM)
    │   └── RunStopped            somebody stopped a run of taas.submit
    ├── DamagedAnswer             a file of a background run is truncated
    ├── CannotRehearse            (RuntimeError) a call needs a real GPU
    ├── CannotAdopt               (RuntimeError) a launcher or wrapper cannot use the ranks
    │   └── RanksDisagree         ranks that had to do the same thing did different things
    ├── StorageDenied             (PermissionError) only rank 0 writes to the project
    └── DeliveryError             a registered DataLoader cannot be delivered
        ├── RegistrationError     taas.register() rejected the loader
        └── UnitsExhausted        the batches that --units allows are used up

Each message states what happened, why, and what to do next. All of these exceptions can be pickled
and unpickled.
"""

from __future__ import annotations


class TaasError(Exception):
    """Base class of all exceptions of taas."""


class _NoLine:
    """An error not raised by a line of the cell; IPython shows its message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class HeaderError(TaasError):
    """The header of a cell, or the line of a magic, is invalid; nothing was started."""


class ConfigError(HeaderError):
    """``taas.toml`` is invalid; the message names the file, the key and the allowed values."""


class CaptureError(_NoLine, TaasError):
    """A variable cannot be transferred to the ranks, or a function's value back."""


class EngineError(_NoLine, TaasError):
    """The engine cannot provide the machines that the run requests."""


class NotEnoughDevices(EngineError):
    """There are fewer free GPUs than the run needs."""


class RanksGone(EngineError):
    """The ranks that the notebook kept have ended."""

    @staticmethod
    def in_words(why: str) -> str:
        """Return the error's message."""
        return f"the ranks that this notebook kept are gone ({why})"


class VersionMismatch(_NoLine, TaasError):
    """The version of Python or of a library differs between the notebook and a VM."""


class RunFailed(TaasError):
    """A run ended without success.

    Attributes:
        run: the name of the run.
    """

    run: str = ""


class CellFailed(RunFailed):
    """The cell raised an exception in a rank, or a rank died.

    IPython shows the rank's traceback, with the lines of the cell, instead of one of this process.

    Attributes:
        rank: the global rank that failed first.
        vm: the name of the VM on which this rank ran; empty if the run used only this machine.
        etype: the name of the exception's class in the rank (``"SIGKILL"`` for a signal).
        traceback_lines: the rank's traceback, formatted by IPython.
        others: the number of other ranks that failed afterwards, or in a collective that waited
            for this rank.
        below_traceback: the message without the words with which the traceback ends; empty if the
            whole message is needed.
    """

    rank: int = -1
    vm: str = ""
    etype: str = ""
    traceback_lines: tuple[str, ...] = ()
    others: int = 0
    below_traceback: str = ""

    def _render_traceback_(self) -> list[str]:
        return [*self.traceback_lines, f"{type(self).__name__}: {self.below_traceback or self}"]


class RunLost(_NoLine, RunFailed):
    """A process of taas was killed: an agent, its forkserver, the supervisor, or a whole VM."""


class RunStopped(_NoLine, RunFailed):
    """Somebody stopped the run, with its handle or with ``%taas stop``."""


class DamagedAnswer(_NoLine, TaasError):
    """A file of a background run is truncated, and was not read."""


class CannotRehearse(TaasError, RuntimeError):
    """A call needs a real GPU; the message names the call."""


class RehearsalWarning(UserWarning):
    """A call has no meaning in a simulated GPU environment (*rehearsal*); its result is neutral."""


class CannotAdopt(TaasError, RuntimeError):
    """A launcher or wrapper cannot use the ranks that exist already."""


class RanksDisagree(CannotAdopt):
    """Ranks that had to do the same thing did different things."""


class StorageDenied(TaasError, PermissionError):
    """Only rank 0 writes to the project; the message names the path, the rank and the rule."""


class DeliveryError(TaasError):
    """A registered DataLoader cannot be delivered."""


class RegistrationError(DeliveryError):
    """``taas.register`` rejected the loader; the message says why."""


class UnitsExhausted(DeliveryError):
    """The batches that ``--units`` allows are used up; the message names the option to change."""

"""The errors of taas, in one tree.

::

    TaasError
    ├── HeaderError               the cell's header or a %taas line is wrong; nothing was started
    │   └── ConfigError           taas.toml is wrong
    ├── CaptureError              a name the cell needs cannot travel; nothing was started
    ├── EngineError               the machines asked for cannot be had
    │   ├── NotEnoughDevices      fewer GPUs than ranks
    │   └── RanksGone             the ranks that the notebook kept
    ├── VersionMismatch           Python, torch or cloudpickle differ between machines
    ├── RunFailed                 a run ended without success
    │   ├── CellFailed            the cell raised, or a rank died, in a rank
    │   ├── RunLost               a process of taas itself was killed (agent, supervisor, VM)
    │   └── RunStopped            somebody stopped a run that was given to taas.submit
    ├── DamagedAnswer             what a background run left on disk is cut off
    ├── CannotRehearse            (RuntimeError) this needs a real GPU
    ├── CannotAdopt               (RuntimeError) this launcher or wrapper cannot use the ranks
    │   └── RanksDisagree         ranks that had to do the same did different things
    ├── StorageDenied             (PermissionError) only rank 0 writes the project
    └── DeliveryError             a registered DataLoader cannot be delivered
        ├── RegistrationError     taas.register() refused the loader
        └── UnitsExhausted        --units elements were taken

Each message has the fact, the cause and the next step. Each pickles round trip.
"""

from __future__ import annotations


class TaasError(Exception):
    """Root of all errors of taas."""


class _NoLine:
    """An error that no line of the cell raised: IPython shows its message without frames."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class HeaderError(TaasError):
    """The header of a cell, or the line of a magic, is wrong; nothing was started."""


class ConfigError(HeaderError):
    """``taas.toml`` is wrong; the message names file, key and what is allowed."""


class CaptureError(_NoLine, TaasError):
    """A name that the cell surely needs cannot travel; nothing was started."""


class EngineError(_NoLine, TaasError):
    """The engine cannot give the machines the run asks for."""


class NotEnoughDevices(EngineError):
    """Fewer GPUs than the run has ranks."""


class RanksGone(EngineError):
    """The ranks that the notebook kept have ended."""

    @staticmethod
    def in_words(why: str) -> str:
        """Return the error's message."""
        return f"the ranks that this notebook kept are gone ({why})"


class VersionMismatch(_NoLine, TaasError):
    """Python, torch or cloudpickle differ between the notebook and a VM."""


class RunFailed(TaasError):
    """A run ended without success.

    Attributes:
        run: name of the run.
    """

    run: str = ""


class CellFailed(RunFailed):
    """The cell raised in a rank, or a rank died.

    IPython shows the rank's own traceback, on the cell's lines, in place of this process's.

    Attributes:
        rank: global rank that failed first.
        vm: name of the VM it ran on; empty where the run has this machine alone.
        etype: name of the exception's class in the rank (``"SIGKILL"`` for a signal).
        traceback_lines: the rank's traceback, formatted as IPython formats it.
        others: how many other ranks failed after it, or in a collective that waited for it.
        below_traceback: the message without the words in which the traceback ends; empty where it
            is needed whole.
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
    """A person stopped the run: by its handle, or by ``%taas stop``."""


class DamagedAnswer(_NoLine, TaasError):
    """A file of a background run is cut off; it was not read."""


class CannotRehearse(TaasError, RuntimeError):
    """A call needs a real GPU; the message names it."""


class RehearsalWarning(UserWarning):
    """A call has no meaning in a rehearsal; its result is neutral."""


class CannotAdopt(TaasError, RuntimeError):
    """A launcher or wrapper cannot use the ranks that exist already."""


class RanksDisagree(CannotAdopt):
    """Ranks that had to do the same thing did different things."""


class StorageDenied(TaasError, PermissionError):
    """Only rank 0 writes the project; the message names path, rank and rule."""


class DeliveryError(TaasError):
    """A registered DataLoader cannot be delivered."""


class RegistrationError(DeliveryError):
    """``taas.register`` refused the loader; the message names what cannot travel."""


class UnitsExhausted(DeliveryError):
    """The run's ``--units`` were taken; the message names the option to change."""

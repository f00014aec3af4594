"""The log files of taas's processes: one for each supervisor and each agent.

The files are in ``<jupyter runtime dir>/taas/logs``. ``%taas doctor --report RUN`` copies those of
a run into a report that a user attaches to a bug report. Therefore a line may contain message
names, states of runs, process ids, signals and exit statuses, but never values of the notebook, the
text of a cell or environment variables.

Ranks and the kernel have no log file: their loggers belong to the user. The messages of a rank and
its end are in the log of its agent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from logging.handlers import RotatingFileHandler
from pathlib import Path

from taas.base.places import runtime_folder

_LARGEST = 1 << 19  # bytes of a file; the previous file is kept, too
_MOST_FILES = 100
BROKE_DOWN = "the supervisor broke down"
_FREQUENT = frozenset({"Alive", "Chunk", "Taken", "RanksUse", "RanksSeen", "LookAtRanks"})
"""Messages that repeat while nothing else happens; they are logged at DEBUG."""
_TOLD = ("what", "stage", "how", "outcome", "rank")
_WORD = re.compile(r"[a-z]+( [a-z]+)?")


def log_file(supervisor: int, agent: str = "") -> Path:
    """Return the log file of a supervisor, by its process id, or of its agent (``agent-0``)."""
    name = f"supervisor-{supervisor}"
    return runtime_folder("logs") / f"{name}{agent and f'-{agent}'}.log"


def log_files(supervisor: int) -> list[Path]:
    """Return the existing log files of a supervisor and of its agents, older parts first."""
    files = runtime_folder("logs").glob(f"supervisor-{supervisor}[.-]*")
    return sorted(files, key=lambda path: (path.name.partition(".log")[0], -len(path.name)))


def begin(supervisor: int, agent: str = "") -> None:
    """Let the loggers of this process write to its file, or nowhere if the disk is full."""
    logging.raiseExceptions = False  # a full disk must not end a run
    logger = logging.getLogger("taas")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        path = log_file(supervisor, agent)
        handler: logging.Handler = RotatingFileHandler(path, maxBytes=_LARGEST, backupCount=1)
        path.chmod(0o600)
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.info("process %d on %s", os.getpid(), socket.gethostname())


def how_it_broke(supervisor: int) -> str:
    """Return the error that ended a supervisor, from its log; empty if it was killed."""
    try:
        text = log_file(supervisor).read_bytes()[-_LARGEST:].decode(errors="replace")
    except OSError:
        return ""
    # an earlier process may have had this id, and the same file
    text = text.rpartition(f"process {supervisor} on ")[2]
    _, broke, rest = text.rpartition(f"{BROKE_DOWN}\n")
    traceback = (
        re.split(r"^\d{4}-\d\d-\d\d ", rest, maxsplit=1, flags=re.MULTILINE)[0] if broke else ""
    )
    return traceback.strip().rpartition("\n")[2]


def remove_old_files() -> None:
    """Remove log files except the newest ones."""
    with contextlib.suppress(OSError):  # another supervisor may be removing the same files
        files = sorted(runtime_folder("logs").iterdir(), key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST_FILES]:
            path.unlink(missing_ok=True)


def log_message(logger: logging.Logger, what: str, message: object) -> None:
    """Log the type of a message that was received or is sent, and of the message inside it.

    ``what`` describes the direction and the peer.
    """
    carried = getattr(message, "said", None) or message  # an OfJob contains another message
    kind = type(carried).__name__
    words = [what, kind]
    job = getattr(message, "job", None)
    if job is not None:
        words.append(f"of job {job}")
    for field in _TOLD:
        value = getattr(carried, field, None)
        # a reason in words may quote user data; only one or two plain words belong to the protocol
        if isinstance(value, int) or (isinstance(value, str) and _WORD.fullmatch(value)):
            words.append(f"{field}={value}")
    logger.log(logging.DEBUG if kind in _FREQUENT else logging.INFO, "%s", " ".join(words))

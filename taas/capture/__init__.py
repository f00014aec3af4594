"""What travels from a notebook to its ranks, and comes back.

In the notebook's kernel::

    check_syntax(body, shell)
    with capture(body, shell.user_ns, shell, project=project) as captured:
        ...                                  # captured.fd to the ranks, captured.notices to the user
        applied = captured.apply(answer_fd)  # in place changes, rebound names

In a rank::

    check_versions(peek(fd))
    arrival = arrive(fd, namespace, device="cuda:0")
    arrival.dress(shell)
    ...                                      # run the cell
    wait_for_devices()                       # in every rank that has one: what failed late is the cell's error
    answer_fd = arrival.pack_answer(namespace, value)
"""

from taas.capture.applying import NOTHING, Applied
from taas.capture.capturing import Capture, capture
from taas.capture.cell_text import check_syntax, python_of
from taas.capture.payload import PayloadHeader, check_versions, peek
from taas.capture.returning import Arrival, arrive
from taas.capture.tensors import wait_for_devices

__all__ = [
    "NOTHING",
    "Applied",
    "Arrival",
    "Capture",
    "PayloadHeader",
    "arrive",
    "capture",
    "check_syntax",
    "check_versions",
    "peek",
    "python_of",
    "wait_for_devices",
]

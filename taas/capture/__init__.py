"""Transfer a notebook's variables to the ranks, and the cell's changes back to the notebook.

In the notebook's kernel::

    check_syntax(body, shell)
    with capture(body, shell.user_ns, shell, project=project) as captured:
        ...                                  # send captured.fd to the ranks, show its notices
        applied = captured.apply(answer_fd)  # change objects in place, rebind variables
        kept = captured.kept()               # if the ranks are kept: ``capture(…, kept=kept)``

In a rank::

    check_versions(peek(fd))
    arrival = arrive(fd, namespace, device="cuda:0")
    arrival.prepare_shell(shell)
    ...                                      # run the cell
    wait_for_devices()                       # raise late GPU errors as errors of the cell
    answer_fd = pack_answer(arrival, namespace, value)
    ...                                      # for the next cell: ``arrive(…, before=arrival)``
"""

from taas.capture.cells import check_syntax, python_of
from taas.capture.describe.libraries import wait_for_devices
from taas.capture.describe.process_bound import Place
from taas.capture.heap.payload import PayloadHeader, check_versions, peek
from taas.capture.moves.answering import pack_answer
from taas.capture.moves.applying import NOTHING, Applied
from taas.capture.moves.arriving import Arrival, arrive, rebind_answer
from taas.capture.moves.capturing import Capture, capture
from taas.capture.moves.kept import Kept

__all__ = [
    "NOTHING", "Applied", "Arrival", "Capture", "Kept", "PayloadHeader", "Place", "arrive",
    "capture", "check_syntax", "check_versions", "pack_answer", "peek", "python_of",
    "rebind_answer", "wait_for_devices",
]  # fmt: skip

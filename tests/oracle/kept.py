"""Ranks that stay, for a kernel of the oracle: its headed cells run in them, one after the other, with nothing of taas but
what travels."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from taas.capture import NOTHING, Arrival, Capture, Kept, arrive, capture

__all__ = ["Group"]


class Group:
    """Processes that run cell after cell.

    Args:
        size: how many ranks.
        folder: the project.

    Attributes:
        kept: what they hold.
        sizes: bytes of each payload.
        returned: names that come back; None for all.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.kept: Kept | None = None
        self.sizes: list[int] = []
        self.returned: tuple[str, ...] | None = None
        self._ranks = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            if (pid := os.fork()) == 0:
                ours.close()
                try:
                    os.chdir(folder)
                    _be_rank(rank, theirs)
                except (EOFError, ConnectionError):  # the kernel has gone
                    pass
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            theirs.close()
            self._ranks.append((ours, pid))

    def capture(self, cell: str, shell: Any) -> Capture:
        """Capture a cell's names."""
        namespace = sys.modules["__main__"].__dict__
        captured = capture(cell, namespace, shell, project=Path.cwd(), kept=self.kept, returned=self.returned)
        self.sizes.append(captured.nbytes)
        return captured

    def run(self, cell: str, shell: Any) -> Any:
        """Run a cell in the ranks, and bring its names back; raises what rank 0's raised."""
        captured = self.capture(cell, shell)
        for wire, _ in self._ranks:
            wire.sendall(len(cell.encode()).to_bytes(4, "little") + cell.encode())
            socket.send_fds(wire, [b"x"], [captured.fd])
        said = []
        for rank, (wire, _) in enumerate(self._ranks):
            _, fds, _, _ = socket.recv_fds(wire, 1, 1)
            said.append(pickle.loads(_receive(wire)))
            if rank == 0:
                applied = captured.apply(fds[0])
            for fd in fds:
                os.close(fd)
        captured.close()
        self.kept = captured.kept()
        sys.stdout.write("".join(said[0][0]))
        for line in (*captured.notices, *(f"did not come back: {what}" for what in applied.lost)):
            print(f"taas: {line}")
        for _, error in said:
            if error is not None:
                raise error
        return None if applied.value is NOTHING else applied.value

    def close(self) -> None:
        """End the ranks."""
        for wire, _ in self._ranks:
            wire.close()
        for _, pid in self._ranks:
            os.waitpid(pid, 0)


def _receive(wire: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        found = b""
        while len(found) < count:
            if not (more := wire.recv(count - len(found))):
                raise EOFError
            found += more
        return found

    return exactly(int.from_bytes(exactly(4), "little"))


def _be_rank(rank: int, wire: socket.socket) -> None:
    import torch
    from IPython.core.interactiveshell import InteractiveShell

    torch.set_num_threads(1)  # a pool of threads that was used before the fork is not there any more
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ["RANK"] = str(rank)
    InteractiveShell.displayhook_class.write_output_prompt = lambda self: None
    shell: Any = InteractiveShell(user_module=main, user_ns=main.__dict__)
    shell.showtraceback = lambda *_, **__: None
    shell.displayhook.write_format_data = lambda *_: None
    shell.displayhook.finish_displayhook = lambda: None
    InteractiveShell._instance = shell
    before: Arrival | None = None
    while True:
        cell = _receive(wire).decode()
        _, fds, _, _ = socket.recv_fds(wire, 1, 1)
        before = arrival = arrive(fds[0], main.__dict__, device=None, before=before)
        os.close(fds[0])
        arrival.dress(shell)
        if rank == 0:
            arrival.mark()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            result = shell.run_cell(cell, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        answers = []
        if rank == 0:
            value = NOTHING if result.result is None else result.result
            answers.append(arrival.pack_answer(main.__dict__, value))
        text = pickle.dumps((said.getvalue(), error))
        socket.send_fds(wire, [b"x"], answers)
        wire.sendall(len(text).to_bytes(4, "little") + text)
        for fd in answers:
            os.close(fd)

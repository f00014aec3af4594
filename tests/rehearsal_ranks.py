"""Runs programs in real rehearsed ranks: fresh interpreters, one gloo group, nothing of the test process in them.

A *program* is a function without arguments in a file beside this one. All programs of a file run one after another
in the same ranks, since starting torch costs seconds; each gets its own verdict.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
OK = "ok"


def programs(module: str) -> list[str]:
    """The names of the programs of a file, in order, without importing it."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    return [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


def run(
    module: str,
    folder: Path,
    ranks: int = 1,
    devices: int | None = None,
    names: list[str] | None = None,
    timeout: float = 150,
) -> dict[str, str]:
    """Run a file's programs in ``ranks`` rehearsed ranks, which have a device each unless told otherwise.

    With 0 devices nothing is rehearsed: the programs see the machine as it is.

    Returns:
        For each program ``"ok"``, or the tracebacks of the ranks where it failed; a program that a rank never came
        to has the rank's last words.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    chosen = names or programs(module)
    children = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "rehearsal",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        }
        with (folder / f"{rank}.log").open("wb") as log:
            arguments = [
                sys.executable,
                __file__,
                module,
                str(folder),
                str(rank),
                str(ranks if devices is None else devices),
                *chosen,
            ]
            children.append(
                subprocess.Popen(arguments, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for child in children:
            child.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:
            child.kill()
            child.wait()
    return {name: _verdict(folder, name, ranks) for name in chosen}


def _verdict(folder: Path, name: str, ranks: int) -> str:
    bad = []
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError):
            verdicts = dict(json.loads(line) for line in (folder / f"{rank}.json").read_text().splitlines())
            if verdicts.get(name) == OK:
                continue
            if name in verdicts:
                bad.append(f"rank {rank}:\n{verdicts[name]}")
                continue
        bad.append(
            f"rank {rank} did not come to it; its last words:\n{(folder / f'{rank}.log').read_text()[-1500:]}"
        )
    return "\n".join(bad) or OK


def _main(module: str, folder: str, rank: str, devices: str, *names: str) -> None:
    import torch  # noqa: F401
    import torch.distributed as dist

    from taas.rehearsal import install

    if int(devices):
        install(int(rank), int(devices))
    loaded = importlib.import_module(module)
    with (Path(folder) / f"{rank}.json").open("w") as verdicts:
        for name in names:
            try:
                getattr(loaded, name)()
                verdict = OK
            except BaseException:
                verdict = traceback.format_exc()
            print(json.dumps([name, verdict]), file=verdicts, flush=True)
            if verdict != OK and int(os.environ["WORLD_SIZE"]) > 1:
                break  # the others are in a collective that this rank will not join
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])

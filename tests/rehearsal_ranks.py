"""Runs programs in real rehearsed ranks: fresh interpreters, one gloo group, nothing of the test process in them.

A *program* is a function without arguments in a file beside this one. All programs of a file run one after another
in the same ranks, since starting torch costs seconds; each gets its own verdict.
"""

from __future__ import annotations

import ast
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
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "rehearsal",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        }
        told = [module, str(folder), str(rank), str(ranks if devices is None else devices), *chosen]
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, __file__, *told]
            children.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for child in children:
            child.wait(timeout)
    except subprocess.TimeoutExpired:
        pass  # a rank waits for one that failed, which says why
    finally:
        for child in children:
            child.kill()
            child.wait()
    return {name: _verdict(folder, name, ranks) for name in chosen}


def _verdict(folder: Path, name: str, ranks: int) -> str:
    bad = []
    for rank in range(ranks):
        file, verdicts = folder / f"{rank}.json", {}
        if file.exists():
            verdicts = dict(json.loads(line) for line in file.read_text().splitlines())
        last_words = f"did not come to it; its last words:\n{(folder / f'{rank}.log').read_text()[-1500:]}"
        if (verdict := verdicts.get(name, last_words)) != OK:
            bad.append(f"rank {rank}: {verdict}")
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

"""``--max-restarts``: a run that lost a rank or VM starts again, and uses its own checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from notebook_harness import Notebook, gone, until

from taas.base.process_log import log_files
from taas.protocol.records import RunRecord
from taas.runs.records import read_records

pytestmark = pytest.mark.slow

HEAD = "#pragma taas --gpus 2 --max-restarts 1"
TRAIN = """
import os, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group()
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step = torch.load("{ckpt}") if Path("{ckpt}").exists() else 0
most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
print(f"start {{restart}} of {{most}} from step {{step}}", flush=True)
while step < 6:
    one = torch.ones(1)
    dist.all_reduce(one)
    step += int(one.item()) // 2
    if dist.get_rank() == 0:
        torch.save(step, "{ckpt}")
    dist.barrier()
    if step == 3 and restart == 0:
        {loss}
dist.destroy_process_group()
"""
KILL_RANK_1 = "dist.get_rank() == 1 and os.kill(os.getpid(), 9); dist.barrier()"


def test_a_lost_rank_is_started_again(notebook: Notebook) -> None:
    """The second start goes on from the first one's checkpoint; the cell says why there was one."""
    ran = notebook.good(HEAD + TRAIN.format(ckpt="rank.pt", loss=KILL_RANK_1))
    assert "rank 1 was killed by SIGKILL" in ran.stdout
    assert "started again (1 of 1 restarts used)" in ran.stdout
    assert ran.stdout.index("start 0 of 1 from step 0") < ran.stdout.index(
        "start 1 of 1 from step 3"
    )
    assert notebook.value("step, restart") == "6 1"


def test_a_lost_vm_is_replaced(notebook: Notebook) -> None:
    """The agent is killed: a new one takes its place, and the other VM's agent stays."""
    wait = "print('ready', flush=True); import time; time.sleep(600)"
    head = "#!x1.1\n" + HEAD
    notebook.folder.joinpath("taas.toml").write_text('[instances."x1.1"]\nvcpus = 1\ngpus = 1\n')
    notebook.start(head + TRAIN.format(ckpt="vm.pt", loss=wait))
    notebook.wait_for("ready")
    before = notebook.processes().agents
    assert len(before) == 2
    lost = max(before, key=lambda process: process.pid)
    os.kill(lost.pid, signal.SIGKILL)
    ran = notebook.end()
    assert ran.status == "ok", ran.traceback
    assert "started again (1 of 1 restarts used)" in ran.stdout
    assert "start 1 of 1 from step 3" in ran.stdout
    after = {process.pid for process in notebook.processes().agents}
    assert len(after) == 2
    assert after & {process.pid for process in before} == {p.pid for p in before} - {lost.pid}
    notebook.folder.joinpath("taas.toml").unlink()


WAITS_FOR_LOSS = """
import os, time
from pathlib import Path
rank = os.environ["RANK"]
Path(signs, f"rank-{rank}").write_text(str(os.getpid()))
while not Path(signs, "go").exists():
    time.sleep(0.01)
if rank == "1":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.mark.parametrize("stops", ["press", "press twice", "taas stop", "taas stop --now"])
def test_who_stops_a_run_after_a_loss_gets_no_other_start(
    notebook: Notebook, tmp_path: Path, stops: str
) -> None:
    """Its agents are still ending what is left when a person stops it: the loss is its end.

    An agent that is stopped meanwhile keeps the run at that.
    """
    name = f"stopped-{tmp_path.name[-1]}"
    notebook.folder.joinpath("taas.toml").write_text('[instances."x1.1"]\nvcpus = 1\ngpus = 1\n')
    notebook.good(f"signs = {str(tmp_path)!r}")
    notebook.start(f"#!x1.1\n{HEAD} --name {name}{WAITS_FOR_LOSS}")
    until(lambda: [record.state for record in _records(name)] == ["running"])
    until(lambda: (tmp_path / "rank-0").exists() and (tmp_path / "rank-0").read_text())
    above = psutil.Process(int((tmp_path / "rank-0").read_text())).parents()
    [agent] = [process for process in notebook.processes().agents if process in above]
    agent.suspend()
    (tmp_path / "go").touch()
    until(lambda: [record.state for record in _records(name)] == ["ending"])
    presses = 2 if stops in ("press twice", "taas stop --now") else 1
    with contextlib.ExitStack() as terminal:
        if stops.startswith("taas"):  # it waits for the run's end
            command = [sys.executable, "-m", "taas.cli", *stops.split()[1:], name]
            nowhere = subprocess.DEVNULL
            terminal.enter_context(subprocess.Popen(command, stdout=nowhere, stderr=nowhere))
        for press in range(1, presses + 1):
            if stops.startswith("press"):
                notebook.interrupt()
            until(partial(_was_pressed, name, press))
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.resume()
        ran = notebook.end()
    assert "started again" not in ran.stdout
    # an agent that has not ended its ranks in time after a second press is killed: another loss
    assert ran.ename in ("CellFailed", "RunLost")[:presses], ran
    assert "was killed" in ran.evalue
    notebook.folder.joinpath("taas.toml").unlink()


def _records(name: str) -> list[RunRecord]:
    return [record for record in read_records() if record.name == name]


def _was_pressed(name: str, press: int) -> bool:
    [record] = _records(name)
    log = "".join(path.read_text() for path in log_files(record.supervisor.pid))
    return f"{name} is interrupted, press {press}" in log


def test_used_up_restarts_are_the_end(notebook: Notebook) -> None:
    """The last loss is the error, and the next cell runs."""
    ran = notebook.run(
        HEAD + "\nimport os\n"
        "print('here', flush=True)\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
    )
    assert ran.stdout.count("started again") == 1
    assert ran.ename == "CellFailed"
    assert "rank 1 was killed by SIGKILL" in ran.evalue
    assert notebook.good("#pragma taas --gpus 2\nprint('fine')").own == "fine\n"


def test_attach_and_logs_show_all_starts(notebook: Notebook) -> None:
    """What the first start printed is not lost with it."""
    notebook.good(
        HEAD + " --background --name twice" + TRAIN.format(ckpt="twice.pt", loss=KILL_RANK_1)
    )
    ran = notebook.good("%taas attach twice")
    assert ran.stdout.index("start 0 of 1 from step 0") < ran.stdout.index(
        "start 1 of 1 from step 3"
    )
    assert notebook.value("step") == "6"
    logs = notebook.good("%taas logs twice --rank 1").stdout
    assert logs.index("start 0 of 1 from step 0") < logs.index("start 1 of 1 from step 3")


LOADER = """
import time, taas
from pathlib import Path
from torch.utils.data import DataLoader
class Waits:
    "Elements that wait for a sign, and so many that they are planned as they are needed."
    def __init__(self, signs): self.signs = Path(signs)
    def __len__(self): return 3000
    def __getitem__(self, index):
        (self.signs / "asked").touch()
        while not (self.signs / "go").exists(): time.sleep(0.01)
        return index
"""
SEES = """
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
seen = 0
for batch in loader:
    seen += 1
    (Path(signs) / "delivering").touch()
    while restart == 0 and not (Path(signs) / "lost").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("when", "who"),
    [
        ("asked", "forkserver"),
        ("asked", "planner"),
        ("asked", "coordinator"),
        ("asked", "agent"),
        ("delivering", "forkserver"),
        ("delivering", "coordinator"),
        ("delivering", "planner"),
    ],
)
def test_a_loss_on_the_data_side_is_one(
    notebook: Notebook, tmp_path: Path, when: str, who: str
) -> None:
    """Whatever of taas goes, before the ranks begin and later, the run starts again."""
    notebook.good(
        "%taas release\n"
        "import os\n"
        f"{LOADER}\n"
        f"signs = {str(tmp_path)!r}\n"
        "loader = DataLoader(Waits(signs), num_workers=1)\n"
        "taas.register(loader)"
    )
    notebook.start(f"{HEAD} --cpus 1{SEES}")
    until((tmp_path / "asked").exists)
    if when == "delivering":
        (tmp_path / "go").touch()
    until((tmp_path / when).exists)
    found = notebook.processes()
    roles = {
        "forkserver": found.forkservers,
        "agent": found.agents,
        "planner": [one for one in found.data_processes if one.name() == "taas-planner"],
        "coordinator": [
            one for one in found.others if "taas.delivery.coordinator" in one.cmdline()
        ],
    }
    [lost] = roles[who]
    lost.kill()
    until(lambda: gone([lost]))
    for sign in ("go", "lost"):
        (tmp_path / sign).touch()
    ran = notebook.end()
    assert ran.status == "ok", ran.evalue + ran.stdout
    assert "started again (1 of 1 restarts used)" in ran.stdout
    assert notebook.value("restart, seen > 0") == "1 True"
    notebook.good("taas.unregister(loader)")

"""`taas doctor --report RUN` writes one file for a bug report, with nothing of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook

pytestmark = pytest.mark.slow


def report_of(notebook: Notebook, run: str) -> str:
    """Write the report of a run; returns its text."""
    said = notebook.run(f"%taas doctor --report {run}")
    assert f"taas-report-{run}.txt has the record of {run}" in said.stdout
    return (notebook.folder / f"taas-report-{run}.txt").read_text()


def test_a_report_has_what_the_processes_did_and_nothing_of_the_user(notebook: Notebook) -> None:
    """Messages, states, signals and exit statuses are there.

    Texts of the cell, its output and its error are not.
    """
    notebook.run("token = 'hf_secret_value'; import os; os.environ['MY_KEY'] = 'key_secret_value'")
    ran = notebook.run(
        block("""
            #pragma taas --gpus 2 --name broken
            import torch.distributed as dist
            print('printed_secret', token)
            if os.environ['RANK'] == '1':
                raise ValueError('raised_secret')
            dist.init_process_group('gloo'); dist.barrier()
        """)
    )
    assert ran.ename == "CellFailed"
    text = report_of(notebook, "broken")
    for step in (
        "heard from the kernel or a visitor: Submit",
        "broken: acquiring -> starting",
        "broken: starting -> running",
        "StartJob of job 0",
        "EndJob of job 0 how=failure",
        "broken is over: failed",
        '"etype": "ValueError"',
        "process",
        "packages: Python",
    ):
        assert step in text, step
    assert "secret" not in text
    assert "token" not in text
    assert str(notebook.folder) not in text


def test_a_run_that_is_not_there_is_named(notebook: Notebook) -> None:
    """Its name is a run's, and a wrong one is answered as for any verb."""
    assert "no run is called nothing" in notebook.run("%taas doctor --report nothing").stderr


_LOGS = """
import logging, os
from taas.base import process_log
from taas.base.process_log import log_file, log_files, log_message
from taas.protocol.agents import EndJob, OfJob
from taas.protocol.framing import Alive
process_log.begin(1)
process_log.begin(2, "agent-0")  # another process's
logger = logging.getLogger("taas.test")
log_message(logger, "heard:", OfJob(run="r1", job=3, said=EndJob(how="failure")))
log_message(logger, "heard:", Alive())
first = log_file(1).read_text()
assert "taas.test: heard: EndJob of job 3 how=failure" in first, first
assert "Alive" not in first
for number in range(40_000):
    logger.info("line %d", number)
assert [path.name for path in log_files(1)] == ["supervisor-1.log.1", "supervisor-1.log"]
assert all(path.stat().st_size <= 1 << 19 for path in log_files(1))
assert "line 39999" in log_file(1).read_text()
for number in range(200):
    log_file(1000 + number).touch()
    os.utime(log_file(1000 + number), (number, number))
process_log.remove_old_files()
assert log_file(1).exists() and log_file(1199).exists() and not log_file(1000).exists()
"""


def test_a_log_has_names_of_messages_and_is_bounded(tmp_path: Path) -> None:
    """What an OfJob carries is named; what comes again and again is left out.

    A file has an end, and so has their number.
    """
    environ = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _LOGS], env=environ, check=True)


def test_a_folder_that_cannot_be_written_costs_a_run_nothing(tmp_path: Path) -> None:
    """Without a place for its file a process logs nothing, and goes on."""
    (tmp_path / "taas").mkdir()
    (tmp_path / "taas" / "logs").touch()
    environ = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    code = "from taas.base import process_log; process_log.begin(1); process_log.remove_old_files()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, capture_output=True
    )
    assert done.stderr == b""

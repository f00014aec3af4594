"""Orphans are ended and reaped, in whatever order their parents die."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, subprocess, sys, psutil
from taas.agent import processes

processes.become_subreaper()
parent = subprocess.Popen(
    ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
)
child = int(parent.stdout.readline())
list_children = psutil.Process.children

def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

def list_then_kill(self, recursive=False):
    found = list_children(self, recursive)
    psutil.Process.children = list_children
    for pid in {deaths}:
        kill(pid)
    return found

psutil.Process.children = list_then_kill
processes.sweep_orphans(())
print("left:", [one.status() for one in psutil.Process().children(recursive=True)])
"""
"""Its orphans die in the moment that it has listed them."""


@pytest.mark.parametrize("deaths", ["()", "(parent.pid,)", "(parent.pid, child)"])
def test_who_dies_while_orphans_are_listed_hands_its_children_on(deaths: str) -> None:
    """A child of one that died after the list was made is not in it, and yet this process's own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{deaths}", deaths)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "left: []\n"

"""Which engine a cell takes, and what is asked of a cluster: without Ray, and without a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from blocks import block

from taas.agent.forkserver import read_at_import
from taas.agent.staging import environment
from taas.config import load_catalog
from taas.engines import choice
from taas.engines.slurm import JobAgents, read_queue, script, settings_of
from taas.errors import EngineError, HeaderError
from taas.protocol.engines import AgentConfig, Demand, EngineChoice
from taas.versions import differing_versions


@pytest.fixture(autouse=True)
def own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, and nothing said before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choice, "_said", [])
    return tmp_path


def test_typed_wins_over_variable_over_file(
    own_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``%taas engine`` wins over TAAS_ENGINE, that over ``taas.toml``, that over the default."""
    assert choice.current_engine(own_project).kind == "local"
    (own_project / "taas.toml").write_text(
        '[engine]\ndefault = "ray"\naddress = "head:6379"\nwait = 5\nidle = 0\n'
    )
    assert choice.current_engine(own_project) == EngineChoice("ray", "head:6379", 5.0, 0.0)
    monkeypatch.setenv("TAAS_ENGINE", "ray other:6380")
    assert choice.current_engine(own_project).address == "other:6380"
    assert choice.choose(["local"]).kind == "local"
    assert choice.current_engine(own_project).kind == "local"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["kubernetes"], "allowed is local, ray and its address, or slurm"),
        (["slurm", "gpu"], "allowed is --partition"),
        (["slurm", "--partition"], "--partition has no value"),
        (["ray", "head"], "type ray head:6379"),
        (["ray", "ray://head:10001"], "make it a node"),
        (["ray", "head:6379", "more"], "type ray head:6379"),
    ],
)
def test_wrong_engines(words: list[str], says: str) -> None:
    """What is typed wrong is answered with what to type."""
    with pytest.raises(HeaderError, match=says):
        choice.choose(words)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray its engine says how to install it; nothing else imports it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'jupyter-taas\[ray\]'"):
        choice.choose(["ray"])
    code = block("""
        import sys
        sys.modules['ray'] = None
        import taas, taas.magics, taas.launcher
        import taas.supervisor.loop, taas.agent.loop, taas.rank.entry
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_asked_of_slurm(own_project: Path) -> None:
    """What is typed wins over `[engine.slurm]`.

    A VM with GPUs is a whole node unless its type says how it is asked for.
    """
    (own_project / "taas.toml").write_text(
        "[engine]\n"
        'default = "slurm"\n'
        "[engine.slurm]\n"
        'partition = "gpu"\n'
        'cpu_partition = "cpu"\n'
        'sbatch = "--qos=long -v"\n'
        '[instances."g2.4"]\n'
        "vcpus = 112\n"
        "gpus = 4\n"
        "slurm = \"--gres=gpu:a100:4 --constraint='big'\"\n"
    )
    settings = settings_of(choice.current_engine(own_project).address)
    rest = ["--qos=long", "-v"]
    whole = ["--exclusive", "--mem=0"]
    assert settings.asked_for(Demand("g2.8", 8)) == [
        "--partition=gpu",
        *whole,
        "--gres=gpu:8",
        *rest,
    ]
    of_type = ["--partition=gpu", "--gres=gpu:a100:4", "--constraint=big", *rest]
    assert settings.asked_for(Demand("g2.4", 4)) == of_type
    assert settings.asked_for(Demand("c1.4")) == ["--partition=cpu", "--cpus-per-task=4", *rest]
    assert settings.asked_for(Demand("g2.4", 4, rehearse=True)) == [
        "--partition=cpu",
        "--exclusive",
        *rest,
    ]
    typed = choice.read_choice(
        ["slurm", "--partition=x", "--time=9"], "", load_catalog(own_project)
    )
    assert settings_of(typed.address).asked_for(Demand(None, 2))[:2] == [
        "--partition=x",
        "--time=9",
    ]


def test_versions_that_differ() -> None:
    """Versions that matter are compared, and the difference is named with what to install."""
    here = {"python": "3.11.7", "torch": "2.9.1+cu126", "jupyter-taas": "0.1.0", "numpy": "2.4"}
    assert (
        differing_versions({**here, "python": "3.11.9", "torch": "2.9.1", "numpy": "2.1"}, here)
        == ""
    )
    assert 'pip install "torch==2.9.1"' in differing_versions({**here, "torch": "2.9.0"}, here)
    assert differing_versions({**here, "python": "3.12.1"}, here).endswith(
        "has python 3.11.7, the VM 3.12.1"
    )
    assert "the VM not" in differing_versions({**here, "jupyter-taas": ""}, here)


def test_the_environment_on_a_vm() -> None:
    """What the notebook set holds, what it inherited yields to the VM's own.

    Libraries are imported with the same.
    """
    notebook = {"PATH": "/here", "OMP_NUM_THREADS": "3", "LANG": "C", "MKL_X": "set"}
    changed = ("LD_PRELOAD", "MKL_X")  # the first was removed
    own = {"PATH": "/there", "LD_PRELOAD": "own.so", "MKL_X": "own", "LANG": "C.UTF-8"}
    config = AgentConfig("", "", "", "", "", remote=True, environ=own)
    there = environment(notebook, changed, config)
    assert there == {"PATH": "/there", "OMP_NUM_THREADS": "3", "LANG": "C.UTF-8", "MKL_X": "set"}
    ahead = environment(read_at_import(notebook), changed, config)
    assert read_at_import(ahead) == read_at_import(there)


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        ("7|NODE_FAIL|NodeDown|1:00:00|0:00|grant 17", "RunLost", "a node failed"),
        ("7|PREEMPTED|None|1:00:00|0:00|taas, by hand", "RunLost", "was preempted"),
        ("7|COMPLETED|None|1:00:00|0:00|(null)", "RunLost", "is over (COMPLETED)"),
        ("7|COMPLETED|None|1:00:00|0:00|a|b", "RunLost", "is over (COMPLETED)"),
        ("7|COMPLETED|None|1:00:00|0:00|two\nlines", "RunLost", "is over (COMPLETED)"),
        ("6|RUNNING|None|1:00:00|0:30|a|\n\nb\n7|PREEMPTED|None|1|0|c", "RunLost", "was preempted"),
        (
            "7|COMPLETED|None|1:00:00|0:00|taas: no numpy there",
            "EngineError",
            "its nodes said: no numpy there",
        ),
        ("7|FAILED|NonZeroExitCode|1:00:00|0:00|grant 17", "EngineError", "is over (FAILED)"),
    ],
)
def test_a_comment_of_somebody_else_is_no_reason(line: str, error: str, says: str) -> None:
    """Sites and users give jobs comments.

    Only what the job's own nodes wrote keeps a run from starting again.
    """
    now = read_queue(line)["7"]
    assert now.over
    assert now.error == error
    assert now.why_over("7").endswith(says)
    assert 'comment="taas: $said"' in script("python", JobAgents({}, ()))


def test_the_variable_is_read_as_a_shell_reads_it(
    own_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotes hold a value together; one that is not closed is said."""
    monkeypatch.setenv(
        "TAAS_ENGINE", "slurm --sbatch=\"--comment='two words' --qos=long\" --time=5"
    )
    asked = settings_of(choice.current_engine(own_project).address).asked_for(Demand(None, 1))
    assert asked[-2:] == ["--comment=two words", "--qos=long"]
    assert "--time=5" in asked
    monkeypatch.setenv("TAAS_ENGINE", 'slurm --sbatch="--qos=long')
    with pytest.raises(HeaderError, match=r"TAAS_ENGINE slurm.*: a quote is opened and not closed"):
        choice.current_engine(own_project)
    monkeypatch.setenv("TAAS_ENGINE", "'ray' 'head:6379'")
    assert choice.current_engine(own_project).address == "head:6379"
    monkeypatch.setenv("TAAS_ENGINE", "  ")
    assert choice.current_engine(own_project).kind == "local"

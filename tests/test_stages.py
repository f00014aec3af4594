"""Where a run stands: real runs take each step of the table; what is no step ends a run."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook, gone, until

from taas.base.process_log import log_files
from taas.protocol.records import RunRecord
from taas.runs.records import read_records
from taas.supervisor.stages import (
    ENDED,
    STEPS,
    UNDER_WAY,
    UNDISTURBED,
    WORDS,
    Stage,
    UnknownStep,
    check_step,
)

ROOT = Path(__file__).parents[1]


# ------------------------------------------------------------ the table


def test_each_step_the_code_asks_for_is_in_the_table_and_none_else() -> None:
    """A stage that the code moves a run to is one to which a step leads, and the other way round.

    From where is known only when a run moves: :func:`test_each_step_is_taken_by_a_run`.
    """
    asked = set()
    for path in (ROOT / "taas" / "supervisor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            method = getattr(getattr(node, "func", None), "attr", "")
            if isinstance(node, ast.Call) and method in ("move", "_end_ranks"):
                asked |= stages_in(node.args[0])
    assert asked == {after for _, after in STEPS}


def stages_in(argument: ast.expr) -> set[Stage]:
    """Return the stages that an argument names."""
    return {
        Stage[node.attr]
        for node in ast.walk(argument)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Stage"
    }


def test_a_run_that_has_not_ended_can_always_be_ended() -> None:
    """That is how a run ends whose next step is refused, and how any run comes to its end."""
    assert all((stage, Stage.ENDING) in STEPS for stage in UNDER_WAY - {Stage.ENDING})
    assert {stage for stage in Stage if not any(stage is before for before, _ in STEPS)} == {
        Stage.OVER
    }
    assert {*UNDER_WAY, *ENDED, Stage.WAITING, Stage.RESTARTING} == {*Stage}
    assert UNDISTURBED < UNDER_WAY
    assert not UNDER_WAY & ENDED


@pytest.mark.parametrize("before", Stage, ids=str)
def test_the_table_refuses_what_it_does_not_know(before: Stage) -> None:
    """The error names the run and both stages; to stay where it is is no step either."""
    for after in Stage:
        if (before, after) in STEPS:
            check_step("r1", before, after)
            continue
        with pytest.raises(UnknownStep, match=f"r1 is {before}: it cannot be {after} next"):
            check_step("r1", before, after)
    assert (before, before) not in STEPS


def test_architecture_draws_the_table() -> None:
    """Its stages, with the words that people see, and its steps are those of the code."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("## Where a run stands")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [name for name, *_ in rows] == [str(stage) for stage in Stage]
    assert {name: word for name, word, *_ in rows if word} == {
        str(stage): word for stage, word in WORDS.items()
    }
    steps = {(name, after) for name, *_, next_ones in rows for after in next_ones.split(", ")}
    assert {step for step in steps if step[1]} == {(str(a), str(b)) for a, b in STEPS}


# ------------------------------------------------------------ runs that take the steps

PEOPLE = """
import os, time, taas
from pathlib import Path
from torch.utils.data import DataLoader

def wait_for(path):
    while not Path(path).exists(): time.sleep(0.01)

def wait_in_rank(folder):
    Path(folder, f"new-{os.environ['RANK']}").touch()
    wait_for(Path(folder, "never"))

def die():
    os.kill(os.getpid(), 9)

class Unpacks:  # does something in a rank before the cell begins there
    def __init__(self, *call): self.call = call
    def __reduce__(self): return self.call[0], self.call[1:]

class Waits:
    def __init__(self, folder): self.folder = folder
    def __len__(self): return 3000
    def __getitem__(self, index):
        Path(self.folder, "asked").touch()
        wait_for(Path(self.folder, "never"))
"""


class Play:
    """A run, what happens to it, and a folder for the signs that its cell and this test give."""

    def __init__(self, notebook: Notebook, name: str, folder: Path) -> None:
        self.notebook, self.name, self.folder = notebook, name, folder
        notebook.good(f"{PEOPLE}\nfolder = {str(folder)!r}; go = f'{{folder}}/go'; odd = None")

    @property
    def record(self) -> RunRecord:
        """Return the run's record."""
        [record] = [record for record in read_records() if record.name == self.name]
        return record

    def start(self, cell: str, options: str = "", *, state: str = "running") -> None:
        """Start the run, and wait until its record says that it is in a state."""
        self.notebook.start(f"#pragma taas --gpus 2 --name {self.name} {options}\n{block(cell)}")
        until(lambda: any(one.name == self.name for one in read_records()))
        until(lambda: self.record.state == state)

    def sign(self, name: str) -> None:
        """Wait for a sign of the run."""
        until((self.folder / name).exists)

    def go(self) -> None:
        """Let the cell go on."""
        (self.folder / "go").touch()

    def interrupt(self, word: str) -> None:
        """Press the button, and wait until the record says what became of that."""
        self.notebook.interrupt()
        until(lambda: self.record.state == word or not self.record.live)

    def story(self) -> str:
        """Return the stages that the run was in, from its supervisor's log."""
        text = "".join(path.read_text() for path in log_files(self.record.supervisor.pid))
        step = rf"taas\.supervisor\.stages: {self.name}: (\w+) -> (\w+)$"
        steps = re.findall(step, text, re.MULTILINE)
        assert all(one[1] == other[0] for one, other in pairwise(steps)), steps
        return " ".join((steps[0][0], *(after for _, after in steps)))


def ends_well(play: Play) -> None:
    """Nothing happens."""
    play.start("wait_for(go)")
    play.go()
    assert play.notebook.end().status == "ok"


def raises(play: Play) -> None:
    """A rank raises an error."""
    play.start("wait_for(go)\nassert os.environ['RANK'] == '0'")
    play.go()
    assert play.notebook.end().ename == "CellFailed"


def is_interrupted(play: Play) -> None:
    """A person presses once."""
    play.start("wait_for(go)")
    play.interrupt("finishing")
    assert play.notebook.end().ename == "KeyboardInterrupt"


def is_interrupted_twice(play: Play) -> None:
    """A person presses again while the cell's own handler runs."""
    play.start(
        """
        try:
            wait_for(go)
        except KeyboardInterrupt:
            Path(folder, "saving").touch()
            wait_for(go)
        """
    )
    play.interrupt("finishing")
    play.sign("saving")
    play.interrupt("ending")
    assert play.notebook.end().ename == "KeyboardInterrupt"


def dies_as_it_starts(play: Play) -> None:
    """The ranks are killed while they unpack their names."""
    play.notebook.good("odd = Unpacks(die)")
    ran = play.notebook.run(f"#pragma taas --gpus 2 --name {play.name}\nseen = odd")
    assert ran.ename == "CellFailed"


def is_interrupted_as_it_starts(play: Play) -> None:
    """A person presses while the ranks unpack their names."""
    play.notebook.good("odd = Unpacks(wait_in_rank, folder)")
    play.start("seen = odd", state="starting")
    play.sign("new-0")
    play.sign("new-1")
    play.interrupt("finishing")
    assert play.notebook.end().ename == "KeyboardInterrupt"


def waits_for_data(play: Play) -> None:
    """Start a run whose first element does not come."""
    play.notebook.good("loader = DataLoader(Waits(folder), num_workers=1); taas.register(loader)")
    play.start("for one in loader: pass", "--cpus 1", state="acquiring")
    play.sign("asked")


def is_interrupted_before_it_starts(play: Play) -> None:
    """A person presses while the first elements are made."""
    waits_for_data(play)
    play.interrupt("finishing")
    assert play.notebook.end().ename == "KeyboardInterrupt"


def loses_data_before_it_starts(play: Play) -> None:
    """The coordinator is killed while the first elements are made."""
    waits_for_data(play)
    coordinators = [
        process
        for process in play.notebook.processes().others
        if "taas.delivery.coordinator" in process.cmdline()
    ]
    for process in coordinators:
        process.kill()
    assert play.notebook.end().ename == "RunLost"


LOSES_RANK_1 = "wait_for(go)\nif os.environ['RANK'] == '1': die()\nwait_for(f'{folder}/on')"


def starts_again(play: Play) -> None:
    """Rank 1 is killed in the first start."""
    restart = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    "
    play.start(restart + LOSES_RANK_1.replace("\n", "\n    "), "--max-restarts 1")
    play.go()
    assert play.notebook.end().status == "ok"


def has_no_room_to_start_again(play: Play) -> None:
    """Rank 1 is killed, and the folder of the next start cannot be made."""
    play.start(LOSES_RANK_1, "--max-restarts 1")
    (play.record.folder / "restart-1").touch()
    play.go()
    ran = play.notebook.end()
    assert ran.ename == "CellFailed"
    assert "it could not be started again" in ran.stdout + ran.stderr


def is_stopped_in_the_queue(play: Play) -> None:
    """All processors are busy, and a person stops it."""
    ranks = len(os.sched_getaffinity(0))
    submit = f"taas.submit(wait_for, go, gpus={ranks}, name="
    play.notebook.good(f"first = {submit}'{play.name}-first'); odd = {submit}'{play.name}')")
    play.notebook.good("odd.stop()")
    assert play.notebook.run("odd.result(60)").ename == "RunStopped"
    play.go()
    play.notebook.good("first.result(120)")


PLAYS: dict[Callable[[Play], None], str] = {
    ends_well: "waiting acquiring starting running sorting over",
    raises: "waiting acquiring starting running ending sorting over",
    is_interrupted: "waiting acquiring starting running finishing sorting over",
    is_interrupted_twice: "waiting acquiring starting running finishing ending sorting over",
    dies_as_it_starts: "waiting acquiring starting ending sorting over",
    is_interrupted_as_it_starts: "waiting acquiring starting finishing sorting over",
    is_interrupted_before_it_starts: "waiting acquiring finishing sorting over",
    loses_data_before_it_starts: "waiting acquiring ending sorting over",
    starts_again: (
        "waiting acquiring starting running ending restarting acquiring starting running sorting"
        " over"
    ),
    has_no_room_to_start_again: "waiting acquiring starting running ending restarting over",
    is_stopped_in_the_queue: "waiting over",
}


def test_each_step_is_taken_by_a_run() -> None:
    """No step stands in the table that the runs below do not take, and they take no other."""
    taken = {step for stages in PLAYS.values() for step in pairwise(stages.split())}
    assert taken == {(str(before), str(after)) for before, after in STEPS}


@pytest.mark.slow
@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
def test_a_run_takes_the_steps(
    notebook: Notebook, tmp_path: Path, play: Callable[[Play], None]
) -> None:
    """The supervisor's log tells the stages that it was in, one after the other."""
    run = Play(notebook, play.__name__.replace("_", "-"), tmp_path)
    try:
        play(run)
        assert run.story() == PLAYS[play]
    finally:
        notebook.good(
            block("""
                from taas.dataloader_registry import list_registered
                for entry in list_registered(): taas.unregister(entry.loader)
            """)
        )


# ------------------------------------------------------------ what is no step

LIES = """
import gc, time
def say_done(*ranks):
    if os.environ["RANK"] not in ranks: return
    from taas.rank.agent_link import AgentLink
    from taas.protocol.ranks import RankEnded
    [link] = [one for one in gc.get_objects() if type(one) is AgentLink]
    link.send(RankEnded(rank=int(os.environ["RANK"]), outcome="done", at=time.time()))
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("liars", "options"),
    [("'0', '1'", ""), ("'1'", ""), ("'0'", ""), ("'0', '1'", "--keep")],
    ids=["both", "rank_1", "rank_0", "both_to_keep"],
)
def test_ranks_that_are_done_before_they_began(
    notebook: Notebook, tmp_path: Path, liars: str, options: str
) -> None:
    """Such a run is not taken to have ended well: the error names the two stages.

    The supervisor is the same afterwards, no rank is left, and the next run goes well.
    """
    before = notebook.processes().supervisor
    run = Play(notebook, f"liars-{tmp_path.name[-12:].replace('_', '-')}", tmp_path)
    notebook.good(f"{LIES}\nodd = Unpacks(say_done, {liars})")
    ran = notebook.run(f"#pragma taas --gpus 2 --name {run.name} {options}\nseen = odd")
    assert ran.ename == "RunLost", ran
    assert f"({run.name} is starting: it cannot be sorting next)" in ran.evalue
    assert f"`%taas doctor --report {run.name}` writes" in ran.evalue
    assert run.story() == "waiting acquiring starting ending sorting over"
    assert not notebook.processes().ranks
    after = notebook.processes().supervisor
    assert not before or [one.pid for one in before] == [one.pid for one in after]
    notebook.good("odd = None\n%taas release")
    assert notebook.good("#pragma taas --gpus 2\nprint('fine')").own == "fine\n"


_SITE = """
import sys
if "taas.supervisor" in sys.orig_argv:
    from taas.supervisor.stages import STEPS, Stage
    del STEPS[Stage.{before}, Stage.{after}]
"""


@pytest.fixture
def lacking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook whose supervisor's table lacks a step that runs take."""
    before, after = request.param
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(before=before, after=after))
    project = tmp_path / "project"
    project.mkdir()
    path = os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))
    notebook = Notebook(project, environ={"PYTHONPATH": path})
    notebook.good("%load_ext taas")
    yield notebook
    notebook.close()


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [("RUNNING", "FINISHING")], indirect=True)
def test_a_refused_step_ends_its_run_and_no_other(lacking: Notebook, tmp_path: Path) -> None:
    """The run whose interrupt is refused is lost; another one, in the background, ends well."""
    run = Play(lacking, "refused", tmp_path)
    lacking.good("#pragma taas --gpus 2 --name other --background\nwait_for(go)\nkept = 7")
    run.start("mine = 5; wait_for(f'{folder}/never')")
    until(lambda: len(lacking.processes().ranks) == 4)
    ranks = lacking.processes().ranks
    lacking.interrupt()
    ran = lacking.end()
    assert ran.ename == "RunLost", ran
    assert (
        "taas has lost track of it (refused is running: it cannot be finishing next)" in ran.evalue
    )
    assert "rank 0's names came back as they stood" in ran.evalue
    assert run.story() == "waiting acquiring starting running ending sorting over"
    until(lambda: len([one for one in ranks if one.is_running()]) == 2)
    report = lacking.good("%taas doctor --report refused").stdout
    assert "taas-report-refused.txt" in report
    written = (lacking.folder / "taas-report-refused.txt").read_text()
    assert "UnknownStep: refused is running: it cannot be finishing next" in written
    run.go()
    lacking.good("%taas attach other")
    assert lacking.value("mine, kept") == "5 7"


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [("ENDING", "SORTING")], indirect=True)
def test_a_run_that_cannot_even_be_ended_ends_with_its_supervisor(
    lacking: Notebook, tmp_path: Path
) -> None:
    """Nobody is held: the supervisor breaks down, and the error says by which step."""
    run = Play(lacking, "stuck", tmp_path)
    run.start("wait_for(go)\nassert os.environ['RANK'] == '0'")
    everybody = lacking.processes().ranks + lacking.processes().supervisor
    run.go()
    ran = lacking.end()
    assert ran.ename == "RunLost", ran
    assert "the supervisor broke down" in ran.evalue
    assert "stuck is ending: it cannot be sorting next" in ran.evalue
    assert gone(everybody)
    assert lacking.good("#pragma taas --gpus 2\nprint('fine')").own == "fine\n"

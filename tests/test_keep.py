"""Ranks that stay: cells of a notebook in the same processes, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil
import pytest
from blocks import block
from notebook_harness import Notebook, gone, there, until


@pytest.fixture(autouse=True)
def released(notebook: Notebook) -> Iterator[None]:
    """End the kept ranks of each test, but not their forkserver, which takes 4 s to start."""
    yield
    if notebook.processes().ranks:
        notebook.run(f"{KEEP}import os\nos.kill(os.getpid(), 9)")
    if notebook.processes().ranks:
        notebook.run("%taas release")
    (notebook.folder / "taas.toml").unlink(missing_ok=True)


KEEP = "#pragma taas --gpus 2 --keep\n"
GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
PIDS = """\
import os, torch.distributed as dist
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
"""


def pids_of(notebook: Notebook) -> list[int]:
    """Ask the ranks for their process ids, by a collective of an earlier cell's group."""
    notebook.good(KEEP + PIDS)
    return [int(pid) for pid in notebook.value("*pids").split()]


def test_the_next_cell_runs_in_the_same_ranks(notebook: Notebook) -> None:
    """They have what only they had, their group, and streams that an earlier cell took hold of."""
    notebook.good(
        KEEP + GROUP + PIDS + "import sys\nown, out = iter(range(9)), sys.stdout\nnext(own)"
    )
    first = notebook.value("*pids")
    ran = notebook.good(KEEP + PIDS + "print(next(own))\nprint('again', file=out)")
    assert (ran.own, notebook.value("*pids")) == ("1\nagain\n", first)
    shown = notebook.good("%taas status").displays[0]["data"]["text/plain"]
    assert re.search(r"done, ranks kept +2 ranks +idle \d.*MB", shown)


def test_a_wrapped_model_is_trained_on(notebook: Notebook) -> None:
    """The wrapper stays in the ranks.

    What it notes there of its own work is no change of anything here.
    """
    notebook.good(
        "import torch\nnet = torch.nn.Linear(2, 1)\nclass Trainer: pass\ntrainer = Trainer()"
    )
    notebook.good(
        KEEP
        + GROUP
        + block("""
            model = trainer.model = torch.nn.parallel.DistributedDataParallel(net)
            opt = torch.optim.SGD(model.parameters(), lr=1.0)
        """)
    )
    for _ in range(2):
        before = notebook.value("net.weight.tolist()")
        ran = notebook.good(
            KEEP
            + block("""
                trainer.model(torch.ones(1, 2)).sum().backward()
                opt.step()
                print(type(model).__name__)
            """)
        )
        assert ran.stdout == "DistributedDataParallel\n"
        assert notebook.value("net.weight.tolist()") != before
        assert notebook.value("model is net, trainer.model is net") == "True True"
    ran = notebook.good(KEEP + "model = torch.nn.parallel.DistributedDataParallel(net)")
    assert not ran.stdout


def test_a_sharded_model_is_trained_on(notebook: Notebook) -> None:
    """It stays in the ranks, with a line, and one more where the notebook's own replaces it."""
    notebook.good("import torch\nnet = torch.nn.Sequential(torch.nn.Linear(2, 2))")
    ran = notebook.good(
        KEEP
        + GROUP
        + block("""
            from torch.distributed.fsdp import fully_shard
            fully_shard(net)
            opt = torch.optim.SGD(net.parameters(), lr=1.0)
        """)
    )
    said = re.findall(
        r"did not come back: (.*): rank 0 has only a shard of it. Gather it .*\n", ran.stdout
    )
    assert [{*names.split(", ")} for names in said] == [{"net", "opt"}]
    assert ran.stdout.count("did not come back") == ran.stdout.count("shard of it") == 1
    train = (
        "net(torch.ones(1, 2)).sum().backward()\nopt.step()\nprint(type(net[0].weight).__name__)"
    )
    for _ in range(2):
        ran = notebook.good(KEEP + train)
        assert ran.own == "DTensor\n"
        assert ran.stdout.count("\n") < 3
    notebook.good("torch.nn.init.ones_(net[0].weight)")
    ran = notebook.good(KEEP + "print(type(net[0].weight).__name__)")
    assert ran.own == "Parameter\n"
    assert "net: changed in the notebook since the last cell" in ran.stdout


@pytest.mark.parametrize("cell", [
    "raise ValueError('wrong')",
    "if dist.get_rank():\n    raise ValueError('wrong')\ndist.barrier()",
])  # fmt: skip
def test_an_error_leaves_ranks_names_and_a_group(notebook: Notebook, cell: str) -> None:
    """The group that was broken off is made anew, and the cell says so."""
    notebook.good(KEEP + GROUP + PIDS + "own = iter(range(9))")
    first = notebook.value("*pids")
    ran = notebook.run(KEEP + "next(own)\n" + cell)
    assert "wrong" in ran.traceback
    assert "All ranks stay; rank 0's names came back as they stood." in ran.evalue
    ran = notebook.good(KEEP + PIDS + "print(next(own))")
    assert "made anew" in ran.stdout
    assert (ran.own, notebook.value("*pids")) == ("1\n", first)


def test_a_group_made_anew_is_as_the_cell_wanted_it(notebook: Notebook) -> None:
    """Its time-out, and on GPUs its device, are those of the call that made the first one."""
    notebook.good(
        KEEP
        + block("""
            import datetime, torch, torch.distributed as dist
            dist.init_process_group(
                'gloo', timeout=datetime.timedelta(seconds=77), device_id=torch.device('cuda', 0)
            )
        """)
    )
    ran = notebook.run(KEEP + "if dist.get_rank():\n    raise ValueError('wrong')\ndist.barrier()")
    assert "wrong" in ran.traceback
    ran = notebook.good(
        KEEP
        + block("""
            options = getattr(dist.group.WORLD._get_backend(torch.device('cpu')), 'options', None)
            print(options and options._timeout.seconds)
        """)
    )
    assert "made anew" in ran.stdout
    assert ran.own in ("77\n", "None\n")  # gloo has options since torch 2.9


SLOW = """
import os, pathlib, time
class Slow:
    waits = ""
    def wait(self, where):
        if self.waits == where and os.getpid() == {kernel}:
            for beat in range(10**9):
                pathlib.Path("waits").write_text(str(beat)); time.sleep(0.01)
    def __getstate__(self): self.wait("packed"); return vars(self)
    def __setstate__(self, state): vars(self).update(state); self.wait("unpacked")
"""


@pytest.mark.parametrize(
    "changed", ["nothing", "a name is gone", "a name is another", "something in a list"]
)
def test_an_interrupt_while_a_cell_is_captured_changes_nothing_of_what_ranks_hold(
    notebook: Notebook, changed: str
) -> None:
    """The next cell finds what only the ranks have, and else what the notebook has."""
    notebook.good(SLOW.format(kernel=notebook.pid) + "x, held, slow = [1], [2], Slow()")
    notebook.good(KEEP + GROUP + PIDS + "own = iter(range(9)); next(own); x; held; slow")
    first = notebook.value("*pids")
    change = {
        "nothing": "",
        "a name is gone": "del x",
        "a name is another": "x = [3]",
        "something in a list": "held[0] = 4",
    }
    notebook.good(f"slow.waits = 'packed'\n{change[changed]}")
    notebook.start(KEEP + "slow, x, held")
    until((notebook.folder / "waits").exists)
    notebook.interrupt()
    assert notebook.end().ename == "KeyboardInterrupt"
    (notebook.folder / "waits").unlink()
    notebook.good("slow.waits = ''")
    ran = notebook.good(
        KEEP + PIDS + "there = {**globals()}\nprint(next(own), there.get('x'), held, slow.waits)"
    )
    expected = {
        "a name is gone": "1 None [2]",
        "a name is another": "1 [3] [2]",
        "something in a list": "1 [1] [4]",
    }
    assert ran.own.strip() == expected.get(changed, "1 [1] [2]")
    assert notebook.value("*pids") == first


def test_after_an_interrupt_while_names_are_unpacked_ranks_have_what_the_notebook_has(
    notebook: Notebook,
) -> None:
    """It does not know what they hold: what it sends is all they have."""
    notebook.good(SLOW.format(kernel=notebook.pid) + "x, gone = [1], [2]")
    notebook.good(KEEP + GROUP + PIDS + "x, gone")
    first = notebook.value("*pids")
    notebook.start(KEEP + "slow = Slow(); slow.waits = 'unpacked'; x[0] = 5; own = 7")
    until((notebook.folder / "waits").exists)
    notebook.interrupt()
    waits = notebook.folder / "waits"
    beat = int(waits.read_text() or 0)
    until(lambda: int(waits.read_text() or 0) > beat + 2)  # two presses at once are one to Python
    notebook.interrupt()
    assert notebook.end().ename == "KeyboardInterrupt"
    notebook.good("x = [3]; del gone")
    notebook.good("globals().pop('slow', None); globals().pop('own', None)")
    ran = notebook.good(
        KEEP
        + PIDS
        + "known = [n for n in ('gone', 'own', 'slow') if n in globals()]\nprint(x, known)"
    )
    assert ran.own == "[3] []\n"
    assert notebook.value("*pids") == first


def test_an_interrupt_leaves_ranks_names_and_a_group(notebook: Notebook) -> None:
    """Rank 0 computes, rank 1 waits for it in a barrier."""
    notebook.good(KEEP + GROUP + PIDS)
    first = notebook.value("*pids")
    notebook.start(
        KEEP + "print('on')\nx = 1\nwhile dist.get_rank() == 0:\n    pass\ndist.barrier()"
    )
    notebook.wait_for("on")
    notebook.interrupt()
    ran = notebook.end()
    assert ran.ename == "KeyboardInterrupt"
    assert (
        "was interrupted: all its ranks stay; rank 0's names came back as they stood" in ran.evalue
    )
    assert notebook.value("x") == "1"
    assert [str(pid) for pid in pids_of(notebook)] == first.split()


def test_a_rank_that_dies_in_a_cell_takes_the_others_along(notebook: Notebook) -> None:
    """The cell says that they are gone; the next one has new ranks, and the notebook's names."""
    notebook.good(KEEP + GROUP + PIDS + "kept = 5")
    before = [int(pid) for pid in notebook.value("*pids").split()]
    ran = notebook.run(
        KEEP
        + block("""
            import os, signal
            if dist.get_rank():
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        """)
    )
    assert "its ranks are gone" in ran.stdout
    ran = notebook.good(KEEP + "print(kept, dist.is_initialized())")
    assert ran.own == "5 False\n"
    assert not there(before)


def test_release_ends_them_and_reload_ext_does_not(notebook: Notebook) -> None:
    """It frees what they had, which the next cell says."""
    notebook.good(KEEP + GROUP + PIDS)
    before = [psutil.Process(int(pid)) for pid in notebook.value("*pids").split()]
    notebook.good("%reload_ext taas")
    assert notebook.good(KEEP + f"print(os.getpid() == {before[0].pid})").own == "True\n"
    assert "2 kept ranks ended" in notebook.good("%taas release").stdout
    assert gone(before)
    ran = notebook.good(KEEP + "print(dist.is_initialized())")
    assert ran.own == "False\n"
    assert "%taas release, or %unload_ext taas, ended them" in ran.stdout


def test_they_end_when_no_cell_comes(notebook: Notebook) -> None:
    """After the time that taas.toml gives."""
    (notebook.folder / "taas.toml").write_text('[keep]\nidle = "1s"\n')
    notebook.good(KEEP + GROUP + PIDS)
    pids = notebook.value("*pids").split()
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))
    assert "[keep] idle" in notebook.good(KEEP + "print(1)").stdout


def test_registered_loaders_deliver_to_them(notebook: Notebook) -> None:
    """Each cell has data workers of its own; one without has the loader itself."""
    notebook.good(
        block("""
            import taas, torch
            from torch.utils.data import DataLoader
            numbers = DataLoader(torch.arange(12), batch_size=2)
            taas.register(numbers)
        """)
    )
    mine, all_of_it = (" --cpus 1", "[0, 4, 8]"), ("", "[0, 2, 4, 6, 8, 10]")
    for options, seen in (mine, mine, all_of_it, mine):
        notebook.good(KEEP.rstrip() + options + "\nseen = [int(batch[0]) for batch in numbers]")
        assert notebook.value("seen") == seen


def test_another_shape_is_refused(notebook: Notebook) -> None:
    """And they stay; a plain cell has ranks of its own."""
    notebook.good(KEEP + GROUP + PIDS)
    first = notebook.value("*pids")
    ran = notebook.run("#pragma taas --gpus 3 --keep\nprint(1)")
    assert "have another number (2) than this cell asks for (3)" in ran.evalue
    assert "%taas release" in ran.evalue
    ran = notebook.run(KEEP.rstrip() + " --rank-writes deny\nprint(1)")
    assert "another --rank-writes (discard) than this cell asks for (deny)" in ran.evalue
    assert (
        notebook.good("#pragma taas --gpus 2\nimport os\nprint(os.getpid())").own.strip()
        not in first
    )
    assert [str(pid) for pid in pids_of(notebook)] == first.split()


def test_arguments_of_a_rank_are_the_notebooks(notebook: Notebook) -> None:
    """The kernel's own are none in ranks.

    What a cell makes of them comes back, without what launchers give a rank.
    """
    notebook.good("import sys; own = sys.argv[0]")
    first = notebook.good(KEEP + "print(sys.argv)  # --local_rank\nsys.argv[1:1] = ['--lr', '1']")
    assert first.own == "['<cell>', '--local_rank=0']\n"
    assert notebook.value("sys.argv == [own, '--lr', '1']") == "True"
    notebook.good("sys.argv[2] = '2'")
    parsed = notebook.good(KEEP + "print(sys.argv[0] == own, sys.argv[1:])\nsys.argv += ['--fast']")
    assert parsed.own == "True ['--lr', '2', '--local_rank=0']\n"
    assert notebook.value("sys.argv == [own, '--lr', '2', '--fast']") == "True"
    notebook.good(KEEP + "sys.argv = ['train.py', *sys.argv[1:2]]")
    assert notebook.value("sys.argv") == "['train.py', '--lr']"

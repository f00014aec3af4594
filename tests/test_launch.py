"""A cell with a header: refused before anything starts, or run in ranks as the contract says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import block
from notebook_harness import Notebook

from taas.engines.local import check_memory
from taas.errors import EngineError

TORCHRUN = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK"
    " ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"
    " TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS"
)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("#!g9.9\n#pragma taas --gpus 8", "g9.9"),
        ("#!g2.8\n#pragma taas --gpus 12", "--gpus 12"),
        ("#pragma taas --gpu 2", "--gpus"),
        ("#pragma taas --gpus 2 --cpus 2", "--cpus"),
        ("#pragma taas --gpus 2 --keep --background", "--background"),
        ("x = 1\n#pragma taas --gpus 2", "below code"),
        ("#pragma taas --gpus '2", "quot"),
        ("#pragma tass --gpus 2", "#pragma taas"),
        ("%%time\n#pragma taas --gpus 2", "below code"),
        ("%%taas --gpus 2\n#pragma taas --gpus 4", "leave one of the two out"),
        ("%%taas --gpus 2\nx = 1\n#!g2.8", "leave one of the two out"),
        ("#pragma taas --gpus 2 --shared " + __file__, "allowed is a directory"),
        ("#pragma taas --gpus 2 --shared .", "allowed is a directory"),
        ("#pragma taas --gpus 2 --shared checkpoints/../..", "allowed is a directory"),
        ("#pragma taas --gpus 2 --shared ../elsewhere/x", "allowed is a directory"),
        (
            "%%taas status",
            "status is no option: leave it out, or put a value in quotes; allowed is --on",
        ),
        ("#pragma taas --gpus 2 --return nosuch", "neither the notebook has nor the cell makes"),
    ],
)
def test_a_wrong_header_is_one_line(notebook: Notebook, header: str, word: str) -> None:
    """It says what is wrong, without a traceback, and the body does not run, here or anywhere."""
    ran = notebook.run(header + "\nprint('the body ran')")
    assert ran.status == "error"
    assert ran.stderr.startswith("UsageError: ")
    assert word in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.traceback == ""
    assert "the body ran" not in ran.stdout


def test_a_shared_directory_that_is_made_is_said(notebook: Notebook) -> None:
    """One inside the project is made before the run, in a line; one that is there needs no word."""
    cell = block("""
        #pragma taas --gpus 2 --shared deep/new.txt
        import os
        open('deep/new.txt/' + os.environ['RANK'], 'w').close()
    """)
    said = "taas: made the directory deep/new.txt, where every rank may write (--shared)\n"
    assert said in notebook.good(cell).stdout
    assert "made the directory" not in notebook.good(cell).stdout
    assert notebook.value("sorted(os.listdir('deep/new.txt'))") == "['0', '1']"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("#pragma taas --gpus 2", "write the code below the header"),
        ("#!g2.8\n#pragma taas --gpus 8\n\n# nothing yet", "write the code below the header"),
        ("%%taas --gpus 2", "write the code below the header"),
        ("%taas --gpus 2", "type %%taas --gpus 2 above its code"),
    ],
)
def test_a_line_without_a_cell_is_an_error(notebook: Notebook, cell: str, said: str) -> None:
    """A header alone starts no run; a cell's options after ``%taas`` say where they belong."""
    ran = notebook.run(cell)
    assert ran.status == "error"
    assert said in ran.stderr
    assert ran.stderr.startswith("UsageError: ")
    assert ran.stderr.count("\n") == 1
    assert not ran.displays


def test_more_ranks_than_there_is_memory_for() -> None:
    """They are not begun: a machine without memory would end other programs."""
    check_memory(2)
    with pytest.raises(
        EngineError, match="1,000,000 ranks on this machine need 25000 GB of memory"
    ):
        check_memory(1_000_000)


def test_syntax_errors_belong_to_the_notebook(notebook: Notebook) -> None:
    """A cell that does not compile starts nothing, and is shown as IPython shows any such cell."""
    # older releases of IPython count on by two after this
    notebook.run("#pragma taas --nosuch\npass")
    for header in ("#pragma taas --gpus 2", "%%taas --gpus 2"):
        ran = notebook.run(f"{header}\nfor\n")
        assert ran.ename == "SyntaxError"
        assert ran.traceback.splitlines()[0].strip() == f"Cell In[{ran.count}], line 2"
        assert "taas/" not in ran.traceback


def test_a_function_of_a_taas_cell_knows_its_cell(notebook: Notebook) -> None:
    """An error in it, raised here later, names the cell and line where it was written."""
    count = notebook.good("#pragma taas --gpus 1\n\ndef halve(n):\n    return 1 / n\n").count
    assert f"Cell In[{count}], line 4, in halve(n)" in notebook.run("halve(0)").traceback


def test_a_needed_name_that_cannot_travel_stops_the_run(notebook: Notebook) -> None:
    """The message names the variable, the path inside it, and its type."""
    notebook.good(
        "import threading\nclass Job: pass\njob = Job(); job.parts = {'lock': threading.Lock()}"
    )
    ran = notebook.run("#pragma taas --gpus 2\nprint('the body ran', job)")
    assert ran.ename == "CaptureError"
    assert "job.parts['lock']" in ran.evalue
    assert ran.traceback == f"CaptureError: {ran.evalue}"
    assert "the body ran" not in ran.stdout


def test_the_environment_of_a_rank_is_torchruns(notebook: Notebook) -> None:
    """Every variable that torchrun sets is set, with torchrun's meaning."""
    body = block(f"""
        import json, os
        print(json.dumps({{name: os.environ.get(name) for name in {TORCHRUN.split()!r}}}))
    """)
    found = json.loads(notebook.good("#pragma taas --gpus 2\n" + body).own)
    assert None not in found.values()
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("0", "2", "2")
    assert found["OMP_NUM_THREADS"] == "1"


def test_several_vms_are_several_agents(notebook: Notebook) -> None:
    """16 GPUs of g2.8 are two VMs: ranks know their VM, and all meet in one group."""
    ran = notebook.good(
        block("""
            #!g2.8
            #pragma taas --gpus 16
            import os, torch, torch.distributed as dist
            dist.init_process_group('nccl')
            total = torch.ones(1, device='cuda')
            dist.all_reduce(total)
            places = [None] * 16
            mine = int(os.environ['GROUP_RANK']), int(os.environ['LOCAL_RANK'])
            dist.all_gather_object(places, (*mine, torch.cuda.device_count()))
            expected = [(vm, local, 8) for vm in range(2) for local in range(8)]
            print(total.item(), sorted(places) == expected)
        """),
        seconds=170,
    )
    assert ran.own == "16.0 True\n"
    assert len(notebook.processes().agents) == 2


def test_an_instance_type_alone_is_one_process_with_all_its_gpus(notebook: Notebook) -> None:
    """``#!g2.4`` without a pragma runs one process that sees four GPUs."""
    body = "import os, torch\nprint(os.environ['WORLD_SIZE'], torch.cuda.device_count())"
    assert notebook.good("#!g2.4\n" + body).own == "1 4\n"


def test_variables_in_the_header(notebook: Notebook) -> None:
    """``{name}`` and ``$name`` are filled in on the header lines, and not in the body."""
    notebook.good("count = 2")
    ran = notebook.good(
        "#pragma taas --gpus {count}\nimport os\nprint('{count}', os.environ['WORLD_SIZE'])"
    )
    assert ran.own == "{count} 2\n"


def test_the_cell_magic_is_the_same_thing(notebook: Notebook) -> None:
    """``%%taas --on g2.2 --gpus 2``."""
    ran = notebook.good("%%taas --on g2.2 --gpus 2\nimport os\nprint(os.environ['WORLD_SIZE'])")
    assert ran.own == "2\n"


def test_names_come_back_in_place(notebook: Notebook) -> None:
    """After the run the notebook is as if rank 0 had run the cell here."""
    notebook.good(
        block("""
            import torch
            from torch import nn
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=.1)
            losses = []; alias = losses; before = net.weight.clone(); where = id(net.weight)
            def step():
                opt.zero_grad(); loss = net(torch.ones(4, 2)).square().mean()
                loss.backward(); opt.step(); losses.append(loss.item())
        """)
    )
    notebook.good("#pragma taas --gpus 2\nfor _ in range(3): step()\nbest = min(losses)")
    assert notebook.value("len(alias), best == alias[-1], id(net.weight) == where") == "3 True True"
    assert notebook.value("bool((net.weight != before).any())") == "True"


def test_a_value_of_each_rank_is_collected(notebook: Notebook) -> None:
    """Copies, of the notebook's own classes.

    What does not come is None, and named, in one line for all that have that reason.
    """
    notebook.good("import taas, torch\nclass Best:\n    pass")
    ran = notebook.good(
        block("""
            #pragma taas --gpus 3 --collect loss,best,odd,gone --return none
            import os
            rank = int(os.environ['RANK'])
            loss = (torch.ones(1000, requires_grad=True) * rank).cuda()[:2]
            best = Best(); best.of = [rank]
            odd = print if rank == 1 else lambda: None
        """)
    )
    said = [line.partition(": ")[2].partition(" was")[0] for line in ran.stdout.splitlines()]
    assert sorted(said) == ["'gone' of ranks 0–2", "'odd' of ranks 0, 2"]
    assert notebook.value("[(x.tolist(), x.requires_grad) for x in taas.collected['loss']]") == str(
        [([float(rank)] * 2, False) for rank in range(3)]
    )
    assert notebook.value("[(type(x) is Best, x.of) for x in taas.collected['best']]") == str(
        [(True, [rank]) for rank in range(3)]
    )
    assert notebook.value("taas.collected['odd']") == str([None, print, None])
    notebook.run(
        block("""
            #pragma taas --gpus 2 --collect loss
            import os
            loss = os.environ['RANK']
            if loss == '1': 1 / 0
        """)
    )
    assert notebook.value("taas.collected['loss'][1]") == "1"  # as it stood


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("taas", ("torch", "zmq", "ray", "numpy", "IPython", "msgspec")),
        ("taas.agent.loop", ("torch", "numpy", "IPython", "ray", "cloudpickle")),
        ("taas.delivery.coordinator", ("torch",)),
    ],
)
def test_importing_is_light(module: str, heavy: tuple[str, ...]) -> None:
    """``import taas`` costs nothing.

    An agent that waits, and the coordinator, have none of the ranks' libraries.
    """
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_name_to_return_that_is_not_there_is_said(notebook: Notebook) -> None:
    """Before the run where the code shows it, which makes a typing error cheap; else afterwards."""
    ran = notebook.run("#pragma taas --gpus 1 --return resullt,made\nresult = made = 1")
    assert "--return resullt, which neither the notebook has nor the cell makes" in ran.stderr
    ran = notebook.good(
        "#pragma taas --gpus 1 --return best,made\nmade = 1\nif made > 1:\n    best = 2"
    )
    assert (
        ran.stdout
        == "taas: did not come back: best: --return asks for it, and the cell made no such name\n"
    )
    assert notebook.value("made") == "1"


def test_what_cannot_come_back_is_one_line(notebook: Notebook) -> None:
    """Names that cannot be pickled stay behind with their reasons; the others come."""
    ran = notebook.good(
        block("""
            #pragma taas --gpus 1
            import threading
            lock, deep, fine = threading.Lock(), [threading.Lock()], 3
        """)
    )
    assert re.fullmatch(
        r"taas: did not come back: lock: lock is a _thread.lock, .*; deep: deep\[0\] is a .*\n",
        ran.stdout,
    )
    assert notebook.value("fine") == "3"


def test_what_a_cell_began_is_ended_as_at_the_end_of_a_program(notebook: Notebook) -> None:
    """Threads and executors finish; their names come back, and their files are whole."""
    notebook.good(
        block("""
            #pragma taas --gpus 2
            import concurrent.futures, sys, threading, weakref
            go, saved = threading.Event(), []
            class Gone: pass
            sys.held = weakref.proxy(Gone())
            def save(name):
                go.wait()
                saved.append(open(name, 'w').write('saved'))
            threading.Thread(target=save, args=('a.txt',)).start()
            pool = concurrent.futures.ThreadPoolExecutor(1); done = pool.submit(save, 'b.txt')
            log = open('log.csv', 'w'); print('one', file=log)
            import atexit; threading._register_atexit(go.set)
        """)
    )
    assert (
        notebook.value("saved, [open(name).read() for name in ('a.txt', 'b.txt', 'log.csv')]")
        == "[5, 5] ['saved', 'saved', 'one\\n']"
    )


def test_a_model_that_an_earlier_cell_has_compiled(notebook: Notebook) -> None:
    """A rehearsal runs it eagerly, as one that the cell compiles."""
    notebook.good("import torch\nmodel = torch.compile(torch.nn.Linear(4, 1))")
    notebook.good("#pragma taas --gpus 2\nmodel(torch.ones(1, 4)).sum().backward()")
    assert notebook.value("model.weight.grad.tolist()") == "[[1.0, 1.0, 1.0, 1.0]]"


def test_loaders_whose_workers_persist(notebook: Notebook) -> None:
    """They are each process' own; also where a cell has asked the loader before."""
    # A kernel that is killed leaves the named locks of workers that were not forked, with and
    # without taas (Python 3.14).
    notebook.good("import multiprocessing\nmultiprocessing.set_start_method('fork', force=True)")
    notebook.good(
        block("""
            import torch
            from torch.utils.data import DataLoader
            workers = dict(num_workers=1, persistent_workers=True)
            here = same = DataLoader(torch.arange(3), **workers)
            first = next(iter(here))
        """)
    )
    ran = notebook.good(
        block("""
            #pragma taas --gpus 2
            seen = [*map(int, here)]; here.note = 1
            there = DataLoader(torch.arange(2), **workers); seen += map(int, there)
        """)
    )
    assert "did not come back" not in ran.stdout
    assert (
        notebook.value("seen, [*map(int, here)], [*map(int, there)], here is same, same.note")
        == "[0, 1, 2, 0, 1] [0, 1, 2] [0, 1] True 1"
    )


@pytest.mark.parametrize(
    "ask", ["input('how many? ')", "breakpoint()", "import pdb; pdb.set_trace()"]
)
def test_a_question_where_nobody_can_answer(notebook: Notebook, ask: str) -> None:
    """Nobody waits for ever for an answer that cannot come."""
    ran = notebook.run(f"#pragma taas --gpus 2\n{ask}\nprint('after')")
    assert ran.ename == "CellFailed"
    assert "StdinNotImplementedError" in ran.evalue


def test_a_module_that_was_edited_after_its_import_is_named(notebook: Notebook) -> None:
    """Ranks run the file, the notebook what it imported.

    One line says so, in cells that use it, until it is reloaded.
    """
    file, said = notebook.folder / "recipe.py", "recipe: edited since this notebook imported it"
    file.write_text("def rate(): return 1\n")
    notebook.good("import importlib, os, recipe\nfrom recipe import rate")
    cell = "#pragma taas --gpus 2\nr = rate(), recipe.rate()"
    assert said not in notebook.good(cell).stdout
    file.write_text("def rate(): return 22\n")
    ran = notebook.good(cell)
    assert ran.stdout.count(said) == 1
    assert notebook.value("r, rate(), recipe.rate()") == "(22, 22) 1 1"
    assert said not in notebook.good("#pragma taas --gpus 2\nx = 1").stdout
    notebook.good("importlib.reload(recipe)")
    assert said not in notebook.good("#pragma taas --gpus 2\nr = recipe.rate()").stdout


def test_modules_of_the_project_called_like_pythons(tmp_path: Path) -> None:
    """taas' own processes do not take them for those.

    As in the notebook, what is there already is used.
    """
    book = Notebook(tmp_path)
    try:
        book.good("%load_ext taas")
        for name in ("queue", "random", "secrets", "select", "socket", "tempfile", "torch"):
            (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the project')\n")
        ran = book.good("#pragma taas --gpus 2\nimport random, torch\nprint(torch.ones(1).item())")
        assert ran.own == "1.0\n"
    finally:
        book.close()


def test_importing_activates_and_unloading_undoes_it(notebook: Notebook) -> None:
    """A plain import activates the header, also twice; ``%unload_ext`` makes it a comment."""
    notebook.good("import taas\n%reload_ext taas")
    notebook.good("%unload_ext taas")
    assert (
        notebook.good("#pragma taas --gpus 2\nimport os\nprint(os.environ.get('WORLD_SIZE'))").own
        == "None\n"
    )
    notebook.good("%load_ext taas")
    assert (
        notebook.good("#pragma taas --gpus 2\nimport os\nprint(os.environ.get('WORLD_SIZE'))").own
        == "2\n"
    )


BACKEND = """
import torch, torch.distributed as dist
dist.init_process_group({asked})
backend = dist.get_backend()
group = dist.new_group(backend="gloo")
total = torch.ones(1); dist.all_reduce(total, group=group)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ("--backend gloo", '"mpi", device_id=torch.device("cuda", 0)', "gloo"),
        ("--rehearse --backend nccl", '"gloo"', "nccl"),
    ],
)
def test_the_headers_backend_is_used(
    notebook: Notebook, options: str, asked: str, told: str
) -> None:
    """Whatever the cell asks for: NCCL is rehearsed, and answers as it would on GPUs."""
    notebook.good(f"#pragma taas --gpus 2 {options}{BACKEND.format(asked=asked)}")
    assert notebook.value("backend, total.item()") == f"{told} 2.0"


def test_a_backend_that_is_not_there_is_refused(notebook: Notebook) -> None:
    """It is said before the cell's first line runs."""
    ran = notebook.run("#pragma taas --gpus 2 --backend mpi\nprint('the body ran')")
    assert "--backend mpi: this torch has no mpi; it was built with gloo" in ran.evalue
    assert "the body ran" not in ran.stdout


def test_a_cpu_type_has_no_gpu(notebook: Notebook) -> None:
    """``#!c1.4`` runs one process, in which CUDA is what it is here."""
    ran = notebook.good("#!c1.4\nimport torch\nprint(torch.cuda.is_available())")
    assert ran.own == "False\n"

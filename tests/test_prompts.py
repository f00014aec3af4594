"""Ranks ask the person at the keyboard: input, getpass, debuggers."""

from __future__ import annotations

import re

import pytest
from blocks import block
from notebook_harness import Notebook, terminal

pytestmark = pytest.mark.slow


def test_input_and_getpass_as_in_a_plain_cell(notebook: Notebook) -> None:
    """Each prompt comes once all before it is shown; the answer is the cell's."""
    notebook.start(
        block("""
            #pragma taas --gpus 1
            import getpass
            print('before')
            name = input('name? ')
            secret = getpass.getpass()
        """),
        keyboard=True,
    )
    assert notebook.asked() == "name? "
    assert not notebook.hidden
    notebook.answer("Ada")
    assert notebook.asked() == "Password: "
    assert notebook.hidden
    notebook.answer("x y")
    ran = notebook.end()
    assert ran.status == "ok", ran
    assert ran.own == "before\n"
    assert notebook.value("name, secret") == "Ada x y"


def test_a_breakpoint_in_one_rank(notebook: Notebook) -> None:
    """What it prints is shown though the rank's output is not.

    The others wait in a collective, and all go on.
    """
    notebook.start(
        block("""
            #pragma taas --gpus 2 --hang-timeout 0.5 --name pondered
            import torch, torch.distributed as dist
            dist.init_process_group('nccl')
            rank = dist.get_rank()
            x = torch.ones(1) * rank
            if rank == 1:
                breakpoint()
                x += 1
            dist.all_reduce(x)
            total = x.item()
        """),
        keyboard=True,
    )
    assert notebook.asked() == "[rank 1] (Pdb) "
    notebook.wait_for("[rank 1] -> ")
    notebook.answer("p rank * 100")
    assert notebook.asked() == "[rank 1] (Pdb) "
    assert "[rank 1] 100" in notebook.wait_for("100").stdout
    for _ in range(3):  # a person looks around for longer than a run may hang
        assert terminal("stacks", "pondered").returncode == 0
    notebook.answer("x += 10")
    assert notebook.asked() == "[rank 1] (Pdb) "
    notebook.answer("n")
    notebook.asked()
    notebook.answer("c")
    ran = notebook.end()
    assert ran.status == "ok", ran
    assert not [update for update in ran.updates if "progress" in update["data"]["text/plain"]]
    assert notebook.value("total") == str(0.0 + 1 + 10 + 1)


OPENS = {
    "breakpoint() in a statement of the cell": (
        "if True:\n    breakpoint()\n    pass\n",
        ["<module>()"],
    ),
    "breakpoint() as the last line": ("x = 1\nbreakpoint()\n", ["<module>()"]),
    "in a function of an earlier cell": ("z = helper(3)\n", ["<module>()", "helper()"]),
    "pdb.set_trace() in a class": (
        """\
import pdb
class A:
    def f(self):
        pdb.set_trace()
        return 1
A().f()
""",
        ["<module>()", "f()"],
    ),
    "behind a top-level await": (
        """\
import asyncio
async def g():
    await asyncio.sleep(0)
    breakpoint()
    return 1
await g()
""",
        ["<module>()", "g()"],
    ),
    "after an error": ("def f():\n    1 / 0\nf()\n", ["<module>()", "f()"]),
}


@pytest.mark.parametrize("how", OPENS)
def test_a_debugger_shows_the_users_frames_only(notebook: Notebook, how: str) -> None:
    """``w`` has neither frames of IPython and taas nor those of the processes' start.

    ``up`` ends at the cell.
    """
    body, frames = OPENS[how]
    notebook.good("def helper(x):\n    y = x + 1\n    breakpoint()\n    return y\n")
    post_mortem = " --post-mortem" if how == "after an error" else ""
    notebook.start(f"#pragma taas --gpus 1{post_mortem}\n{body}", keyboard=True)
    assert notebook.asked() == "(Pdb) "
    notebook.answer("print('stack')")
    for command in ("w", "print('end')", *["up"] * len(frames), "p __name__, 'there'", "q"):
        notebook.asked()
        notebook.answer(command)
    ran = notebook.end()
    stack = ran.stdout.partition("stack\n")[2].partition("end\n")[0]
    assert re.findall(r"\)((?:<module>|\w+)\(\))", stack) == frames, stack
    assert "*** Oldest frame" in ran.stdout
    assert "('__main__', 'there')" in ran.stdout


def test_next_goes_from_statement_to_statement(notebook: Notebook) -> None:
    """As in a script, though IPython runs each as code of its own.

    Past the last one the cell is through.
    """
    notebook.start(
        "#pragma taas --gpus 1\nbreakpoint()\na = 1\nfor b in range(1):\n    c = b\nd = 4\n",
        keyboard=True,
    )
    for _ in range(6):
        notebook.asked()
        notebook.answer("n")
    ran = notebook.end()
    assert ran.status == "ok", ran
    printed = re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout)  # pdb has colours, from Python 3.14 on
    steps = re.findall(r"^-> (.*)", printed, re.MULTILINE)
    assert steps == [
        "breakpoint()",
        "a = 1",
        "for b in range(1):",
        "c = b",
        "for b in range(1):",
        "d = 4",
    ]
    assert notebook.value("a, c, d") == "1 0 4"


def test_two_ranks_take_turns(notebook: Notebook) -> None:
    """One is led to its end before the other one is asked."""
    notebook.start(
        "#pragma taas --gpus 2\nimport os\nfirst = input('a') + input('b') + input('c')\n",
        keyboard=True,
    )
    prompts = []
    for number in range(6):
        prompts.append(notebook.asked())
        notebook.answer(str(number))
    assert notebook.end().status == "ok"
    assert sorted(prompts[:3]) == sorted(f"{prompts[0][:9]}{letter}" for letter in "abc")
    assert {prompt[:9] for prompt in prompts} == {"[rank 0] ", "[rank 1] "}
    assert len({prompt[:9] for prompt in prompts[3:]}) == 1
    assert notebook.value("first") in ("012", "345")


def test_quitting_a_debugger_ends_the_run_in_all_ranks(notebook: Notebook) -> None:
    """The error says so, and no rank is left."""
    notebook.start(
        block("""
            #pragma taas --gpus 2
            import torch.distributed as dist
            dist.init_process_group('gloo')
            if dist.get_rank() == 1:
                from IPython.core.debugger import set_trace; set_trace()
                pass
            dist.barrier()
        """),
        keyboard=True,
    )
    assert notebook.asked() == "[rank 1] ipdb> "
    notebook.answer("q")
    ran = notebook.end()
    assert ran.ename == "CellFailed"
    assert "raised BdbQuit: its debugger was quit" in ran.evalue
    assert not notebook.processes().ranks


def test_an_interrupt_at_the_prompt(notebook: Notebook) -> None:
    """It means the run, and one press is enough."""
    notebook.start(
        block("""
            #pragma taas --gpus 2
            import os
            if os.environ['RANK'] == '1':
                breakpoint()
                pass
        """),
        keyboard=True,
    )
    notebook.asked()
    notebook.interrupt()
    assert notebook.end().ename == "KeyboardInterrupt"
    assert not notebook.processes().ranks


def test_post_mortem(notebook: Notebook) -> None:
    """The debugger opens where the error was, in its rank, with the error shown above."""
    notebook.start(
        block("""
            #pragma taas --gpus 2 --post-mortem
            import os
            rank = int(os.environ['RANK'])
            def divide(a):
                return a / (1 - rank)
            divide(7)
        """),
        keyboard=True,
    )
    assert notebook.asked() == "[rank 1] (Pdb) "
    assert "ZeroDivisionError" in notebook.wait_for("-> ").stdout
    notebook.answer("p a * 6")
    notebook.asked()
    assert "42" in notebook.wait_for("42").stdout
    notebook.answer("q")
    ran = notebook.end()
    assert ran.ename == "CellFailed"
    assert "ZeroDivisionError" in ran.evalue


def test_a_background_run_asks_who_attaches(notebook: Notebook) -> None:
    """It waits for an answer; its line says where one can be given."""
    notebook.good("#pragma taas --gpus 2 --background --name shy\nx = input('who? ')")
    notebook.start("%taas attach shy", keyboard=True)
    prompts = []
    for _ in range(2):
        prompts.append(notebook.asked())
        notebook.answer("me")
    assert sorted(prompts) == ["[rank 0] who? ", "[rank 1] who? "]
    assert notebook.end().status == "ok"
    assert notebook.value("x") == "me"


def test_debug_opens_the_rank_that_failed(notebook: Notebook) -> None:
    """After a cell with --keep its frames are there still."""
    notebook.run(
        block("""
            #pragma taas --gpus 2 --keep
            import os

            def work(x):
                y = 2 * x
                raise ValueError(y)

            if os.environ['RANK'] == '1':
                work(21)
        """)
    )
    notebook.start("%debug", keyboard=True)
    assert notebook.asked() == "[rank 1] ipdb> "
    notebook.answer("p x, y")
    assert notebook.asked() == "[rank 1] ipdb> "
    assert "(21, 42)" in notebook.wait_for("(21, 42)").stdout
    notebook.answer("q")
    assert notebook.end().status == "ok"
    notebook.run("1 / 0")
    notebook.start("%debug", keyboard=True)
    assert notebook.asked() == "ipdb> "  # that of the notebook's own error
    notebook.answer("q")
    notebook.end()
    notebook.run("#pragma taas --gpus 2 --keep\nos.kill(os.getpid(), 9)")  # none stays


def test_debug_says_that_the_ranks_have_ended(notebook: Notebook) -> None:
    """Without --keep the frames of a cell's error are gone.

    Those of taas are of no use to anybody.
    """
    notebook.run("#pragma taas --gpus 2 --name gone\n1 / 0")
    assert (
        "the ranks of gone have ended, and with them the frames of its error"
        in notebook.good("%debug").stdout
    )

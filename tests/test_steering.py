"""The verbs of %taas and of taas: taught, completed, and forgiving of near misses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from notebook_harness import Notebook
from test_background import terminal

from taas.errors import HeaderError
from taas.verbs import VERBS, complete, do, help_text

pytestmark = pytest.mark.slow


def completions(notebook: Notebook, text: str) -> list[str]:
    """Ask the kernel as a front end does when Tab is pressed."""
    reply = notebook._client.complete(text, reply=True, timeout=30)
    matches: list[str] = reply["content"]["matches"]
    return matches


def test_the_status_table_is_live(notebook: Notebook) -> None:
    """It changes in the cell that asked when the run does, after that cell has ended."""
    notebook.good(
        "#pragma taas --gpus 1 --background --name watched\nimport time\nfrom pathlib import Path\n"
        "while not Path('go').exists(): time.sleep(0.05)"
    )
    shown = notebook.good("%taas status").displays[-1]["data"]
    assert "watched" in shown["text/plain"]
    notebook.folder.joinpath("go").touch()
    while True:
        message = notebook._client.get_iopub_msg(timeout=120)
        if (
            message["msg_type"] == "update_display_data"
            and "done" in message["content"]["data"]["text/plain"]
        ):
            break
    notebook.good("%taas attach watched")


def test_the_verbs_are_these() -> None:
    """The contract's list."""
    assert list(VERBS) == [
        "status",
        "logs",
        "stop",
        "stacks",
        "attach",
        "history",
        "recover",
        "engine",
        "release",
        "doctor",
    ]
    assert all(verb in help_text() for verb in VERBS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stauts", "did you mean %taas status?"),
        ("frobnicate", "allowed is status, logs"),
        ("logs --rnk 3", "type --rank"),
        ("logs --rank", "a value is missing"),
        ("status now", "now is one word too many; type %taas status"),
        ("stop -9", "it has no options"),
        ("engine nebula", "allowed is local, or ray"),
        ("logs 'a", "a quote is opened and not closed"),
    ],
)
def test_a_wrong_line_says_what_to_type(line: str, said: str) -> None:
    """One line: what is wrong, what is allowed."""

    class Nobody:
        kernel = 0

    with pytest.raises(HeaderError, match=re.escape(said)) as caught:
        do(line, Nobody())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_verbs_and_options_complete() -> None:
    """After nothing the verbs, after dashes the verb's options."""
    assert complete("st") == list(VERBS)
    assert complete("logs --") == ["--rank", "--follow"]
    assert complete("engine ") == ["local", "ray"]
    assert complete("nonsense ") == []


def test_the_notebook_completes_and_teaches(notebook: Notebook) -> None:
    """Tab offers verbs, run names and header options; ``%taas?`` shows the table, ``%%taas?`` the options."""
    notebook.good("#pragma taas --gpus 1 --name completed\nprint('hello')")
    assert {"status", "stop", "stacks"} <= set(completions(notebook, "%taas st"))
    assert "completed" in completions(notebook, "%taas logs comp")
    assert "--follow" in completions(notebook, "%taas logs --f")
    assert "--background" in completions(notebook, "#pragma taas --gpus 2 --back")
    reply = notebook._client.inspect("%taas", reply=True, timeout=30)
    assert "stacks [RUN]" in reply["content"]["data"]["text/plain"]
    assert "--hang-timeout S" in notebook.good("print(get_ipython().object_inspect_text('%%taas'))").stdout
    assert "did you mean %taas status?" in notebook.run("%taas stauts").stderr + notebook._ran.evalue


def test_taas_alone_is_the_status_table(notebook: Notebook) -> None:
    """HTML in a notebook, with text beside it."""
    notebook.good("#pragma taas --gpus 1 --name seen\npass")
    [shown] = notebook.good("%taas").displays
    assert "<table>" in shown["data"]["text/html"]
    assert "seen" in shown["data"]["text/plain"]
    assert "seen" in terminal().stdout


def test_logs_have_all_ranks_complete_and_in_order(notebook: Notebook) -> None:
    """What the cell did not show is kept, tagged with its rank."""
    ran = notebook.good(
        "#pragma taas --gpus 2 --name kept\nimport os\n"
        "for i in range(5000): print(os.environ['RANK'], i)\nstatus = os.system('echo from a shell')"
    )
    expected = "".join(f"0 {i}\n" for i in range(5000)) + "from a shell\n"
    assert ran.own == expected
    assert notebook.good("%taas logs kept --rank 1").own == expected.replace("0 ", "1 ", 1).replace(
        "\n0 ", "\n1 "
    )
    both = terminal("logs", "kept").stdout.splitlines()
    assert [line for line in both if line.startswith("[rank 1] ")][-1] == "[rank 1] from a shell"
    assert len(both) == 10002
    assert terminal("logs", "kept", "--rank", "7").returncode == 2


def test_release_gives_warm_machines_back(notebook: Notebook) -> None:
    """The next run starts new ones."""
    notebook.good("#pragma taas --gpus 1\npass")
    assert notebook.processes().agents
    assert "given back" in notebook.good("%taas release").stdout
    assert not notebook.processes().agents
    assert notebook.good("#pragma taas --gpus 1\nprint('again')").own == "again\n"


def test_the_terminal_teaches_and_fails_with_a_status(tmp_path: Path) -> None:
    """``taas --help`` is the same table; a wrong verb is status 2."""
    assert "stacks [RUN]" in terminal("--help").stdout
    wrong = terminal("stauts")
    assert wrong.returncode == 2
    assert wrong.stderr == "taas: taas stauts: there is no such verb; did you mean taas status?\n"

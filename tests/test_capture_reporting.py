"""What earlier cells said about logging, warnings and printing holds in the ranks."""

from __future__ import annotations

from notebook_harness import Notebook

EARLIER = """
import logging, warnings
import numpy as np, torch
import matplotlib.pyplot as plt
logging.basicConfig(level=logging.INFO, format="{levelname}: {message}", style="{")
log = logging.getLogger("training")
log.setLevel(logging.DEBUG)
book = logging.FileHandler("training.log")
book.setLevel(logging.INFO)
log.addHandler(book)
class Careful(UserWarning): pass
warnings.filterwarnings("ignore", "noise")
warnings.simplefilter("ignore", Careful)
np.set_printoptions(precision=2)
torch.set_printoptions(precision=2)
torch.backends.cudnn.benchmark = True
plt.rcParams["figure.figsize"] = (3, 2)
"""


def test_logs_of_a_rank_are_the_notebooks(notebook: Notebook) -> None:
    """Levels, the form of lines, and files are those that earlier cells set."""
    notebook.good(EARLIER)
    ran = notebook.good(
        "#pragma taas --gpus 2\nlog.debug('fine')\nlogging.info('rough')\nlogging.debug('hidden')\nlog.info('kept')"
    )
    assert ran.stderr.splitlines() == ["DEBUG: fine", "INFO: rough", "INFO: kept"]
    assert (notebook.folder / "training.log").read_text() == "kept\n"


def test_warnings_and_numbers_of_a_rank_are_the_notebooks(notebook: Notebook) -> None:
    """What is filtered here is filtered there; arrays, tensors and plots look alike."""
    ran = notebook.good(
        "#pragma taas --gpus 2\n"
        "warnings.warn('noise of a library')\n"
        "warnings.warn('this one counts')\n"
        "print(np.array([1 / 3]), torch.tensor([1 / 3]), torch.backends.cudnn.benchmark)\n"
        "print(plt.rcParams['figure.figsize'], plt.get_backend())"
    )
    assert "noise" not in ran.stderr
    assert "this one counts" in ran.stderr
    assert ran.own == ("[0.33] tensor([0.33]) True\n[3.0, 2.0] module://matplotlib_inline.backend_inline\n")


def test_arguments_of_a_rank_are_the_notebooks(notebook: Notebook) -> None:
    """The kernel's own are none in ranks; what a cell makes of them comes back, without what launchers give a rank."""
    header = "#pragma taas --gpus 2 --keep\n"
    notebook.good("import sys; own = sys.argv[0]")
    first = notebook.good(header + "print(sys.argv)  # --local_rank\nsys.argv[1:1] = ['--lr', '1']")
    assert first.own == "['<cell>', '--local_rank=0']\n"
    assert notebook.value("sys.argv == [own, '--lr', '1']") == "True"
    notebook.good("sys.argv[2] = '2'")
    parsed = notebook.good(header + "print(sys.argv[0] == own, sys.argv[1:])\nsys.argv += ['--fast']")
    assert parsed.own == "True ['--lr', '2', '--local_rank=0']\n"
    assert notebook.value("sys.argv == [own, '--lr', '2', '--fast']") == "True"
    notebook.good(header + "sys.argv = ['train.py', *sys.argv[1:2]]")
    assert notebook.value("sys.argv") == "['train.py', '--lr']"

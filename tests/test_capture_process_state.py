"""What cells did to their process holds in ranks, and what they do there holds in the notebook.

GPUs are not needed; test_gpu.py has what is.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import IPython
import pytest
from blocks import block
from oracle import Program, assert_same, each_of, play, row, together

pytestmark = pytest.mark.usefixtures("oracle")


class Change(NamedTuple):
    """One kind of state: how an earlier cell sets it, how the cell does, and how it is seen."""

    name: str
    first: str
    then: str
    seen: str


CHANGES = [
    Change(
        "decimal",
        first="""
            import decimal
            decimal.getcontext().prec = 7
        """,
        then="""
            decimal.getcontext().rounding = "ROUND_UP"
            decimal.Decimal(1) / 3
        """,
        seen="decimal.getcontext()",
    ),
    Change(
        "errors of NumPy",
        first="""
            import numpy as np
            np.seterr(divide="raise")
        """,
        then='np.seterr(over="ignore")',
        seen="np.geterr()",
    ),
    Change(
        "print options of NumPy",
        first="""
            import numpy as np
            np.set_printoptions(precision=3)
        """,
        then="np.set_printoptions(suppress=True)",
        seen="np.get_printoptions()",
    ),
    Change(
        "print options of torch",
        first="""
            import torch
            torch.set_printoptions(precision=3)
        """,
        then="torch.set_printoptions(linewidth=50)",
        seen="vars(torch._tensor_str.PRINT_OPTS)",
    ),
    Change(
        "default dtype",
        first="""
            import torch
            torch.set_default_dtype(torch.float64)
        """,
        then="torch.set_default_dtype(torch.float16)",
        seen="torch.ones(1).dtype",
    ),
    Change(
        "threads of torch",
        first="import torch",
        then="torch.set_num_threads(3)",
        seen="torch.get_num_threads()",
    ),
    Change(
        "precision",
        first='torch.set_float32_matmul_precision("high")',
        then='torch.set_float32_matmul_precision("medium")',
        seen="torch.get_float32_matmul_precision()",
    ),
    Change(
        "gradient mode",
        first="""
            import torch
            torch.set_grad_enabled(False)
        """,
        then="torch.set_grad_enabled(True)",
        seen="torch.is_grad_enabled()",
    ),
    Change(
        "pandas",
        first="""
            import pandas as pd
            pd.set_option("display.max_rows", 7)
        """,
        then="pd.options.display.precision = 2",
        seen='pd.get_option("display.max_rows"), str(pd.Series([1 / 3]))',
    ),
    Change(
        "matplotlib",
        first="""
            import matplotlib as m
            m.rcParams["lines.linewidth"] = 3
            m.rcParams["axes.prop_cycle"] = m.cycler(color="rb", lw=[1, 2])
        """,
        then="""
            m.rcParams["font.size"] = 5
            m.rcParams["lines.linewidth"] = m.rcParamsDefault["lines.linewidth"]
        """,
        seen="""
            (
                m.rcParams["font.size"],
                m.rcParams["lines.linewidth"],
                list(m.rcParams["axes.prop_cycle"]),
            )
        """,
    ),
    Change(
        "time zone",
        first="""
            import os, time
            os.environ["TZ"] = "Asia/Tokyo"
            time.tzset()
        """,
        then="""
            os.environ["TZ"] = "America/Lima"
            time.tzset()
        """,
        seen="time.tzname, time.localtime(0)[:5]",
    ),
    Change(
        "recursion limit",
        first="""
            import sys
            sys.setrecursionlimit(5000)
        """,
        then="sys.setrecursionlimit(6000)",
        seen="sys.getrecursionlimit()",
    ),
    Change(
        "arguments",
        first="""
            import sys
            sys.argv = ["train.py", "--lr", "1"]
        """,
        then='sys.argv.append("--fast")',
        seen="sys.argv",
    ),
    Change(
        "log levels",
        first="""
            import logging
            logging.getLogger("a").setLevel(10)
            logging.getLogger("b").setLevel(10)
        """,
        then="""
            logging.getLogger("a.b").propagate = False
            logging.getLogger("b").setLevel(0)
            logging.disable(5)
        """,
        seen="""
            (
                [(x.level, x.propagate) for x in map(logging.getLogger, ("a", "a.b", "b"))],
                logging.root.manager.disable,
            )
        """,
    ),
    Change(
        "log handlers",
        first="""
            import logging, sys
            logging.basicConfig(level=20, format="%(message)s", filename="a.log")
        """,
        then="""
            logging.root.handlers.clear()
            logging.getLogger("c").addHandler(logging.FileHandler("c.log"))
        """,
        seen="""
            [
                (type(x).__name__, x.formatter and x.formatter._fmt)
                for n in ("", "c")
                for x in logging.getLogger(n).handlers
            ]
        """,
    ),
    Change(
        "warnings",
        first="""
            import warnings
            warnings.simplefilter("error", UserWarning)
        """,
        then='warnings.filterwarnings("ignore", "noise")',
        seen="[(a, m and m.pattern, c) for a, m, c, *_ in warnings.filters[:2]]",
    ),
    Change(
        "path",
        first="""
            import sys
            sys.path.append("/there/a")
            sys.path.insert(0, "/there/b")
        """,
        then="""
            sys.path.remove("/there/a")
            sys.path.insert(0, "/there/c")
        """,
        seen='[p for p in sys.path if p.startswith("/there")]',
    ),
    Change(
        "environment",
        first="""
            import os
            os.environ["PROGRAM_A"] = "1"
            os.environ.pop("HOME", None)
        """,
        then="""
            os.environ["HOME"] = "/there"
            del os.environ["PROGRAM_A"]
        """,
        seen='os.environ.get("HOME"), os.environ.get("PROGRAM_A")',
    ),
    Change(
        "scikit-learn",
        first="""
            import sklearn
            sklearn.set_config(transform_output="pandas", assume_finite=True)
        """,
        then='sklearn.set_config(transform_output="default", display="text")',
        seen="sorted(sklearn.get_config().items())",
    ),
    Change(
        "names of log levels",
        first="""
            import logging
            logging.addLevelName(25, "NOTICE")
            logging.addLevelName(20, "Info")
        """,
        then="""
            logging.addLevelName(25, "NOTE")
            logging.addLevelName(5, "TRACE")
        """,
        seen='[logging.getLevelName(x) for x in (5, 20, 25, "NOTICE", "INFO", "TRACE")]',
    ),
    Change(
        "sharing strategy",
        first="""
            import torch.multiprocessing as tm
            tm.set_sharing_strategy("file_system")
        """,
        then='tm.set_sharing_strategy("file_descriptor")',
        seen="tm.get_sharing_strategy()",
    ),
    Change(
        "open files",
        first="""
            import resource
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 10, limit[1]))
        """,
        then="resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 5, limit[1]))",
        seen="resource.getrlimit(resource.RLIMIT_NOFILE)[0] - limit[0]",
    ),
    Change(
        "garbage collection",
        first="""
            import gc
            gc.set_threshold(900, 11, 12)
        """,
        then="""
            gc.disable()
            gc.set_threshold(800, 11, 12)
        """,
        seen="gc.isenabled(), gc.get_threshold()[:2]",
    ),
    Change(
        "digits of integers",
        first="""
            import sys
            sys.set_int_max_str_digits(5000)
        """,
        then="sys.set_int_max_str_digits(6000)",
        seen="sys.get_int_max_str_digits()",
    ),
    Change(
        "fields of CSV",
        first="""
            import csv
            csv.field_size_limit(1 << 30)
        """,
        then="csv.field_size_limit(1 << 31)",
        seen="csv.field_size_limit()",
    ),
    Change(
        "patience of sockets",
        first="""
            import socket
            socket.setdefaulttimeout(30)
        """,
        then="socket.setdefaulttimeout(None)",
        seen="socket.getdefaulttimeout()",
    ),
    Change(
        "images",
        first="""
            from PIL import Image, ImageFile
            ImageFile.LOAD_TRUNCATED_IMAGES = True
        """,
        then="Image.MAX_IMAGE_PIXELS = None",
        seen="ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS",
    ),
    Change(
        "kernels of attention",
        first="""
            import torch
            torch.backends.cuda.enable_flash_sdp(False)
        """,
        then="""
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_flash_sdp(True)
        """,
        seen="""
            (
                torch.backends.cuda.flash_sdp_enabled(),
                torch.backends.cuda.mem_efficient_sdp_enabled(),
            )
        """,
    ),
    Change(
        "torch's compiler",
        first="""
            import torch._dynamo
            torch._dynamo.config.suppress_errors = True
            torch._dynamo.config.cache_size_limit = 11
        """,
        then="""
            torch._dynamo.config.suppress_errors = False
            torch._dynamo.config.verbose = True
        """,
        seen="""
            (
                torch._dynamo.config.suppress_errors,
                torch._dynamo.config.cache_size_limit,
                torch._dynamo.config.verbose,
            )
        """,
    ),
    Change(
        "random numbers",
        first="""
            import random, numpy as np, torch
            random.seed(3)
            np.random.seed(3)
            torch.manual_seed(3)
        """,
        then="""
            random.random()
            np.random.rand()
            torch.rand(1)
        """,
        seen="random.getstate()[1][-1], np.random.get_state()[2], torch.get_rng_state().sum()",
    ),
]

OF_IPYTHON = [
    Change(
        "%precision",
        first="%precision 3",
        then="%precision 5",
        seen='get_ipython().display_formatter.formatters["text/plain"].float_precision',
    ),
    Change(
        "values of a cell",
        first='get_ipython().ast_node_interactivity = "all"',
        then='get_ipython().ast_node_interactivity = "last_expr"',
        seen="get_ipython().ast_node_interactivity",
    ),
    Change(
        "working directory",
        first="""
            import os
            os.mkdir("a")
            os.mkdir("b")
            os.chdir("a")
        """,
        then='os.chdir("../b")',
        seen="os.path.basename(os.getcwd())",
    ),
    Change(
        "aliases",
        first="%alias greet echo hello",
        then="%alias wave echo bye",
        seen='[a for a in get_ipython().alias_manager.aliases if a[0] in ("greet", "wave")]',
    ),
]


def _row(change: Change) -> Program:
    seen = f"repr(({block(change.seen)}))"
    cell = block(f"there = {seen}", change.then)
    return row(change.name, setup=change.first, cell=cell, check=seen)


@each_of([*together(map(_row, CHANGES), most=20), *map(_row, OF_IPYTHON)])
def test_state_travels_both_ways(program: Program, tmp_path: Path) -> None:
    """A rank has what an earlier cell set, and the notebook has what the cell did."""
    assert_same(program, tmp_path)


def test_a_library_takes_its_state_when_it_is_imported(tmp_path: Path) -> None:
    """An earlier cell's setting holds where the cell imports the library, and not earlier."""
    program = row(
        "imported in the cell",
        setup="""
            import pandas as pd
            pd.set_option("display.max_rows", 7)
            del pd
        """,
        cell="""
            import pandas
            rows = pandas.get_option("display.max_rows")
            del pandas
        """,
        check="rows",
    )
    assert play(program, tmp_path, plain=False).value == "7"


DEFAULTS = """
import torch
from taas.capture.settings.process_state import table
def set_here(wanted, own, count):
    torch.cuda.is_available, torch.cuda.device_count = lambda: count > 0, lambda: count
    torch.set_default_device(None)
    (row,) = [row for row in table(own) if row.name == "default device of torch"]
    row.put(torch, wanted)
    return row.take(torch)
print(set_here("cuda", "cuda:1", 2), set_here("cuda:0", "cuda:1", 2))  # the second rank
print(set_here("cuda", None, 0), set_here("cuda:1", None, 0), torch.zeros(1).device)  # a CPU type
print(set_here("cuda:1", None, 2), set_here("cuda:1", None, 1))  # a notebook, or a rehearsed rank
print(set_here("meta", "cuda:1", 2))
"""


def test_a_default_device_is_each_ranks_own(tmp_path: Path) -> None:
    """``cuda`` stays the current device, a number is the rank's.

    Without CUDA the CPU is the default.
    """
    ran = subprocess.run(
        [sys.executable, "-c", DEFAULTS], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ran.stdout.splitlines() == ["cuda cuda:1", "cpu cpu cpu", "cuda:1 cuda", "meta"]


# ---------------------------------------------------- variables in which a process speaks of itself

SERVED = """
import os, socket, tempfile
folder = tempfile.mkdtemp()
os.environ.pop('TORCHINDUCTOR_CACHE_DIR', None)  # importing torch's compiler has set it
def serve(name):
    served = socket.socket(socket.AF_UNIX)
    served.bind(f'{folder}/{name}')
    served.listen()
    return served
with serve('left'):
    pass
here = os.dup(serve('here').detach())
"""
OF_A_RANK = {
    "A_PID": "f'pid:{os.getpid()}'",
    "A_CHILD": "str(child.pid)",
    "A_SOCKET": "f'unix://{folder}/there'",
    "A_SOCKET_THAT_WAS_LEFT": "f'{folder}/left:0'",
    "WANDB_SERVICE": "f'3-{os.getpid()}-unix-{folder}/there'",
    "TORCHINDUCTOR_CACHE_DIR": "'/tmp/torchinductor_somebody'",
    "TRITON_CACHE_DIR": "'/tmp/torchinductor_somebody/triton/1'",
    "CUDA_MODULE_LOADING": "'LAZY'",
}
OF_THE_USER = {
    "B_SOCKET": "f'{folder}/here'",
    "B_FILE": "folder",
    "B_NUMBER": "'1.' + str(os.getpid())",
    "TORCHINDUCTOR_FORCE": "'/tmp/torchinductor_somebody'",
    "TRITON_HOME": "folder",
}
SILENT = ("WANDB", "TORCHINDUCTOR", "TRITON", "CUDA")


def test_what_names_a_rank_stays_with_it(tmp_path: Path) -> None:
    """A line names the variables of a process or socket of the run.

    Those of compilers go silently.
    """
    variables = {**OF_A_RANK, **OF_THE_USER}
    program = row(
        "of a rank",
        setup=SERVED,
        cell=block(
            """
            import subprocess
            child = subprocess.Popen(["sleep", "60"])
            there = serve("there").detach()
            """,
            *(f"os.environ[{name!r}] = {value}" for name, value in variables.items()),
            "del child",
        ),
        check=f"[name for name in {[*variables]} if name in os.environ]",
    )
    played = play(program, tmp_path, plain=False)
    assert played.value == repr([*OF_THE_USER])
    named = {what.partition(":")[0].removeprefix("the variable ") for what in played.lost}
    assert named == {name for name in OF_A_RANK if not name.startswith(SILENT)}


def test_what_compilers_left_in_the_notebook_is_not_the_ranks(tmp_path: Path) -> None:
    """Ranks choose their own caches, unless the user has set one."""
    left = {name: OF_A_RANK[name] for name in OF_A_RANK if name.startswith(SILENT[1:])}
    program = row(
        "left here",
        setup=block(
            "import os",
            *(f"os.environ[{name!r}] = {value}" for name, value in left.items()),
            "os.environ['TRITON_HOME'] = 'mine'",
        ),
        cell=f"seen = [n for n in {[*left, 'TRITON_HOME']} if n in os.environ]",
        check="seen",
    )
    assert play(program, tmp_path, plain=False).value == "['TRITON_HOME']"


# ---------------------------------------------------------------- random numbers that imports draw

DRAWS = {
    "draws.py": """
        import random
        secret = random.random()
    """,
    "layer.py": """
        import torch
        layer = torch.nn.Linear(2, 2)
    """,
    "noise.py": """
        import numpy
        noise = numpy.random.rand(3)
        import draws
    """,
    "seeds.py": """
        import random, torch
        random.seed(5)
        torch.manual_seed(5)
    """,
}
"""Modules of the project that draw, or seed, as they are imported."""

NUMBERS = """
import random, numpy, torch
numbers = random.random(), numpy.random.rand(), torch.rand(1).item()
"""
SEED = """
import random, numpy, torch
random.seed(1)
numpy.random.seed(1)
torch.manual_seed(1)
"""
LATE = """
def late():
    import noise
    return noise.noise[0]
late()
"""
DRAWN = [
    row(
        "a library",
        setup=block("import rich.console", SEED),
        cell=block("import rich.console", NUMBERS),
        files=DRAWS,
    ),
    row(
        "the project's modules",
        setup=block("import draws, noise, layer", SEED),
        cell=block("import draws, noise", "from layer import layer", NUMBERS),
        files=DRAWS,
    ),
    row(
        "one that seeds",
        setup=block("import seeds", SEED),
        cell=block("import seeds", NUMBERS),
        files=DRAWS,
    ),
    row("in a function", setup=block(LATE, SEED), cell=block("late()", NUMBERS), files=DRAWS),
    row("new to both", setup=SEED, cell=block("import noise, layer, seeds", NUMBERS), files=DRAWS),
    row(
        "reloaded",
        setup=block("import importlib, draws", SEED),
        cell=block("import draws", "importlib.reload(draws)", NUMBERS),
        files=DRAWS,
    ),
]


@each_of(DRAWN)
def test_imports_draw_as_in_the_notebook(program: Program, tmp_path: Path) -> None:
    """What the notebook has imported draws nothing in a rank; what is new draws in both."""
    if "import rich" in program.cells[0]:
        pytest.importorskip("rich")
    assert_same(program, tmp_path)


def test_what_an_earlier_cells_ranks_imported_draws_nothing(tmp_path: Path) -> None:
    """In a notebook without headers it was imported by then, whether or not a name came of it."""
    late = """
        def late():
            import noise, layer
            return noise.noise.sum()
    """
    cells = (block(late), "sum = late()", block(SEED), block("again = late()", NUMBERS))
    program = row("twice", setup=cells[:-1], cell=cells[-1], files=DRAWS)
    assert_same(dataclasses.replace(program, headed=(1, 3)), tmp_path)


# ------------------------------------------------------ modules that the notebook reloads by itself


def _edits(text: str) -> str:
    """Return lines that edit helper.py, as an editor would some seconds later."""
    return block(f"""
        import os
        with open('helper.py', 'w') as file: chars = file.write({text!r})
        os.utime('helper.py', (2e9, 2e9))
        del file
    """)


OLD = """
scale, base = 3, 1
def f(x): return x + .5
class Net:
    def out(self): return scale
"""


class Reloaded(NamedTuple):
    """A module that is edited while a notebook has it.

    Attributes:
        mode: of %autoreload.
        earlier: what the notebook did to it, or took from it.
        edits: what of its text is replaced by what.
        seen: the value that shows the edit.
        added: to the end of its text.
    """

    name: str
    mode: int
    earlier: str
    edits: tuple[str, str]
    seen: str
    added: str = ""


RELOADED = [
    Reloaded(
        "a function, beside data of the notebook",
        mode=2,
        earlier="helper.extra = 10",
        edits=("x + .5", "x * 3 + .05"),
        seen="helper.f(1) * helper.extra",
    ),
    Reloaded(
        "a method, of an instance that was there",
        mode=2,
        earlier="net = helper.Net()",
        edits=("return scale", "return scale * 100"),
        seen="net.out()",
    ),
    Reloaded(
        "data that the notebook had changed",
        mode=2,
        earlier="helper.scale = 50",
        edits=("base = 3, 1", "base = 4, 2"),
        seen="helper.scale, helper.base",
    ),
    Reloaded(
        "all of it made anew",
        mode=3,
        earlier="helper.base = 10",
        edits=("x + .5", "x * 4"),
        added="def g(): return f(2) + base\n",
        seen="helper.g()",
    ),
]


@pytest.mark.parametrize("reloaded", RELOADED, ids=lambda reloaded: reloaded.name)
def test_autoreload_is_a_reload(reloaded: Reloaded, tmp_path: Path) -> None:
    """A module that %autoreload reloaded is the file's in ranks, with the notebook's data."""
    if reloaded.name.endswith("beside data of the notebook") and IPython.version_info < (9,):
        pytest.skip("an older %autoreload drops what the notebook has set in a module")
    cells = (
        f"%load_ext autoreload\n%autoreload {reloaded.mode}",
        f"import helper\n{reloaded.earlier}",
        _edits(OLD.replace(*reloaded.edits) + reloaded.added),
        f"there = {reloaded.seen}",
        f"there, {reloaded.seen}",
    )
    program = Program(reloaded.name, cells, (3,), files=(("helper.py", OLD),))
    assert_same(program, tmp_path)
    (tmp_path / "again").mkdir()
    said = play(program, tmp_path / "again", plain=False).said
    assert not [line for line in said if "edited" in line]


def test_what_autoreload_fails_at_is_not_reloaded(tmp_path: Path) -> None:
    """The notebook goes on with what it imported, with a line; so it does where it is off."""
    for mode, text in (("2", "f = (lambda x: 1 / 0)(1)\n"), ("0", OLD)):
        cells = (
            f"%load_ext autoreload\n%autoreload {mode}",
            "import helper",
            _edits(text),
            "there = 'helper' in globals() and callable(helper)",
        )
        (tmp_path / mode).mkdir()
        program = Program("fails", cells, (3,), files=(("helper.py", OLD),))
        said = play(program, tmp_path / mode, plain=False).said
        assert [
            line for line in said if "helper: edited since this notebook imported it" in line
        ], said

"""What cells did to their process holds in ranks, and what they do there holds in the notebook.

GPUs are not needed; test_gpu.py has what is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from oracle import Program, compare, play, row, together

pytestmark = pytest.mark.usefixtures("oracle")


class Change(NamedTuple):
    """One kind of state: how an earlier cell sets it, how the cell does, and how it is seen."""

    name: str
    first: str
    then: str
    seen: str


CHANGES = [
    Change("decimal", "import decimal; decimal.getcontext().prec = 7", "decimal.getcontext().rounding = 'ROUND_UP'; decimal.Decimal(1) / 3", "decimal.getcontext()"),
    Change("errors of NumPy", "import numpy as np; np.seterr(divide='raise')", "np.seterr(over='ignore')", "np.geterr()"),
    Change("print options of NumPy", "import numpy as np; np.set_printoptions(precision=3)", "np.set_printoptions(suppress=True)", "np.get_printoptions()"),
    Change("print options of torch", "import torch; torch.set_printoptions(precision=3)", "torch.set_printoptions(linewidth=50)", "vars(torch._tensor_str.PRINT_OPTS)"),
    Change("default dtype", "import torch; torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float16)", "torch.ones(1).dtype"),
    Change("threads of torch", "import torch", "torch.set_num_threads(3)", "torch.get_num_threads()"),
    Change("precision", "torch.set_float32_matmul_precision('high')", "torch.set_float32_matmul_precision('medium')", "torch.get_float32_matmul_precision()"),
    Change("gradient mode", "import torch; torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)", "torch.is_grad_enabled()"),
    Change("pandas", "import pandas as pd; pd.set_option('display.max_rows', 7)", "pd.options.display.precision = 2", "pd.get_option('display.max_rows'), str(pd.Series([1 / 3]))"),
    Change("matplotlib", "import matplotlib as m; m.rcParams['lines.linewidth'] = 3; m.rcParams['axes.prop_cycle'] = m.cycler(color='rb', lw=[1, 2])", "m.rcParams['font.size'] = 5; m.rcParams['lines.linewidth'] = m.rcParamsDefault['lines.linewidth']", "m.rcParams['font.size'], m.rcParams['lines.linewidth'], list(m.rcParams['axes.prop_cycle'])"),
    Change("time zone", "import os, time; os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "os.environ['TZ'] = 'America/Lima'; time.tzset()", "time.tzname, time.localtime(0)[:5]"),
    Change("recursion limit", "import sys; sys.setrecursionlimit(5000)", "sys.setrecursionlimit(6000)", "sys.getrecursionlimit()"),
    Change("arguments", "import sys; sys.argv = ['train.py', '--lr', '1']", "sys.argv.append('--fast')", "sys.argv"),
    Change("log levels", "import logging; logging.getLogger('a').setLevel(10); logging.getLogger('b').setLevel(10)", "logging.getLogger('a.b').propagate = False; logging.getLogger('b').setLevel(0); logging.disable(5)", "[(x.level, x.propagate) for x in map(logging.getLogger, ('a', 'a.b', 'b'))], logging.root.manager.disable"),
    Change("log handlers", "import logging, sys; logging.basicConfig(level=20, format='%(message)s', filename='a.log')", "logging.root.handlers.clear(); logging.getLogger('c').addHandler(logging.FileHandler('c.log'))", "[(type(x).__name__, x.formatter and x.formatter._fmt) for n in ('', 'c') for x in logging.getLogger(n).handlers]"),
    Change("warnings", "import warnings; warnings.simplefilter('error', UserWarning)", "warnings.filterwarnings('ignore', 'noise')", "[(a, m and m.pattern, c) for a, m, c, *_ in warnings.filters[:2]]"),
    Change("path", "import sys; sys.path.append('/there/a'); sys.path.insert(0, '/there/b')", "sys.path.remove('/there/a'); sys.path.insert(0, '/there/c')", "[p for p in sys.path if p.startswith('/there')]"),
    Change("environment", "import os; os.environ['PROGRAM_A'] = '1'; os.environ.pop('HOME', None)", "os.environ['HOME'] = '/there'; del os.environ['PROGRAM_A']", "os.environ.get('HOME'), os.environ.get('PROGRAM_A')"),
    Change("scikit-learn", "import sklearn; sklearn.set_config(transform_output='pandas', assume_finite=True)", "sklearn.set_config(transform_output='default', display='text')", "sorted(sklearn.get_config().items())"),
    Change("names of log levels", "import logging; logging.addLevelName(25, 'NOTICE'); logging.addLevelName(20, 'Info')", "logging.addLevelName(25, 'NOTE'); logging.addLevelName(5, 'TRACE')", "[logging.getLevelName(x) for x in (5, 20, 25, 'NOTICE', 'INFO', 'TRACE')]"),
    Change("sharing strategy", "import torch.multiprocessing as tm; tm.set_sharing_strategy('file_system')", "tm.set_sharing_strategy('file_descriptor')", "tm.get_sharing_strategy()"),
    Change("open files", "import resource; limit = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 10, limit[1]))", "resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 5, limit[1]))", "resource.getrlimit(resource.RLIMIT_NOFILE)[0] - limit[0]"),
    Change("garbage collection", "import gc; gc.set_threshold(900, 11, 12)", "gc.disable(); gc.set_threshold(800, 11, 12)", "gc.isenabled(), gc.get_threshold()[:2]"),
    Change("digits of integers", "import sys; sys.set_int_max_str_digits(5000)", "sys.set_int_max_str_digits(6000)", "sys.get_int_max_str_digits()"),
    Change("fields of CSV", "import csv; csv.field_size_limit(1 << 30)", "csv.field_size_limit(1 << 31)", "csv.field_size_limit()"),
    Change("patience of sockets", "import socket; socket.setdefaulttimeout(30)", "socket.setdefaulttimeout(None)", "socket.getdefaulttimeout()"),
    Change("images", "from PIL import Image, ImageFile; ImageFile.LOAD_TRUNCATED_IMAGES = True", "Image.MAX_IMAGE_PIXELS = None", "ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS"),
    Change("kernels of attention", "import torch; torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.enable_mem_efficient_sdp(False); torch.backends.cuda.enable_flash_sdp(True)", "torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()"),
    Change("torch's compiler", "import torch._dynamo; torch._dynamo.config.suppress_errors = True; torch._dynamo.config.recompile_limit = 11", "torch._dynamo.config.suppress_errors = False; torch._dynamo.config.verbose = True", "torch._dynamo.config.suppress_errors, torch._dynamo.config.recompile_limit, torch._dynamo.config.verbose"),
    Change("random numbers", "import random, numpy as np, torch; random.seed(3); np.random.seed(3); torch.manual_seed(3)", "random.random(); np.random.rand(); torch.rand(1)", "random.getstate()[1][-1], np.random.get_state()[2], torch.get_rng_state().sum()"),
]  # fmt: skip


OF_IPYTHON = [
    Change("%precision", "%precision 3", "%precision 5", "get_ipython().display_formatter.formatters['text/plain'].float_precision"),
    Change("values of a cell", "get_ipython().ast_node_interactivity = 'all'", "get_ipython().ast_node_interactivity = 'last_expr'", "get_ipython().ast_node_interactivity"),
    Change("working directory", "import os; os.mkdir('a'); os.mkdir('b'); os.chdir('a')", "os.chdir('../b')", "os.path.basename(os.getcwd())"),
    Change("aliases", "%alias greet echo hello", "%alias wave echo bye", "[a for a in get_ipython().alias_manager.aliases if a[0] in ('greet', 'wave')]"),
]  # fmt: skip


def _row(change: Change) -> Program:
    seen = f"repr(({change.seen}))"
    return row(change.name, (change.first,), f"there = {seen}\n{change.then}", seen)


@pytest.mark.parametrize(
    "program",
    [*together(map(_row, CHANGES), most=20), *map(_row, OF_IPYTHON)],
    ids=lambda program: program.name[:60],
)
def test_state_travels_both_ways(program: Program, tmp_path: Path) -> None:
    """A rank has what an earlier cell set, and the notebook has what the cell did."""
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)


def test_a_library_takes_its_state_when_it_is_imported(tmp_path: Path) -> None:
    """What an earlier cell set holds where the cell imports the library; nothing imports it before."""
    cell = "import pandas\nrows = pandas.get_option('display.max_rows')\ndel pandas"
    earlier = "import pandas as pd\npd.set_option('display.max_rows', 7)\ndel pd"
    program = row("imported in the cell", (earlier,), cell, "rows")
    assert play(program, tmp_path, plain=False).value == "7"


DEFAULTS = """
import torch
from taas.capture.process_state import table
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
    """``cuda`` stays the current device, a number becomes the rank's; without CUDA the CPU stays the default."""
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
    """Variables that name a process or a socket of the run do not come back, with a line; what a compiler leaves, silently."""
    sets = "\n".join(
        f"os.environ[{name!r}] = {value}" for name, value in {**OF_A_RANK, **OF_THE_USER}.items()
    )
    cell = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nthere ="
        f" serve('there').detach()\n{sets}\ndel child"
    )
    names = [*OF_A_RANK, *OF_THE_USER]
    program = row("of a rank", (SERVED,), cell, f"[name for name in {names} if name in os.environ]")
    played = play(program, tmp_path, plain=False)
    assert played.value == repr([*OF_THE_USER])
    named = {what.partition(":")[0].removeprefix("the variable ") for what in played.lost}
    assert named == {name for name in OF_A_RANK if not name.startswith(SILENT)}


def test_what_compilers_left_in_the_notebook_is_not_the_ranks(tmp_path: Path) -> None:
    """Ranks choose their own caches, unless the user has set one."""
    left = {name: OF_A_RANK[name] for name in OF_A_RANK if name.startswith(SILENT[1:])}
    sets = "\n".join(f"os.environ[{name!r}] = {value}" for name, value in left.items())
    earlier = f"import os\n{sets}\nos.environ['TRITON_HOME'] = 'mine'"
    program = row(
        "left here",
        (earlier,),
        f"seen = [n for n in {[*left, 'TRITON_HOME']} if n in os.environ]",
        "seen",
    )
    assert play(program, tmp_path, plain=False).value == "['TRITON_HOME']"


# ---------------------------------------------------------------- random numbers that imports draw

DRAWS = {
    "draws": "import random\nsecret = random.random()\n",
    "layer": "import torch\nlayer = torch.nn.Linear(2, 2)\n",
    "noise": "import numpy\nnoise = numpy.random.rand(3)\nimport draws\n",
    "seeds": "import random, torch\nrandom.seed(5)\ntorch.manual_seed(5)\n",
}
FILES = tuple((f"{name}.py", text) for name, text in DRAWS.items())
NUMBERS = (
    "import random, numpy, torch\nnumbers = random.random(), numpy.random.rand(),"
    " torch.rand(1).item()"
)
SEED = "import random, numpy, torch\nrandom.seed(1); numpy.random.seed(1); torch.manual_seed(1)"
DRAWN = [
    ("a library", (f"import rich.console\n{SEED}",), f"import rich.console\n{NUMBERS}", ""),
    ("the project's modules", (f"import draws, noise, layer\n{SEED}",), f"import draws, noise\nfrom layer import layer\n{NUMBERS}", ""),
    ("one that seeds", (f"import seeds\n{SEED}",), f"import seeds\n{NUMBERS}", ""),
    ("in a function", (f"def late():\n    import noise\n    return noise.noise[0]\nlate()\n{SEED}",), f"late()\n{NUMBERS}", ""),
    ("new to both", (SEED,), f"import noise, layer, seeds\n{NUMBERS}", ""),
    ("reloaded", (f"import importlib, draws\n{SEED}",), f"import draws\nimportlib.reload(draws)\n{NUMBERS}", ""),
]  # fmt: skip


@pytest.mark.parametrize("drawn", DRAWN, ids=lambda drawn: drawn[0])
def test_imports_draw_as_in_the_notebook(
    drawn: tuple[str, tuple[str, ...], str, str], tmp_path: Path
) -> None:
    """What the notebook has imported draws nothing when a rank imports it; what is new draws in both."""
    name, earlier, cell, probe = drawn
    different = compare(row(name, earlier, cell, probe, files=FILES), tmp_path)
    assert not different, "\n".join(different)


def test_what_an_earlier_cells_ranks_imported_draws_nothing(tmp_path: Path) -> None:
    """In a notebook without headers it would have been imported by then, whether or not a name came of it."""
    late = "def late():\n    import noise, layer\n    return noise.noise.sum()"
    cells = (late, "sum = late()", SEED, f"again = late()\n{NUMBERS}")
    different = compare(Program("twice", cells, (1, 3), files=FILES), tmp_path)
    assert not different, "\n".join(different)


# ------------------------------------------------------ modules that the notebook reloads by itself


def _edits(text: str) -> str:
    """Return lines that edit helper.py, as an editor would some seconds later."""
    return (
        f"import os\nwith open('helper.py', 'w') as file: chars = file.write({text!r})\n"
        "os.utime('helper.py', (2e9, 2e9))\ndel file"
    )


OLD = "scale, base = 3, 1\ndef f(x): return x + .5\nclass Net:\n    def out(self): return scale\n"
RELOADED = [
    ("a function, beside data of the notebook", 2, "helper.extra = 10", OLD.replace("x + .5", "x * 3 + .05"), "helper.f(1) * helper.extra"),
    ("a method, of an instance that was there", 2, "net = helper.Net()", OLD.replace("return scale", "return scale * 100"), "net.out()"),
    ("data that the notebook had changed", 2, "helper.scale = 50", OLD.replace("base = 3, 1", "base = 4, 2"), "helper.scale, helper.base"),
    ("all of it made anew", 3, "helper.base = 10", OLD.replace("x + .5", "x * 4") + "def g(): return f(2) + base\n", "helper.g()"),
]  # fmt: skip


@pytest.mark.parametrize("reloaded", RELOADED, ids=lambda reloaded: reloaded[0])
def test_autoreload_is_a_reload(reloaded: tuple[str, int, str, str, str], tmp_path: Path) -> None:
    """A module that %autoreload has reloaded is the file's in ranks, with the notebook's data in it; no line says otherwise."""
    name, mode, earlier, text, seen = reloaded
    cells = (
        f"%load_ext autoreload\n%autoreload {mode}",
        f"import helper\n{earlier}",
        _edits(text),
        f"there = {seen}",
        f"there, {seen}",
    )
    program = Program(name, cells, (3,), files=(("helper.py", OLD),))
    different = compare(program, tmp_path)
    assert not different, "\n".join(different)
    (tmp_path / "again").mkdir()
    assert not [
        line for line in play(program, tmp_path / "again", plain=False).said if "edited" in line
    ]


def test_what_autoreload_fails_at_is_not_reloaded(tmp_path: Path) -> None:
    """The notebook goes on with what it imported, and the line says so; so where it is not switched on."""
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

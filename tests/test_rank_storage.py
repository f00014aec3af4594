"""The write rule as a rank meets it: what it may write, what it sees, what it is told."""

# Which function a rank calls is what is tested.
# ruff: noqa: PTH103, PTH104, PTH110, PTH116, PTH118, PTH123, PTH207, PTH208

from __future__ import annotations

import _ctypes
import ctypes
import errno
import glob
import os
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from blocks import block
from privileges import needs_mounts, needs_user_namespaces
from storage_ranks import Run, Turns, diverted, fork, join

from taas import rank_storage
from taas.base import linux
from taas.errors import StorageDenied
from taas.project.wall import walls
from taas.rank.cell import said_of_wall


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(params=rank_storage.MECHANISMS)
def wall(request: pytest.FixtureRequest) -> str:
    lines = walls.verdicts((request.param,))
    if not lines[0].startswith(f"write rule: {request.param}"):
        pytest.skip(" ".join(lines))
    return request.param


def test_rank_0_writes_itself(run: Run):
    """Rank 0 writes the project; ``deny``, under which no other rank writes, changes nothing."""

    def body(guard):
        Path("model.pt").write_text("weights")
        return [guard.mechanism, os.open is __import__("posix").open]

    # rank 0 finds other ranks' files (test_rank_saves)
    assert run.rank(body, rank=0) == ["none (rank 0)", False]
    assert run.rank(body, rank=0, mode="deny") == ["none (rank 0)", True]
    assert (run.project / "model.pt").read_text() == "weights"


def test_a_rank_reads_its_own_writes_back(run: Run, wall: str):
    """Every way of looking sees what the rank wrote; the project stays as it was."""
    (run.project / "data").mkdir()
    (run.project / "data" / "a.txt").write_text("a")

    def body(guard):
        Path("data/b.txt").write_text("b")
        os.makedirs("data/deep/er")
        Path("data/deep/er/c.txt").write_text("c")
        walked = sorted(
            os.path.join(top, name) for top, _, names in os.walk("data") for name in names
        )
        entries = {entry.name: entry.is_dir() for entry in os.scandir("data")}
        globbed = sorted(str(path) for path in Path().rglob("*.txt"))
        assert Path("data/b.txt").exists() and os.access("data/b.txt", os.W_OK)
        assert os.stat("data/b.txt").st_size == 1
        assert sorted(glob.glob("data/**/*.txt", recursive=True)) == walked
        return [walked, sorted(os.listdir("data")), entries, globbed == walked]

    walked, listed, entries, same = run.rank(body, mechanism=wall)
    assert walked == ["data/a.txt", "data/b.txt", "data/deep/er/c.txt"]
    assert listed == ["a.txt", "b.txt", "deep"]
    assert entries == {"a.txt": False, "b.txt": False, "deep": True}
    assert same
    assert sorted(path.name for path in run.project.rglob("*")) == ["a.txt", "data"]


ORDINARY = {
    "json": block("""
        with open('a.json', 'w') as file: json.dump({'a': 1}, file)
        assert json.load(open('a.json')) == {'a': 1}
    """),
    "append": block("""
        open('log', 'a').write('rank 1')
        open('log', 'a').write('!')
        assert open('log').read() == 'live rank 1!'
    """),
    "update": (
        "with open('log', 'r+') as file: file.write('L')\nassert open('log').read() == 'Live '"
    ),
    "replace": block("""
        new = tempfile.NamedTemporaryFile('w', dir='.', delete=False)
        new.write('x')
        new.close()
        os.replace(new.name, 'config')
        assert open('config').read() == 'x' and not os.path.exists(new.name)
    """),
    "temporary": block("""
        with tempfile.TemporaryDirectory(dir='.') as name: open(f'{name}/a', 'w').close()
        with tempfile.NamedTemporaryFile(dir='.') as file: file.write(b'x')
        assert not os.path.exists(name)
    """),
    "copies": block("""
        os.makedirs('a/b')
        open('a/b/c', 'w').write('x')
        shutil.copytree('a', 'd')
        shutil.copy2('d/b/c', 'e')
        shutil.copy('log', 'd/log')
        shutil.move('d', 'moved')
        assert os.listdir('moved/b') == ['c'] and open('e').read() == 'x'
    """),
    "rmtree": block("""
        os.makedirs('a/b', exist_ok=True)
        open('a/b/c', 'w').close()
        shutil.rmtree('a')
        assert not os.path.exists('a')
        os.makedirs('a', exist_ok=True)
        assert os.listdir('a') == []
    """),
    "logging": block("""
        logger = logging.getLogger('x')
        logger.addHandler(logging.FileHandler('train.log'))
        logger.error('lost')
        logger.addHandler(logging.handlers.RotatingFileHandler('r.log', maxBytes=9, backupCount=2))
        for _ in range(3):
            logger.error('twelve bytes')
        assert 'lost' in open('train.log').read() and os.path.exists('r.log.2')
    """),
    "arrays": block("""
        numpy.save('a.npy', numpy.arange(3))
        numpy.savez('b.npz', a=numpy.arange(3))
        numpy.arange(3).tofile('c')
        assert numpy.load('a.npy')[2] == numpy.load('b.npz')['a'][2] == 2
        assert numpy.fromfile('c', int)[2] == 2
    """),
    "torch": block("""
        os.makedirs('ckpt', exist_ok=True)
        torch.save({'a': 1}, 'ckpt/last.pt')
        os.replace('ckpt/last.pt', 'ckpt/best.pt')
        assert torch.load('ckpt/best.pt') == {'a': 1} and os.listdir('ckpt') == ['best.pt']
    """),
    "table": block("""
        pandas = pytest.importorskip('pandas')
        pandas.DataFrame({'a': [1]}).to_csv('t.csv', mode='a')
        assert list(pandas.read_csv('t.csv')['a']) == [1]
    """),
    "figure": block("""
        plt = pytest.importorskip('matplotlib.figure')
        plt.Figure().savefig('f.png')
        assert os.path.getsize('f.png')
    """),
    "archive": block("""
        open('a', 'w').close()
        shutil.make_archive('z', 'zip', '.', 'a')
        shutil.unpack_archive('z.zip', 'out')
        assert os.listdir('out') == ['a']
    """),
    "paths": block("""
        Path('x/y').mkdir(parents=True)
        Path('x/y/z').touch()
        Path('x/y/z').chmod(0o600)
        Path('x/y/z').rename('x/w')
        assert sorted(str(path) for path in Path('x').rglob('*')) == ['x/w', 'x/y']
    """),
}
"""What training programs do in every rank; the project has a file ``log`` from before."""


@pytest.mark.parametrize("what", ORDINARY)
def test_ordinary_code_goes_well_in_every_rank(run: Run, what: str) -> None:
    """Its own asserts hold, and the project stays as it was."""
    (run.project / "log").write_text("live ")
    names = "json, logging.handlers, os, shutil, tempfile, numpy, pytest, torch"
    code = f"import {names}\nfrom pathlib import Path\n{ORDINARY[what]}"
    run.rank(lambda guard: exec(code, {}))
    assert {path.name: path.read_text() for path in run.project.iterdir()} == {"log": "live "}


LIKE_THE_REAL_ONE = {
    "held by a class": block("""
        class Files:
            make, look, move, drop = os.mkdir, os.stat, os.rename, os.remove
            read = open
        files = Files()
        files.make('a')
        files.read('a/b', 'w').close()
        files.move('a/b', 'a/c')
        assert files.look('a/c').st_size == 0
        files.drop('a/c')
        assert os.listdir('a') == []
    """),
    "pickled and copied": block("""
        for call in (open, os.mkdir, os.stat, os.rename, os.remove, os.getcwd, shutil.rmtree):
            assert pickle.loads(pickle.dumps(call)) is call
            assert copy.deepcopy(call) is call
    """),
    "bound beforehand": block("""
        write = functools.partial(open, mode='w')
        write('a').close()
        list(map(os.remove, ['a']))
        assert not os.path.exists('a')
    """),
    "asked what it is": block("""
        assert os.mkdir.__name__ == 'mkdir' and os.mkdir.__doc__ == posix.mkdir.__doc__
        assert [*inspect.signature(os.rename).parameters][:2] == ['src', 'dst']
        assert os.stat in os.supports_follow_symlinks and callable(shutil.rmtree)
    """),
}
"""How programs use functions of ``os``, and ``open``."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", LIKE_THE_REAL_ONE)
def test_what_stands_in_the_place_of_a_function_is_used_like_it(run: Run, what: str, rank: int):
    """It is no method of a class that holds it, and goes by its name."""
    code = f"import copy, functools, inspect, os, pickle, posix, shutil\n{LIKE_THE_REAL_ONE[what]}"
    run.rank(lambda guard: exec(code, {"__name__": "__main__"}), rank=rank)


def test_the_newer_of_two_versions_is_seen(run: Run):
    """What rank 0 saved after this rank's own save is loaded.

    While it is still writing, the rank's own is.
    """
    turns = Turns()

    def body(guard):
        Path("best.pt").write_text("mine")
        seen = [Path("best.pt").read_text()]
        for _ in range(2):
            turns.give()
            seen.append(Path("best.pt").read_text())
        return seen

    started = run.start(body)
    turns.take()
    with open(run.project / "best.pt", "w") as file:
        file.write("rank 0, ")
        file.flush()
        turns.give_back()
        turns.take()
        file.write("whole")
    turns.give_back()
    assert join(started) == ["mine", "mine", "rank 0, whole"]
    turns.close()


def test_a_save_by_rename_is_not_disturbed_by_that_of_rank_0(run: Run):
    """Both write ``new`` and move it to ``done``, thousands of times.

    What rank 0 moved away is not missed.
    """
    rounds = 3000

    def body(guard):
        for number in range(rounds):
            Path("new").write_text(str(number))
            Path("new").read_text()
            Path("new").replace("done")
        return rounds

    rank = run.start(body)
    while not os.waitid(os.P_PID, rank[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
        (run.project / "new").write_text("rank 0's")
        (run.project / "new").replace(run.project / "done")
    assert join(rank) == rounds


def test_c_code_at_the_wall_is_explained(run: Run):
    """The rank's error report can say why a library written in C could not write."""

    def body(guard):
        try:
            with sqlite3.connect("new.db") as database:
                database.execute("create table t (a)")
        except sqlite3.OperationalError as error:
            first = guard.explain(error)
        rust = RuntimeError("I/O error: Read-only file system (os error 30)")
        return [first, guard.explain(rust), guard.explain(ValueError("no such key"))]

    sqlite, rust, other = run.rank(body, rank=2)
    assert "rank 2 may not write" in sqlite
    assert "rank 2 may not write" in rust
    assert other is None


def test_shared_directories_are_written_by_all(run: Run, wall: str):
    """--shared is written in the project itself, is made if absent, and may lie deep."""

    def body(guard):
        Path("ckpt/deep/shard1").write_text("x")
        Path("ckpt/outside").write_text("y")
        return [path for path, _ in diverted(run)]

    assert run.rank(body, mechanism=wall, shared=("ckpt/deep",)) == ["ckpt/outside"]
    assert [
        str(path.relative_to(run.project)) for path in run.project.rglob("*") if path.is_file()
    ] == ["ckpt/deep/shard1"]


def test_a_home_directory_as_project_keeps_its_caches(
    run: Run, wall: str, monkeypatch: pytest.MonkeyPatch
):
    """Where the project is a whole home, caches and the rank's own files stay writable."""
    monkeypatch.setenv("HOME", str(run.project))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    scratch = run.project / ".local" / "rank1"
    scratch.mkdir(parents=True)
    logs = run.project / "logs"
    logs.mkdir()

    def body(guard):
        Path("~/.cache/hub").expanduser().mkdir()
        (logs / "events").write_text("x")
        Path("model.pt").write_text("x")
        return Path("model.pt").read_text()

    assert run.rank(body, mechanism=wall, scratch=scratch, writable=(str(logs),)) == "x"
    assert (run.project / ".cache" / "hub").is_dir()
    assert (logs / "events").exists()
    assert not (run.project / "model.pt").exists()


@pytest.mark.parametrize(
    ("home", "variables", "cache"),
    [
        (".", {}, ".triton"),
        ("home", {}, "home/.triton"),
        (".", {}, ".nv"),
        (".", {"TRITON_CACHE_DIR": "build/triton"}, "build/triton"),
        ("home", {"TORCH_EXTENSIONS_DIR": "extensions"}, "extensions"),
    ],
)
def test_what_python_writes_to_a_cache_is_loaded_by_c_code(
    run: Run,
    wall: str,
    monkeypatch: pytest.MonkeyPatch,
    home: str,
    variables: dict[str, str],
    cache: str,
):
    """Triton writes a compiled module to a new cache, and the system's loader opens it."""
    (run.project / home).mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(run.project / home))
    for name, place in variables.items():
        monkeypatch.setenv(name, str(run.project / place))
    library = Path(_ctypes.__file__).read_bytes()

    def body(guard):
        place = run.project / cache / "abc"
        place.mkdir(parents=True)
        (place / "module.so").write_bytes(library)
        ctypes.CDLL(str(place / "module.so"))
        return os.system(f"cp {place}/module.so {place}/copied.so")

    assert run.rank(body, mechanism=wall) == 0
    assert sorted(path.name for path in (run.project / cache / "abc").iterdir()) == [
        "copied.so",
        "module.so",
    ]


def test_outside_the_project_nothing_is_restricted(run: Run, wall: str):
    """Files beside the project, temporary files and children work as ever."""
    beside = run.base / "beside"
    beside.mkdir()

    def body(guard):
        (beside / "file").write_text("x")
        os.rename(beside / "file", beside / "moved")
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x")
        return os.system(f"cp {beside}/moved {beside}/copied")

    assert run.rank(body, mechanism=wall) == 0
    assert sorted(path.name for path in beside.iterdir()) == ["copied", "moved"]


def test_names_with_quotes_blanks_and_newlines(tmp_path: Path, wall: str):
    """A project may have any name a file system allows."""
    base = tmp_path / 'it\'s "odd"\n dir\\040ä'
    base.mkdir()
    run = Run(base)

    def body(guard):
        Path("ä\n'b").write_text("x")
        return [os.system("touch direct 2>/dev/null") != 0, Path("ä\n'b").read_text()]

    held, text = run.rank(body, mechanism=wall)
    assert text == "x"
    assert held or wall == "diversion"


@needs_mounts
def test_kernels_before_5_12_remount_one_by_one(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Without mount_setattr(2) each mount is made read-only by itself and keeps its flags."""

    def refuse(target: str) -> None:
        raise OSError(errno.ENOSYS, "mount_setattr: the kernel is older than 5.12")

    monkeypatch.setattr(linux, "mount_readonly", refuse)
    (run.project / "disk").mkdir()
    policy = run.policy(1)

    def body():
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount(None, "/", linux.MS_REC | linux.MS_PRIVATE)
        assert os.system(f"mount -t tmpfs -o nosuid,nodev none {run.project}/disk") == 0
        rank_storage.guard(**policy, mechanisms=("mount",))
        held = [
            os.system(f"touch {place}/x 2>/dev/null") != 0
            for place in (run.project, run.project / "disk")
        ]
        *_, disk = (entry for entry in linux.mounts() if entry.point == str(run.project / "disk"))
        return [*held, sorted(disk.options & {"ro", "nosuid", "nodev"})]

    assert join(fork(body)) == [True, True, ["nodev", "nosuid", "ro"]]


def _disk() -> str:
    """A block device that this process may write; empty where there is none."""
    for device in sorted(path for path in Path("/dev").iterdir() if path.is_block_device()):
        try:
            os.close(os.open(device, os.O_WRONLY))
        except OSError:
            continue
        return str(device)
    return ""


def _by_program(disk: str) -> None:
    if subprocess.run(
        ["dd", f"of={disk}", "count=0"], stderr=subprocess.DEVNULL, check=False
    ).returncode:
        raise PermissionError(errno.EACCES, disk)


OPENS_DISK = {
    "to write": lambda disk: os.open(disk, os.O_WRONLY),
    "to read and write": lambda disk: os.open(disk, os.O_RDWR | os.O_EXCL),
    "by a program": _by_program,
    "by a descriptor of its path": lambda disk: os.open(
        f"/proc/self/fd/{os.open(disk, os.O_PATH)}", os.O_WRONLY
    ),
    "by a second name": lambda disk: (
        os.link(disk, "/dev/taas-second") or os.open("/dev/taas-second", os.O_WRONLY)
    ),
    "by another one of its number": lambda disk: os.mknod("node", 0o60600, os.stat(disk).st_rdev),
}


@needs_mounts
@pytest.mark.parametrize("how", OPENS_DISK)
def test_root_does_not_write_past_the_wall_by_the_disk_itself(run: Run, how: str):
    """Behind the mount, devices in /dev that root could write are closed to the rank."""
    if not (disk := _disk()):
        pytest.skip("there is no block device that this process may write")
    opening = OPENS_DISK[how]

    def body(guard):
        assert guard.mechanism.startswith("mount")
        try:
            opening(disk)
        except OSError as error:
            return error.errno
        return "it was opened"

    assert run.rank(body, mechanism="mount") in (
        errno.EACCES,
        errno.EXDEV,
        errno.EPERM,
        errno.EROFS,
    )


@needs_mounts
@pytest.mark.parametrize("project", ["/", "/dev/..", "the folder with a link to /"])
def test_the_disk_is_closed_where_the_project_has_the_devices(run: Run, project: str):
    """The rank sees /dev as it was, and the devices in it are closed."""
    if not (disk := _disk()):
        pytest.skip("there is no block device that this process may write")
    (run.base / "link").symlink_to("/")
    policy = run.policy(1) | {
        "project": project if "/dev" in project or project == "/" else str(run.base / "link")
    }

    def body():
        rank_storage.guard(**policy, mechanisms=("mount",))
        try:
            os.open(disk, os.O_WRONLY)
        except OSError as error:
            return [error.errno, os.access("/dev/null", os.W_OK), Path(disk).is_block_device()]
        return "it was opened"

    assert join(fork(body)) == [errno.EACCES, True, True]


@needs_user_namespaces
def test_a_refused_mechanism_gives_way_to_the_next(run: Run):
    """Where namespaces are refused, Landlock stands."""
    policy = run.policy(1)
    uid, gid = os.geteuid(), os.getegid()

    def body():
        linux.unshare(linux.CLONE_NEWUSER)
        linux.map_own_ids(uid, gid)
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
        linux.drop_capabilities(None)
        return rank_storage.guard(**policy).mechanism

    assert join(fork(body)) == "landlock"


def test_no_wall_at_all_is_an_error(run: Run):
    """A rank that cannot be held does not run."""

    def body():
        try:
            rank_storage.guard(**run.policy(1), mechanisms=())
        except StorageDenied as error:
            return str(error)
        return "it ran"

    assert "cannot be kept from writing" in join(fork(body))


BELOW_PYTHON = {
    "safetensors, in a folder that this rank made": (
        "safetensors.torch.save_file({'a': torch.ones(2)}, 'made/m.safetensors')",
        "made",
    ),
    "safetensors, where the wall is met": (
        "safetensors.torch.save_file({'a': torch.ones(2)}, 'there/m.safetensors')",
        "there",
    ),
    "safetensors reads": (
        "safetensors.torch.load_file('made/own.safetensors')",
        "made/own.safetensors",
    ),
    "torch.jit.save": (
        "torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), 'made/m.pt')",
        "made",
    ),
    "torchvision reads": (
        "torchvision.io.read_file('made/own.safetensors')",
        "made/own.safetensors",
    ),
    "a program writes": (
        "subprocess.run(['touch', 'made/x'], check=True, capture_output=True)",
        "made",
    ),
    "a program reads": (
        "subprocess.run(['cat', 'made/own.safetensors'], check=True, capture_output=True)",
        "made/own.safetensors",
    ),
    "a program's working directory": ("subprocess.run(['true'], cwd='made', check=True)", "made"),
    "a library's absolute path": (
        "safetensors.torch.load_file(os.path.abspath('made/own.safetensors'))",
        "made/own.safetensors",
    ),
}
"""What C code and programs do with what a rank other than 0 wrote, and the path that is explained.
"""


@pytest.mark.parametrize("what", BELOW_PYTHON)
def test_what_c_code_does_not_find_is_explained(run: Run, what: str):
    """Whether it meets the wall or finds no folder.

    Path, rank, rule and what to do, in one sentence.
    """
    pytest.importorskip("safetensors")  # the oldest versions are installed without it
    code, path = BELOW_PYTHON[what]
    (run.project / "there").mkdir()
    import safetensors.torch
    import torch
    import torchvision

    def body(guard):
        Path("made").mkdir()
        Path("made/own.safetensors").write_bytes(safetensors.torch.save({"a": torch.ones(1)}))
        names = {"safetensors": safetensors, "torch": torch, "torchvision": torchvision}
        warnings.simplefilter("ignore")  # torch's, of what is deprecated
        try:
            eval(code, {**names, "subprocess": subprocess, "os": os})
        except Exception as error:
            return guard.explain(error)
        return "no error"

    said = run.rank(body)
    for words in (str(run.project / path), "rank 1", "only rank 0 writes the project", "--shared"):
        assert words in said


@pytest.mark.parametrize(
    "code",
    [
        "open('made/none')",
        "open('none')",
        "raise_(RuntimeError('the model does not exist'))",
        "subprocess.run(['cat', '/none'], check=True, capture_output=True)",
        "os.remove('made/none')",
    ],
)
def test_what_is_nowhere_is_not_explained(run: Run, code: str):
    """A file that nobody has is an ordinary error, also beside what this rank has."""

    def raise_(error):
        raise error

    def body(guard):
        Path("made").mkdir()
        Path("made/own").write_text("x")
        try:
            eval(code, {"raise_": raise_, "subprocess": subprocess, "os": os})
        except Exception as error:
            return guard.explain(error)
        return "no error"

    assert run.rank(body) is None


def test_a_machine_that_gives_no_wall_is_told_of_in_the_cell(run: Run):
    """What Python's own functions write is diverted there all the same."""

    def body(guard):
        Path("model.txt").write_text("x")
        return [said_of_wall(guard), os.path.exists("model.txt")]

    (line,), seen = run.rank(body, mechanism="diversion")
    assert "this machine gives no wall" in line
    assert seen
    assert not (run.project / "model.txt").exists()


LOOKS_INTO = """
import ctypes, os, signal, sys, tempfile
from pathlib import Path
from taas import rank_storage
from taas.base import linux
from storage_ranks import fork, join

class Vector(ctypes.Structure):
    _fields_ = ("base", ctypes.c_void_p), ("length", ctypes.c_size_t)

def tried(call):
    try:
        return call()
    except OSError:
        return "refused"

def read(pid, address):
    found = ctypes.create_string_buffer(5)
    here, there = ctypes.byref(Vector(ctypes.addressof(found), 5)), ctypes.byref(Vector(address, 5))
    linux.check(linux.libc.process_vm_readv(pid, here, 1, there, 1, 0), "read", "")
    return found.value.decode()

def take(pid, fd):
    taken = linux.libc.syscall(438, os.pidfd_open(pid), fd, 0)
    return os.read(linux.check(taken, "pidfd_getfd", ""), 5).decode()

def rank(number, body):
    scratch = rank_storage.scratch_of(base / "scratch", number)
    scratch.mkdir(parents=True)
    wall = rank_storage.guard(project=str(base / "project"), rank=number, scratch=scratch)
    return body(wall)

def look(_):
    ways = (
        lambda: read(pid, address),
        lambda: take(pid, pipe),
        lambda: Path(f"/proc/{pid}/fd/{pipe}").stat() and "opens",
    )
    return [tried(way) for way in ways]

def be_looked_into(wall):
    os.write(ready, wall.mechanism.encode())
    signal.pause()

base = Path(tempfile.mkdtemp(dir="/tmp"))
(base / "project").mkdir()
import taas.agent.import_first
memory = ctypes.create_string_buffer(b"there")
address = ctypes.addressof(memory)
pipe, filled = os.pipe()
os.write(filled, b"taken" * 2)
told, ready = os.pipe()
for other in 2, 0:
    pid, _ = fork(lambda: rank(other, be_looked_into))
    mechanism = os.read(told, 100).decode()
    print(mechanism, *join(fork(lambda: rank(1 + other, look))))
    os.kill(pid, signal.SIGKILL)
"""


@needs_mounts
@needs_user_namespaces
def test_ranks_of_an_ordinary_user_may_look_into_each_other():
    """As libraries for GPUs do to share memory.

    Not into rank 0, which stays in the user's own namespace.
    """
    user = [] if os.geteuid() else ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(
        [*user, sys.executable, "-c", LOOKS_INTO],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "mount there taken opens",
        "none (rank 0) refused refused refused",
    ]

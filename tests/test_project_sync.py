"""Project files on VMs without a shared disk.

What travels, what comes back, and what nothing may happen to.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import block
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_harness import until
from privileges import needs_mounts, small_disk

from taas.header.options import RunSpec
from taas.project.sync import archive
from taas.project.sync.applier import Applier, unpack
from taas.project.sync.archive import ArchiveEntry, Changes, entries, only, pack
from taas.protocol.chunks import chunks_of
from taas.protocol.framing import Memory
from taas.supervisor.transfer import ProjectSync

_ROOT = Path(__file__).resolve().parent.parent


def tree(root: Path) -> dict[str, object]:
    """Everything beneath a folder: contents of files, targets of links, None for directories."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


class Travel:
    """A project, its copies on two VMs, and rank 0's way back, as taas's processes hold them."""

    def __init__(self, folder: Path) -> None:
        self.project, self.copy, self.scratch = (
            folder / "project",
            folder / "copy",
            folder / "scratch",
        )
        self.second = folder / "second"
        for place in (self.project, self.copy, self.second):
            place.mkdir(exist_ok=True)

    def go(self, *, again: bool = False, **limits: int) -> archive.Archive:
        packed = pack(str(self.project), **limits, known=self.applier.known if again else None)
        try:
            assert unpack(packed.fd, str(self.copy)) == unpack(packed.fd, str(self.second)) == []
        finally:
            os.close(packed.fd)
        self.changes = Changes(str(self.copy), only(()))
        aside = self.scratch / "rank0" / "tree"
        self.applier = Applier(str(self.project), packed.found, packed.stayed, "golden-fox", aside)
        return packed

    def back(self, last: bool = True) -> int:
        """Bring the changes back through an archive; returns their number."""
        with tempfile.TemporaryFile() as file:
            for _ in self.changes.pack(file.fileno(), last=last):
                pass
            self.applier.take(file.fileno())
            return sum(1 for _ in entries(file.fileno()))

    @property
    def aside(self) -> dict[str, object]:
        """What found no place in the project."""
        found = tree(self.scratch / "rank0" / "tree") if self.scratch.exists() else {}
        return {name: content for name, content in found.items() if content is not None}


@pytest.fixture
def travel(tmp_path: Path) -> Travel:
    return Travel(tmp_path)


def fill(folder: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


# ---------------------------------------------------------------- what travels


def test_code_travels_and_data_and_what_can_be_made_anew_stay(travel: Travel) -> None:
    """Modules whatever their size, other files up to a size; directories and links as they are."""
    code = {
        "model.py": "import net\n" * 1000,
        "pkg/net.py": "",
        "config.yaml": "lr: 1",
        "big.py": b"#" * 5000,
    }
    home = {
        ".git/HEAD": "ref",
        "venv/pyvenv.cfg": "",
        "venv/lib/torch.py": "",
        "pkg/__pycache__/net.pyc": "",
        ".ipynb_checkpoints/a.ipynb": "{}",
        "data/train.bin": b"0" * 3000,
    }
    fill(travel.project, {**code, **home})
    (travel.project / "runs").mkdir()
    (travel.project / "latest").symlink_to("runs")
    os.mkfifo(travel.project / "pipe")
    packed = travel.go(large=2000)
    there = tree(travel.copy)
    assert {name for name, content in there.items() if isinstance(content, bytes)} == code.keys()
    assert there["runs"] is None
    assert there["data"] is None
    assert there["latest"] == ("link", "runs")
    assert {path: seen.size for path, seen in packed.stayed.items()} == {b"data/train.bin": 3000}


# ---------------------------------------------------------------- what comes back


def test_files_directories_links_and_removals_come_back_while_the_run_goes_on(
    travel: Travel,
) -> None:
    fill(travel.project, {"old.pt": "1", "keep.py": "x", "runs/1/log": "a"})
    travel.go()
    travel.back()
    assert tree(travel.project) == {
        "old.pt": b"1",
        "keep.py": b"x",
        "runs": None,
        "runs/1": None,
        "runs/1/log": b"a",
    }
    fill(travel.copy, {"model.pt": b"w" * ((16 << 20) + 5), "runs/2/log": "b", "empty": ""})
    os.utime(travel.copy / "empty", ns=(1, 10**18 + 1))
    (travel.copy / "old.pt").unlink()
    (travel.copy / "runs/1").rename(travel.copy / "runs/first")
    (travel.copy / "latest").symlink_to("model.pt")
    (travel.copy / "run.sh").write_text("true")
    (travel.copy / "run.sh").chmod(0o755)
    travel.back()
    assert tree(travel.project) == tree(travel.copy)
    assert stat.S_IMODE((travel.project / "run.sh").stat().st_mode) == 0o755
    assert (travel.project / "empty").stat().st_mtime_ns == 10**18 + 1, (
        "or a module would count as edited"
    )
    assert travel.applier.notices == []


@pytest.mark.parametrize(
    "code",
    [
        "f = open('part.pt', 'wb'); f.write(b'half'); f.flush()",
        block("""
            import mmap
            f = open('part.pt', 'w+b')
            f.truncate(4096)
            m = mmap.mmap(f.fileno(), 0)
            f.close()
        """),
    ],
    ids=["descriptor", "mapping"],
)
def test_a_file_that_is_open_for_writing_comes_back_when_it_is_closed(
    travel: Travel, code: str
) -> None:
    """Whoever has it open: also a mapping that outlives its descriptor.

    At the last look it comes as it is.
    """
    travel.go()
    part = travel.copy / "part.pt"
    command = [sys.executable, "-c", f"{code}; print(flush=True); input()"]
    with subprocess.Popen(
        command, cwd=travel.copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdin and writer.stdout
        writer.stdout.readline()
        until(lambda: time.time_ns() - part.stat().st_ctime_ns > 10**8)
        assert travel.back(last=False) == 0
        writer.communicate(b"\n")
    until(lambda: travel.back(last=False))
    assert tree(travel.project) == tree(travel.copy)
    with part.open("w") as file:
        file.write("the process that had it open was killed")
        file.flush()
        assert (travel.back(last=False), travel.back()) == (0, 1)
    assert tree(travel.project) == tree(travel.copy)


# -------------------------------------------------------------- the notebook's user goes on working


def test_what_the_user_changed_is_not_removed_and_what_he_removed_may_come_anew(
    travel: Travel,
) -> None:
    fill(travel.project, {"a": "old", "b": "old", "dir/x": "old"})
    travel.go()
    fill(travel.project, {"a": "user's", "dir/y": "user's"})
    (travel.project / "b").unlink()
    (travel.copy / "a").unlink()
    (travel.copy / "b").write_text("run's")
    subprocess.run(["rm", "-r", str(travel.copy / "dir")], check=True)
    travel.back()
    assert tree(travel.project) == {"a": b"user's", "b": b"run's", "dir": None, "dir/y": b"user's"}
    assert [notice.split()[0] for notice in travel.applier.notices] == ["a"]


def test_a_folder_that_the_user_has_made_a_file_or_a_link(travel: Travel, tmp_path: Path) -> None:
    """Nothing is written through a link that leads out of the project."""
    travel.go()
    (tmp_path / "outside").mkdir()
    (travel.project / "link").symlink_to(tmp_path / "outside")
    fill(travel.project, {"out": "user's"})
    fill(travel.copy, {"out/1": "run's", "out/deep/2": "run's", "link/3": "run's", "fine": "run's"})
    travel.back()
    assert tree(travel.project) == {
        "fine": b"run's",
        "link": ("link", str(tmp_path / "outside")),
        "out": b"user's",
    }
    assert travel.aside == {"out/1": b"run's", "out/deep/2": b"run's", "link/3": b"run's"}
    assert tree(tmp_path / "outside") == {}


@pytest.mark.parametrize(
    "path", [b"../escaped", b"/escaped", b"a/../../escaped", b"..", b"", b"a\0b"]
)
def test_a_path_that_leads_out_of_the_project_is_refused(travel: Travel, path: bytes) -> None:
    travel.go()
    file = archive.FileState("file", 0o644, 1)
    with tempfile.TemporaryFile() as forged:
        for entry, data in ((ArchiveEntry(path, file), b"x"), (ArchiveEntry(path), b"")):
            archive._add(forged.fileno(), entry)
            os.write(forged.fileno(), data)
        travel.applier.take(forged.fileno())
    assert not (travel.project.parent / "escaped").exists() and not Path("/escaped").exists()
    [said] = travel.applier.notices
    assert " did not come back: " in said


def test_what_the_run_made_in_place_of_a_file_that_stayed_home_loses_nothing_of_it(
    travel: Travel,
) -> None:
    """A line added to a large log is all that the VM has of it.

    A checkpoint is a new one. Both versions are kept.
    """
    large = {"history.csv": b"0" * 100, "model.pt": b"old" * 50, "twice.csv": b"1" * 100}
    fill(travel.project, {**large, "twice.before-golden-fox.csv": "x"})
    packed = travel.go(large=10)
    assert packed.stayed.keys() == {os.fsencode(name) for name in large}
    fill(travel.copy, {"history.csv": "a line", "model.pt": "new", "twice.csv": "a line"})
    travel.back()
    fill(travel.copy, {"model.pt": "newer"})  # what is the run's own goes on being so
    travel.back()
    assert tree(travel.project) == {
        "history.before-golden-fox.csv": b"0" * 100,
        "history.csv": b"a line",
        "model.before-golden-fox.pt": b"old" * 50,
        "model.pt": b"newer",
        "twice.before-golden-fox.csv": b"x",
        "twice.csv": b"1" * 100,
    }
    assert travel.aside == {"twice.csv": b"a line"}
    assert {notice.split()[0] for notice in travel.applier.notices} == {"history.csv", "model.pt"}
    assert travel.applier.written == {
        b"model.pt",
        b"history.csv",
    }, "the next start has the run's own"


def test_killed_in_the_middle_the_project_has_each_file_old_or_new(tmp_path: Path) -> None:
    """Never a half under its name."""
    files = {f"{number}.pt": bytes([number]) * (20 << 20) for number in range(3)}
    copy, project = tmp_path / "copy", tmp_path / "project"
    fill(copy, files)
    fill(project, dict.fromkeys(files, b"old"))
    code = block("""
        import os, sys
        from taas.project.sync.applier import unpack
        from taas.project.sync.archive import pack
        packed = pack(sys.argv[1], large=1 << 30, total=1 << 30)
        print(flush=True)
        unpack(packed.fd, sys.argv[2])
    """)
    command = [sys.executable, "-c", code, str(copy), str(project)]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE) as taker:
        assert taker.stdout is not None
        taker.stdout.readline()
        until(lambda: len(list(project.iterdir())) > len(files) or taker.poll() is not None)
        taker.send_signal(signal.SIGKILL)
    assert all(tree(project)[name] in (b"old", files[name]) for name in files)


# ---------------------------------------------------------------- anything at all

_ODD = os.fsdecode(b"\xff q'\"\n")
_PATHS = st.sampled_from(["a", "b", "a/x", "a/y", f"b/{_ODD}", "c", "c/d/e", "c/d"])
_DEEDS = st.one_of(
    st.tuples(st.just("write"), _PATHS, st.binary(max_size=3)),
    st.tuples(st.just("remove"), _PATHS, st.just(b"")),
    st.tuples(st.just("link"), _PATHS, st.just(b"a")),
    st.tuples(st.just("directory"), _PATHS, st.just(b"")),
    st.tuples(st.just("rename"), _PATHS, st.sampled_from([b"a", b"b", b"c/d", b"z"])),
    st.tuples(st.just("look"), st.just(""), st.just(b"")),
)


def do(root: Path, deed: tuple[str, str, bytes]) -> None:
    """Do something to a tree that may be impossible."""
    what, name, data = deed
    path = root / name
    try:
        if what == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        elif what == "link":
            path.symlink_to(os.fsdecode(data))
        elif what == "directory":
            path.mkdir(parents=True)
        elif what == "rename":
            path.rename(root / os.fsdecode(data))
        elif what == "remove":
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError:
        return


@settings(max_examples=40)
@given(st.lists(_DEEDS, max_size=12), st.lists(_DEEDS, max_size=20))
def test_whatever_the_run_does_the_project_ends_as_the_copy(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[str, str, bytes]],
    during: list[tuple[str, str, bytes]],
) -> None:
    travel = Travel(tmp_path_factory.mktemp("any"))
    for deed in before:
        do(travel.project, deed)
    travel.go()
    assert tree(travel.copy) == tree(travel.project)
    for deed in during:
        do(travel.copy, deed)
        if deed[0] == "look":
            travel.back()
    travel.back()
    assert tree(travel.project) == tree(travel.copy)
    assert travel.applier.notices == []


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), _DEEDS), max_size=20))
def test_whatever_both_do_no_version_of_a_file_is_lost(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[bool, tuple[str, str, bytes]]]
) -> None:
    """What the user wrote last stays; what the run wrote since it last came back comes, too."""
    travel = Travel(tmp_path_factory.mktemp("both"))
    travel.go()
    fresh: dict[str, bytes] = {}
    for number, (users, (what, name, _)) in enumerate(deeds):
        if what not in ("write", "look"):
            continue
        place = travel.project if users else travel.copy
        content = f"{'user' if users else 'run'} {number}".encode()
        do(place, (what, name, content))
        if what == "look":
            travel.back()
            fresh.clear()
        elif not users:
            fresh[name] = content
    runs_files = {
        name: content for name, content in fresh.items() if tree(travel.copy).get(name) == content
    }
    users_files = {
        name: content
        for name, content in tree(travel.project).items()
        if isinstance(content, bytes)
    }
    kept = {content for content in users_files.values() if content.startswith(b"user")}
    travel.back()
    after = {*tree(travel.project).values(), *travel.aside.values()}
    assert kept <= after
    assert set(runs_files.values()) <= after


# ---------------------------------------------------------------- the supervisor's end


class Home:
    """A project and a run of two VMs with two ranks each."""

    def __init__(self, folder: Path) -> None:
        self.project, self.scratch, self._vms = (
            folder / "project",
            folder / "scratch",
            folder / "vms",
        )
        self.project.mkdir()
        self.scratch.mkdir()
        spec = RunSpec(vms=2, ranks_per_vm=2, shared=("ckpt", "a/../deep/shared"))
        self.project_sync = ProjectSync("golden-fox", str(self.project), self.scratch, spec)

    def arrive(
        self, vm: int, files: dict[str, bytes | None], of: str = "changes", part: int = 1 << 30
    ) -> None:
        """Let a VM bring files, or their removal, in so many chunks at most."""
        with tempfile.TemporaryFile() as file:
            for name, data in files.items():
                path = os.fsencode(name)
                state = None if data is None else archive.FileState("file", 0o644, len(data))
                archive._add(file.fileno(), ArchiveEntry(path, state))
                os.write(file.fileno(), data or b"")
            memory = Memory(os.getpid(), file.fileno(), os.fstat(file.fileno()).st_size)
            for chunk in [*chunks_of(of, memory, 2 * vm)][:part]:  # type: ignore[arg-type]
                self.project_sync.take(vm, chunk)

    def files(self) -> dict[str, bytes]:
        """The project's files."""
        return {path.name: path.read_bytes() for path in self.project.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.project_sync.close()


def test_what_several_vms_write_into_a_shared_directory_is_no_conflict(home: Home) -> None:
    """The last one to write a file wins, as on one machine.

    What the user changes is the user's against them all.
    """
    home.project_sync.packed()
    for vm, text in ((1, b"one"), (0, b"zero"), (1, b"one again")):
        home.arrive(vm, {"ckpt/latest.txt": text, f"ckpt/{vm}.txt": b""})
        assert home.files()["latest.txt"] == text
    assert home.project_sync.written == {b"ckpt/latest.txt", b"ckpt/0.txt", b"ckpt/1.txt"}
    (home.project / "ckpt/latest.txt").write_text("user's")
    home.arrive(1, {"ckpt/latest.txt": b"later"})
    assert home.files() == {"latest.txt": b"user's", "0.txt": b"", "1.txt": b""}
    assert (home.scratch / "rank0/tree/ckpt/latest.txt").read_bytes() == b"later"


@pytest.mark.parametrize(
    "path", ["model.py", "ckpt.py", "ckpt/../model.py", "deep", "deep/x", "../model.py"]
)
def test_a_vm_without_rank_0_changes_nothing_but_shared_directories(home: Home, path: str) -> None:
    """Its agent may say what it likes: the project is rank 0's to write."""
    (home.project / "model.py").write_text("mine")
    home.project_sync.packed()
    home.arrive(1, {path: b"not its", "deep/shared/1.pt": b"its shard", "model.py": None})
    home.arrive(1, {path: None, "deep": None})
    assert home.files() == {"model.py": b"mine", "1.pt": b"its shard"}
    home.arrive(0, {"new.py": b"rank 0's"})
    assert home.files() == {"model.py": b"mine", "1.pt": b"its shard", "new.py": b"rank 0's"}
    assert list(home.scratch.iterdir()) == []


def test_what_other_ranks_wrote_is_theirs_alone(home: Home) -> None:
    """Each VM brings what its own ranks diverted.

    Nothing of it is in the project before it was sorted.
    """
    names = (
        "rank2/tree/a.txt",
        "rank3/gone/b/mark",
        "rank1/tree/a.txt",
        "rank0/tree/a.txt",
        "run.json",
    )
    home.arrive(1, dict.fromkeys(names, b"its"), of="writes")
    assert {name for name, content in tree(home.scratch).items() if content is not None} == {
        "rank2/tree/a.txt",
        "rank3/gone/b/mark",
    }
    assert home.files() == {}


@needs_mounts
@pytest.mark.parametrize("place", ["project", "scratch"])
def test_a_full_disk_is_named_and_the_rest_comes(home: Home, place: str) -> None:
    """That of the project, or of the run's folder.

    The run is not lost for that, and what is written later comes.
    """
    (home.project / "old.txt").write_text("old")
    home.project_sync.packed()
    with small_disk(getattr(home, place), "size=2m"):
        home.arrive(0, {"net.pt": bytes(3 << 20), "log.txt": b"1"})
        home.arrive(0, {"best.pt": b"2"})
        [said] = home.project_sync.notices(well=True)
        assert " did not " in said and "No space left on device" in said
        names = {"best.pt", "log.txt"} if place == "project" else {"best.pt", "old.txt"}
        assert home.files().keys() == names


def test_a_file_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    """Nobody answers: whoever waits is told after a while.

    One who is answered in vain finds no file, as ever.
    """
    code = """
import sys
from pathlib import Path
from taas.project.sync import files_on_demand
from taas.protocol import deadlines
deadlines.FILE_ON_DEMAND = 0.3
folder, project = sys.argv[1:]
(Path(folder) / "index").write_text('["data/big.bin"]')
files_on_demand.use(folder, project, "")
try:
    open(f"{project}/data/big.bin")
except TimeoutError as error:
    print(error)
print([path.name for path in Path(folder).iterdir()])
"""
    (tmp_path / "asks").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "asks"), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "nothing has come from there" in done.stdout
    assert "'data/big.bin'" in done.stdout
    assert done.stdout.endswith("['index']\n")

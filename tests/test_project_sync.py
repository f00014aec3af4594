"""Project files on VMs without a shared disk: what travels, what comes back, and what nothing may happen to."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas.header.grammar import RunSpec
from taas.project_sync import archive
from taas.project_sync.applier import Applier
from taas.project_sync.tree import PIECE, FileState, PathChange, Token, decode_all, encode, is_own, read_token
from taas.project_sync.watcher import Watcher
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


def piece(path: bytes, size: int, offset: int, data: bytes) -> PathChange:
    """A part of a file."""
    return PathChange(path, FileState("file", 0o644, size), offset, data)


class Travel:
    """A project, its copy on a VM, and the way back, as a supervisor and an agent hold them."""

    def __init__(self, folder: Path) -> None:
        self.project, self.copy = folder / "project", folder / "copy"
        self.project.mkdir(exist_ok=True)
        self.copy.mkdir()

    def go(self, *, again: bool = False, **limits: int) -> archive.Archive:
        expected = self.applier.expected.items() if again else ()
        known = {path: seen for path, seen in expected if seen is not None}
        packed = archive.pack(str(self.project), **limits, known=known)
        try:
            assert archive.unpack(packed.fd, str(self.copy)) == []
        finally:
            os.close(packed.fd)
        self.watcher = Watcher(str(self.copy))
        self.applier = Applier(str(self.project), packed.found, "golden-fox", packed.stayed)
        return packed

    def back(self, last: bool = False) -> int:
        """Bring the changes back through bytes, as a wire does; returns their number."""
        count = 0
        for change in self.watcher.changes(last):
            for decoded in decode_all(encode(change)):
                self.applier.take(decoded)
                count += 1
        return count


@pytest.fixture
def travel(tmp_path: Path):
    made = Travel(tmp_path)
    yield made
    if hasattr(made, "applier"):
        made.applier.close()


def fill(folder: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


# ---------------------------------------------------------------- one disk or two


def test_the_same_disk_is_recognised_and_a_copy_is_not(tmp_path: Path) -> None:
    """A folder with the same names, sizes and times is not the same folder."""
    project = tmp_path / "project"
    fill(project, {"model.py": "x"})
    token = Token(str(project))
    subprocess.run(["cp", "-a", str(project), str(tmp_path / "copy")], check=True)
    assert token.path is not None
    assert read_token(token.path) == token.content
    (tmp_path / "copy" / Path(token.path).name).write_bytes(b"0" * 32)
    assert read_token(str(tmp_path / "copy" / Path(token.path).name)) != token.content
    path = token.path
    token.remove()
    assert read_token(path) != token.content
    assert tree(project) == {"model.py": b"x"}


def test_a_project_that_cannot_be_written_counts_as_not_seen(tmp_path: Path) -> None:
    token = Token(str(tmp_path / "nowhere"))
    assert token.path is None
    assert read_token(token.path or "") != token.content


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
    assert packed.left_out == {"data/train.bin": 3000}


def test_all_together_is_bounded_and_modules_come_first(travel: Travel) -> None:
    fill(travel.project, {"a.txt": b"1" * 400, "b.txt": b"1" * 300, "c.py": b"1" * 500})
    packed = travel.go(total=900)
    assert set(tree(travel.copy)) == {"b.txt", "c.py"}
    assert list(packed.left_out) == ["a.txt"]
    assert packed.nbytes < 2000


def test_a_run_that_starts_again_finds_its_large_checkpoint(travel: Travel) -> None:
    """What came back from a run travels with its next start whatever its size, and takes nobody's room."""
    fill(travel.project, {"data.bin": b"0" * 300})
    travel.go(large=100, total=100)
    fill(travel.copy, {"checkpoint.pt": b"1" * 300, "small.txt": b"2" * 80})
    travel.back()
    assert travel.applier.written == {b"checkpoint.pt", b"small.txt"}
    fill(travel.project, {"also.txt": b"3" * 90})
    packed = archive.pack(str(travel.project), large=100, total=100, always=travel.applier.written)
    os.close(packed.fd)
    assert list(packed.left_out) == ["data.bin"]


def test_a_copy_that_stays_is_brought_up_to_date(travel: Travel) -> None:
    """What changed travels, what went goes, and a large file that the run made stays what it is, and the run's."""
    fill(
        travel.project,
        {"edited.py": "1", "goes.py": "1", "turns": "1", "was/in.py": "1", "off/on": "1", "grows.bin": "1"},
    )
    travel.go(large=100)
    fill(travel.copy, {"made.pt": b"1" * 300})
    travel.back()
    made = (travel.copy / "made.pt").stat().st_ino
    (travel.project / "goes.py").unlink()
    (travel.project / "turns").unlink()
    shutil.rmtree(travel.project / "was")
    shutil.rmtree(travel.project / "off")
    fill(
        travel.project,
        {"edited.py": "2", "turns/in.py": "2", "off": "2", "added/x.py": "2", "grows.bin": b"2" * 300},
    )
    packed = travel.go(again=True, large=100)
    assert tree(travel.copy) | {"grows.bin": b"2" * 300} == tree(travel.project)
    assert list(packed.left_out) == ["grows.bin"]
    assert not (travel.copy / "grows.bin").exists()
    assert (travel.copy / "made.pt").stat().st_ino == made
    fill(travel.copy, {"made.pt": b"3" * 301})
    travel.back()
    assert travel.applier.notices == []
    assert (travel.project / "made.pt").read_bytes() == b"3" * 301
    (travel.project / "made.pt").unlink()
    travel.go(again=True, large=100)
    assert not (travel.copy / "made.pt").exists()


def test_a_project_with_too_many_files_says_so(travel: Travel) -> None:
    fill(travel.project, {f"{number}.py": "" for number in range(30)})
    assert not travel.go(entries=20).whole


def test_names_that_are_no_text_travel_there_and_back(travel: Travel) -> None:
    """Blanks, quotes, newlines, bytes that are no UTF-8."""
    names = [b"a b", b"q'\"q", b"line\nline", b"\xff\xfe", "ü".encode()]
    for name in names:
        (travel.project / os.fsdecode(name)).write_text("x")
    travel.go()
    assert tree(travel.copy) == tree(travel.project)
    for name in names:
        (travel.copy / os.fsdecode(name)).write_text("longer")
    travel.back()
    assert tree(travel.copy) == tree(travel.project)


# ---------------------------------------------------------------- what comes back


def test_files_directories_links_and_removals_come_back_while_the_run_goes_on(travel: Travel) -> None:
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
    fill(travel.copy, {"model.pt": b"w" * (2 * PIECE + 5), "runs/2/log": "b", "empty": ""})
    (travel.copy / "old.pt").unlink()
    (travel.copy / "runs/1").rename(travel.copy / "runs/first")
    (travel.copy / "latest").symlink_to("model.pt")
    (travel.copy / "run.sh").write_text("true")
    (travel.copy / "run.sh").chmod(0o755)
    travel.back()
    assert tree(travel.project) == tree(travel.copy)
    assert stat.S_IMODE((travel.project / "run.sh").stat().st_mode) == 0o755
    assert travel.applier.notices == []


def test_what_becomes_another_kind_comes_back(travel: Travel) -> None:
    """A file where a directory was, a directory where a file was, a link where a file was."""
    fill(travel.project, {"a/b/c": "1", "a/d": "2", "file": "3", "other": "4"})
    travel.go()
    subprocess.run(["rm", "-r", str(travel.copy / "a")], check=True)
    (travel.copy / "a").write_text("now a file")
    (travel.copy / "file").unlink()
    fill(travel.copy, {"file/inside": "5"})
    (travel.copy / "other").unlink()
    (travel.copy / "other").symlink_to("a")
    travel.back()
    assert tree(travel.project) == tree(travel.copy)


def test_a_file_that_is_open_for_writing_comes_back_when_it_is_closed(travel: Travel) -> None:
    """Whoever has it open: also a mapping that outlives its descriptor. At the last look it comes as it is."""
    travel.go()
    for kind in ("descriptor", "mapping"):
        code = {
            "descriptor": "f = open('part.pt', 'wb'); f.write(b'half'); f.flush()",
            "mapping": "import mmap; f = open('part.pt', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 0); f.close()",
        }[kind]
        writer = subprocess.Popen(
            [sys.executable, "-c", f"{code}; print(flush=True); input()"],
            cwd=travel.copy,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert writer.stdin and writer.stdout
        writer.stdout.readline()
        assert travel.back() == 0
        assert tree(travel.project) == {}
        writer.communicate(b"\n")
        travel.back()
        assert tree(travel.project) == tree(travel.copy)
        (travel.copy / "part.pt").unlink()
        travel.back()
        assert tree(travel.project) == {}
    with (travel.copy / "log").open("w") as file:
        file.write("the process that had it open was killed")
        file.flush()
        assert travel.back() == 0
        assert travel.back(last=True) == 1
    assert tree(travel.project) == tree(travel.copy)


def test_a_change_within_a_tick_of_the_clock_is_not_missed(travel: Travel) -> None:
    """The same size and the same times do not prove the same content."""
    travel.go()
    for number in range(50):
        (travel.copy / "counter").write_text(f"{number:03}")
        travel.back(last=True)
        assert (travel.project / "counter").read_text() == f"{number:03}"


def test_a_file_that_changes_while_it_is_read_is_given_up_and_sent_anew(travel: Travel) -> None:
    travel.go()
    fill(travel.copy, {"model.pt": b"a" * (3 * PIECE)})
    changes = travel.watcher.changes()
    travel.applier.take(next(changes))
    fill(travel.copy, {"model.pt": b"b" * (3 * PIECE)})
    for change in changes:
        travel.applier.take(change)
    assert tree(travel.project) == {}
    travel.back()
    assert tree(travel.project) == tree(travel.copy)


def test_files_of_several_vms_may_come_at_once(tmp_path: Path) -> None:
    """Their pieces are mixed; each file is whole."""
    for vm in range(3):
        fill(tmp_path / str(vm), {f"shard-{vm}": bytes([vm + 1]) * (3 * PIECE + vm + 1), "only/one": "x"})
    (tmp_path / "project").mkdir()
    applier = Applier(str(tmp_path / "project"), {}, "golden-fox")
    streams = [list(Watcher(str(tmp_path / str(vm)), afresh=True).changes()) for vm in range(3)]
    for round_ in zip(*streams, strict=True):
        for change in round_:
            applier.take(change)
    applier.close()
    assert applier.notices == []
    assert {name: content for name, content in tree(tmp_path / "project").items() if content} == {
        **{f"shard-{vm}": bytes([vm + 1]) * (3 * PIECE + vm + 1) for vm in range(3)},
        "only/one": b"x",
    }


def test_only_chosen_directories_are_told_of(tmp_path: Path) -> None:
    """What every rank may write comes back from the other VMs, too, and nothing else does."""
    fill(tmp_path, {"shared/deep/0": "", "elsewhere/x": "", "shared2": ""})
    watcher = Watcher(str(tmp_path), only=["shared/deep"], afresh=True)
    assert [change.path for change in watcher.changes()] == [b"shared", b"shared/deep", b"shared/deep/0"]


# ---------------------------------------------------------------- the notebook's user goes on working


def test_what_the_user_changed_meanwhile_is_kept_and_the_runs_version_stands_beside_it(
    travel: Travel,
) -> None:
    """Changed, made, or replaced: both versions are there, and named."""
    fill(travel.project, {"model.py": "old", "notes.txt": "old"})
    travel.go()
    fill(travel.project, {"model.py": "user's", "new.txt": "user's"})
    fill(travel.copy, {"model.py": "run's", "new.txt": "run's", "notes.txt": "run's"})
    travel.back()
    assert tree(travel.project) == {
        "model.golden-fox.py": b"run's",
        "model.py": b"user's",
        "new.golden-fox.txt": b"run's",
        "new.txt": b"user's",
        "notes.txt": b"run's",
    }
    assert len(travel.applier.notices) == 2
    assert "model.py was changed here" in travel.applier.notices[0]
    assert "model.golden-fox.py" in travel.applier.notices[0]
    fill(travel.copy, {"model.py": "run's, later"})
    travel.back()
    assert (travel.project / "model.py").read_text() == "user's"
    assert (travel.project / "model.golden-fox.py").read_text() == "run's, later"
    assert len(travel.applier.notices) == 2


def test_what_the_user_changed_is_not_removed_and_what_he_removed_may_come_anew(travel: Travel) -> None:
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


def test_a_folder_that_the_user_has_made_a_file_leaves_the_runs_files_beside_it(travel: Travel) -> None:
    travel.go()
    fill(travel.project, {"out": "user's"})
    fill(travel.copy, {"out/1": "run's", "out/deep/2": "run's"})
    travel.back()
    assert tree(travel.project) == {
        "out": b"user's",
        "out.golden-fox": None,
        "out.golden-fox/1": b"run's",
        "out.golden-fox/deep": None,
        "out.golden-fox/deep/2": b"run's",
    }


def test_what_both_made_alike_is_no_conflict(travel: Travel) -> None:
    travel.go()
    for place in (travel.project, travel.copy):
        fill(place, {"same": "content"})
    travel.back()
    assert travel.applier.notices == []
    assert tree(travel.project) == {"same": b"content"}


def test_a_file_that_stayed_home_is_not_removed(travel: Travel) -> None:
    """Data that did not travel is absent on the VM: that is no removal, nor is that of its folder."""
    fill(travel.project, {"data.bin": b"0" * 100, "runs/old.bin": b"0" * 100})
    travel.go(large=10)
    (travel.copy / "runs").rmdir()
    travel.back(last=True)
    assert tree(travel.project) == {"data.bin": b"0" * 100, "runs": None, "runs/old.bin": b"0" * 100}
    assert travel.applier.notices == []


def test_what_the_run_made_in_place_of_a_file_that_stayed_home_loses_nothing_of_it(
    travel: Travel,
) -> None:
    """A line added to a large log is all that the VM has of it; a checkpoint is a new one. Both versions are kept."""
    fill(
        travel.project,
        {"history.csv": b"0" * 100, "model.pt": b"old" * 50, "history.before-golden-fox.csv": "x"},
    )
    packed = travel.go(large=10)
    assert packed.stayed == {b"history.csv", b"model.pt"}
    with (travel.copy / "history.csv").open("a") as log:
        log.write("a line")
    fill(travel.copy, {"model.pt": "new"})
    travel.back()
    for number in range(2):  # what is the run's own goes on being so
        fill(travel.copy, {"model.pt": f"newer {number}"})
        travel.back()
    assert tree(travel.project) == {
        "history.before-golden-fox-2.csv": b"0" * 100,
        "history.before-golden-fox.csv": b"x",
        "history.csv": b"a line",
        "model.before-golden-fox.pt": b"old" * 50,
        "model.pt": b"newer 1",
    }
    assert travel.applier.replaced == {b"history.csv", b"model.pt"}
    assert [notice.split()[0] for notice in travel.applier.notices] == ["history.csv", "model.pt"]
    assert "history.before-golden-fox-2.csv" in travel.applier.notices[0]
    assert {b"model.pt", b"history.csv"} == travel.applier.written, "the next start has the run's own"
    fill(travel.project, {"model.pt": "user's"})
    fill(travel.copy, {"model.pt": "run's"})
    travel.back()
    assert (travel.project / "model.pt").read_text() == "user's"


def test_a_file_that_could_not_be_read_stayed_home(travel: Travel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that belongs to somebody else; or one that may not have a second name: then the run's stands beside."""

    def refuse(root: bytes, path: bytes) -> int:
        raise PermissionError(errno.EACCES, "no")

    def refuse_link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    link = os.link
    fill(travel.project, {"a.txt": "theirs", "b.txt": "theirs"})
    with monkeypatch.context() as patch:
        patch.setattr(archive, "open_to_read", refuse)
        travel.go()
    assert tree(travel.copy) == {}
    fill(travel.copy, {"a.txt": "run's"})
    travel.back()
    fill(travel.copy, {"b.txt": "run's"})
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "link", lambda *names, **how: refuse_link() if names[0] == b"b.txt" else link(*names, **how)
        )
        travel.back()
    assert tree(travel.project) == {
        "a.before-golden-fox.txt": b"theirs",
        "a.txt": b"run's",
        "b.golden-fox.txt": b"run's",
        "b.txt": b"theirs",
    }


def test_a_full_or_forbidden_place_is_named_and_the_rest_comes(travel: Travel, tmp_path: Path) -> None:
    """A path that leads out of the project, through a link of the user's, is refused."""
    travel.go()
    (tmp_path / "outside").mkdir()
    (travel.project / "link").symlink_to(tmp_path / "outside")
    fill(travel.copy, {"link/escaped": "x", "fine": "y"})
    travel.back()
    assert tree(tmp_path / "outside") == {}
    assert (travel.project / "fine").read_text() == "y"
    for path in (b"../escaped", b"/escaped", b"a/../../escaped"):
        travel.applier.take(piece(path, 1, 0, b"x"))
        travel.applier.take(PathChange(path))
    assert not (tmp_path / "escaped").exists()
    assert not Path("/escaped").exists()
    assert sum("did not come back" in notice for notice in travel.applier.notices) == 3


def test_a_file_system_without_nameless_files_serves_too(
    travel: Travel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS is."""
    fill(travel.project, {"a": "old"})
    travel.go()
    real = os.open

    def no_nameless(path: object, flags: int, *rest: object, **options: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real(path, flags, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_nameless)
    fill(travel.copy, {"a": "new", "b": "new"})
    travel.back()
    assert tree(travel.project) == {"a": b"new", "b": b"new"}


# ---------------------------------------------------------------- killed in the middle

_SEND = """
import sys
from taas.project_sync.tree import encode
from taas.project_sync.watcher import Watcher
from taas.supervisor.transfer import ProjectSync
for change in Watcher(sys.argv[1], afresh=True).changes():
    sys.stdout.buffer.write(encode(change))
sys.stdout.flush()
"""
_TAKE = """
import sys
from taas.project_sync.applier import Applier
from taas.project_sync.tree import decode_all
from taas.project_sync.archive import stays_home
from taas.project_sync.tree import scan
applier = Applier(sys.argv[1], dict(scan(sys.argv[1].encode(), stays_home)), "golden-fox")
while head := sys.stdin.buffer.read(4):
    for change in decode_all(head + sys.stdin.buffer.read(int.from_bytes(head, "big"))):
        applier.take(change)
print(applier.notices)
"""


@pytest.mark.parametrize("victim", ["sender", "taker"])
@pytest.mark.parametrize("after", [1, 3 * PIECE // 2, 4 * PIECE])
def test_killed_in_the_middle_the_project_has_each_file_old_or_new(
    tmp_path: Path, victim: str, after: int
) -> None:
    """Never a half, nor a leftover; and the next run brings the rest."""
    files = {f"{number}.pt": bytes([number]) * (2 * PIECE + number) for number in range(3)}
    copy, project = tmp_path / "copy", tmp_path / "project"
    fill(copy, files)
    fill(project, dict.fromkeys(files, b"old"))
    environ = {**os.environ, "PYTHONPATH": str(_ROOT)}

    def start(code: str, folder: Path, **pipes: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, str(folder)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, **pipes)  # type: ignore[call-overload]

    def travel(limit: int | None) -> None:
        sender, taker = start(_SEND, copy), start(_TAKE, project, stdin=subprocess.PIPE)
        assert sender.stdout and taker.stdin and taker.stdout
        taker.stdin.write(sender.stdout.read(limit if limit is not None else -1))
        if limit is not None:
            taker.stdin.flush()
            os.kill((sender if victim == "sender" else taker).pid, signal.SIGKILL)
        with taker.stdin, taker.stdout:
            taker.stdin.close()
            taker.wait(60)
        with sender.stdout:
            sender.kill()
        sender.wait(60)

    travel(after)
    now = tree(project)
    assert now.keys() == files.keys()
    assert all(now[name] in (b"old", files[name]) for name in files)
    travel(None)
    assert tree(project) == files


def test_what_a_killed_process_left_is_nobodys_work_and_goes(tmp_path: Path) -> None:
    """Its names say that they are taas' own: they don't travel, and are removed once they are an hour old."""
    project = tmp_path / "project"
    left = ".taas-part-0123456789abcdef"
    fill(project, {left: "half", "a": "1"})
    assert is_own(left.encode())
    packed = archive.pack(str(project))
    os.close(packed.fd)
    assert packed.found.keys() == {b"a"}
    assert next(Watcher(str(project), afresh=True).changes()).path == b"a"


# ---------------------------------------------------------------- anything at all

_PATHS = st.sampled_from(["a", "b", "a/x", "a/y", "b/x", "c", "c/d/e", "c/d"])
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
    travel.back(last=True)
    travel.applier.close()
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
    runs_files = {name: content for name, content in fresh.items() if tree(travel.copy).get(name) == content}
    users_files = {
        name: content for name, content in tree(travel.project).items() if isinstance(content, bytes)
    }
    kept = {content for content in users_files.values() if content.startswith(b"user")}
    travel.back(last=True)
    travel.applier.close()
    after = {content for content in tree(travel.project).values() if isinstance(content, bytes)}
    assert kept <= after
    assert set(runs_files.values()) <= after


# ---------------------------------------------------------------- the supervisor's end


class Home:
    """A project and a run of two VMs with two ranks each."""

    def __init__(self, folder: Path) -> None:
        self.project, self.scratch = folder / "project", folder / "scratch"
        self.project.mkdir()
        spec = RunSpec(vms=2, ranks_per_vm=2, shared=("ckpt", "a/../deep/shared"))
        self.project_sync = ProjectSync("golden-fox", str(self.project), self.scratch, spec)

    def arrive(self, vm: int, rank: int, change: PathChange) -> None:
        """Let a VM bring a change."""
        self.project_sync.apply(vm, rank, encode(change))

    def files(self) -> dict[str, bytes]:
        """The project's files."""
        return {path.name: path.read_bytes() for path in self.project.rglob("*") if path.is_file()}


def whole(path: str, data: bytes) -> PathChange:
    """A small file."""
    return piece(path.encode(), len(data), 0, data)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.project_sync.close()


def test_a_large_file_that_the_cell_adds_to_is_kept_and_both_are_named(home: Home) -> None:
    """The VM had nothing of it. What did not travel is said, though the run succeeded."""
    large = bytes(archive.LARGE + 1)
    (home.project / "history.csv").write_bytes(large)
    home.project_sync.packed()
    assert home.project_sync.notices(well=True) == []
    home.arrive(0, 0, whole("history.csv", b"a line\n"))
    assert home.files() == {"history.csv": b"a line\n", "history.before-golden-fox.csv": large}
    said = home.project_sync.notices(well=True)
    assert "history.csv (8.4 MB) had not travelled" in said[0]
    assert "yours is history.before-golden-fox.csv" in said[0]
    assert "not on the VMs, which do not see this disk: history.csv (8.4 MB)" in said[1]


def test_what_several_vms_write_into_a_shared_directory_is_no_conflict(home: Home) -> None:
    """The last one to write a file wins, as on one machine; what the user changes is the user's against them all."""
    for vm, text in ((1, b"one"), (0, b"zero"), (1, b"one again")):
        home.arrive(vm, 0, PathChange(b"ckpt", FileState("directory", 0o755)))
        home.arrive(vm, 0, whole("ckpt/latest.txt", text))
        assert home.files() == {"latest.txt": text}
    home.arrive(0, 0, whole("ckpt/0.txt", b""))
    home.arrive(1, 0, PathChange(b"ckpt"))
    assert home.project_sync.written == {b"ckpt/latest.txt", b"ckpt/0.txt"}
    (home.project / "ckpt/latest.txt").write_text("user's")
    for vm in range(2):
        home.arrive(vm, 0, whole("ckpt/latest.txt", b"later, %d" % vm))
    assert home.files() == {"latest.txt": b"user's", "latest.golden-fox.txt": b"later, 1", "0.txt": b""}
    (home.project / "ckpt/latest.txt").unlink()
    for name in (b"ckpt/latest.txt", b"ckpt/0.txt", b"ckpt"):
        home.arrive(0, 0, PathChange(name))
    assert list(home.project.iterdir()) == []
    [said] = home.project_sync.notices(well=True)
    assert "the run's is ckpt/latest.golden-fox.txt" in said


OUTSIDE = ["model.py", "ckpt.py", "ckpt/../model.py", "deep", "deep/x", "../model.py"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_vm_without_rank_0_changes_nothing_but_shared_directories(home: Home, path: str) -> None:
    """Its agent may say what it likes: the project is rank 0's to write."""
    (home.project / "model.py").write_text("mine")
    (home.project / "deep").mkdir()
    home.arrive(1, 0, PathChange(b"deep/shared", FileState("directory", 0o755)))
    home.arrive(1, 0, whole("deep/shared/1.pt", b"its shard"))
    home.arrive(1, 0, whole(path, b"not its"))
    home.arrive(1, 0, PathChange(path.encode()))
    home.arrive(1, 0, PathChange(b"deep"))
    assert home.files() == {"model.py": b"mine", "1.pt": b"its shard"}
    home.arrive(0, 0, whole("new.py", b"rank 0's"))
    assert home.files() == {"model.py": b"mine", "1.pt": b"its shard", "new.py": b"rank 0's"}


def test_the_same_file_may_come_from_two_vms_at_once(home: Home) -> None:
    """Each version is whole, and what a lost VM was sending does not count."""
    texts = [b"0" * (PIECE + 1), b"1" * (PIECE + 1)]
    for offset in (0, PIECE):
        for vm, text in enumerate(texts):
            home.arrive(
                vm,
                0,
                piece(b"ckpt/x", len(text), offset, text[offset:][:PIECE]),
            )
            if vm == 1 and offset == 0:
                home.project_sync.lose(1)
    assert home.files() == {"x": texts[0]}

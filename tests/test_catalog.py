"""Instance types and ``taas.toml``."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import block

from taas.config import load_catalog
from taas.errors import ConfigError, HeaderError
from taas.header.catalog import BUILT_IN_TYPES, Catalog, InstanceType
from taas.header.grammar import parse_header, parse_magic_line


@pytest.fixture(autouse=True)
def own_configuration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the configuration of the person who runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "taas").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def config(tmp_path: Path, project: str = "", user: str = "") -> Catalog:
    (tmp_path / "project" / "taas.toml").write_text(project)
    (tmp_path / "config" / "taas" / "taas.toml").write_text(user)
    return load_catalog()


def test_built_in_types() -> None:
    """The types are DataSphere's."""
    sizes = {name: (kind.vcpus, kind.gpus, kind.gpu_model) for name, kind in BUILT_IN_TYPES.items()}
    assert sizes == {
        "c1.4": (4, 0, ""),
        "c1.8": (8, 0, ""),
        "c1.32": (32, 0, ""),
        "c1.80": (80, 0, ""),
        "g1.1": (8, 1, "V100"),
        "g1.2": (16, 2, "V100"),
        "g1.4": (32, 4, "V100"),
        "g2.1": (28, 1, "A100"),
        "g2.2": (56, 2, "A100"),
        "g2.4": (112, 4, "A100"),
        "g2.8": (224, 8, "A100"),
    }


def test_types_of_ones_own(tmp_path: Path) -> None:
    """A file adds types and redefines built-in ones; none is needed."""
    assert load_catalog() == Catalog()
    catalog = config(
        tmp_path,
        '[instances."x1.2"]\n'
        "vcpus = 16\n"
        "gpus = 2\n"
        'gpu_model = "L40S"\n'
        "vms = [1, 3]\n"
        '[instances."g2.8"]\n'
        "vcpus=9\n",
    )
    assert catalog.find("x1.2") == InstanceType(
        name="x1.2", vcpus=16, gpus=2, gpu_model="L40S", vms=(1, 3)
    )
    assert catalog.find("g2.8") == InstanceType(name="g2.8", vcpus=9)
    assert catalog.find("c1.4") == BUILT_IN_TYPES["c1.4"]


def test_project_wins_over_user_key_by_key(tmp_path: Path) -> None:
    """The user's file holds where the project's says nothing."""
    catalog = config(
        tmp_path,
        project='[run]\nmax_restarts = 1\n[delivery]\nbuffer = "1.5 GB"\n',
        user=(
            block("""
                [run]
                max_restarts = 2
                hang_timeout = 20
                [engine]
                default = "ray"
                address = "head:6379"
                [delivery]
                buffer = "2GiB"
                encrypt = false
            """)
        ),
    )
    assert (catalog.settings["run.max_restarts"], catalog.settings["run.hang_timeout"]) == (1, 20.0)
    assert (catalog["engine.default"], catalog["engine.address"]) == ("ray", "head:6379")
    assert (catalog["delivery.buffer"], catalog["delivery.encrypt"]) == (1_500_000_000, False)


def test_a_key_takes_what_its_option_takes(tmp_path: Path) -> None:
    """One grammar for what is typed above a cell and what holds for all."""
    catalog = config(
        tmp_path,
        '[run]\nhang_timeout = "5min"\noutput = "0,2-3"\n[storage]\nshared = ["a", "b c"]\n',
    )
    header = parse_header(
        parse_magic_line("--gpus 4"), expand=str, catalog=catalog, visible_gpus=0, registered=()
    )
    assert (header.hang_timeout, header.output, header.shared) == (300.0, (0, 2, 3), ("a", "b c"))


REFUSED = {
    '[instance."x1.2"]\nvcpus = 3\n': "did you mean instances.",
    "run = 3\n": "write one of run.",
    "[run]\nhang_timout = 3\n": "did you mean run.hang_timeout?",
    "[run]\nhang_timeout = -3\n": "above 0",
    '[engine]\ndefault = "kubernetes"\n': "default",
    '[engine.slurm]\npartitio = "gpu"\n': "did you mean engine.slurm.partition?",
    '[run.slurm]\npartition = "gpu"\n': "did you mean engine.slurm.partition?",
    "[storage]\nrank_writes = 'dicard'\n": "did you mean discard?",
    "[delivery]\nbuffer = '2 parsecs'\n": "a size: bytes",
    "[instances.g3.8]\nvcpus = 3\n": "quotes",
    '[instances."big"]\nvcpus = 3\n': "called like g2.8",
    '[instances."g3.8"]\ngpus = 3\n': "vcpus",
    '[instances."g3.8"]\nvcpus = 3\ngpu = 3\n': ".gpus",
    '[instances."g3.8"]\nvcpus = 8\nvms = []\n': "vms",
    "[run\n": "line 1",
    "\udcff": "utf-8",
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """The one-line error names the file, the key, and the nearest key or what is allowed."""
    path = tmp_path / "project" / "taas.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        load_catalog()
    message = str(refused.value)
    assert message.startswith(str(path))
    assert REFUSED[text] in message
    assert len(message.splitlines()) == 1


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    """A file that cannot be read is an error, never silently no file."""
    (tmp_path / "project" / "taas.toml").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match="correct the file or remove it"):
        load_catalog()


def test_unknown_type_names_the_nearest() -> None:
    """The types there are, and what to type."""
    with pytest.raises(HeaderError, match=r"no instance type #!g2,4: did you mean #!g2\.4\?"):
        Catalog().find("g2,4")

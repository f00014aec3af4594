"""What the documents say is there."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from taas.header.catalog import _KEYS, InstanceType
from taas.header.grammar import NOT_WITH_KEEP
from taas.header.options import _FIELDS, MAY_DIFFER, ON, OPTIONS, SETTINGS
from taas.notebook.verbs import VERBS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ANCHOR = r'<a id="[a-z0-9-]+"></a>'
CELL_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")
OF_RAY = "address autoscaling-config block head num-cpus num-gpus port resources"
OF_SLURM = "exclusive qos gres long mem nice no-kill no-requeue"
OF_OTHERS = (
    "bounding-set clear-groups inh-caps regid reuid nnodes nproc-per-node gpu-ids num-processes"
    " hypothesis-profile hypothesis-seed ip no-browser shm-size local constraint help rank"
    " runtime-dir follow strict nproc user index-url logdir cpus-per-task"
)
OF_OTHER_PROGRAMS = {*OF_RAY.split(), *OF_SLURM.split(), *OF_OTHERS.split()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Each link of a document to a file of the project leads to one.

    Headings that are linked to exist.
    """
    for target in LINK.findall(path.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, heading = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        assert ROOT in file.parents, f"{path.name} links out of the project: {target}"
        if heading:
            known = {*slugs(file), *anchors(file)}
            assert heading in known, f"{path.name} links to {target}"


def slugs(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def anchors(document: Path) -> list[str]:
    """The anchors that a document sets itself."""
    return re.findall(r'<a id="([a-z0-9-]+)"></a>', document.read_text())


@pytest.mark.parametrize("name", ["troubleshooting.md", "glossary.md"])
def test_each_row_has_an_address(name: str) -> None:
    """Each message, symptom and word begins with an anchor, and no two have the same one."""
    document = ROOT / "docs" / name
    rows = re.findall(r"^\| (.+)\n(?!\|-)", document.read_text(), re.MULTILINE)  # but the heads
    assert rows
    assert [row for row in rows if not re.match(ANCHOR, row)] == []
    found = [*anchors(document), *slugs(document)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_in_documents_exist(path: Path) -> None:
    """Each option that a document names is an option of the header or of a verb."""
    named = set(CELL_OPTION.findall(path.read_text())) - OF_OTHER_PROGRAMS
    assert named <= {
        *OPTIONS,
        ON.name,
        *(option.name for verb in VERBS.values() for option in verb.options),
    }


def first_column(name: str) -> list[str]:
    """What stands as code in the first column of a page's tables."""
    text = (ROOT / "docs" / name).read_text()
    rows = re.findall(rf"^\| (?:{ANCHOR})?(`.+?) \|", text, re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def test_every_option_and_every_key_has_its_row() -> None:
    """The tables of options and of ``taas.toml``'s keys have all that there are, and no others."""
    assert set(CELL_OPTION.findall(" ".join(first_column("cell.md")))) == {*OPTIONS, ON.name}
    keys = {
        *_KEYS,
        *SETTINGS,
        *(f'instances."NAME".{field.name}' for field in fields(InstanceType)[1:]),
    }
    documented = {row for row in first_column("configuration.md") if "." in row}
    assert documented == keys


def test_kept_ranks_are_as_their_document_says() -> None:
    """It lists all options in which two ``--keep`` cells may not differ, and no others."""
    text = (ROOT / "docs" / "keep.md").read_text()
    listed = re.search(r"asks for other ranks \(([^)]*)\)", text)
    assert listed is not None
    fixed = {option.name for field, option in _FIELDS.items() if field not in MAY_DIFFER}
    assert set(CELL_OPTION.findall(listed[1])) == fixed - {*NOT_WITH_KEEP}


def test_what_troubleshooting_quotes_is_printed() -> None:
    """Each text of the first columns stands in a string of the code.

    ``…`` is what the code puts in.
    """
    trees = [ast.parse(path.read_text()) for path in (ROOT / "taas").rglob("*.py")]
    strings = [string for tree in trees for string in map(words, ast.walk(tree)) if string]
    for quoted in first_column("troubleshooting.md"):
        pattern = re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)
        assert any(map(pattern.search, strings)), f"taas prints no {quoted!r}"


def words(node: ast.AST) -> str | None:
    """The text of a string, with what an f-string puts in left out."""
    if isinstance(node, ast.JoinedStr):
        return "\0".join(
            part.value if isinstance(part, ast.Constant) else "" for part in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_verbs_in_documents_exist(path: Path) -> None:
    """Each ``%taas VERB`` that a document names is a verb."""
    named = set(re.findall(r"`%taas ([a-z]+)", path.read_text()))
    assert named <= set(VERBS)


def test_make_knows_the_targets_that_documents_name() -> None:
    """``make NAME`` in a document, and in CI, is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in [*DOCUMENTS, ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").iterdir()]:
        named = set(re.findall(r"(?:^|`|- run: )make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert named <= targets, path.name
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, ".ci/run is executable"
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0


def test_constraints_meet_what_the_package_asks_for() -> None:
    """Each dependency of package, extras and groups has a tested version in constraints.txt."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    tested = {canonicalize_name(name): version for name, version in pinned.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    groups = [project["project"]["dependencies"], *project["dependency-groups"].values(), *extras]
    for requirement in map(Requirement, (line for group in groups for line in group)):
        version = tested.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} and {version}"

"""The house keeps its shape; `make lint` holds which package may import which."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("platform", "deployments", "routers", "kvstore")

MOST_FILES = 15
MOST_LINES = 500
MOST_CLASS_LINES = 250

# Exceptions, with the reason that each stands for.
LARGE_FOLDERS = {"platform/config": "one section of the configuration a file"}
LONG_FILES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {}
SHARED_NAMES: dict[str, str] = {}


def modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def test_platform_has_no_init_which_would_shadow_the_standard_library() -> None:
    assert not (ROOT / "platform/__init__.py").exists()


def test_every_package_is_listed_for_the_build() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {".".join(("loomserve", *p.parent.relative_to(ROOT).parts)) for p in modules(*CODE)}
    assert set(project["tool"]["setuptools"]["packages"]) == packages | {"loomserve.platform"}


def test_every_package_has_a_row_in_the_architecture_and_no_row_lacks_its_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `([^`]+/)` \| .+ \|$", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    packages = {f"{name_of(p.parent)}/" for p in modules(*CODE)}
    assert set(rows) == packages


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules(*CODE):
        for node in classes(path):
            if not node.name.startswith("_"):
                homes[node.name].append(name_of(path))
    several = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in several.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(several), "an exception that is no longer one"


def test_a_folder_holds_no_more_than_a_reader_takes_in() -> None:
    files: dict[str, int] = defaultdict(int)
    for path in modules(*CODE):
        files[name_of(path.parent)] += path.name != "__init__.py"
    large = {folder for folder, count in files.items() if count > MOST_FILES}
    assert large == set(LARGE_FOLDERS)


def test_files_and_classes_are_short() -> None:
    long_files = {
        name_of(p) for p in modules(*CODE) if len(p.read_text().splitlines()) > MOST_LINES
    }
    assert long_files == set(LONG_FILES)
    long_classes = {
        f"{name_of(path)}:{node.name}"
        for path in modules(*CODE)
        for node in classes(path)
        if (node.end_lineno or 0) - node.lineno >= MOST_CLASS_LINES
    }
    assert long_classes == set(LONG_CLASSES)

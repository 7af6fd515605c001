"""Pages point to what there is: other pages, their headings, files and folders of the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for folder in (".", "docs", "benchmarks") for page in (ROOT / folder).glob("*.md")
)
FOLDERS = ("platform", "deployments", "routers", "kvstore", "tests", "docs", "examples", "scripts")
CODE = ("platform", "deployments", "routers", "kvstore")
THEIRS = {  # vLLM's
    *("AsyncLLM", "EngineCoreOutputs", "EngineCoreProc", "EngineCoreRequest"),
    "KVConnectorBase_V1",
}


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> Iterator[str]:
    """As GitHub makes them of headings."""
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for to in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = to.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in to:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(to)
    assert lost == []


def test_every_path_of_the_tree_is_there(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", text_of(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_the_first_line_says_what_a_page_is_for(page: Path) -> None:
    _, _, first, *_ = page.read_text().splitlines()
    assert first.startswith(("Guide: ", "Reference: ", "Measurements: "))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_figures_of_commits_are_on_pages_of_measurements(page: Path) -> None:
    text = page.read_text()
    if "\nMeasurements: " not in text:
        assert (
            re.findall(r"\bat commit [0-9a-f]{7}\b|raw results? not kept|load average", text) == []
        )


def test_readme_and_architecture_lead_to_the_glossary() -> None:
    assert "docs/glossary.md" in (ROOT / "README.md").read_text()
    assert "glossary.md" in (ROOT / "docs/architecture.md").read_text()


def names() -> set[str]:
    """Classes, functions and aliases of the product."""
    found: set[str] = set()
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
    return found


def test_the_map_names_classes_and_methods_that_there_are() -> None:
    text = text_of(ROOT / "docs/architecture.md")
    dotted = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", text)
    named = {name for pair in dotted for name in pair if name}
    assert named - names() - THEIRS == set()

"""Pages say of each figure where it is from, and have what the files of results have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.pages import PAGES, ROOT, TEXTS, marked, number, spread, written
from benchmarks.result_files import CITED

PERFORMANCE = ROOT / "docs/performance.md"
TOLD = re.compile(r"raw results? not\s+kept|at tag `figures-2026-11`")
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b")
DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
NO_FIGURES = {"Measured elsewhere", "Measure it yourself"}


def sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_what_the_files_have(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert written(text) == text, "run make performance"


def test_all_that_is_made_is_on_a_page_and_all_that_is_cited_is_shown() -> None:
    shown = {name for page in PAGES for name in marked(page.read_text(encoding="utf-8"))}
    assert shown == set(TEXTS)
    made = "\n".join(text() for text in TEXTS.values())
    hidden = [path.name for path in CITED.glob("*.json") if path.name not in made]
    assert hidden == []


@pytest.mark.parametrize("name", sorted(sections(PERFORMANCE).keys() - NO_FIGURES))
def test_a_section_names_a_file_or_the_day_and_commit_of_its_figures(name: str) -> None:
    text = sections(PERFORMANCE)[name]
    if not any(TEXTS[made]() for made in marked(text)):
        assert TOLD.search(text), "say whether there is a file of results"
        assert COMMIT.search(text)
        assert DAY.search(text)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "benchmarks").glob("*.md")), ids=lambda page: page.stem
)
def test_a_story_without_a_file_says_by_which_commit_it_was_measured(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if not any(TEXTS[made]() for made in marked(text)):
        assert TOLD.search(text)
        assert COMMIT.search(text)


def test_a_page_with_a_changed_figure_is_seen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    figure = TEXTS["asleep"]()
    assert f"<!-- made: asleep -->{figure}<!-- end -->" in text
    assert written(text.replace(f">{figure}<", ">0.01 s<")) == text


def test_a_marker_that_names_nothing_is_refused() -> None:
    with pytest.raises(KeyError):
        written("<!-- made: nothing --><!-- end -->")


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        *((0.0253, 2, "0.025"), (0.95, 2, "0.95"), (0.996, 2, "1.0"), (25.16, 2, "25")),
        *((1001.03, 4, "1,001"), (119.53, 3, "120"), (-0.5, 2, "-0.50"), (0, 2, "0")),
    ],
)
def test_a_number_has_the_digits_that_count(value: float, digits: int, shown: str) -> None:
    assert number(value, digits) == shown


def test_extremes_are_shown_where_they_differ() -> None:
    assert spread({"median": 3.76, "min": 3.7, "max": 3.8}, "s") == "3.8 s (3.7 to 3.8)"
    assert spread({"median": 25.16, "min": 25.16, "max": 25.16}, "s") == "25 s"


def test_every_benchmark_is_listed_with_its_question() -> None:
    listed = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    ends_in_a_file = [
        path.name
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"^    return run\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(ends_in_a_file) > 12
    assert [name for name in ends_in_a_file if f"| `{name}` |" not in listed] == []

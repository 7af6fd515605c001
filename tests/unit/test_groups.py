"""Tests that share an engine or a platform are in one group, which one process runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.groups import FIRST, GROUPS, group

TESTS = Path(__file__).parents[1]
ENGINES = {"pair": "Pair", "served_engine": "ServedEngine", "stored_engine": "StoredEngine"}


def files(folder: str) -> list[Path]:
    return sorted((TESTS / folder).glob("test_*.py"))


def group_of(file: Path) -> str:
    return group(f"{file.relative_to(TESTS.parent).as_posix()}::test_something[a]")


@pytest.mark.parametrize("file", files("e2e"), ids=lambda file: file.stem)
def test_a_file_is_with_those_that_use_the_same_platform(file: Path) -> None:
    text = file.read_text()
    if re.search(r"^def platform\(", text, re.MULTILINE):
        assert group_of(file) == f"e2e/{file.name}"
    elif re.search(r"^    serve_instead\(platform, ", text, re.MULTILINE):
        assert group_of(file) == "other models"
    else:
        assert group_of(file) == "platform"


def test_files_that_serve_other_models_come_after_those_that_need_the_platforms_own() -> None:
    assert FIRST.index("other models") > FIRST.index("platform")


@pytest.mark.parametrize("file", files("integration"), ids=lambda file: file.stem)
def test_a_file_that_shares_an_engine_is_with_the_others(file: Path) -> None:
    text = file.read_text()
    shared = [name for name, kind in ENGINES.items() if f"{name}: {kind}" in text]
    assert group_of(file) == (shared[0] if shared else f"integration/{file.name}")


def test_what_is_named_is_there() -> None:
    named = [name for name in (*GROUPS, *FIRST) if name.endswith(".py")]
    assert [name for name in named if not (TESTS / name).exists()] == []

"""Arms are compared run by run, and a headline says what was aimed at."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, result_files
from benchmarks.harness import (
    Figure,
    NotMeasuredError,
    headline,
    headline_of,
    medians,
    over,
    percentiles,
    rotated,
    run,
    spread,
)

RUNS = [
    {"a": {"x": 90.0}, "b": {"x": 100.0}},
    {"a": {"x": 50.0}, "b": {"x": 50.0}},
    {"a": {"x": 190.0}, "b": {"x": 200.0}},
]


def test_ratios_are_of_runs_and_not_of_medians() -> None:
    ratio = over(RUNS, "a", "b", "x")
    assert ratio is not None
    assert (ratio["median"], ratio["min"], ratio["max"]) == pytest.approx((0.95, 0.9, 1.0))
    assert over([*RUNS, {"a": {"x": 1.0}, "b": {"x": 0.0}}], "a", "b", "x") is None


def test_a_percentile_comes_with_how_many_values_it_is_of() -> None:
    assert percentiles("ttft_ms", [1.0, 2.0, 3.0], (50,)) == {"ttft_ms_p50": 2.0, "ttft_ms_n": 3}
    assert percentiles("ttft_ms", []) == {"ttft_ms_p50": None, "ttft_ms_p99": None, "ttft_ms_n": 0}


def test_medians_have_their_extremes_beside_them() -> None:
    assert medians({"x": spread([3.0, 1.0, 2.0])}) == {"x": 2.0, "spread": {"x": [1.0, 3.0]}}


def test_arms_take_turns_at_going_first() -> None:
    assert [rotated("ab", number) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_a_headline_is_flat_and_says_which_goals_were_met() -> None:
    figures = {"over": {"b": {"x": spread([0.3, 0.4])}}, "lost": 0, "nothing": None}
    names = {
        "x_over_b": Figure("over/b/x", most=0.3),
        "lost": Figure("lost", most=0),
        "more": Figure("lost", least=1),
        "known": Figure("over/b/x"),
        "not_run": Figure("over/c/x", most=1.0),
        "nothing": Figure("nothing"),
    }
    assert headline(names, figures) == {
        "headline": {"x_over_b": 0.35, "lost": 0.0, "more": 0.0, "known": 0.35},
        "goals": {
            "x_over_b": {"most": 0.3, "met": False},
            "lost": {"most": 0, "met": True},
            "more": {"least": 1, "met": False},
        },
    }


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        harness, "publish", lambda *of, **more: result_files.publish(*of, **more, folder=tmp_path)
    )
    must = {"lost": Figure("lost", most=0, must=True)}
    monkeypatch.setattr(harness, "headline_of", lambda name: must)
    return tmp_path


def test_each_headline_names_a_question() -> None:
    for name in ("documents", "weave", "continuation"):
        assert headline_of(name)
    stated = tomllib.loads((Path(harness.__file__).with_name("headlines.toml")).read_text())
    assert all((Path(harness.__file__).with_name(f"{name}.py")).exists() for name in stated)
    assert headline_of("documents")["again_over_no_store"].most == 0.35


def test_a_run_publishes_its_headline_with_its_options(published: Path) -> None:
    def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        assert folder.is_dir()
        return {"lost": options.lost}

    options = argparse.Namespace(lost=0, port=7)
    assert run("x", options, measure, without=("port",), more=1) == 0
    (file,) = published.iterdir()
    found = json.loads(file.read_text())
    assert found["headline"] == {"lost": 0.0}
    assert found["setup"] == {"lost": 0, "more": 1}
    assert run("x", argparse.Namespace(lost=2), measure) == 1


def test_what_was_not_measured_is_not_published(published: Path) -> None:
    def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        raise NotMeasuredError("a server went away")

    assert run("x", argparse.Namespace(), measure) == 1
    assert list(published.iterdir()) == []

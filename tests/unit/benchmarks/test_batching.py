"""The arguments of the benchmark of static batches."""

from __future__ import annotations

import pytest

from benchmarks.batching import arguments


@pytest.mark.parametrize(
    ("words", "slo_load"),
    [
        ("", 1.0),
        ("--loads 1.5", 1.5),
        ("--loads 3 2", 2.0),
        ("--loads 1.5 2 --slo-load 2", 2.0),
    ],
)
def test_deadlines_are_told_of_the_least_load_unless_another_is_named(
    words: str, slo_load: float
) -> None:
    options = arguments(words.split())
    assert options.slo_load == slo_load
    assert options.slo_load in options.loads


def test_deadlines_cannot_be_told_of_a_load_that_is_not_measured() -> None:
    with pytest.raises(SystemExit):
        arguments(["--loads", "1.5", "--slo-load", "1"])

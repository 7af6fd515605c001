from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.access.policy.pools import slices, whole_slices

DEMANDS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1000), min_size=1)
WHOLE = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 20), min_size=1)


@given(DEMANDS, st.floats(0, 1000))
def test_the_whole_limit_is_given_and_no_more(demands: dict[str, float], limit: float) -> None:
    parts = slices(demands, limit)
    assert parts.keys() == demands.keys()
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(limit)


@given(DEMANDS, st.floats(0, 1000))
def test_nobody_has_less_than_an_equal_part_unless_it_asks_for_less(
    demands: dict[str, float], limit: float
) -> None:
    parts = slices(demands, limit)
    for name, part in parts.items():
        assert part >= min(demands[name], limit / len(demands)) - 1e-6
        if part < demands[name] - 1e-6:
            # It is short, so nobody has more than it but who asks for no more.
            assert all(other <= part + 1e-6 for other in parts.values())


@pytest.mark.parametrize(
    ("demands", "limit", "parts"),
    [
        ({"a": 5, "b": 0}, 10, {"a": 7.5, "b": 2.5}),
        ({"a": 50, "b": 0}, 10, {"a": 10, "b": 0}),
        ({"a": 50, "b": 2}, 10, {"a": 8, "b": 2}),
        ({"a": 50, "b": 60, "c": 1}, 10, {"a": 4.5, "b": 4.5, "c": 1}),
        ({"a": 0, "b": 0}, 10, {"a": 5, "b": 5}),
        ({"a": 1}, -3, {"a": 0}),
    ],
)
def test_parts_follow_demand(
    demands: dict[str, float], limit: float, parts: dict[str, float]
) -> None:
    assert slices(demands, limit) == pytest.approx(parts)


@given(WHOLE, st.integers(0, 50), st.integers(0, 100))
def test_whole_parts_are_the_whole_limit(demands: dict[str, int], limit: int, turn: int) -> None:
    parts = whole_slices(demands, limit, turn)
    assert sum(parts.values()) == limit
    for name, part in parts.items():
        assert part >= int(min(demands[name], limit / len(demands)))
    if sum(demands.values()) >= limit:
        assert all(part <= demands[name] for name, part in parts.items())


@given(WHOLE, st.integers(1, 50))
def test_whoever_asks_gets_a_unit_at_some_turn(demands: dict[str, int], limit: int) -> None:
    turns = [whole_slices(demands, limit, turn) for turn in range(len(demands))]
    for name, demand in demands.items():
        assert demand == 0 or any(parts[name] for parts in turns)

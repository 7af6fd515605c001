"""The value functions: tables for the formula, properties for what any formula must keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.eviction import POLICIES, Candidate, Policy, cost, lru

BASE = Candidate(recompute_s=0.5, block_bytes=1_000, uses=0, age_s=0.0)

seconds = st.floats(0, 1e6)
candidates = st.builds(
    Candidate,
    recompute_s=seconds,
    block_bytes=st.integers(1, 2**32),
    uses=st.integers(0, 1_000),
    age_s=seconds,
)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({}, 0.5 / 1_000),
        ({"recompute_s": 2.0}, 2.0 / 1_000),
        ({"block_bytes": 4_000}, 0.5 / 4_000),
        ({"uses": 3}, 4 * 0.5 / 1_000),
        ({"age_s": 600.0}, 0.5 * 0.5 / 1_000),
        ({"age_s": 1_800.0}, 0.25 * 0.5 / 1_000),
        ({"age_s": 600.0, "uses": 1}, 0.5 / 1_000),
    ],
)
def test_cost_is_recompute_time_times_likelihood_of_reuse_per_byte(
    change: dict[str, float], value: float
) -> None:
    assert cost(replace(BASE, **change)) == pytest.approx(value)  # type: ignore[arg-type]


def test_the_half_life_can_be_chosen() -> None:
    assert cost(replace(BASE, age_s=10.0), half_life_s=10.0) == pytest.approx(cost(BASE) / 2)


@given(candidates, candidates)
def test_lru_looks_at_age_alone(one: Candidate, other: Candidate) -> None:
    assert (lru(one) < lru(other)) == (one.age_s > other.age_s)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(candidate=candidates, older=seconds)
def test_no_block_gains_by_ageing(policy: Policy, candidate: Candidate, older: float) -> None:
    aged = replace(candidate, age_s=candidate.age_s + older)
    assert policy(aged) <= policy(candidate)


@given(candidates, st.integers(1, 100), st.floats(1, 100))
def test_cost_keeps_what_is_used_more_or_slower_to_compute_or_smaller(
    candidate: Candidate, more: int, slower: float
) -> None:
    value = cost(candidate)
    assert cost(replace(candidate, uses=candidate.uses + more)) >= value
    assert cost(replace(candidate, recompute_s=candidate.recompute_s * slower)) >= value
    assert cost(replace(candidate, block_bytes=candidate.block_bytes + more)) <= value

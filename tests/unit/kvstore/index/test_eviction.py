"""The value functions: tables for the formula, properties for what any formula must keep."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.index.eviction import POLICIES, EvictionCandidate, Policy, cost, lru
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES

BASE = EvictionCandidate(recompute_s=0.5, block_bytes=1_000, uses=0, age_s=0.0)

seconds = st.floats(0, 1e6)
candidates = st.builds(
    EvictionCandidate,
    recompute_s=seconds,
    block_bytes=st.integers(1, 2**32),
    uses=st.integers(0, 1_000),
    age_s=seconds,
    floor=st.floats(0, 1e3),
)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({}, 0.5 / 1_000),
        ({"recompute_s": 2.0}, 2.0 / 1_000),
        ({"block_bytes": 4_000}, 0.5 / 4_000),
        ({"uses": 3}, 4 * 0.5 / 1_000),
        ({"age_s": 600.0}, 0.5 / 1_000),
        ({"floor": 0.25}, 0.25 + 0.5 / 1_000),
    ],
)
def test_cost_is_recompute_time_times_uses_per_byte_above_what_was_evicted(
    change: dict[str, float], value: float
) -> None:
    assert cost(replace(BASE, **change)) == pytest.approx(value)  # type: ignore[arg-type]


@given(candidates, candidates)
def test_lru_looks_at_age_alone(one: EvictionCandidate, other: EvictionCandidate) -> None:
    assert (lru(one) < lru(other)) == (one.age_s > other.age_s)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(candidate=candidates, older=seconds)
def test_no_block_gains_by_ageing(
    policy: Policy, candidate: EvictionCandidate, older: float
) -> None:
    aged = replace(candidate, age_s=candidate.age_s + older)
    assert policy(aged) <= policy(candidate)


@given(candidates, st.integers(1, 100), st.floats(1, 100))
def test_cost_keeps_what_is_used_more_or_slower_to_compute_or_smaller(
    candidate: EvictionCandidate, more: int, slower: float
) -> None:
    value = cost(candidate)
    assert cost(replace(candidate, uses=candidate.uses + more)) >= value
    assert cost(replace(candidate, recompute_s=candidate.recompute_s * slower)) >= value
    assert cost(replace(candidate, block_bytes=candidate.block_bytes + more)) <= value


SPACE = b"s" * 16


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()[:KEY_BYTES]


def full_store(policy: Policy, blocks: int, uses: int) -> Index:
    """Of chains of one block, all read ``uses`` times."""
    index = Index(policy)
    index.add_namespace(SPACE, 1_000)
    for slot in range(blocks):
        index.insert(SPACE, key(slot), 0, [slot], 0.0, 0.5)
        for _ in range(uses):
            index.lookup(SPACE, key(slot), 0.0)
    return index


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("uses", [0, 1, 10])
def test_what_was_useful_once_does_not_keep_new_blocks_out_for_long(
    policy: Policy, uses: int
) -> None:
    index = full_store(policy, blocks=8, uses=uses)
    for turn in range(1, 8 * (1 + uses) + 1):
        (slot,) = index.evict(1, float(turn)).slots
        index.insert(SPACE, key(("new", turn)), 0, [slot], float(turn), 0.5)
    assert not any(index.match(SPACE, key(slot)).in_memory for slot in range(8))


def test_cost_keeps_what_is_read_again_and_again_through_a_scan_and_lru_does_not() -> None:
    def kept(policy: Policy) -> bool:
        index = full_store(policy, blocks=8, uses=0)
        for _ in range(3):
            index.lookup(SPACE, key(0), 0.0)
        for turn in range(1, 100):
            (slot,) = index.evict(1, float(turn)).slots
            index.insert(SPACE, key(("scan", turn)), 0, [slot], float(turn), 0.5)
            if turn % 10 == 0 and not index.lookup(SPACE, key(0), float(turn)).in_memory:
                return False
        return True

    assert kept(cost)
    assert not kept(lru)

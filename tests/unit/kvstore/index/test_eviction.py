"""The value functions: tables for the formula, properties for what any formula must keep."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.index.eviction import POLICIES, EvictionCandidate, Policy, cost, lru
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.radix import KEY_BYTES
from tests.unit.kvstore.index.invariants import check_index, order_by_rule

BASE = EvictionCandidate(recompute_s=0.5, block_bytes=1_000, uses=0, last_used=0.0)

seconds = st.floats(0, 1e6)
candidates = st.builds(
    EvictionCandidate,
    recompute_s=seconds,
    block_bytes=st.integers(1, 2**32),
    uses=st.integers(0, 1_000),
    last_used=seconds,
    floor=st.floats(0, 1e3),
)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({}, 0.5 / 1_000),
        ({"recompute_s": 2.0}, 2.0 / 1_000),
        ({"block_bytes": 4_000}, 0.5 / 4_000),
        ({"uses": 3}, 4 * 0.5 / 1_000),
        ({"last_used": 600.0}, 0.5 / 1_000),
        ({"floor": 0.25}, 0.25 + 0.5 / 1_000),
    ],
)
def test_cost_is_recompute_time_times_uses_per_byte_above_what_was_evicted(
    change: dict[str, float], value: float
) -> None:
    assert cost(replace(BASE, **change)) == pytest.approx(value)  # type: ignore[arg-type]


@given(candidates, candidates)
def test_lru_looks_at_the_last_use_alone(one: EvictionCandidate, other: EvictionCandidate) -> None:
    assert (lru(one) < lru(other)) == (one.last_used < other.last_used)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(candidate=candidates, later=seconds)
def test_no_block_loses_by_a_later_use(
    policy: Policy, candidate: EvictionCandidate, later: float
) -> None:
    used = replace(candidate, last_used=candidate.last_used + later, uses=candidate.uses + 1)
    assert policy(used) >= policy(candidate)


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
        (slot,) = index.evict(1).slots
        index.insert(SPACE, key(("new", turn)), 0, [slot], float(turn), 0.5)
    assert not any(index.match(SPACE, key(slot)).in_memory for slot in range(8))


def test_cost_keeps_what_is_read_again_and_again_through_a_scan_and_lru_does_not() -> None:
    def kept(policy: Policy) -> bool:
        index = full_store(policy, blocks=8, uses=0)
        for _ in range(3):
            index.lookup(SPACE, key(0), 0.0)
        for turn in range(1, 100):
            (slot,) = index.evict(1).slots
            index.insert(SPACE, key(("scan", turn)), 0, [slot], float(turn), 0.5)
            if turn % 10 == 0 and not index.lookup(SPACE, key(0), float(turn)).in_memory:
                return False
        return True

    assert kept(cost)
    assert not kept(lru)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_that_of_the_rule_whatever_happened_before(policy: Policy, seed: int) -> None:
    rng, index = random.Random(seed), Index(policy)
    spaces = (SPACE, b"t" * 16)
    for size, space in enumerate(spaces, start=1):
        index.add_namespace(space, 100 * size)
    leases: list[int] = []
    places = iter(range(10**9))

    def chain() -> bytes:
        return b"".join(
            key(name[: at + 1])
            for name in ["".join(rng.choices("ab", k=rng.randint(1, 9)))]
            for at in range(len(name))
        )

    for now in range(600):
        space, keys = rng.choice(spaces), chain()
        blocks = len(keys) // KEY_BYTES
        there = index.match(space, keys)
        new = [next(places) for _ in range(blocks)]
        match rng.randrange(9):
            case 0 | 1 | 2:
                index.insert(space, keys, 0, new, now, rng.choice([0.1, 0.5, rng.random()]))
            case 3:
                first = rng.randrange(blocks)
                index.insert_ssd(space, keys, first, new[first:], now, 0.3)
            case 4 | 5:
                index.lookup(space, keys, now)
            case 6 if there.in_memory:
                lease = index.lease(space, keys, there.in_memory, 0, now, 50.0)
                leases += [lease.id] if lease is not None else []
            case 7 if leases:
                index.leases.release(leases.pop(rng.randrange(len(leases))))
            case 8 if now % 7 == 0:
                index.remove(space, keys, blocks - 1)
            case _:
                expected = [
                    slot
                    for node in order_by_rule(index.trees(), policy)
                    for slot in reversed(node.slots)
                ]
                count = rng.randrange(6)
                assert index.evict(count).slots == expected[:count]
        if now % 20 == 0:
            order = [node for _, _, node in index.order()]
            assert order == list(order_by_rule(index.trees(), policy))
            check_index(index)


def test_copies_of_other_nodes_are_seen_in_turn_and_their_loss_at_once() -> None:
    copies: dict[bytes, float] = {}
    index = Index(cost, refetch=lambda space, block, size: copies.get(block))
    index.add_namespace(SPACE, 1_000)
    for slot in range(200):
        index.insert(SPACE, key(slot), 0, [slot], float(slot), 0.5)
    copies[key(150)] = 0.1
    for _ in range(4):
        index.evict(0)
    assert index.evict(1).slots == [150]
    copies[key(160)] = 0.1
    for _ in range(4):
        index.evict(0)
    del copies[key(160)]
    assert index.evict(1).slots == [0]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_taking_a_few_of_many_blocks_does_not_look_at_all(policy: Policy) -> None:
    def took(blocks: int) -> float:
        index, times = full_store(policy, blocks, uses=0), []
        index.evict(16)
        for turn in range(40):
            for used in range(8):
                index.lookup(SPACE, key(blocks // 2 + used), 1.0 + turn)
            begin = time.thread_time()
            slots = index.evict(16).slots
            times.append(time.thread_time() - begin)
            for slot in slots:
                index.insert(SPACE, key((turn, slot)), 0, [slot], 1.0 + turn, 0.5)
        return min(times)

    # A pass over all would take fifty times as long.
    assert took(20_000) < 5 * took(400)

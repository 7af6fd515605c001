"""Where a borrower's requests start, and which one moves: tables, properties, a simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loomserve.platform.lending.policy.partition_choice import (
    PLACEMENTS,
    Arrival,
    Partition,
    Placement,
    RequestMove,
    Resident,
    headroom_blocks,
    move,
)

LOCAL, RATIO, ADAPTIVE = PLACEMENTS["local"], PLACEMENTS["ratio"], PLACEMENTS["adaptive"]

# Ten requests of 200 tokens in 5 of 64 blocks each; attention takes 4 of a step's 24 ms.
OWN = Partition(
    blocks=64,
    free_blocks=14,
    needed_blocks=4,
    requests=10,
    tokens=2_000,
    token_s=2e-6,
    growth_blocks=2.0,
)
LENDER = Partition(
    blocks=128,
    free_blocks=128,
    needed_blocks=4,
    requests=0,
    tokens=0,
    token_s=3e-6,
    handoff_s=1e-3,
    growth_blocks=2.0,
)
FULL = replace(OWN, free_blocks=3)
REST_S = 20e-3


@st.composite
def memories(draw: st.DrawFn) -> Partition:
    blocks = draw(st.integers(1, 500))
    requests = draw(st.integers(0, 40))
    return Partition(
        blocks=blocks,
        free_blocks=draw(st.integers(0, blocks)),
        needed_blocks=draw(st.integers(1, 60)),
        requests=requests,
        tokens=requests * draw(st.integers(1, 2_000)),
        token_s=draw(st.floats(1e-8, 1e-4)),
        handoff_s=draw(st.floats(0, 1e-2)),
        allowed=draw(st.booleans()),
        growth_blocks=draw(st.none() | st.floats(0, 50)),
    )


own_memories = memories().map(lambda partition: replace(partition, handoff_s=0.0, allowed=True))
arrivals = st.builds(
    Arrival,
    partitions=st.tuples(own_memories, st.lists(memories(), max_size=3)).map(
        lambda s: [s[0], *s[1]]
    ),
    tokens=st.integers(1, 2_000),
    rest_s=st.just(0.0) | st.floats(1e-3, 1.0),
)
shares = st.floats(0, 1)
policies = st.sampled_from(list(PLACEMENTS.values()))


def arrival(*partitions: Partition, tokens: int = 150, rest_s: float = REST_S) -> Arrival:
    return Arrival(partitions, tokens, rest_s)


@given(policies, arrivals, shares)
def test_no_request_starts_where_it_does_not_fit_or_may_not(
    place: Placement, given_: Arrival, share: float
) -> None:
    at = place(given_, share)
    if at is not None:
        partition = given_.partitions[at]
        assert partition.allowed
        assert partition.needed_blocks <= partition.free_blocks


@given(policies, arrivals, shares)
def test_a_request_that_stock_vllm_would_start_never_waits(
    place: Placement, given_: Arrival, share: float
) -> None:
    assume(LOCAL(given_, share) == 0)
    assert place(given_, share) is not None


@given(st.sampled_from([RATIO, ADAPTIVE]), arrivals, shares)
def test_without_a_lender_that_may_lend_every_policy_is_stock_vllm(
    place: Placement, given_: Arrival, share: float
) -> None:
    none_lends = [
        given_.partitions[0],
        *(replace(each, allowed=False) for each in given_.partitions[1:]),
    ]
    for partitions in ([given_.partitions[0]], none_lends):
        alone = replace(given_, partitions=partitions)
        assert place(alone, share) == LOCAL(alone, share)


@given(arrivals, shares)
def test_the_local_policy_lends_nothing(given_: Arrival, share: float) -> None:
    assert LOCAL(given_, share) in (0, None)


@given(arrivals, shares)
def test_with_nothing_running_a_request_starts_wherever_it_fits(
    given_: Arrival, share: float
) -> None:
    partitions = [replace(each, requests=0, tokens=0) for each in given_.partitions]
    assume(any(each.allowed and each.needed_blocks <= each.free_blocks for each in partitions))
    assert ADAPTIVE(replace(given_, partitions=partitions), share) is not None


@given(shares, st.integers(1, 3), st.integers(1, 120))
def test_a_fixed_ratio_is_never_missed_by_more_than_half_a_request(
    share: float, lenders: int, requests: int
) -> None:
    partitions = [replace(OWN, blocks=10_000, free_blocks=10_000, requests=0)]
    partitions += [replace(partitions[0])] * lenders
    for count in range(1, requests + 1):
        at = RATIO(arrival(*partitions), share)
        assert at is not None
        taken = partitions[at]
        partitions[at] = replace(
            taken, requests=taken.requests + 1, free_blocks=taken.free_blocks - 4
        )
        lent = count - partitions[0].requests
        assert abs(lent - share * count) <= 0.5 + 1e-9


def test_a_fixed_ratio_gives_to_the_emptiest_lender_and_else_to_the_other_kind_of_side() -> None:
    fuller = replace(LENDER, free_blocks=100)
    assert RATIO(arrival(OWN, fuller, LENDER), 0.5) == 2
    assert RATIO(arrival(OWN, replace(LENDER, free_blocks=3)), 0.5) == 0
    assert RATIO(arrival(FULL, LENDER), 0.0) == 1
    assert RATIO(arrival(FULL, replace(LENDER, allowed=False)), 0.5) is None


@pytest.mark.parametrize(
    ("given_", "partition"),
    [
        (arrival(OWN, LENDER), 0),
        (arrival(FULL, LENDER), 1),
        # Running requests would grow into what is left of the own memory.
        (arrival(replace(OWN, free_blocks=5, growth_blocks=8.0), LENDER), 1),
        (arrival(replace(OWN, free_blocks=5, growth_blocks=None), LENDER), 1),
        # They hold so much that the first to end makes room for all others.
        (arrival(replace(OWN, free_blocks=5, growth_blocks=2.0), LENDER), 0),
        # Attention is most of a step, and shorter with the request on the lender.
        (arrival(OWN, LENDER, rest_s=3e-3), 1),
        # It is not shorter there, so it goes on at home.
        (arrival(OWN, replace(LENDER, requests=9, tokens=2_000), rest_s=3e-3), 0),
        # Two lenders: by the work they have, not by their free blocks.
        (arrival(FULL, replace(LENDER, requests=9, tokens=3_000), replace(LENDER, blocks=9)), 2),
        # A lender so slow that the borrower generates fewer tokens a second with it.
        (arrival(FULL, replace(LENDER, token_s=1e-4)), None),
        (arrival(FULL, replace(LENDER, allowed=False)), None),
        (arrival(FULL, replace(LENDER, free_blocks=3)), None),
        # The requests that are there would grow into what is left.
        (arrival(FULL, replace(LENDER, free_blocks=6, requests=9, tokens=9)), 1),
        (arrival(FULL, replace(LENDER, free_blocks=6, requests=9, growth_blocks=30.0)), None),
    ],
)
def test_requests_start_where_there_is_room_and_attention_takes_least(
    given_: Arrival, partition: int | None
) -> None:
    assert ADAPTIVE(given_, 0.0) == partition


@given(arrivals, memories(), st.floats(1.0, 10.0))
def test_a_lender_that_holds_no_request_yet_is_not_chosen_for_being_slower(
    given_: Arrival, lender: Partition, slower: float
) -> None:
    # With requests of others it makes every step longer, which hides more work of other partitions.
    lender = replace(lender, allowed=True, requests=0, tokens=0)
    slow = replace(lender, token_s=lender.token_s * slower)
    last = len(given_.partitions)
    if ADAPTIVE(replace(given_, partitions=[*given_.partitions, slow]), 0.0) == last:
        assert ADAPTIVE(replace(given_, partitions=[*given_.partitions, lender]), 0.0) == last


def test_requests_are_balanced_by_the_time_that_their_attention_takes() -> None:
    # Memory for all anywhere; the lender takes three times as long for a token.
    roomy = replace(OWN, blocks=10_000, free_blocks=10_000, requests=0, tokens=0)
    partitions = [roomy, replace(roomy, token_s=6e-6)]
    for _ in range(200):
        at = ADAPTIVE(arrival(*partitions, tokens=200, rest_s=1e-3), 0.0)
        assert at is not None
        each = partitions[at]
        partitions[at] = replace(each, requests=each.requests + 1, tokens=each.tokens + 200)
    assert partitions[1].requests == pytest.approx(200 / 4, abs=2)


@pytest.mark.parametrize(("held", "growth"), [(0, 40), (20, 40), (60, 40), (100, 40)])
def test_headroom_is_what_growing_requests_come_to_need_beyond_what_they_hold(
    held: int, growth: int
) -> None:
    requests = 5_000
    left = 2 * growth * (np.arange(requests) + 0.5) / requests
    grown = np.arange(2 * growth + 1)
    running = (left[None, :] > grown[:, None]).sum(axis=1)
    most_more = max(float((running * (held + grown)).max()) - requests * held, 0.0)
    partition = replace(
        OWN,
        blocks=requests * held,
        free_blocks=held,
        requests=requests - 1,
        growth_blocks=float(growth),
    )
    assert headroom_blocks(partition, held) == pytest.approx(
        most_more, rel=0.01, abs=0.01 * requests
    )


LONG = Resident(blocks=9, tokens=400, copy_s=0.009, recompute_s=0.4)
SHORT = Resident(blocks=2, tokens=90, copy_s=0.002, recompute_s=0.1)
SLOWER = replace(LENDER, token_s=8e-6, handoff_s=0.0)
FASTER = replace(LENDER, handoff_s=0.0)
TINY = Resident(blocks=1, tokens=40, copy_s=0.001, recompute_s=0.05)


@pytest.mark.parametrize(
    ("partitions", "requests", "missing_blocks", "moved"),
    [
        ((FULL, LENDER), (LONG, SHORT, TINY), 1, RequestMove(2, 1)),
        # What moves must make room for the whole step.
        ((FULL, LENDER), (LONG, SHORT, TINY), 2, RequestMove(1, 1)),
        ((FULL, LENDER), (SHORT, TINY), 3, None),
        # The partition in which attention then takes least, and which has room.
        ((FULL, replace(LENDER, tokens=9_000), LENDER), (SHORT,), 1, RequestMove(0, 2)),
        ((FULL, LENDER, replace(LENDER, free_blocks=1)), (SHORT,), 1, RequestMove(0, 1)),
        # The exhausted partition would hide how slow the first lender is, but for what leaves it.
        ((replace(FULL, tokens=400), SLOWER, FASTER), (SHORT,), 1, RequestMove(0, 2)),
        ((FULL, replace(LENDER, allowed=False)), (SHORT,), 1, None),
        # A copy that takes longer than computing again what would be preempted.
        ((FULL, LENDER), (replace(TINY, recompute_s=0.0005),), 1, None),
        ((FULL, LENDER), (replace(TINY, recompute_s=0.0005), SHORT), 1, None),
        # Two would be preempted for these two blocks.
        ((FULL, LENDER), (TINY, SHORT), 2, RequestMove(1, 1)),
        ((FULL, LENDER), (), 1, None),
    ],
)
def test_the_cheapest_copy_that_spares_a_preemption_moves(
    partitions: tuple[Partition, ...],
    requests: tuple[Resident, ...],
    missing_blocks: int,
    moved: RequestMove | None,
) -> None:
    assert move(partitions, requests, 0, missing_blocks) == moved


def test_a_request_comes_home_from_a_lender_that_has_no_room_left() -> None:
    assert move((OWN, replace(LENDER, free_blocks=0)), (SHORT,), 1, 1) == RequestMove(0, 0)


residents = st.builds(
    Resident,
    blocks=st.integers(1, 60),
    tokens=st.just(0),
    copy_s=st.floats(0, 1),
    recompute_s=st.floats(0, 1),
)


@given(arrivals, st.lists(residents, max_size=6), st.data())
def test_a_move_fits_frees_enough_and_costs_less_than_what_it_spares(
    given_: Arrival, requests: list[Resident], data: st.DataObject
) -> None:
    partitions = given_.partitions
    exhausted = data.draw(st.integers(0, len(partitions) - 1))
    missing_blocks = data.draw(st.integers(1, 60))
    moved = move(partitions, requests, exhausted, missing_blocks)
    if moved is not None:
        victim, partition = requests[moved.request], partitions[moved.partition]
        assert moved.partition != exhausted
        assert partition.allowed
        assert victim.blocks <= partition.free_blocks
        assert victim.blocks >= missing_blocks
        assert victim.copy_s < sum(each.recompute_s for each in requests)

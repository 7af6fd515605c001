"""Blocks are fetched from where they come soonest, if that is sooner than computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.kvstore.index.directory import Holding
from loomserve.kvstore.index.sources import LinkRate, Offer, best_offer

SLOT = 10**6
FAST = LinkRate(bytes_per_s=1e9, setup_s=0.001, fetches=10)
SLOW = LinkRate(bytes_per_s=1e7, setup_s=0.001, fetches=10)


def offer_of(holdings: list[Holding], have: int = 0, block_s: float = 0.03) -> Offer | None:
    links = {"fast": FAST, "slow": SLOW}
    return best_offer(holdings, have, SLOT, lambda node: links[node], block_s)


def test_of_two_that_have_the_same_the_faster_link() -> None:
    offer = offer_of([Holding("slow", 10, 10), Holding("fast", 10, 10)])
    assert offer == Offer("fast", 10, 10, pytest.approx(0.011))


def test_a_longer_prefix_is_worth_a_slower_link_only_as_far_as_it_saves() -> None:
    assert offer_of([Holding("slow", 2, 2), Holding("fast", 1, 1)]) == Offer(
        "fast", 1, 1, pytest.approx(0.002)
    ), "0.2 s against 0.06 s of computing"
    # A block takes the slow link a tenth of a second.
    offer = offer_of([Holding("slow", 10, 10), Holding("fast", 1, 1)], block_s=1.0)
    assert offer == Offer("slow", 10, 10, pytest.approx(1.001))


@pytest.mark.parametrize(("have", "block_s"), [(10, 1.0), (12, 1.0), (0, 0.0), (0, 0.001)])
def test_none_where_there_is_no_more_or_computing_is_quicker(have: int, block_s: float) -> None:
    assert offer_of([Holding("fast", 10, 10)], have, block_s) is None


def test_no_more_than_comes_while_an_engine_waits() -> None:
    offer = offer_of([Holding("slow", 100, 100)], block_s=1.0)
    assert offer is not None
    assert offer.blocks == 14
    assert offer.ready_s < 1.5


def test_blocks_on_its_ssd_take_longer_and_come_last() -> None:
    offer = offer_of([Holding("fast", 10, 4)])
    assert offer is not None
    assert (offer.blocks, offer.in_memory) == (10, 4)
    assert offer.ready_s == pytest.approx(0.011 + 6 * SLOT / 5e8)
    assert offer_of([Holding("fast", 10, 4)], have=6) == Offer(
        "fast", 4, 0, pytest.approx(0.005 + 4 * SLOT / 5e8)
    )


def test_the_first_measurements_replace_the_guess_and_later_ones_smooth() -> None:
    link = LinkRate(setup_s=0.0)
    link.learn(10**8, 1.0)
    assert link.bytes_per_s == pytest.approx(1e8)
    for _ in range(50):
        link.learn(10**8, 0.1)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.01)
    before = link.bytes_per_s
    link.learn(10**8, 10.0)
    assert 0.75 * before < link.bytes_per_s < before
    link.learn(1000, 0.05)
    assert 0.005 < link.setup_s < 0.05, "a small fetch says how long one takes to begin"


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-9, 1e4)), max_size=30),
    st.integers(0, 10**12),
)
def test_predictions_stay_finite_and_positive(took: list[tuple[int, float]], size: int) -> None:
    link = LinkRate()
    for measured, seconds in took:
        link.learn(measured, seconds)
    assert 0 < link.seconds(size) < 1e14
    assert link.bytes_per_s > 0

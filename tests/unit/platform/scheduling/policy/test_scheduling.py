"""Queue orders, preemption modes, and who starts: tables for the paper's formulas, properties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.scheduling.policy.admission import (
    StartCandidate,
    never_computed_twice,
    start,
)
from loomserve.platform.scheduling.policy.preemption import PREEMPTIONS, PreemptionMode, Victim
from loomserve.platform.scheduling.policy.queue import QueuedRequest
from loomserve.platform.scheduling.queue_orders.deadline import Deadline
from loomserve.platform.scheduling.queue_orders.fair import Fair
from loomserve.platform.scheduling.queue_orders.fcfs import Fcfs
from loomserve.platform.scheduling.queue_orders.sjf import Sjf

ORDERS = {"fair": Fair, "fcfs": Fcfs, "deadline": Deadline, "sjf": Sjf}
QUEUES = {name: order(order.Options()).priority for name, order in ORDERS.items()}
fair = QUEUES["fair"]
BASE = QueuedRequest(arrived_s=100.0, tokens=50, left=20)

requests = st.builds(
    QueuedRequest,
    arrived_s=st.floats(0, 1e4),
    tokens=st.integers(1, 10_000),
    left=st.integers(0, 10_000),
    left_s=st.just(0.0),
    deadline_s=st.none() | st.floats(0, 2e4),
    background=st.just(False),
)


@pytest.mark.parametrize(
    ("queue", "request_", "priority"),
    [
        ("fair", BASE, 10 / 50),
        ("fair", BASE._replace(tokens=5), 10 / 5),
        ("fair", BASE._replace(arrived_s=110.0), 0.0),
        ("fair", BASE._replace(arrived_s=111.0), 0.0),
        ("fair", BASE._replace(deadline_s=120.0), 10 / 50 * 2),
        ("fair", BASE._replace(deadline_s=110.01), 10 / 50 * 100),
        ("fair", BASE._replace(deadline_s=109.0), 10 / 50),
        ("fcfs", BASE, -100.0),
        ("deadline", BASE._replace(deadline_s=111.0), -111.0),
        ("deadline", BASE._replace(deadline_s=109.0), -700.0),
        ("deadline", BASE, -700.0),
        ("sjf", BASE, -20.0),
    ],
)
def test_priorities_are_those_of_the_formulas(
    queue: str, request_: QueuedRequest, priority: float
) -> None:
    assert QUEUES[queue](request_, 110.0) == pytest.approx(priority)


@pytest.mark.parametrize("queue", [fair, QUEUES["fcfs"], QUEUES["deadline"]])
@given(long=requests, now=st.floats(0, 1e4))
def test_whoever_waits_is_served_before_all_that_come_much_later(
    queue: Callable[[QueuedRequest, float], float], long: QueuedRequest, now: float
) -> None:
    # As long as the new one's own waiting is bounded, by ten seconds here.
    waited = now + 10.0 * (1 + long.tokens) * 100 + 1_000
    patient = long._replace(arrived_s=now, deadline_s=None)
    new = QueuedRequest(arrived_s=waited - 10.0, tokens=1, left=1)
    assert queue(patient, waited) > queue(new, waited)


@given(requests, st.floats(0, 2e4), st.floats(0, 100))
def test_fairness_never_takes_priority_back_from_a_waiting_request_but_for_a_missed_deadline(
    request_: QueuedRequest, now: float, later: float
) -> None:
    missed = request_.deadline_s is not None and now < request_.deadline_s <= now + later
    assert missed or fair(request_, now + later) >= fair(request_, now)


@given(requests, requests, st.floats(0, 2e4))
def test_of_two_that_came_together_fairness_serves_the_shorter(
    one: QueuedRequest, other: QueuedRequest, now: float
) -> None:
    other = other._replace(arrived_s=one.arrived_s, deadline_s=one.deadline_s)
    if one.tokens <= other.tokens:
        assert fair(one, now) >= fair(other, now)


@pytest.mark.parametrize(
    ("preemption", "swap_s", "free", "mode"),
    [
        ("adaptive", 0.1, 1_000, PreemptionMode.SWAP),
        ("adaptive", 0.1, 999, PreemptionMode.RECOMPUTE),
        ("adaptive", 0.5, 1_000, PreemptionMode.RECOMPUTE),
        ("adaptive", 0.9, 1_000, PreemptionMode.RECOMPUTE),
        ("swap", 0.9, 1_000, PreemptionMode.SWAP),
        ("swap", 0.1, 999, PreemptionMode.RECOMPUTE),
        ("recompute", 0.1, 1_000, PreemptionMode.RECOMPUTE),
    ],
)
def test_the_mode_is_the_cheaper_one_that_has_room(
    preemption: str, swap_s: float, free: int, mode: PreemptionMode
) -> None:
    assert PREEMPTIONS[preemption](Victim(1_000, swap_s, recompute_s=0.5), free) is mode


def candidate(priority: float, blocks: int, *, swapped: bool) -> StartCandidate:
    return StartCandidate(priority, blocks, blocks + 2, swapped)


@pytest.mark.parametrize(
    ("candidates", "free", "places", "chosen", "prefill"),
    [
        ([], 9, 9, (), False),
        # Means of 5 and 4: those that are swapped come back, as many as fit.
        ([(6, 2, True), (5, 3, False), (4, 2, True), (3, 2, False)], 9, 9, (0, 2), False),
        # Of 6 and 7.
        ([(8, 2, True), (7, 3, False), (4, 2, True)], 9, 9, (1,), True),
        # Equal: those that need no prefill.
        ([(5, 2, False), (5, 2, True)], 9, 9, (1,), False),
        # One side does not fit: the other, though its mean is lower.
        ([(9, 8, False), (1, 2, True)], 7, 9, (1,), False),
        ([(9, 8, True), (1, 2, False)], 7, 9, (1,), True),
        # Nothing overtakes the first that does not fit.
        ([(9, 8, True), (8, 1, True)], 7, 9, (), False),
        ([(9, 1, True), (8, 1, True), (7, 1, True)], 7, 2, (0, 1), False),
        ([(9, 1, True)], 7, 0, (), False),
    ],
)
def test_either_swapped_requests_come_back_or_prompts_are_computed(
    candidates: list[tuple[float, int, bool]],
    free: int,
    places: int,
    chosen: tuple[int, ...],
    prefill: bool,
) -> None:
    given_ = [
        candidate(priority, blocks, swapped=swapped) for priority, blocks, swapped in candidates
    ]
    started = start(given_, free, places)
    assert (started.chosen, started.prefill) == (chosen, prefill)


@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(1, 9), st.booleans()), max_size=12),
    st.integers(0, 40),
    st.integers(0, 12),
)
def test_what_starts_fits_and_something_starts_if_the_first_fits(
    parts: list[tuple[float, int, bool]], free: int, places: int
) -> None:
    candidates = [
        candidate(priority, blocks, swapped=swapped)
        for priority, blocks, swapped in sorted(parts, reverse=True)
    ]
    chosen, prefill = (
        start(candidates, free, places).chosen,
        start(candidates, free, places).prefill,
    )
    assert sum(candidates[at].blocks for at in chosen) <= free
    assert len(chosen) <= places
    assert all(candidates[at].swapped is not prefill for at in chosen)
    if candidates and places and candidates[0].blocks <= free:
        assert chosen


def test_requests_start_only_while_swap_space_could_take_what_all_may_come_to() -> None:
    waiting = [
        candidate(3, 1, swapped=True),
        candidate(2, 1, swapped=False),
        candidate(1, 1, swapped=False),
    ]
    # The swapped one is among those that are held.
    assert never_computed_twice(waiting, 0, held=[3, 3], blocks=8, swap_blocks=4) == (0, 1, 2)
    assert never_computed_twice(waiting, 0, held=[3, 3], blocks=8, swap_blocks=3) == (0, 1)
    assert never_computed_twice(waiting, 0, held=[3, 3], blocks=6, swap_blocks=2) == (0,)
    assert never_computed_twice([], 0, held=[], blocks=6, swap_blocks=2) == ()


def test_those_behind_what_may_not_start_are_not_looked_at() -> None:
    waiting = iter([candidate(-at, 4, swapped=at == 2) for at in range(9)])
    assert never_computed_twice(waiting, 1, held=[], blocks=4, swap_blocks=2) == (0, 2)
    assert len(list(waiting)) == 5


def test_a_swapped_request_comes_back_past_one_that_may_not_start() -> None:
    waiting = [
        candidate(3, 4, swapped=False),
        candidate(2, 1, swapped=True),
        candidate(1, 1, swapped=False),
    ]
    assert never_computed_twice(waiting, 1, held=[3], blocks=6, swap_blocks=2) == (1,)

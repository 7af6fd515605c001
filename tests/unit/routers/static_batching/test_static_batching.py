"""How static batches form and which is next: tables for the papers' formulas, properties."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    KvBudget,
    StaticBatch,
)
from loomserve.routers.static_batching.fifo import Fifo
from loomserve.routers.static_batching.queue import BatchQueue, first, halves, hrrn, oldest
from loomserve.routers.static_batching.s3 import S3
from loomserve.routers.static_batching.slo_odbs import Odbs, OutputTerm, SloDbs, SloOdbs
from loomserve.routers.static_batching.wma import Wma, wasted, wma

NOW = 1000.0
LONGEST = 64
MOST = 7
"""Batches of so many of the longest always fit in the memory."""
MEMORY = KvBudget(bytes=MOST * 2 * LONGEST * 10, token_bytes=10)
AMPLE = KvBudget(bytes=10**12, token_bytes=10)


def policy(kind: type[BatchingPolicy], **options: Any) -> BatchingPolicy:
    return kind(kind.Options.model_validate(options))


BATCHERS = {
    "fifo": Fifo(Fifo.Options(size=MOST)),
    "s3": policy(S3),
    "wma": policy(Wma, most_waste=500),
    "wma without a bound": policy(Wma, most_waste=10**9),
    "slo_odbs": policy(
        SloOdbs,
        threshold=200.0,
        slo_weight=0.1,
        output_weight=1.0,
        output_term=OutputTerm.DIFFERENCE,
    ),
    "slo_odbs by the sum": policy(SloOdbs, threshold=2000.0, slo_weight=0.3, output_weight=1.0),
    "slo_dbs": policy(SloDbs, threshold=50.0, output_weight=1.0, output_term=OutputTerm.DIFFERENCE),
    "odbs": policy(Odbs, threshold=2000.0, slo_weight=1.0),
}


def request(
    name: str = "r",
    tokens: int = 10,
    answer: int = 10,
    at_s: float = 0.0,
    left: float | None = None,
) -> BatchRequest:
    return BatchRequest(name, at_s, tokens, answer, None if left is None else NOW + left)


def requests(most: int = LONGEST) -> st.SearchStrategy[list[BatchRequest]]:
    # Arrival, prompt, answer, deadline; of a few values, so that some are equal.
    fields = st.tuples(
        st.integers(0, 20),
        st.integers(1, most),
        st.integers(1, most),
        st.none() | st.integers(-5, 20),
    )
    return st.lists(fields, max_size=16).map(
        lambda rows: [
            BatchRequest(
                str(at), 50.0 * came, tokens, answer, None if left is None else NOW + 20.0 * left
            )
            for at, (came, tokens, answer, left) in enumerate(rows)
        ]
    )


def ids(batch: StaticBatch) -> list[str]:
    return [one.id for one in batch.requests]


@settings(deadline=None)
@given(waiting=requests(most=3 * LONGEST))
def test_every_request_is_in_exactly_one_batch_however_long_it_is(
    waiting: list[BatchRequest],
) -> None:
    for batcher in BATCHERS.values():
        batches = batcher.form(waiting, MEMORY, NOW)
        assert Counter(one for batch in batches for one in batch.requests) == Counter(waiting)
        assert all(batch.requests for batch in batches)


@settings(deadline=None)
@given(waiting=requests())
def test_every_batch_fits_into_memory_by_its_longest_prompt_and_answer(
    waiting: list[BatchRequest],
) -> None:
    for batcher in BATCHERS.values():
        for batch in batcher.form(waiting, MEMORY, NOW):
            longest = max(one.input_tokens for one in batch.requests)
            answer = max(one.predicted_tokens for one in batch.requests)
            assert len(batch.requests) * (longest + answer) * MEMORY.token_bytes <= MEMORY.bytes


@settings(deadline=None)
@given(waiting=requests(most=10 * LONGEST))
def test_what_does_not_fit_is_alone(waiting: list[BatchRequest]) -> None:
    for name in BATCHERS.keys() - {"fifo"}:
        for batch in BATCHERS[name].form(waiting, MEMORY, NOW):
            fits = MEMORY.holds(len(batch.requests), batch.length, batch.generation)
            assert fits or len(batch.requests) == 1


@settings(deadline=None)
@given(waiting=requests(), seed=st.integers())
def test_the_order_of_the_requests_in_the_list_makes_no_difference(
    waiting: list[BatchRequest], seed: int
) -> None:
    shuffled = random.Random(seed).sample(waiting, len(waiting))
    for batcher in BATCHERS.values():
        assert batcher.form(shuffled, MEMORY, NOW) == batcher.form(waiting, MEMORY, NOW)


@settings(deadline=None)
@given(waiting=requests().filter(bool), number=st.integers(0))
def test_the_other_batches_form_again_when_one_has_left(
    waiting: list[BatchRequest], number: int
) -> None:
    for name in ("wma", "wma without a bound"):
        batches = BATCHERS[name].form(waiting, MEMORY, NOW)
        gone = batches[number % len(batches)]
        left = [one for one in waiting if one not in gone.requests]
        assert BATCHERS[name].form(left, MEMORY, NOW) == [one for one in batches if one != gone]


@settings(deadline=None)
@given(waiting=requests())
def test_first_come_first_served_fills_batches_in_the_order_of_arrival(
    waiting: list[BatchRequest],
) -> None:
    batches = policy(Fifo, size=3).form(waiting, MEMORY, NOW)
    served = [one.arrived_s for batch in batches for one in batch.requests]
    assert served == sorted(served)
    assert all(len(batch.requests) == 3 for batch in batches[:-1])


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        policy(Fifo, size=size)


def test_waste_is_that_of_magnus_formulas() -> None:
    # 4 times 3 tokens of padding; then 4 + 10, 5 + 10 and 6 + 10 tokens read.
    assert wasted(request(tokens=7, answer=4), length=10, generation=6) == 12 + 14 + 15 + 16
    assert wma(StaticBatch((request("a", 10, 6), request("b", 7, 4)))) == 57


@settings(deadline=None)
@given(waiting=requests().filter(bool))
def test_a_batchs_waste_is_its_greatest_as_joining_requests_see_it(
    waiting: list[BatchRequest],
) -> None:
    def by_definition(batch: StaticBatch) -> int:
        return max(
            one.predicted_tokens * (batch.length - one.input_tokens)
            + sum(g + batch.length for g in range(one.predicted_tokens, batch.generation + 1))
            for one in batch.requests
        )

    threshold = 800
    for batch in policy(Wma, most_waste=threshold).form(waiting, AMPLE, NOW):
        assert wma(batch) == by_definition(batch)
        assert len(batch.requests) == 1 or wma(batch) < threshold


def test_a_request_joins_the_batch_where_it_wastes_the_least() -> None:
    waiting = [
        request("long", 60, 60, at_s=0.0),
        request("short", 5, 5, at_s=1.0),
        request("shorter", 4, 4, at_s=2.0),
        request("longer", 61, 62, at_s=3.0),
    ]
    batches = policy(Wma, most_waste=1000).form(waiting, AMPLE, NOW)
    assert [ids(batch) for batch in batches] == [["long", "longer"], ["short", "shorter"]]


def test_bins_are_packed_by_the_longest_answer_first_each_into_the_first_with_room() -> None:
    memory = KvBudget(bytes=100, token_bytes=1)
    waiting = [
        request("a", 10, 10),
        request("b", 10, 40),
        request("c", 10, 40),
        request("d", 10, 39),
        request("e", 10, 11),
    ]
    assert [ids(batch) for batch in policy(S3).form(waiting, memory, NOW)] == [
        ["b", "c"],
        ["d", "e"],
        ["a"],
    ]


@settings(deadline=None)
@given(waiting=requests())
def test_batches_are_runs_of_the_order_of_deadlines_missed_and_absent_ones_last(
    waiting: list[BatchRequest],
) -> None:
    for name in ("slo_odbs", "slo_odbs by the sum", "slo_dbs", "odbs"):
        order = [
            one for batch in BATCHERS[name].form(waiting, MEMORY, NOW) for one in batch.requests
        ]
        due = [one.deadline_s for one in order if one.deadline_s and one.deadline_s > NOW]
        assert due == sorted(due)
        # The patience with those that have none ends 600 s after their arrival.
        recent = [one for one in order if one.arrived_s > NOW - 200]
        still = [one.deadline_s is not None and one.deadline_s > NOW for one in recent]
        assert still == sorted(still, reverse=True)


@pytest.mark.parametrize(
    ("kind", "options", "cost"),
    [
        # Joining a batch of one: twice (SLO + L_CM) and twice (length ± O_CM).
        (SloDbs, {"output_weight": 1.0, "output_term": "difference"}, 2 * (30 - 20)),
        (SloDbs, {"output_weight": 1.0}, 2 * (30 + 20)),
        (Odbs, {"slo_weight": 1.0}, 2 * (80 + 50)),
        (
            SloOdbs,
            {"slo_weight": 0.5, "output_weight": 3.0, "output_term": "difference"},
            0.5 * 2 * (80 + 50) + 3 * 2 * (30 - 20),
        ),
    ],
)
def test_a_batch_ends_where_joining_costs_more_than_the_threshold(
    kind: type[BatchingPolicy], options: dict[str, Any], cost: float
) -> None:
    waiting = [request("first", answer=20, left=50.0), request("second", answer=30, left=80.0)]
    together = policy(kind, threshold=cost, **options).form(waiting, AMPLE, NOW)
    apart = policy(kind, threshold=cost - 0.01, **options).form(waiting, AMPLE, NOW)
    assert [ids(batch) for batch in together] == [["first", "second"]]
    assert [ids(batch) for batch in apart] == [["first"], ["second"]]


def test_by_the_difference_short_requests_join_any_batch_and_by_the_sum_they_do_not() -> None:
    waiting = [request(str(at), answer=100 if at == 0 else 5, left=at + 1.0) for at in range(20)]

    def by(term: OutputTerm) -> list[StaticBatch]:
        made = policy(SloDbs, threshold=150.0, output_weight=1.0, output_term=term)
        return made.form(waiting, AMPLE, NOW)

    assert [len(batch.requests) for batch in by(OutputTerm.DIFFERENCE)] == [20]
    assert len(by(OutputTerm.SUM)) > 1


def batches(*arrived: float) -> list[StaticBatch]:
    return [StaticBatch((request(str(at), at_s=at_s),)) for at, at_s in enumerate(arrived)]


def test_the_highest_response_ratio_is_next() -> None:
    # Waits of 100, 60 and 10 s over 50, 20 and 10 s of work.
    choose = hrrn(lambda of: [50.0, 20.0, 10.0])
    assert choose(batches(900, 940, 990), NOW) == 1
    # Much later the first has waited 1,900 s, the others 1,860 and 1,810.
    assert choose(batches(900, 940, 990), NOW + 1800) == 2


@settings(deadline=None)
@given(st.lists(st.floats(0, NOW), min_size=1, max_size=10), st.floats(0.1, 100))
def test_batches_of_equal_length_go_in_the_order_of_their_oldest(
    arrived: list[float], seconds: float
) -> None:
    waiting = batches(*arrived)
    ratio = hrrn(lambda of: [seconds] * len(of))
    assert arrived[oldest(waiting, NOW)] == min(arrived)
    # Waits that differ by less than a float can tell may go either way.
    assert NOW - arrived[ratio(waiting, NOW)] == NOW - min(arrived)
    assert first(waiting, NOW) == 0


@settings(deadline=None)
@given(requests().filter(lambda waiting: len(waiting) > 1))
def test_halves_are_of_equal_size_and_one_holds_the_longest(waiting: list[BatchRequest]) -> None:
    shorter, longer = halves(StaticBatch(tuple(waiting)))
    assert Counter(shorter.requests + longer.requests) == Counter(waiting)
    assert 0 <= len(shorter.requests) - len(longer.requests) <= 1
    lengths = [
        [one.input_tokens + one.predicted_tokens for one in half.requests]
        for half in (shorter, longer)
    ]
    assert max(lengths[0]) <= min(lengths[1])


def test_a_lone_request_is_not_split() -> None:
    with pytest.raises(ValueError, match="needs more memory"):
        halves(StaticBatch((request(),)))


@settings(deadline=None)
@given(waiting=requests(), failing=st.lists(st.booleans(), max_size=20))
def test_whatever_runs_out_of_memory_every_request_runs_once_or_is_told_of(
    waiting: list[BatchRequest], failing: list[bool]
) -> None:
    for batcher in BATCHERS.values():
        queue = BatchQueue(batcher, oldest, MEMORY)
        for one in waiting:
            queue.add(one)
        ran: list[BatchRequest] = []
        fails = iter(failing)
        while batch := queue.take(NOW):
            if next(fails, False):
                lone = queue.out_of_memory(batch)
                assert (lone is not None) == (len(batch.requests) == 1)
                ran += [lone] if lone else []
            else:
                ran += batch.requests
        assert Counter(ran) == Counter(waiting)
        assert len(queue) == 0


def test_nothing_joins_what_ran_out_of_memory() -> None:
    queue = BatchQueue(policy(Wma, most_waste=10**9), first, AMPLE)
    for name in "ab":
        queue.add(request(name))
    batch = queue.take(NOW)
    assert batch is not None
    queue.out_of_memory(batch)
    queue.add(request("c"))
    taken = [queue.take(NOW) for _ in range(4)]
    assert [ids(one) if one else None for one in taken] == [["a"], ["b"], ["c"], None]


def test_a_request_waits_once() -> None:
    queue = BatchQueue(policy(S3), first, MEMORY)
    queue.add(request())
    with pytest.raises(ValueError, match="waits already"):
        queue.add(request())


def test_who_withdraws_is_in_no_batch_and_in_no_half() -> None:
    queue = BatchQueue(policy(S3), first, AMPLE)
    for name in "abcd":
        queue.add(request(name))
    batch = queue.take(NOW)
    assert batch is not None
    queue.out_of_memory(batch)
    queue.add(request("e"))
    for name in ("a", "c", "d", "e", "who was never here"):
        queue.withdraw(name)
    assert len(queue) == 1
    left = queue.take(NOW)
    assert left is not None
    assert ids(left) == ["b"]
    assert queue.take(NOW) is None


def test_a_suspect_runs_alone() -> None:
    queue = BatchQueue(policy(S3), first, AMPLE)
    queue.add(request("a"))
    queue.add_alone(request("b"))
    queue.add(request("c"))
    taken = [queue.take(NOW) for _ in range(2)]
    assert sorted(sorted(ids(one)) for one in taken if one) == [["a", "c"], ["b"]]


def test_a_new_prediction_changes_who_runs_together() -> None:
    queue = BatchQueue(policy(S3), first, MEMORY)
    capacity = MEMORY.bytes // MEMORY.token_bytes
    for name in "ab":
        queue.add(request(name, answer=capacity - 10))
    queue.predict("a", 10)
    queue.predict("b", 10)
    queue.predict("who was never here", 10)
    batch = queue.take(NOW)
    assert batch is not None
    assert sorted(ids(batch)) == ["a", "b"]

"""The lane of static batches that benchmarks run: its clock, its model, its bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import task_lengths
from benchmarks.static_lane import (
    FittedBatches,
    LaneRequest,
    Ran,
    attainable,
    fit_error,
    serve,
    shape_of,
)
from loomserve.platform.costs.batch_time import BatchShape
from loomserve.routers.static_batching.base import BatchRequest, KvBudget
from loomserve.routers.static_batching.fifo import Fifo
from loomserve.routers.static_batching.next_batch import first, oldest
from loomserve.routers.static_batching.queue import BatchQueue
from loomserve.routers.static_batching.s3 import s3
from loomserve.routers.static_batching.slo_odbs import OutputTerm, slo_dbs
from loomserve.routers.static_batching.wma import Wma

MEMORY = KvBudget(bytes=4000, token_bytes=1)


def seconds(shape: BatchShape) -> float:
    """What the model can express."""
    steps = shape.generation - 1
    return (
        0.1
        + 0.07 * steps
        + 0.012 * steps * (min(shape.size, 8) - 1)
        + 0.004 * shape.size * shape.length
        + 0.0045 * steps * shape.size
        + 1e-5 * steps * shape.size * (shape.length + shape.generation / 2)
    )


SHAPES = [
    BatchShape(size, length, generation)
    for size in (1, 4, 12, 40)
    for length in (10, 100)
    for generation in (2, 20, 90)
]
MODEL = FittedBatches([(shape, seconds(shape)) for shape in SHAPES])


def request(
    name: str, at_s: float = 0.0, tokens: int = 10, answer: int = 10, due: float = 1e9
) -> LaneRequest:
    return LaneRequest(BatchRequest(name, at_s, tokens, answer, due), answer)


def ten_seconds(requests: Sequence[LaneRequest]) -> Ran:
    return Ran(shape_of(requests), 10.0, True)


def test_batches_run_in_turn_and_time_jumps_to_the_next_arrival() -> None:
    waiting = [request("a", 1.0), request("b", 2.0), request("c", 3.0), request("d", 50.0)]
    served = serve(waiting, BatchQueue(Fifo(2), oldest, MEMORY), ten_seconds)
    assert served.finished_s == {"a": 11.0, "b": 21.0, "c": 21.0, "d": 60.0}


def test_a_batch_that_runs_out_of_memory_costs_its_time_and_runs_in_halves() -> None:
    def run(requests: Sequence[LaneRequest]) -> Ran:
        return Ran(shape_of(requests), 10.0, len(requests) < 3)

    told: list[float] = []
    waiting = [request(name) for name in "abcd"]
    queue = BatchQueue(s3, first, MEMORY)
    served = serve(waiting, queue, run, lambda ran, now: told.append(now))
    assert served.finished_s == {"a": 20.0, "b": 20.0, "c": 30.0, "d": 30.0}
    assert served.out_of_memory == 1
    assert told == [20.0, 30.0]


def test_the_model_recovers_what_it_can_express() -> None:
    other = [BatchShape(7, 55, 33), BatchShape(25, 20, 60)]
    assert MODEL.seconds(other) == pytest.approx([seconds(shape) for shape in other])
    assert fit_error([(shape, seconds(shape)) for shape in SHAPES]) < 0.01


def test_who_outgrows_memory_ends_where_memory_does() -> None:
    run = MODEL.run_with(KvBudget(bytes=100, token_bytes=1))
    fits = run([request("a", tokens=20, answer=30), request("b", tokens=20, answer=5)])
    assert fits.fitted
    assert fits.seconds == pytest.approx(seconds(BatchShape(2, 20, 30)))
    outgrown = run([request("a", tokens=20, answer=31), request("b", tokens=20, answer=5)])
    assert not outgrown.fitted
    assert outgrown.shape.generation == 31
    assert outgrown.seconds == pytest.approx(seconds(BatchShape(2, 20, 30)))


lane_requests = st.lists(
    st.tuples(st.floats(0, 200), st.integers(1, 200), st.integers(1, 200), st.floats(1, 120)),
    min_size=1,
    max_size=25,
).map(
    lambda rows: [
        request(str(at), came, tokens, answer, came + left)
        for at, (came, tokens, answer, left) in enumerate(rows)
    ]
)


@settings(deadline=None)
@given(lane_requests)
def test_a_batch_takes_no_less_than_its_requests_least_shares(waiting: list[LaneRequest]) -> None:
    shape = shape_of(waiting)
    if MEMORY.holds(shape.size, shape.length, shape.generation):
        shares = sum(MODEL.least_share(one, MEMORY) for one in waiting)
        assert shares <= MODEL.seconds([shape])[0] * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(lane_requests)
def test_no_policy_meets_more_deadlines_than_the_bound(waiting: list[LaneRequest]) -> None:
    bound = attainable(waiting, MODEL, MEMORY)
    for batcher in (Fifo(3), s3, Wma(3000), slo_dbs(50.0, output_term=OutputTerm.DIFFERENCE)):
        served = serve(waiting, BatchQueue(batcher, first, MEMORY), MODEL.run_with(MEMORY))
        met = statistics.fmean(
            served.finished_s[one.known.id] <= (one.known.deadline_s or 0) for one in waiting
        )
        assert met <= bound + 1e-9


def test_the_bound_knows_who_is_late_in_any_order() -> None:
    alone = seconds(BatchShape(1, 10, 10))
    in_time, hopeless = request("a", due=alone * 1.01), request("b", due=alone * 0.99)
    assert attainable([in_time], MODEL, MEMORY) == 1.0
    assert attainable([in_time, hopeless], MODEL, MEMORY) == 0.5
    # Many at once, each of whom could be in time alone.
    crowd = [request(str(at), due=alone * 1.01) for at in range(200)]
    assert 0 < attainable(crowd, MODEL, MEMORY) < 0.5


def test_lengths_are_drawn_in_the_likeness_of_the_tasks() -> None:
    found = task_lengths.drawn(3000, None, "seed")
    assert found == task_lengths.drawn(3000, None, "seed")
    assert found != task_lengths.drawn(3000, None, "another")
    prompts, answers = [one.prompt for one in found], [one.answer for one in found]
    # Means of the data, tasks weighing the same: 48 with their instructions, and 33.
    assert statistics.fmean(prompts) == pytest.approx(48, rel=0.1)
    assert statistics.fmean(answers) == pytest.approx(33, rel=0.1)
    assert 0.5 < statistics.correlation(prompts, answers) < 1
    assert max(prompts) <= task_lengths.LONGEST_PROMPT
    assert min(answers) >= 2
    assert max(answers) <= task_lengths.LONGEST_ANSWER

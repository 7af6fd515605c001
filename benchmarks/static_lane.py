"""A lane of static batches: requests arrive, a queue forms batches, an engine runs them in turn.

Time is counted, not waited for: it goes on by what each batch takes, and jumps to the next arrival
when nothing waits. What a batch takes is measured where it is really computed, or predicted by a
model fitted to measured ones; the lane is the same.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression

from loomserve.platform.costs.batch_time import BatchShape, TimedBatch
from loomserve.routers.static_batching.base import BatchRequest, KvBudget
from loomserve.routers.static_batching.queue import BatchQueue

if TYPE_CHECKING:
    from loomserve.platform.batch.offline.executor import OfflineExecutor

_VOCABULARY = (1000, 40000)


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """What the queue knows of a request, and how long its answer is going to be."""

    known: BatchRequest
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Ran:
    """How a batch went, by its real lengths; ``fitted``: it did not run out of memory."""

    shape: BatchShape
    seconds: float
    fitted: bool


Run = Callable[[Sequence[LaneRequest]], Ran]
"""Computes a batch, or says what that would take."""


@dataclass
class Served:
    """When each request's batch ended, by its id, and how all batches went, in their order."""

    finished_s: dict[str, float] = field(default_factory=dict)
    batches: list[Ran] = field(default_factory=list)

    @property
    def out_of_memory(self) -> int:
        return sum(not one.fitted for one in self.batches)


def serve(
    requests: Iterable[LaneRequest],
    queue: BatchQueue,
    run: Run,
    ended: Callable[[Ran, float], None] = lambda ran, now: None,
) -> Served:
    """All requests to their end; ``ended`` is told of each batch that was completed, and when.

    Raises:
        RuntimeError: a request does not fit into memory even alone.
    """
    coming = sorted(requests, key=lambda one: one.known.arrived_s, reverse=True)
    by_id = {one.known.id: one for one in coming}
    served = Served()
    now = 0.0
    while coming or len(queue):
        while coming and (coming[-1].known.arrived_s <= now or not len(queue)):
            arrived = coming.pop().known
            now = max(now, arrived.arrived_s)
            queue.add(arrived)
        batch = queue.take(now)
        assert batch is not None, "something waits"
        ran = run([by_id[one.id] for one in batch.requests])
        served.batches.append(ran)
        now += ran.seconds
        if ran.fitted:
            served.finished_s |= dict.fromkeys((one.id for one in batch.requests), now)
            ended(ran, now)
        elif lone := queue.out_of_memory(batch):
            raise RuntimeError(f"request {lone.id} does not fit into memory: give it more")
    return served


def shape_of(requests: Sequence[LaneRequest]) -> BatchShape:
    return BatchShape(
        len(requests),
        max(one.known.input_tokens for one in requests),
        max(one.output_tokens for one in requests),
    )


def measured(executor: OfflineExecutor, clock: Callable[[], float]) -> Run:
    """Batches really computed; each request's tokens follow from its id."""
    # torch takes seconds to import, which who only predicts need not spend.
    from loomserve.platform.batch.offline.executor import OfflineRequest, OutOfMemoryError

    def run(requests: Sequence[LaneRequest]) -> Ran:
        prompts = [
            OfflineRequest(
                random.Random(one.known.id).choices(range(*_VOCABULARY), k=one.known.input_tokens),
                one.output_tokens,
                ignore_eos=True,
            )
            for one in requests
        ]
        shape, fitted = shape_of(requests), True
        begin = clock()
        try:
            executor.run(prompts)
        except OutOfMemoryError:
            fitted = False
        return Ran(shape, clock() - begin, fitted)

    return run


# A step costs the more the more requests are in it, at first steeply: products of a matrix and a
# few vectors use the cores less well.
_FEW = 8
# Features that do not grow with a batch's size, and those that each of its requests adds to.
_PER_BATCH, _PER_REQUEST = 2, 3


class FittedBatches:
    """Seconds of a batch as a sum of non-negative shares, fitted to measured batches."""

    def __init__(self, samples: Sequence[TimedBatch]) -> None:
        rows = _features([shape for shape, _ in samples])
        seconds = np.array([seconds for _, seconds in samples])
        # Relative errors: short batches count as much as long ones.
        self._regression = LinearRegression(positive=True, fit_intercept=False)
        self._regression.fit(rows / seconds[:, None], np.ones(len(seconds)))

    def seconds(self, shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
        """``[shapes]``"""
        return np.asarray(_features(shapes) @ self._regression.coef_, dtype=np.float64)

    def run_with(self, memory: KvBudget) -> Run:
        """Batches predicted; one that outgrows memory takes as long as until there."""

        def run(requests: Sequence[LaneRequest]) -> Ran:
            shape = shape_of(requests)
            room = memory.bytes // memory.token_bytes // shape.size - shape.length
            done = BatchShape(shape.size, shape.length, max(0, min(room, shape.generation)))
            return Ran(shape, float(self.seconds([done])[0]), room >= shape.generation)

        return run

    def least_share(self, request: LaneRequest, memory: KvBudget) -> float:
        """What a request adds to the time of any batch that fits into memory, at the least.

        Its own prompt and steps without padding, and of what a batch costs whatever its size, the
        part of memory that the request takes: a batch of n requests takes n times that at most.
        """
        alone = shape_of([request])
        parts = (_features([alone]) * self._regression.coef_)[0]
        memory_share = (alone.length + alone.generation) * memory.token_bytes / memory.bytes
        return float(parts[:_PER_BATCH].sum() * memory_share + parts[_PER_REQUEST:].sum())


def _features(shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
    """Of each: the batch, its steps, its steps of few, its prompts' and its steps' tokens, and the
    tokens that these attend to, ``[shapes, 6]``."""
    size, length, generation = np.array(
        [(one.size, one.length, one.generation) for one in shapes], dtype=np.float64
    ).T
    steps = np.maximum(generation - 1, 0)
    return np.stack(
        [
            np.ones_like(size),
            steps,
            steps * np.minimum(size - 1, _FEW - 1),
            size * length,
            steps * size,
            steps * size * (length + generation / 2),
        ],
        axis=1,
    )


def fit_error(samples: Sequence[TimedBatch]) -> float:
    """Mean absolute error as a share, each batch predicted from all the others."""
    errors = []
    for at, (shape, seconds) in enumerate(samples):
        model = FittedBatches([*samples[:at], *samples[at + 1 :]])
        errors.append(abs(float(model.seconds([shape])[0]) / seconds - 1))
    return float(np.mean(errors))


def attainable(requests: Sequence[LaneRequest], batches: FittedBatches, memory: KvBudget) -> float:
    """The share of deadlines that no order of static batches can exceed, by the fitted model.

    Who could not make it even alone and at once is late. The others need at least
    :meth:`FittedBatches.least_share` of the engine's time each. For every moment: of those that
    arrive from then on, as if they all came then, Moore and Hodgson's algorithm tells how many are
    late in the best order. The worst moment counts.
    """
    alone = batches.seconds([shape_of([one]) for one in requests])
    hopeful = [
        one
        for one, seconds in zip(requests, alone, strict=True)
        if one.known.arrived_s + seconds <= _deadline(one)
    ]
    shares = {one.known.id: batches.least_share(one, memory) for one in hopeful}
    by_deadline = sorted(hopeful, key=_deadline)
    most = 0
    for moment in sorted(one.known.arrived_s for one in hopeful):
        late, busy_s = 0, 0.0
        taken: list[float] = []
        for one in by_deadline:
            if one.known.arrived_s < moment:
                continue
            share = shares[one.known.id]
            heapq.heappush(taken, -share)
            busy_s += share
            if moment + busy_s > _deadline(one):
                busy_s += heapq.heappop(taken)
                late += 1
        most = max(most, late)
    return (len(hopeful) - most) / len(requests)


def _deadline(request: LaneRequest) -> float:
    assert request.known.deadline_s is not None
    return request.known.deadline_s

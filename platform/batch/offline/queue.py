"""Queue of one offline model: lines form static batches, which a process computes in turn.

Which lines run together, and which batch is next, the configuration chooses among the policies of
:mod:`loomserve.routers.static_batching`; times of batches are learnt from those that ran. A batch
that runs out of memory waits again as two halves. The queue is only in memory: after a restart the
lane sends its lines again.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loomserve.platform.base.errors import BadRequest, EngineGone
from loomserve.platform.batch.executor import AWAY, LineAnswer, LineCall, LineOutcome, QueuedModel
from loomserve.platform.batch.offline.worker import (
    OfflineFacts,
    OfflineLine,
    OfflineWorker,
    WorkerGoneError,
)
from loomserve.platform.config import Batching
from loomserve.platform.state import OfflineModelState
from loomserve.routers.static_batching.base import (
    BatchingPolicy,
    BatchRequest,
    KvBudget,
    StaticBatch,
)
from loomserve.routers.static_batching.queue import BatchQueue, first, hrrn, oldest

if TYPE_CHECKING:
    from loomserve.platform.costs.batch_time import BatchShape, BatchTimes

_log = logging.getLogger("ray.serve")

# Share of the KV memory that plans leave to answers longer than predicted.
_RESERVE = 0.2
# Lines come one by one; a batch waits a moment for those behind the first.
_GATHER_S = 0.05
_LONGEST_GATHER_S = 1.0
_RESTART_S = 2.0
_LONGEST_RESTART_S = 60.0
_SHORTEST_BATCH_S = 1e-3
_BATCH_TIME = "loomserve.platform.costs.batch_time"


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A line without an answer, in the queue or in the running batch."""

    line: OfflineLine
    expected_tokens: Callable[[], float]
    future: asyncio.Future[LineAnswer]

    @property
    def predicted_tokens(self) -> int:
        return max(1, math.ceil(self.expected_tokens()))


class OfflineQueue:
    """Queue of one offline model's lines; call it from one event loop."""

    def __init__(
        self,
        name: str,
        start: Callable[[], OfflineWorker],
        kv_bytes: int,
        *,
        places: int,
        rules: Batching | None = None,
        predictor: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._name, self._start, self._predictor = name, start, predictor
        self._kv_bytes, self._places = kv_bytes, places
        rules = rules or Batching()
        self._policy: BatchingPolicy = rules.batching_policy()
        self._order = rules.order
        self._clock, self._pause = clock, pause
        self._worker: OfflineWorker | None = None
        self._facts: OfflineFacts | None = None
        self._queue: BatchQueue | None = None
        self._times: BatchTimes | None = None
        self._reading = 0
        self._problem: str | None = None
        self._completed = self._splits = self._ended = 0
        self._waiting: dict[str, _Waiting] = {}
        self._wake = asyncio.Event()

    @property
    def model(self) -> QueuedModel:
        """The model, for the lane."""
        return QueuedModel(
            max_model_len=self._facts.context if self._facts else None,
            engine=f"offline:{self._name}",
            places=self._places if self._worker is not None else 0,
            predictor=self._predictor,
        )

    @property
    def state(self) -> OfflineModelState:
        return OfflineModelState(
            name=self._name,
            ready=self._worker is not None,
            problem=self._problem,
            batches=self._completed,
            splits=self._splits,
        )

    async def run(self) -> None:
        """Compute batches until cancelled; a process that ends is started again."""
        failures = 0
        while True:
            worker = self._start()
            try:
                facts = await worker.facts()
                failures = 0
                await self._serve(worker, facts)
            except WorkerGoneError as error:
                pause_s = min(_LONGEST_RESTART_S, _RESTART_S * 2**failures)
                failures += 1
                self._problem = str(error)
                _log.warning(
                    "offline model %s starts again in %.0f s: %s", self._name, pause_s, error
                )
            finally:
                self._worker = None
                worker.stop()
            await self._pause(pause_s)

    async def execute(self, call: LineCall) -> LineAnswer:
        """Compute a line; cancelling the call withdraws it from its batch."""
        worker = self._worker
        if worker is None:
            return AWAY
        line = OfflineLine(call.request_id, call.path, call.body)
        self._reading += 1
        try:
            tokens = await worker.prompt_tokens(line)
        except BadRequest as error:
            return LineAnswer.of(error)
        except WorkerGoneError:
            self._lose(worker)
            return AWAY
        finally:
            self._reading -= 1
        return await self._answered(line, call, tokens)

    async def _answered(self, line: OfflineLine, call: LineCall, tokens: int) -> LineAnswer:
        assert self._queue is not None
        future = asyncio.get_running_loop().create_future()
        waiting = self._waiting[line.id] = _Waiting(line, call.expected_tokens, future)
        now = self._clock()
        request = BatchRequest(line.id, now, tokens, waiting.predicted_tokens, now + call.left_s)
        # A process may have died of this line; alone, it takes no other with it.
        (self._queue.add_alone if call.attempts else self._queue.add)(request)
        self._wake.set()
        try:
            answer: LineAnswer = await future
            return answer
        finally:
            del self._waiting[line.id]
            if future.cancelled():
                self._queue.withdraw(line.id)
                await self._leave(line.id)

    async def _leave(self, line_id: str) -> None:
        if self._worker is not None:
            try:
                await self._worker.leave(line_id)
            except WorkerGoneError:
                self._lose(self._worker)

    def _lose(self, worker: OfflineWorker | None) -> None:
        if self._worker is worker:
            self._worker = None
            self._wake.set()

    async def _serve(self, worker: OfflineWorker, facts: OfflineFacts) -> None:
        self._facts = facts
        if self._queue is None:
            planned = KvBudget(int(self._kv_bytes * (1 - _RESERVE)), facts.token_bytes)
            self._queue = BatchQueue(self._policy, self._next, planned)
        self._worker, self._problem = worker, None
        while True:
            while not len(self._queue) and self._worker is worker:
                self._wake.clear()
                await self._wake.wait()
                await self._gather()
            if self._worker is not worker:
                raise WorkerGoneError("its process has ended")
            for line_id, waiting in self._waiting.items():
                self._queue.predict(line_id, waiting.predicted_tokens)
            batch = self._queue.take(self._clock())
            if batch is not None:
                await self._compute(worker, batch)

    async def _gather(self) -> None:
        until = self._clock() + _LONGEST_GATHER_S
        await self._pause(_GATHER_S)
        while self._reading and self._clock() < until:
            await self._pause(_GATHER_S)

    async def _compute(self, worker: OfflineWorker, batch: StaticBatch) -> None:
        assert self._queue is not None
        lines = [self._waiting[one.id].line for one in batch.requests]
        began = self._clock()
        try:
            answers = await worker.run(lines)
        except WorkerGoneError:
            self._ended += 1
            for line in lines:
                self._answer(line.id, _gone(self._name, self._ended))
            raise
        if answers is None:
            self._split(batch)
            return
        self._completed += 1
        for line, answer in zip(lines, answers, strict=True):
            self._answer(line.id, LineAnswer(LineOutcome.ANSWERED, 200, answer.body))
        await self._learn(batch, max(answer.tokens for answer in answers), self._clock() - began)

    def _split(self, batch: StaticBatch) -> None:
        assert self._queue is not None
        self._splits += 1
        if lone := self._queue.out_of_memory(batch):
            self._answer(lone.id, LineAnswer.of(_too_large(self._kv_bytes)))
        for request in batch.requests:
            if request.id not in self._waiting:
                self._queue.withdraw(request.id)

    def _answer(self, line_id: str, answer: LineAnswer) -> None:
        # A line may have been withdrawn meanwhile.
        if line_id in self._waiting and not self._waiting[line_id].future.done():
            self._waiting[line_id].future.set_result(answer)

    # Which batch is next

    def _next(self, batches: Sequence[StaticBatch], now: float) -> int:
        if self._order == "deadline":
            return first(batches, now)
        choose = oldest if self._times is None else hrrn(self._seconds)
        return choose(batches, now)

    def _seconds(self, batches: Sequence[StaticBatch]) -> Sequence[float]:
        assert self._times is not None
        found = self._times.seconds(
            [_shape(len(one.requests), one.length, one.generation) for one in batches]
        )
        return [max(_SHORTEST_BATCH_S, float(seconds)) for seconds in found]

    async def _learn(self, batch: StaticBatch, generated: int, seconds: float) -> None:
        if generated == 0:
            return  # all lines were withdrawn
        self._policy.ran(batch, generated, seconds)
        if self._order != "hrrn":
            return
        if self._times is None:
            # scikit-learn takes seconds to import.
            await asyncio.to_thread(importlib.import_module, _BATCH_TIME)
        from loomserve.platform.costs.batch_time import BatchTimes

        shape = _shape(len(batch.requests), batch.length, generated)
        if self._times is None:
            self._times = BatchTimes([(shape, seconds)], self._clock())
        else:
            self._times.finished(shape, seconds, self._clock())


def _shape(size: int, length: int, generation: int) -> BatchShape:
    from loomserve.platform.costs.batch_time import BatchShape

    return BatchShape(size, length, generation)


def _too_large(kv_bytes: int) -> BadRequest:
    return BadRequest(
        f"the request needs more KV memory alone than its model has ({kv_bytes} bytes): shorten "
        "it, lower max_tokens, or ask the operator to raise "
        "batch.offline_models[].kv_cache_memory",
        param="max_tokens",
        reason="kv_memory_exceeded",
    )


def _gone(name: str, process: int) -> LineAnswer:
    error = EngineGone(f"the process of model {name!r} ended while it computed; send it again")
    return LineAnswer.of(error, LineOutcome.ENGINE_ENDED, f"offline:{name}:{process}")

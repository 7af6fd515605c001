"""Sends lines of batches in progress to engines, and stores their answers."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from loomserve.platform.batch.dispatch import Dispatcher
from loomserve.platform.batch.ending import answered
from loomserve.platform.batch.executor import AWAY, LineAnswer, LineCall, LineExecutor, LineOutcome
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.length_estimation import LengthEstimator
from loomserve.platform.batch.live import LiveBatch, RunningLine
from loomserve.platform.batch.policy import lines
from loomserve.platform.batch.policy.breaker import MOST_ENDS
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import BatchRecord, LineError, new_id
from loomserve.platform.batch.store.lines import StoredAnswer
from loomserve.platform.batch.store.store import BatchStore, StoreThread

_log = logging.getLogger("ray.serve")

MOST_ATTEMPTS = 3
_TICK_S = 0.5
# Answers that come together are stored together, and their successors chosen together.
_GATHER_S = 0.02
_AWAY_S = 2.0
_FAILED_S = 1.0


class _FileGoneError(Exception):
    """The content of a batch's input file is not there any more."""


_Ended = tuple[LiveBatch, RunningLine, StoredAnswer]


class LineRunner:
    """Batches in progress, whose lines leave for engines and come back as stored answers. A line
    may be computed several times; it is answered once."""

    def __init__(
        self,
        store: BatchStore,
        thread: StoreThread,
        folder: BatchFolder,
        executor: LineExecutor,
        concurrency: int,
        *,
        estimator: LengthEstimator,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._thread, self._folder = store, thread, folder
        self._executor, self._estimator, self._clock = executor, estimator, clock
        self._estimations: dict[tuple[str, str], asyncio.Task[None]] = {}
        # That of engines' load reports.
        self._load_clock = time.monotonic
        self._dispatcher = Dispatcher(concurrency)
        self._answers: list[_Ended] = []
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self.live = self._dispatcher.live
        """Batches in progress, by id."""
        self.lines_ended: Counter[str] = Counter()
        """Lines ``answered`` and ``failed``."""
        self.retries = 0
        """Attempts that engines failed on."""

    def close(self) -> None:
        for batch_id in [*self.live]:
            self.drop(batch_id)
        self._estimator.close()

    def nudge(self) -> None:
        self._wake.set()

    def add(self, batch: BatchRecord, waiting: Iterable[BatchLine]) -> None:
        """Run the lines of a batch, from now on."""
        self._dispatcher.join(LiveBatch(batch, waiting, self._clock()))
        self.nudge()

    def drop(self, batch_id: str) -> None:
        """Take a batch's lines from their engines, and run no more of them."""
        live = self._dispatcher.leave(batch_id)
        for key in [key for key in self._estimations if key[0] == batch_id]:
            self._estimations.pop(key).cancel()
        for running in live.running.values() if live else ():
            if running.task is not None:
                running.task.cancel()

    # Lines to engines

    async def dispatch(self) -> None:
        """Wait until there may be something to do, and send the lines that may start."""
        try:
            async with asyncio.timeout(_TICK_S):
                await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass
        self._wake.clear()
        if self._answers or not self._dispatcher.wanted(self._clock()):
            return
        known = await self._executor.models()
        if known is None:
            return
        models = self._dispatcher.resolve(known)
        for model in self._dispatcher.wanted(self._clock()):
            served = models.get(model)
            if served is not None and served.predictor is not None:
                for batch in self._dispatcher.waiting_for(model):
                    self._estimate(batch, model, served.predictor)
        for batch, running in self._dispatcher.starts(models, self._clock(), self._load_clock()):
            running.task = asyncio.create_task(self._compute(batch, running))

    def _estimate(self, batch: LiveBatch, model: str, predictor: str) -> None:
        key = batch.record.id, model
        if key not in self._estimations:
            work = self._estimator.estimate(batch, model, predictor)
            self._estimations[key] = asyncio.create_task(work)

    async def _compute(self, batch: LiveBatch, running: RunningLine) -> None:
        request_id = new_id("")
        said = await self._attempt(batch, running, request_id)
        running.ended_s = self._load_clock()
        self._dispatcher.ended(running)
        line = running.line
        failed = said.outcome in (LineOutcome.ENGINE_FAILED, LineOutcome.ENGINE_ENDED)
        if failed:
            self.retries += 1
            line = replace(line, attempts=line.attempts + 1)
        again = said.outcome is LineOutcome.AWAY or (failed and line.attempts < MOST_ATTEMPTS)
        self._judge(batch, running, said, again=again)
        if again:
            if line is not running.line:
                await self._keep_attempt(batch.record.id, line.number)
            pause = _AWAY_S if said.outcome is LineOutcome.AWAY else _FAILED_S * line.attempts
            batch.put_off(running, line, self._clock() + pause)
            return
        answer = answered(batch.record.id, line.number, line.custom_id, request_id, said)
        self._answers.append((batch, running, answer))
        self._answered.set()

    async def _attempt(self, batch: LiveBatch, running: RunningLine, request_id: str) -> LineAnswer:
        try:
            call = await self._thread.call(self._call, batch, running, request_id)
            return await self._executor.execute(call)
        except asyncio.CancelledError:
            if self.live.get(batch.record.id) is not batch:
                raise
            # Whoever computed it cancelled it, or the batch was stopped.
            return AWAY
        except _FileGoneError:
            self._stop(batch, FILE_GONE)
            return AWAY
        except Exception as error:
            _log.warning("line %d of %s: %r", running.line.number, batch.record.id, error)
            return _broken(error)

    def _judge(
        self, batch: LiveBatch, running: RunningLine, said: LineAnswer, *, again: bool
    ) -> None:
        """Tell the batch's breaker how an attempt ended; if it opens, stop the batch."""
        number, breaker = running.line.number, batch.breaker
        if said.outcome is LineOutcome.ENGINE_ENDED:
            engine = said.ended or str(running.engine)
            breaker.ended(engine, number, running.line.model, alone=running.alone)
        if said.outcome is LineOutcome.ANSWERED:
            breaker.answered(number, computed=said.status == 200)
        elif not again:
            breaker.condemned(number)
        if breaker.is_open and batch.problem is None:
            _log.error("batch %s is stopped: its lines end engines", batch.record.id)
            self._stop(batch, _ENDS_ENGINES)

    def _stop(self, batch: LiveBatch, problem: LineError) -> None:
        """Take a batch's lines from their engines and start no more; the lifecycle ends it."""
        batch.problem = problem
        for running in batch.running.values():
            if running.task is not None and running.task is not asyncio.current_task():
                running.task.cancel()

    def _call(self, batch: LiveBatch, running: RunningLine, request_id: str) -> LineCall:
        record, line = batch.record, running.line
        try:
            with self._folder.blob(record.input_file_id).open("rb") as stream:
                stream.seek(line.offset)
                body = lines.parse(stream.read(line.size))["body"]
        except FileNotFoundError:
            raise _FileGoneError from None
        return LineCall(
            owner=record.owner,
            path=record.endpoint,
            body=body,
            request_id=request_id,
            model=line.model,
            engine=running.engine,
            left_s=record.expires_at - self._clock(),
            expected_tokens=lambda: batch.length(line).tokens,
            attempts=line.attempts,
        )

    async def _keep_attempt(self, batch_id: str, number: int) -> None:
        try:
            await self._thread.call(self._store.lines.failed_attempt, batch_id, number)
        except sqlite3.Error as error:
            _log.warning("a failed attempt at a batch's line is not kept: %r", error)

    # Answers to the store

    async def store_answers(self) -> None:
        """Wait for answers, and store those that have come."""
        await self._answered.wait()
        self._answered.clear()
        await asyncio.sleep(_GATHER_S)
        taken = [*self._answers]
        try:
            counted = await self._thread.call(
                self._store.lines.answer, [answer for _, _, answer in taken]
            )
        except sqlite3.Error:
            self._answered.set()
            raise
        del self._answers[: len(taken)]
        for (batch, running, answer), once in zip(taken, counted, strict=True):
            self._finished(batch, running, answer, once)
        self._wake.set()

    def _finished(
        self, batch: LiveBatch, running: RunningLine, answer: StoredAnswer, once: bool
    ) -> None:
        if running.line.number in batch.running:
            expected = batch.expected(running)
            sequences = running.line.sequences
            took = answer.input_tokens + answer.output_tokens
            batch.finished(
                running, answer.input_tokens, answer.output_tokens / sequences, self._clock()
            )
            if running.engine is not None:
                self._dispatcher.took(batch, took - expected)
        if once:
            self.lines_ended["answered" if answer.ok else "failed"] += 1


FILE_GONE = LineError(
    code="input_file_gone",
    message="The content of the input file is gone from the server's disk. Upload it again, and "
    "tell the operator.",
    param="input_file_id",
)
_ENDS_ENGINES = LineError(
    code="engines_ended",
    message=f"The batch was stopped because {MOST_ENDS} engines ended while they worked on its "
    "lines. Lines with an answer keep it; give the operator the batch's id.",
)


def _broken(error: Exception) -> LineAnswer:
    """The answer to a line on which the lane itself failed."""
    body = b'{"error": {"message": "The batch lane failed on this request. Send it again; if it '
    body += b'fails again, tell the operator.", "type": "server_error", "param": null, '
    body += b'"code": "internal_error"}}'
    return LineAnswer(LineOutcome.ENGINE_FAILED, 500, body)

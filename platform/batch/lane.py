"""The lane: takes batches from their files to their answers, one transaction after another.

What must not be lost is in the :class:`~loomserve.platform.batch.store.store.BatchStore`. Which
lines are with engines and how long they take is only in memory and learnt anew after a restart: a
line that was with an engine is computed again, and answered once.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from loomserve.platform.base.periodic import every
from loomserve.platform.batch import answers, ending
from loomserve.platform.batch.dispatch import Dispatch
from loomserve.platform.batch.executor import (
    LineAnswer,
    LineCall,
    LineExecutor,
    LineOutcome,
)
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.length_estimation import Foresight
from loomserve.platform.batch.live import LiveBatch, Running
from loomserve.platform.batch.policy import lines
from loomserve.platform.batch.policy.objects import BatchRecord, new_id
from loomserve.platform.batch.policy.status import Status
from loomserve.platform.batch.store.lines import Answer
from loomserve.platform.batch.store.store import BatchStore
from loomserve.platform.config import Batch
from loomserve.platform.state import BatchLaneState, BatchState

_log = logging.getLogger("ray.serve")

MOST_ATTEMPTS = 3
_TICK_S = 0.5
# Answers that come together are stored together, and their successors chosen together.
_GATHER_S = 0.02
_AWAY_S = 2.0
_FAILED_S = 1.0
_CLEAN_UP_S = 60.0
# It looks at every line.
_LOOK_AHEAD_S = 3.0
_DAY_S = 86_400.0

R = TypeVar("R")
_Ended = tuple[LiveBatch, Running, Answer]


class BatchLane:
    """Runs until it is cancelled; all but :meth:`run` is to be called from the same loop."""

    def __init__(
        self,
        store: BatchStore,
        folder: BatchFolder,
        executor: LineExecutor,
        options: Batch,
        *,
        max_body: int,
        foresight: Foresight | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._folder = folder
        self._executor = executor
        self._options = options
        self._max_body = max_body
        self._foresight = foresight or Foresight(folder)
        self._foreseeing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._clock = clock
        self._dispatcher = Dispatch(options.concurrency)
        self._live = self._dispatcher.live
        self._answers: list[_Ended] = []
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._lines_ended: Counter[str] = Counter()
        self._retries = 0
        # SQLite syncs to disk, which must not hold up the loop.
        self._thread = ThreadPoolExecutor(1, "batch-store")

    async def run(self) -> None:
        """Work for ever; what breaks for a moment (a full disk) is tried again."""
        work = (self._dispatch, self._store_answers, self._look_after_batches)
        try:
            async with asyncio.TaskGroup() as group:
                for step in work:
                    group.create_task(
                        every(
                            0.0,
                            step,
                            failed=self._warn,
                            errors=(sqlite3.Error, OSError),
                            retry_s=_FAILED_S,
                        )
                    )
        finally:
            for batch_id in [*self._live]:
                self._drop(batch_id)
            self._foresight.close()
            self._thread.shutdown(wait=True)

    def _warn(self, error: Exception) -> None:
        _log.warning("the batch lane cannot go on, and tries again: %r", error)

    async def call(self, work: Callable[..., R], *given: Any) -> R:
        """Run something that reads or writes the store, in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def nudge(self) -> None:
        """There may be something to do."""
        self._wake.set()

    async def cancel(self, owner: str | None, batch_id: str) -> BatchRecord:
        """See :meth:`Store.cancel`; its lines leave their engines at once."""
        batch = await self.call(self._store.batches.cancel, owner, batch_id, self._clock())
        self._drop(batch_id)
        self.nudge()
        return batch

    async def state(self) -> BatchLaneState:
        """What operators see: batches that have not ended, and counts of all."""
        records = await self.call(self._store.batches.unended)
        counts = await self.call(self._store.batches.counts)
        return BatchLaneState(
            batches=tuple(map(self.seen, records)),
            by_status={str(status): counts.get(status, 0) for status in Status},
            answered_lines=self._lines_ended["answered"],
            failed_lines=self._lines_ended["failed"],
            retries=self._retries,
        )

    def seen(self, batch: BatchRecord) -> BatchState:
        live = self._live.get(batch.id)
        return BatchState(
            id=batch.id,
            api_key=batch.owner,
            status=batch.status,
            endpoint=batch.endpoint,
            created_at=batch.created_at,
            expires_at=batch.expires_at,
            total=batch.total,
            completed=batch.completed,
            failed=batch.failed,
            in_flight=len(live.running) if live else 0,
            eta_s=live.eta_s if live else None,
            late=live.late if live else False,
        )

    # Lines to engines

    async def _dispatch(self) -> None:
        try:
            async with asyncio.timeout(_TICK_S):
                await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass
        self._wake.clear()
        wanted = self._dispatcher.wanted(self._clock())
        if not wanted or self._answers:
            return
        models = await self._executor.models()
        if models is None:
            return
        for model in wanted:
            served = models.get(model)
            if served is not None and served.predictor is not None:
                for batch in self._dispatcher.waiting_for(model):
                    self._foresee(batch, model, served.predictor)
        for batch, running in self._dispatcher.starts(models, self._clock()):
            self._send(batch, running)

    def _foresee(self, batch: LiveBatch, model: str, predictor: str) -> None:
        key = batch.record.id, model
        if key not in self._foreseeing:
            work = self._foresight.foresee(batch, model, predictor)
            self._foreseeing[key] = asyncio.create_task(work)

    def _send(self, batch: LiveBatch, running: Running) -> None:
        running.task = asyncio.create_task(self._compute(batch, running))

    async def _compute(self, batch: LiveBatch, running: Running) -> None:
        request_id = new_id("")
        try:
            call = await self.call(self._call, batch, running, request_id)
            said = await self._executor.execute(call)
        except asyncio.CancelledError:
            if self._live.get(batch.record.id) is not batch:
                raise
            # Not by us, but by who computed it.
            said = LineAnswer(LineOutcome.AWAY, 503, b"{}")
        except Exception as error:
            _log.warning("line %d of %s: %r", running.line.number, batch.record.id, error)
            said = _broken(error)
        running.ended_s = self._clock()
        self._dispatcher.ended(running)
        line = running.line
        if said.outcome is LineOutcome.ENGINE_FAILED:
            self._retries += 1
            line = replace(line, attempts=line.attempts + 1)
        if said.outcome is LineOutcome.AWAY or (
            said.outcome is LineOutcome.ENGINE_FAILED and line.attempts < MOST_ATTEMPTS
        ):
            if line is not running.line:
                await self._keep_attempt(batch.record.id, line.number)
            pause = _AWAY_S if said.outcome is LineOutcome.AWAY else _FAILED_S * line.attempts
            batch.put_off(running, line, self._clock() + pause)
            return
        answer = answers.answered(batch.record.id, line.number, line.custom_id, request_id, said)
        self._answers.append((batch, running, answer))
        self._answered.set()

    def _call(self, batch: LiveBatch, running: Running, request_id: str) -> LineCall:
        record, line = batch.record, running.line
        with self._folder.blob(record.input_file_id).open("rb") as stream:
            stream.seek(line.offset)
            body = lines.parse(stream.read(line.size))["body"]
        return LineCall(
            owner=record.owner,
            path=record.endpoint,
            body=body,
            request_id=request_id,
            engine=running.engine,
            expected_tokens=lambda: batch.length(line).tokens,
            attempts=line.attempts,
        )

    async def _keep_attempt(self, batch_id: str, number: int) -> None:
        try:
            await self.call(self._store.lines.failed_attempt, batch_id, number)
        except sqlite3.Error as error:
            _log.warning("a failed attempt at a batch's line is not kept: %r", error)

    # Answers to the store

    async def _store_answers(self) -> None:
        await self._answered.wait()
        self._answered.clear()
        await asyncio.sleep(_GATHER_S)
        taken = [*self._answers]
        try:
            counted = await self.call(self._store.lines.answer, [answer for _, _, answer in taken])
        except sqlite3.Error:
            self._answered.set()
            raise
        del self._answers[: len(taken)]
        for (batch, running, answer), once in zip(taken, counted, strict=True):
            self._finished(batch, running, answer, once)
        self._wake.set()

    def _finished(self, batch: LiveBatch, running: Running, answer: Answer, once: bool) -> None:
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
            self._lines_ended["answered" if answer.ok else "failed"] += 1

    # Batches from state to state

    async def _look_after_batches(self) -> None:
        now = self._clock()
        unended = await self.call(self._store.batches.unended)
        for batch in unended:
            await self._look_after(batch, self._clock())
        for gone in self._live.keys() - {batch.id for batch in unended}:
            self._drop(gone)
        if int(now / _CLEAN_UP_S) != int((now - _TICK_S) / _CLEAN_UP_S):
            await self._clean_up(now)
        if int(now / _LOOK_AHEAD_S) != int((now - _TICK_S) / _LOOK_AHEAD_S):
            for live in self._live.values():
                live.look_ahead(now)
        await asyncio.sleep(_TICK_S)

    async def _look_after(self, batch: BatchRecord, now: float) -> None:
        if batch.status in (Status.VALIDATING, Status.IN_PROGRESS) and batch.expires_at <= now:
            self._drop(batch.id)
            await self.call(self._store.batches.begin_to_end, batch.id, Status.EXPIRED, now)
        elif batch.status is Status.VALIDATING:
            await self._validate(batch)
        elif batch.status is Status.IN_PROGRESS and batch.unanswered == 0:
            self._drop(batch.id)
            await self.call(self._store.batches.begin_to_end, batch.id, Status.COMPLETED, now)
        elif batch.status is Status.IN_PROGRESS:
            await self._bring_to_life(batch)
        elif batch.status in (Status.FINALIZING, Status.CANCELLING):
            self._drop(batch.id)
            # Beside the store's thread: other batches go on while long files are written.
            await asyncio.to_thread(
                ending.end,
                *(self._store, self._folder, batch, self._options.retention_days * _DAY_S, now),
            )

    async def _validate(self, batch: BatchRecord) -> None:
        found = await asyncio.to_thread(self._check, batch)
        if found.errors:
            await self.call(self._store.batches.fail, batch.id, found.errors, self._clock())
        else:
            await self.call(self._store.batches.begin, batch.id, found.lines, self._clock())

    def _check(self, batch: BatchRecord) -> lines.Checked:
        with self._folder.blob(batch.input_file_id).open("rb") as stream:
            return lines.check(
                stream,
                batch.endpoint,
                max_lines=self._options.max_lines,
                max_body=self._max_body,
            )

    async def _bring_to_life(self, batch: BatchRecord) -> None:
        live = self._live.get(batch.id)
        if live is not None:
            live.record = batch
            return
        waiting = await self.call(self._store.lines.unanswered, batch.id)
        self._dispatcher.join(LiveBatch(batch, waiting, self._clock()))
        self.nudge()

    def _drop(self, batch_id: str) -> None:
        live = self._dispatcher.leave(batch_id)
        for key in [key for key in self._foreseeing if key[0] == batch_id]:
            self._foreseeing.pop(key).cancel()
        for running in live.running.values() if live else ():
            if running.task is not None:
                running.task.cancel()

    async def _clean_up(self, now: float) -> None:
        for file_id in await self.call(self._store.files.expire, now):
            self._folder.remove(file_id)
        kept_since = now - self._options.retention_days * _DAY_S
        await self.call(self._store.batches.forget, kept_since)


def _broken(error: Exception) -> LineAnswer:
    """What a line is told that broke the lane itself."""
    body = b'{"error": {"message": "The batch lane failed on this request. Send it again; if it '
    body += b'fails again, tell the operator.", "type": "server_error", "param": null, '
    body += b'"code": "internal_error"}}'
    return LineAnswer(LineOutcome.ENGINE_FAILED, 500, body)

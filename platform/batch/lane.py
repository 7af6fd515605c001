"""The batch lane: takes batches from their input files to their output files.

The :class:`~loomserve.platform.batch.store.store.BatchStore` keeps what must not be lost. Which
lines are with engines, and how long they take, is only in memory: after a restart a line that was
with an engine is computed again, and answered once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from loomserve.platform.base.errors import TakenOver
from loomserve.platform.base.periodic import every, steady_unix_clock
from loomserve.platform.batch.executor import LineExecutor
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.length_estimation import LengthEstimator
from loomserve.platform.batch.lifecycle import BatchLifecycle
from loomserve.platform.batch.line_runner import LineRunner
from loomserve.platform.batch.policy.objects import BatchRecord, BatchStatus
from loomserve.platform.batch.store.store import BatchStore, StoreThread
from loomserve.platform.config import Batch
from loomserve.platform.state import BatchLaneState, BatchState

_log = logging.getLogger("ray.serve")

_FAILED_S = 1.0

R = TypeVar("R")


class BatchLane:
    """The lane. :meth:`run` works until it is cancelled; call all else from the same event loop."""

    def __init__(
        self,
        store: BatchStore,
        folder: BatchFolder,
        executor: LineExecutor,
        options: Batch,
        *,
        max_body: int,
        estimator: LengthEstimator | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``clock``: Unix seconds, by which batches expire; None: one that takes no steps."""
        clock = clock or steady_unix_clock()
        self._store = store
        self._clock = clock
        self._thread = StoreThread()
        self._runner = LineRunner(
            store,
            self._thread,
            folder,
            executor,
            options.concurrency,
            estimator=estimator or LengthEstimator(folder),
            clock=clock,
        )
        self._lifecycle = BatchLifecycle(
            store, self._thread, folder, self._runner, options, max_body=max_body, clock=clock
        )

    async def run(self) -> None:
        """Work until cancelled; after an error, try again. Raises TakenOver if another lane has the
        store; all that is with engines is taken from them."""
        work = (self._runner.dispatch, self._runner.store_answers, self._lifecycle.advance_all)
        try:
            async with asyncio.TaskGroup() as group:
                for step in work:
                    again = every(0.0, step, failed=self._warn, retry_s=_FAILED_S)
                    group.create_task(again)
        finally:
            self._lifecycle.close()
            self._runner.close()
            self._thread.close()

    def _warn(self, error: Exception) -> None:
        if isinstance(error, TakenOver):
            raise error
        _log.error("the batch lane cannot go on, and tries again", exc_info=error)

    async def call(self, work: Callable[..., R], *given: Any) -> R:
        """Run ``work``, which reads or writes the store, in the store's thread."""
        return await self._thread.call(work, *given)

    def now(self) -> float:
        """Unix seconds of the clock by which batches expire."""
        return self._clock()

    def nudge(self) -> None:
        """Look for work now: a batch has come or gone."""
        self._runner.nudge()

    async def cancel(self, owner: str | None, batch_id: str) -> BatchRecord:
        """Cancel a batch in the store, and take its lines from their engines at once."""
        batch = await self.call(self._store.batches.cancel, owner, batch_id, self._clock())
        self._runner.drop(batch_id)
        self.nudge()
        return batch

    async def state(self) -> BatchLaneState:
        """Batches that have not ended, and counts of all, for operators."""
        records = await self.call(self._store.batches.unended)
        counts = await self.call(self._store.batches.counts)
        return BatchLaneState(
            batches=tuple(map(self.state_of, records)),
            by_status={str(status): counts.get(status, 0) for status in BatchStatus},
            answered_lines=self._runner.lines_ended["answered"],
            failed_lines=self._runner.lines_ended["failed"],
            retries=self._runner.retries,
        )

    def state_of(self, batch: BatchRecord) -> BatchState:
        live = self._runner.live.get(batch.id)
        return BatchState(
            **batch.model_dump(include=set(BatchState.model_fields)),
            api_key=batch.owner,
            in_flight=len(live.running) if live else 0,
            eta_s=live.eta_s if live else None,
            late=live.late if live else False,
        )

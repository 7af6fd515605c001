"""Moves batches from state to state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loomserve.platform.batch import ending
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.line_runner import LineRunner
from loomserve.platform.batch.policy import lines
from loomserve.platform.batch.policy.objects import BatchRecord
from loomserve.platform.batch.policy.status import BatchStatus
from loomserve.platform.batch.store.store import BatchStore
from loomserve.platform.batch.store.thread import StoreThread
from loomserve.platform.config import Batch

_TICK_S = 0.5
_CLEAN_UP_S = 60.0
# A look ahead visits every line.
_LOOK_AHEAD_S = 3.0
_DAY_S = 86_400.0


class BatchLifecycle:
    """Validates batches, hands them to the runner, ends them and forgets them."""

    def __init__(
        self,
        store: BatchStore,
        thread: StoreThread,
        folder: BatchFolder,
        runner: LineRunner,
        options: Batch,
        *,
        max_body: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._thread = thread
        self._folder = folder
        self._runner = runner
        self._options = options
        self._max_body = max_body
        self._clock = clock

    async def advance_all(self) -> None:
        """Move each batch to its next state if it is time; now and then also clean up."""
        now = self._clock()
        unended = await self._thread.call(self._store.batches.unended)
        for batch in unended:
            await self._advance(batch, self._clock())
        for gone in self._runner.live.keys() - {batch.id for batch in unended}:
            self._runner.drop(gone)
        if int(now / _CLEAN_UP_S) != int((now - _TICK_S) / _CLEAN_UP_S):
            await self._clean_up(now)
        if int(now / _LOOK_AHEAD_S) != int((now - _TICK_S) / _LOOK_AHEAD_S):
            for live in self._runner.live.values():
                live.look_ahead(now)
        await asyncio.sleep(_TICK_S)

    async def _advance(self, batch: BatchRecord, now: float) -> None:
        if (
            batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
            and batch.expires_at <= now
        ):
            self._runner.drop(batch.id)
            await self._thread.call(
                self._store.batches.begin_to_end, batch.id, BatchStatus.EXPIRED, now
            )
        elif batch.status is BatchStatus.VALIDATING:
            await self._validate(batch)
        elif batch.status is BatchStatus.IN_PROGRESS and batch.unanswered == 0:
            self._runner.drop(batch.id)
            await self._thread.call(
                self._store.batches.begin_to_end, batch.id, BatchStatus.COMPLETED, now
            )
        elif batch.status is BatchStatus.IN_PROGRESS:
            await self._resume(batch)
        elif batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self._runner.drop(batch.id)
            # Beside the store's thread: other batches go on while long files are written.
            await asyncio.to_thread(
                ending.end,
                *(self._store, self._folder, batch, self._options.retention_days * _DAY_S, now),
            )

    async def _validate(self, batch: BatchRecord) -> None:
        found = await asyncio.to_thread(self._check, batch)
        if found.errors:
            await self._thread.call(self._store.batches.fail, batch.id, found.errors, self._clock())
        else:
            await self._thread.call(self._store.batches.begin, batch.id, found.lines, self._clock())

    def _check(self, batch: BatchRecord) -> lines.CheckedFile:
        with self._folder.blob(batch.input_file_id).open("rb") as stream:
            return lines.check(
                stream,
                batch.endpoint,
                max_lines=self._options.max_lines,
                max_body=self._max_body,
            )

    async def _resume(self, batch: BatchRecord) -> None:
        live = self._runner.live.get(batch.id)
        if live is not None:
            live.record = batch
            return
        self._runner.add(batch, await self._thread.call(self._store.lines.unanswered, batch.id))

    async def _clean_up(self, now: float) -> None:
        for file_id in await self._thread.call(self._store.files.expire, now):
            self._folder.remove(file_id)
        kept_since = now - self._options.retention_days * _DAY_S
        await self._thread.call(self._store.batches.forget, kept_since)

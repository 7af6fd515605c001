"""Moves batches from state to state."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from loomserve.platform.batch import ending
from loomserve.platform.batch.folder import BatchFolder
from loomserve.platform.batch.line_runner import FILE_GONE, LineRunner
from loomserve.platform.batch.policy import lines
from loomserve.platform.batch.policy.objects import BatchRecord, BatchStatus, LineError
from loomserve.platform.batch.policy.progress import MOST_FAILURES, Retries, may_join
from loomserve.platform.batch.store.store import BatchStore, StoreThread
from loomserve.platform.config import Batch

_log = logging.getLogger("ray.serve")

_TICK_S = 0.5
_CLEAN_UP_S = 60.0
# A look ahead visits every line.
_LOOK_AHEAD_S = 3.0
_DAY_S = 86_400.0
_ENDING = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
# The disk is full: nothing is wrong with the batch, and there may be room soon.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_S = 1.0


class BatchLifecycle:
    """Validates batches, hands them to the runner, ends them and forgets them. Each batch by
    itself: one whose step fails waits and is tried again, and is failed in the end, while all
    others go on. What reads or writes whole files is done beside the rest, one file to be checked
    and one batch to be ended at a time."""

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
        self._store, self._thread, self._folder = store, thread, folder
        self._runner, self._clock = runner, clock
        self._options, self._max_body = options, max_body
        self._retries = Retries()
        self._slow: dict[str, asyncio.Task[None]] = {}
        self._too_long: dict[str, int] = {}

    def close(self) -> None:
        for task in self._slow.values():
            task.cancel()

    async def advance_all(self) -> None:
        """Move each batch to its next state if it is time; now and then also clean up."""
        now = self._clock()
        await self._thread.call(self._store.check_owner)
        unended = await self._thread.call(self._store.batches.unended)
        # Those that must be done first come first into memory.
        due = sorted(unended, key=lambda batch: batch.expires_at)
        for batch in due:
            await self._guard(batch, self._advance)
        self._beside("validate", [one for one in due if one.status is BatchStatus.VALIDATING])
        self._beside("end", [one for one in due if one.status in _ENDING])
        for gone in self._runner.live.keys() - {batch.id for batch in unended}:
            self._runner.drop(gone)
        if int(now / _CLEAN_UP_S) != int((now - _TICK_S) / _CLEAN_UP_S):
            await self._clean_up(now)
        if int(now / _LOOK_AHEAD_S) != int((now - _TICK_S) / _LOOK_AHEAD_S):
            for live in self._runner.live.values():
                live.look_ahead(now)
        await asyncio.sleep(_TICK_S)

    def _beside(self, kind: Literal["validate", "end"], batches: Sequence[BatchRecord]) -> None:
        """Take a step with each of the batches, unless an earlier call still does."""
        running = self._slow.get(kind)
        if batches and (running is None or running.done()):
            work = self._validate_each if kind == "validate" else self._end_each
            self._slow[kind] = asyncio.create_task(work(batches))

    async def _guard(
        self, batch: BatchRecord, step: Callable[[BatchRecord], Awaitable[bool]]
    ) -> None:
        """Take a step with a batch if it is time; ``step`` tells whether there was one."""
        if not self._retries.may_try(batch.id, self._clock()):
            return
        try:
            if await step(batch):
                self._retries.went_well(batch.id)
        except Exception as error:
            await self._failed(batch, error)

    async def _failed(self, batch: BatchRecord, error: Exception) -> None:
        if _is_passing(error):
            _log.warning("batch %s waits: %r", batch.id, error)
            self._retries.wait(batch.id, self._clock() + _NO_ROOM_S)
            return
        _log.error("batch %s cannot go on", batch.id, exc_info=error)
        if not self._retries.failed(batch.id, self._clock()):
            return
        problem = LineError(
            code="internal_error",
            message=f"The batch was given up after {MOST_FAILURES} failures "
            f"({type(error).__name__}). Give the operator the batch's id.",
        )
        try:
            await self._thread.call(
                self._store.batches.give_up, batch.id, (problem,), self._clock()
            )
        except sqlite3.Error as another:
            _log.warning("batch %s cannot be failed either: %r", batch.id, another)
        else:
            self._runner.drop(batch.id)
            self._retries.went_well(batch.id)

    async def _advance(self, batch: BatchRecord) -> bool:
        live = self._runner.live.get(batch.id)
        if batch.status in _ENDING:
            self._runner.drop(batch.id)
            return False
        if batch.expires_at <= self._clock():
            await self._begin_to_end(batch, BatchStatus.EXPIRED)
        elif batch.status is BatchStatus.VALIDATING:
            return False
        elif batch.unanswered == 0:
            await self._begin_to_end(batch, BatchStatus.COMPLETED)
        elif live is not None and live.problem is not None:
            await self._begin_to_end(batch, BatchStatus.FAILED, live.problem)
        elif live is not None:
            live.record = batch
        elif may_join(batch, [other.record for other in self._runner.live.values()]):
            self._runner.add(batch, await self._thread.call(self._store.lines.unanswered, batch.id))
        return True

    async def _begin_to_end(
        self, batch: BatchRecord, status: BatchStatus, *errors: LineError
    ) -> None:
        await self._thread.call(
            self._store.batches.begin_to_end, batch.id, status, self._clock(), errors
        )
        self._runner.drop(batch.id)

    async def _validate_each(self, batches: Sequence[BatchRecord]) -> None:
        waiting: set[str] = set()
        for batch in batches:
            # A key's batches begin in their order, so that not each of them is read in vain.
            if batch.owner not in waiting:
                await self._guard(batch, self._validate)
                if batch.id in self._too_long:
                    waiting.add(batch.owner)

    async def _validate(self, batch: BatchRecord) -> bool:
        taken = await self._thread.call(self._store.batches.unended_lines)
        room = self._options.max_unended_lines - taken
        if self._too_long.get(batch.id, 1) > room:
            self._too_long.setdefault(batch.id, 1)
            return False
        self._too_long.pop(batch.id, None)
        try:
            found = await asyncio.to_thread(self._check, batch)
        except FileNotFoundError:
            found = lines.CheckedFile(errors=[FILE_GONE])
        if found.errors:
            await self._thread.call(self._store.batches.fail, batch.id, found.errors, self._clock())
        elif len(found.lines) > room:
            self._too_long[batch.id] = len(found.lines)
        else:
            await self._thread.call(self._store.batches.begin, batch.id, found.lines, self._clock())
        return True

    def _check(self, batch: BatchRecord) -> lines.CheckedFile:
        with self._folder.blob(batch.input_file_id).open("rb") as stream:
            return lines.check(
                stream, batch.endpoint, max_lines=self._options.max_lines, max_body=self._max_body
            )

    async def _end_each(self, batches: Sequence[BatchRecord]) -> None:
        for batch in batches:
            await self._guard(batch, self._end)

    async def _end(self, batch: BatchRecord) -> bool:
        if (await self._thread.call(self._store.batches.get, None, batch.id)).status in _ENDING:
            # Beside the store's thread: other batches go on while long files are written.
            kept_s = self._options.retention_days * _DAY_S
            await asyncio.to_thread(
                ending.end, self._store, self._folder, batch, kept_s, self._clock()
            )
        return True

    async def _clean_up(self, now: float) -> None:
        for file_id in await self._thread.call(self._store.files.expire, now):
            self._folder.remove(file_id)
        kept_since = now - self._options.retention_days * _DAY_S
        await self._thread.call(self._store.batches.forget, kept_since)


def _is_passing(error: Exception) -> bool:
    """Whether an error is the disk's or the database's, and not the batch's own."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return isinstance(error, sqlite3.OperationalError)

"""Work that is repeated for as long as its task lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn


async def every(
    period_s: float,
    work: Callable[[], Awaitable[object]],
    *,
    delay_s: float = 0.0,
    failed: Callable[[Exception], object] | None = None,
    errors: type[Exception] | tuple[type[Exception], ...] = Exception,
    retry_s: float | None = None,
) -> NoReturn:
    """Repeat ``work`` until the task is cancelled.

    Args:
        period_s: sleep between the end of one run and the start of the next.
        work: what is repeated; cancelling the task cancels the run in progress.
        delay_s: sleep before the first run.
        failed: told each of ``errors``, after which ``work`` is repeated; None: the first error
            ends the task.
        errors: those that ``failed`` is told; all others end the task.
        retry_s: sleep after an error; None: ``period_s``.
    """
    await asyncio.sleep(delay_s)
    while True:
        pause_s = period_s
        try:
            await work()
        except errors as error:
            if failed is None:
                raise
            failed(error)
            pause_s = period_s if retry_s is None else retry_s
        await asyncio.sleep(pause_s)

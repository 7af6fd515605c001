"""Work that is repeated for as long as its task lives."""

from __future__ import annotations

import asyncio
import time
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
    """Repeat ``work`` until the task is cancelled, which cancels the run in progress too.

    There are ``period_s`` seconds from the end of one run to the next, and ``delay_s`` before the
    first. ``failed`` gets each of ``errors``, after which ``retry_s`` (None: ``period_s``) pass;
    without it, as with other errors, the first one ends the task.
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


def steady_unix_clock() -> Callable[[], float]:
    """A clock in Unix seconds that takes the time of day once, and goes on by itself. It counts the
    time in which the machine sleeps, and follows no step of the machine's clock."""
    began = time.time() - _since_boot()
    return lambda: began + _since_boot()


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)

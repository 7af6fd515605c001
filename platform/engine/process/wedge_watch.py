"""Finds an engine's process that exists and makes no progress: by a deadlock, say, or SIGSTOP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from typing import Any

from loomserve.platform.engine.process.attentive_clock import AttentiveClock, PeerClock
from loomserve.platform.engine.process.peer_process import PeerProcess, PeerState
from loomserve.platform.engine.process.policy.silence import wedged

LOOK_S = 1.0


async def until_wedged(
    pid: int,
    turn: Callable[[], Coroutine[Any, Any, object]],
    *,
    limit_s: float,
    look_s: float,
) -> str:
    """Ask an engine for a turn again and again; returns why it has to be ended, once it has.

    Args:
        pid: of its process.
        turn: returns once the engine's loop has come by, between two steps.
        limit_s: seconds of its standing still that count.
        look_s: between two looks at it.

    Raises:
        Exception: what ``turn`` raised.
    """
    while True:
        asked = asyncio.ensure_future(turn())
        try:
            await asyncio.wait([asked], timeout=look_s)
            if not asked.done():
                with suppress(OSError):  # it has ended, or cannot be looked at just now
                    if (why := await _wedged(pid, asked, limit_s, look_s)) is not None:
                        return why
            if asked.done():
                asked.result()
        finally:
            asked.cancel()
        await asyncio.sleep(look_s)


async def _wedged(
    pid: int, asked: asyncio.Future[object], limit_s: float, look_s: float
) -> str | None:
    """None: it has taken its turn."""
    # What this process does not see while it has no core itself does not count.
    attended = AttentiveClock(time.monotonic, 2 * look_s)
    with closing(PeerProcess(pid)) as process:
        counted = PeerClock(attended, process.work)
        while not asked.done():
            stopped = process.state() is PeerState.STOPPED
            why = wedged(attended(), counted(), limit_s, stopped=stopped)
            if why is not None:
                return why
            await asyncio.wait([asked], timeout=look_s)
            attended.tick()
            counted.tick(late=True)
    return None

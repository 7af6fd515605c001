"""How replicas of the platform's deployments end, by themselves or as Serve has them end."""

from __future__ import annotations

import asyncio
from typing import Any

HEALTH_CHECKS = {"health_check_period_s": 2, "health_check_timeout_s": 60}
"""Serve's, which ends what has not answered three of them in a row. Processes that have ended are
seen without, and what is slow answers at last: these end only what neither runs nor ends."""
EMPTY_LOOK_S = 0.25
"""How long Serve waits before it looks, and looks again, whether calls through Serve still run on
a replica that ends. Its own 2 s are for callers that hear of the end late, and ours do at once;
requests of clients do not pass through Serve, and each deployment waits for them itself."""


async def ended_with_caller(call: Any) -> Any:
    """The answer to a call of a replica, which does not go on with it once its caller is cancelled.

    A replica that is to end waits for the calls that it has.
    """
    try:
        return await call
    except asyncio.CancelledError:
        call.cancel()
        raise

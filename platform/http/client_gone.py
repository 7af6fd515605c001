"""Cancels work when the HTTP client that waits for it disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

R = TypeVar("R")


class ClientGoneError(Exception):
    """The client closed its connection, and the work was cancelled."""


async def while_connected(work: Coroutine[Any, Any, R], receive: Receive) -> R:
    """Run ``work`` until it is done or the client disconnects; its result.

    The body must have been received before.

    Raises:
        ClientGoneError: the client disconnected, and the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass

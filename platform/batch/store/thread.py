"""The thread that works on the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


class StoreThread:
    """One thread for all reads and writes: SQLite syncs to disk, which would hold up the loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "batch-store")

    async def call(self, work: Callable[..., R], *given: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def close(self) -> None:
        """Wait for work that has begun, and end the thread."""
        self._thread.shutdown(wait=True)

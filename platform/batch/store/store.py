"""The lane's database: files, batches and the answers to their lines, in SQLite.

One process writes (:class:`~loomserve.platform.batch.folder.BatchFolder`), from one thread at a
time; what one of an earlier generation still tries to write is refused. Every method of the tables
is one transaction, so that a process killed anywhere leaves either all of it or nothing. An answer
counts in the transaction that stores it, once: a line has at most one answer, and after its batch
has begun to end it gets none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from loomserve.platform.batch.store import schema
from loomserve.platform.batch.store.batches import BatchTable
from loomserve.platform.batch.store.files import FileTable
from loomserve.platform.batch.store.lines import LineTable

R = TypeVar("R")


class BatchStore:
    """The lane's database: its tables, safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """Take over from an earlier lane. Raises StartError if the file is no database, or of
        another version."""
        self._database = schema.open_database(path)
        self.generation = self._database.take_over()
        """Of this lane: no other has it, and later ones have later ones."""
        self.files = FileTable(self._database)
        self.batches = BatchTable(self._database)
        self.lines = LineTable(self._database)

    def check_owner(self) -> None:
        """Raises TakenOver if another lane has taken over."""
        self._database.check_owner()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nobody takes over while the block runs. Raises TakenOver if another lane has taken
        over."""
        with self._database.transaction():
            yield

    def close(self) -> None:
        self._database.close()


class StoreThread:
    """One thread for all reads and writes: SQLite syncs to disk, which would hold up the loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "batch-store")

    async def call(self, work: Callable[..., R], *given: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def close(self) -> None:
        """Wait for work that has begun, and end the thread."""
        self._thread.shutdown(wait=True)

"""The lane's database: files, batches and the answers to their lines, in SQLite.

One process writes (:class:`~loomserve.platform.batch.folder.BatchFolder`), from one thread at a
time. Every method of the tables is one transaction, so that a process killed anywhere leaves either
all of it or nothing. An answer counts in the transaction that stores it, once: a line has at most
one answer, and after its batch has begun to end it gets none.
"""

from __future__ import annotations

from pathlib import Path

from loomserve.platform.batch.store import schema
from loomserve.platform.batch.store.batches import BatchTable
from loomserve.platform.batch.store.files import FileTable
from loomserve.platform.batch.store.lines import LineTable


class BatchStore:
    """The lane's database: its tables, safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            StartError: the file is no database, or of another version.
        """
        self._database = schema.open_database(path)
        self.files = FileTable(self._database)
        self.batches = BatchTable(self._database)
        self.lines = LineTable(self._database)

    def close(self) -> None:
        self._database.close()

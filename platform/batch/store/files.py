"""Records of files; the bytes are in the lane's folder."""

from __future__ import annotations

import sqlite3

from loomserve.platform.base.errors import Conflict, NotFound
from loomserve.platform.base.sqlite import Database
from loomserve.platform.batch.policy.objects import FileRecord
from loomserve.platform.batch.policy.quota import BatchQuota
from loomserve.platform.batch.store import schema


class FileTable:
    """Records of files, by id and owner; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: FileRecord, quota: BatchQuota | None = None) -> None:
        """Add a file, within a quota if one is given. Raises BodyTooLarge if its owner's files
        would have more bytes than the quota allows."""
        with self._database.transaction() as db:
            if quota is not None:
                quota.check_bytes(_bytes_of(db, file.owner) + file.bytes)
            schema.insert(db, "files", file.model_dump())

    def bytes_of(self, owner: str) -> int:
        with self._database.transaction() as db:
            return _bytes_of(db, owner)

    def get(self, owner: str, file_id: str) -> FileRecord:
        """Raises NotFound if there is none, or it is another's."""
        rows = self._database.read("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        if not rows:
            raise NotFound(f"No such File object: {file_id}", param="id")
        return schema.file_of(rows[0])

    def page(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """A page of an owner's files, and whether there are more. Raises NotFound as
        :func:`.schema.page`."""
        of_purpose = "(?4 IS NULL OR purpose = ?4)"
        rows, more = schema.page(
            self._database, "files", owner, after, limit, newest_first, of_purpose, purpose
        )
        return [schema.file_of(row) for row in rows], more

    def delete(self, owner: str, file_id: str) -> None:
        """Raises NotFound if there is none, or it is another's; Conflict if a batch reads it
        still."""
        self.get(owner, file_id)
        with self._database.transaction() as db:
            if file_id in _read_by_batches(db):
                raise Conflict(
                    f"File {file_id} is the input of a batch that has not ended: cancel the batch "
                    "first, or wait for it",
                    param="id",
                )
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expire(self, now: float) -> list[str]:
        """Delete records of expired files that no batch reads, and return their ids."""
        with self._database.transaction() as db:
            rows = db.execute("SELECT id FROM files WHERE expires_at <= ?", (int(now),)).fetchall()
            gone = [row["id"] for row in rows if row["id"] not in _read_by_batches(db)]
            db.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in gone])
        return gone

    def ids(self) -> list[str]:
        return [row["id"] for row in self._database.read("SELECT id FROM files")]


def _bytes_of(db: sqlite3.Connection, owner: str) -> int:
    row = db.execute("SELECT COALESCE(SUM(bytes), 0) AS n FROM files WHERE owner = ?", (owner,))
    return int(row.fetchone()["n"])


def _read_by_batches(db: sqlite3.Connection) -> set[str]:
    rows = db.execute(f"SELECT input_file_id FROM batches WHERE {schema.UNENDED}")
    return {row["input_file_id"] for row in rows}

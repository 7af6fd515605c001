"""The lane's tables, and their rows as records."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from loomserve.platform.base.errors import NotFound, StartError
from loomserve.platform.base.sqlite import Database, OtherVersionError, SqlSchema
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import ENDED, BatchRecord, FileRecord

_BUSY_TIMEOUT_S = 30.0
UNENDED = f"status NOT IN ({', '.join(repr(str(each)) for each in sorted(ENDED))})"
"""Condition of a batch that has not ended."""
_SCHEMA = SqlSchema(
    version=1,
    tables="""
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
) STRICT;
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    ending TEXT,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    output_expires_s INTEGER,
    metadata TEXT,
    errors TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    output_file_id TEXT,
    error_file_id TEXT,
    total INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    CHECK (completed + failed <= total)
) STRICT;
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    model TEXT NOT NULL,
    offset INTEGER NOT NULL,
    size INTEGER NOT NULL,
    max_tokens INTEGER,
    sequences INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    ok INTEGER,
    answer BLOB,
    PRIMARY KEY (batch, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX unanswered_lines ON lines (batch) WHERE ok IS NULL;
""",
)


def open_database(path: Path) -> Database:
    """Raises StartError if the file is no database, or of another version."""
    try:
        return Database(path, _SCHEMA, busy_timeout_s=_BUSY_TIMEOUT_S)
    except OtherVersionError as error:
        raise StartError(
            f"{path} was written by {error.age} Loomserve: use that, or set batch.folder"
        ) from None
    except sqlite3.DatabaseError as error:
        raise StartError(
            f"{path} cannot be used ({error}): restore it from a backup, or set batch.folder"
        ) from None


def insert(connection: sqlite3.Connection, table: str, values: dict[str, Any]) -> None:
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", [*values.values()])


def batch_values(batch: BatchRecord) -> dict[str, Any]:
    values = batch.model_dump(mode="json")
    return values | {
        name: None if values[name] is None else json.dumps(values[name])
        for name in ("metadata", "errors")
    }


def batch_of(row: sqlite3.Row) -> BatchRecord:
    values = dict(row)
    for name in ("metadata", "errors"):
        values[name] = None if values[name] is None else json.loads(values[name])
    return BatchRecord.model_validate(values)


def file_of(row: sqlite3.Row) -> FileRecord:
    return FileRecord.model_validate(dict(row))


def line_of(row: sqlite3.Row) -> BatchLine:
    names = ("number", "custom_id", "model", "offset", "size", "max_tokens", "sequences")
    return BatchLine(**{name: row[name] for name in names}, attempts=row["attempts"])


def page(
    database: Database,
    table: str,
    owner: str | None,
    after: str | None,
    limit: int,
    newest_first: bool,
    condition: str = "?4 IS NULL",
    value: str | None = None,
) -> tuple[list[sqlite3.Row], bool]:
    """A page of an owner's rows (None: of everybody's), and whether there are more. Raises NotFound
    if ``after`` is the id of no such row."""
    owned = "(?2 IS NULL OR owner = ?2)"
    beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
    start = 2**62 if newest_first else 0
    if after is not None:
        found = database.read(f"SELECT seq FROM {table} WHERE id = ?1 AND {owned}", after, owner)
        if not found:
            raise NotFound(f"There is no {after!r} to go on after.", param="after")
        start = found[0]["seq"]
    query = (
        f"SELECT * FROM {table} WHERE seq {beyond} ?1 AND {owned} AND {condition} "
        f"ORDER BY seq {order} LIMIT ?3"
    )
    rows = database.read(query, start, owner, limit + 1, value)
    return rows[:limit], len(rows) > limit

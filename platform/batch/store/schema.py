"""The lane's tables, and the connection to them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from loomserve.platform.base.errors import StartError
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import BatchRecord, FileRecord

_VERSION = 1
_BUSY_TIMEOUT_S = 30.0

_TABLES = """
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
"""


def connect(path: Path) -> sqlite3.Connection:
    """A connection that commits only where it is told to, and durably: WAL, synced each time.

    Raises:
        StartError: the file is no database, or of a newer version.
    """
    try:
        connection = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _make_tables(connection, path)
    except sqlite3.DatabaseError as error:
        raise StartError(
            f"{path} cannot be used ({error}): restore it from a backup, or set batch.folder"
        ) from None
    return connection


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _VERSION:
        raise StartError(f"{path} was written by a newer Loomserve: use that, or set batch.folder")
    if version == 0:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;"
        )


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

"""Durable SQLite databases, shared by threads, each with one owner at a time.

An owner takes a database over with a number, its *generation*, one more than the last owner's. What
an owner of an earlier generation still tries to change is refused, so one that hung, or was cut
off, and goes on beside its successor changes nothing.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loomserve.platform.base.errors import TakenOver

_RETRY_AFTER_S = 1.0
_GENERATIONS = """
CREATE TABLE IF NOT EXISTS generations (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    generation INTEGER NOT NULL
) STRICT
"""


class OtherVersionError(Exception):
    """Another version of Loomserve has written the database; ``age``: "a newer" or "an older"."""

    def __init__(self, age: str) -> None:
        super().__init__(f"{age} Loomserve wrote the database")
        self.age = age


@dataclass(frozen=True, slots=True)
class SqlSchema:
    """Statements that create tables, and a version (``user_version``) that grows with changes."""

    tables: str
    version: int


class Database:
    """A connection for several threads, which takes one transaction at a time. Each commit is
    synced to disk: after a crash a transaction is there whole, or not at all."""

    def __init__(self, path: Path, schema: SqlSchema, *, busy_timeout_s: float) -> None:
        """Open the database, and make the tables of a new one. A statement waits ``busy_timeout_s``
        for another connection's lock. Raises OtherVersionError if its version is not
        ``schema.version``; sqlite3.DatabaseError if it is no database, or cannot be opened."""
        self._path = path
        self._schema = schema
        self._busy_timeout_s = busy_timeout_s
        self._connection = self._connect()
        self._lock = threading.Lock()
        self._generation: int | None = None

    def take_over(self) -> int:
        """Become the owner; returns the generation, which no other owner has or had. What an
        earlier owner has begun is committed first, and seen; it can begin nothing more."""
        with self._transaction() as db:
            db.execute(_GENERATIONS)
            (self._generation,) = db.execute(
                "INSERT INTO generations VALUES (1, 1)"
                " ON CONFLICT (one) DO UPDATE SET generation = generation + 1"
                " RETURNING generation"
            ).fetchone()
        assert self._generation is not None
        return self._generation

    def check_owner(self) -> None:
        """``TakenOver`` if another owner has taken the database over."""
        with self._lock:
            self._check_owner()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block does; undo all of it if the block or the commit fails.
        ``TakenOver``, and the block is not entered: another owner has taken the database over."""
        with self._transaction() as db:
            self._check_owner()
            yield db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def read(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Run a query outside of a transaction, and return all its rows."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own, for long reads that do not hold up transactions."""
        with closing(self._connect()) as connection:
            yield connection

    def _check_owner(self) -> None:
        if self._generation is None:
            return
        query = "SELECT generation FROM generations"
        (newest,) = self._connection.execute(query).fetchone()
        if newest != self._generation:
            raise TakenOver(
                f"{self._path.name} has another owner: send it again", retry_after_s=_RETRY_AFTER_S
            )

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path,
            timeout=self._busy_timeout_s,
            isolation_level=None,  # transactions begin and end where we say so
            check_same_thread=False,
        )
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(
                    f"BEGIN IMMEDIATE; {self._schema.tables} "
                    f"PRAGMA user_version = {self._schema.version}; COMMIT;"
                )
            elif version != self._schema.version:
                raise OtherVersionError("a newer" if version > self._schema.version else "an older")
        except BaseException:
            connection.close()
            raise
        return connection


class LatestGeneration:
    """What one receiver of orders has heard of.

    All that an owner orders bears its generation (:meth:`Database.take_over`). Who keeps to the
    latest one is not moved by an order that an earlier owner gave late.
    """

    def __init__(self) -> None:
        self._latest = 0

    def admits(self, generation: int) -> bool:
        """Whether an order counts: none of a later generation has come."""
        if generation < self._latest:
            return False
        self._latest = generation
        return True

    def check(self, generation: int) -> None:
        """``TakenOver`` if an order does not count."""
        if not self.admits(generation):
            raise TakenOver("another owner has taken over: send it again")

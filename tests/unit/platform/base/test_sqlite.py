"""Databases of which nothing that was committed is lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.platform.base.sqlite import Database, OtherVersionError, SqlSchema

NUMBERS = SqlSchema(tables="CREATE TABLE numbers (n INTEGER NOT NULL) STRICT;", version=2)


def opened(path: Path, version: int = NUMBERS.version) -> Database:
    return Database(path, SqlSchema(NUMBERS.tables, version), busy_timeout_s=1)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = opened(tmp_path / "db")
    yield database
    database.close()


def insert(database: Database, *values: object) -> None:
    with database.transaction() as db:
        for value in values:
            db.execute("INSERT INTO numbers VALUES (?)", (value,))


def numbers(database: Database) -> list[int]:
    return [n for (n,) in database.read("SELECT n FROM numbers WHERE n < ?", 100)]


def test_a_transaction_is_there_whole_or_not_at_all(database: Database, tmp_path: Path) -> None:
    insert(database, 1)
    with pytest.raises(sqlite3.IntegrityError):
        insert(database, 2, None)
    with pytest.raises(sqlite3.ProgrammingError):
        insert(database, 3, object())
    assert numbers(database) == [1]
    database.close()
    again = opened(tmp_path / "db")
    assert numbers(again) == [1]
    again.close()


def test_a_reader_sees_what_was_committed_while_a_transaction_goes_on(database: Database) -> None:
    with database.transaction() as db:
        db.execute("INSERT INTO numbers VALUES (1)")
        with database.reader() as beside:
            assert beside.execute("SELECT * FROM numbers").fetchall() == []
    with database.reader() as beside:
        assert [n for (n,) in beside.execute("SELECT * FROM numbers")] == [1]


@pytest.mark.parametrize(("version", "age"), [(1, "a newer"), (3, "an older")])
def test_a_database_of_another_version_is_not_opened(
    tmp_path: Path, version: int, age: str
) -> None:
    opened(tmp_path / "db").close()
    with pytest.raises(OtherVersionError) as error:
        opened(tmp_path / "db", version)
    assert error.value.age == age


def test_what_is_no_database_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        opened(tmp_path / "db")

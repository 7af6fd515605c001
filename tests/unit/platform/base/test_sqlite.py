"""Databases of which nothing that was committed is lost."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loomserve.platform.base.errors import TakenOver
from loomserve.platform.base.sqlite import Database, OtherVersionError, SqlSchema
from tests.waiting import PATIENCE_S

NUMBERS = SqlSchema(tables="CREATE TABLE numbers (n INTEGER NOT NULL) STRICT;", version=2)


def opened(path: Path, version: int = NUMBERS.version, busy_timeout_s: float = 1) -> Database:
    return Database(path, SqlSchema(NUMBERS.tables, version), busy_timeout_s=busy_timeout_s)


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


def test_a_late_write_of_an_earlier_owner_changes_nothing(tmp_path: Path) -> None:
    old, new = opened(tmp_path / "db"), opened(tmp_path / "db")
    first = old.take_over()
    insert(old, 1)
    assert new.take_over() == first + 1
    for _ in range(2):
        with pytest.raises(TakenOver):
            insert(old, 2)
    with pytest.raises(TakenOver):
        old.check_owner()
    new.check_owner()
    insert(new, 3)
    assert numbers(new) == numbers(old) == [1, 3]
    old.close()
    new.close()


def test_who_takes_over_sees_what_was_begun_before(tmp_path: Path) -> None:
    old, new = opened(tmp_path / "db"), opened(tmp_path / "db")
    old.take_over()
    taker = threading.Thread(target=new.take_over)
    with old.transaction() as db:
        taker.start()
        taker.join(0.1)
        assert taker.is_alive(), "it waits for what has begun"
        db.execute("INSERT INTO numbers VALUES (1)")
    taker.join()
    assert numbers(new) == [1]
    old.close()
    new.close()


def test_no_two_owners_have_one_generation(tmp_path: Path) -> None:
    path, taken = tmp_path / "db", list[int]()
    opened(path).close()

    def take() -> None:
        for _ in range(20):
            database = opened(path, busy_timeout_s=PATIENCE_S)
            taken.append(database.take_over())
            database.close()

    takers = [threading.Thread(target=take) for _ in range(4)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert sorted(taken) == list(range(1, 81))


def test_a_generation_outlives_its_owner(tmp_path: Path) -> None:
    for generation in (1, 2, 3):
        database = opened(tmp_path / "db")
        assert database.take_over() == generation
        database.close()

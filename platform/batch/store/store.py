"""What the lane must not lose: files, batches and the answers to their lines, in SQLite.

One process writes (:class:`~loomserve.platform.batch.folder.BatchFolder`), from one thread at a
time. Every method is one transaction, so that a process killed anywhere leaves either all of it or
nothing. An answer counts in the transaction that stores it, once: a line has at most one answer,
and after its batch has begun to end it gets none.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from loomserve.platform.base.errors import BadRequest, Conflict, NotFound
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import INPUT, BatchRecord, FileRecord, LineError
from loomserve.platform.batch.policy.status import CANCELLABLE, ENDED, TRANSITIONS, Status, stamp
from loomserve.platform.batch.store import schema

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line.

    Attributes:
        ok: It goes to the output file; else to the error file.
        text: Its whole line in that file, without the line's end.
    """

    batch_id: str
    number: int
    ok: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class BatchStore:
    """The lane's database; safe to call from several threads, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = schema.connect(path)
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _read(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    # Files

    def add_file(self, file: FileRecord) -> None:
        with self._transaction() as db:
            schema.insert(db, "files", file.model_dump())

    def file(self, owner: str, file_id: str) -> FileRecord:
        """
        Raises:
            NotFound: there is none, or it is another's.
        """
        rows = self._read("SELECT * FROM files WHERE id = ? AND owner = ?", file_id, owner)
        if not rows:
            raise NotFound(f"No such File object: {file_id}", param="id")
        return schema.file_of(rows[0])

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """A page of an owner's files, and whether there are more.

        Raises:
            NotFound: ``after`` is none of the owner's files.
        """
        rows = self._page(
            "files", owner, after, limit, newest_first, "(? IS NULL OR purpose = ?)", purpose
        )
        return [schema.file_of(row) for row in rows[:limit]], len(rows) > limit

    def delete_file(self, owner: str, file_id: str) -> None:
        """
        Raises:
            NotFound: there is none, or it is another's.
            Conflict: a batch still reads it.
        """
        self.file(owner, file_id)
        with self._transaction() as db:
            if file_id in self._read_by_batches(db):
                raise Conflict(
                    f"File {file_id} is the input of a batch that has not ended: cancel the batch "
                    "first, or wait for it",
                    param="id",
                )
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expire_files(self, now: float) -> list[str]:
        """Forget files whose time is up and that no batch reads; their ids."""
        with self._transaction() as db:
            rows = db.execute("SELECT id FROM files WHERE expires_at <= ?", (int(now),)).fetchall()
            gone = [row["id"] for row in rows if row["id"] not in self._read_by_batches(db)]
            db.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in gone])
        return gone

    def file_ids(self) -> list[str]:
        return [row["id"] for row in self._read("SELECT id FROM files")]

    # Batches

    def add_batch(self, batch: BatchRecord) -> None:
        """
        Raises:
            BadRequest: its input file is not there, or not for batches.
        """
        with self._transaction() as db:
            row = db.execute(
                "SELECT purpose FROM files WHERE id = ? AND owner = ?",
                (batch.input_file_id, batch.owner),
            ).fetchone()
            if row is None:
                raise BadRequest(
                    f"No such File object: {batch.input_file_id}", param="input_file_id"
                )
            if row["purpose"] != INPUT:
                raise BadRequest(
                    f"File {batch.input_file_id} has the purpose {row['purpose']!r}: upload it "
                    f"with purpose={INPUT}",
                    param="input_file_id",
                )
            schema.insert(db, "batches", schema.batch_values(batch))

    def batch(self, owner: str | None, batch_id: str) -> BatchRecord:
        """An owner's batch, or anybody's (None).

        Raises:
            NotFound: there is none, or it is another's.
        """
        rows = self._read(
            "SELECT * FROM batches WHERE id = ? AND (? IS NULL OR owner = ?)",
            *(batch_id, owner, owner),
        )
        if not rows:
            raise NotFound(f"No batch found with id '{batch_id}'.", param="batch_id")
        return schema.batch_of(rows[0])

    def batches(
        self, owner: str | None, *, after: str | None, limit: int
    ) -> tuple[list[BatchRecord], bool]:
        """A page of an owner's batches, or of all (None), and whether there are more.

        Raises:
            NotFound: ``after`` is none of them.
        """
        rows = self._page("batches", owner, after, limit, True)
        return [schema.batch_of(row) for row in rows[:limit]], len(rows) > limit

    def unended(self) -> list[BatchRecord]:
        """All batches that have not ended, the oldest first."""
        marks = ", ".join("?" * len(ENDED))
        rows = self._read(
            f"SELECT * FROM batches WHERE status NOT IN ({marks}) ORDER BY seq", *ENDED
        )
        return [schema.batch_of(row) for row in rows]

    def counts(self) -> dict[Status, int]:
        """Batches by status."""
        rows = self._read("SELECT status, COUNT(*) AS n FROM batches GROUP BY status")
        return {Status(row["status"]): row["n"] for row in rows}

    def begin(self, batch_id: str, lines: Sequence[BatchLine], now: float) -> bool:
        """The file is right: its lines may be answered. False: it was cancelled meanwhile."""
        with self._transaction() as db:
            if not self._move(db, batch_id, Status.VALIDATING, Status.IN_PROGRESS, now):
                return False
            db.executemany(
                "INSERT INTO lines VALUES (:batch, :number, :custom_id, :model, :offset, :size, "
                ":max_tokens, :sequences, :attempts, NULL, NULL)",
                ({"batch": batch_id, **asdict(line)} for line in lines),
            )
            db.execute("UPDATE batches SET total = ? WHERE id = ?", (len(lines), batch_id))
        return True

    def fail(self, batch_id: str, errors: Sequence[LineError], now: float) -> bool:
        """The file is wrong. False: the batch was cancelled meanwhile."""
        with self._transaction() as db:
            if not self._move(db, batch_id, Status.VALIDATING, Status.FAILED, now):
                return False
            record = self._one(db, batch_id).model_copy(update={"errors": tuple(errors)})
            db.execute(
                "UPDATE batches SET errors = ? WHERE id = ?",
                (schema.batch_values(record)["errors"], batch_id),
            )
        return True

    def cancel(self, owner: str | None, batch_id: str, now: float) -> BatchRecord:
        """Answer no more of its lines; one that is cancelling already stays so.

        Raises:
            NotFound: there is none, or it is another's.
            Conflict: it has ended, or is about to.
        """
        self.batch(owner, batch_id)
        with self._transaction() as db:
            batch = self._one(db, batch_id)
            if batch.status is not Status.CANCELLING:
                if batch.status not in CANCELLABLE:
                    raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
                self._move(db, batch_id, batch.status, Status.CANCELLING, now)
            return self._one(db, batch_id)

    def begin_to_end(self, batch_id: str, ending: Status, now: float) -> bool:
        """Answer no more of its lines and write its files, to end as completed or expired.

        Returns:
            Whether it does; False: it ends already, or was cancelled.
        """
        with self._transaction() as db:
            status = self._one(db, batch_id).status
            if Status.FINALIZING not in TRANSITIONS[status]:
                return False
            self._move(db, batch_id, status, Status.FINALIZING, now)
            db.execute("UPDATE batches SET ending = ? WHERE id = ?", (ending, batch_id))
        return True

    def finish(
        self, batch_id: str, output: FileRecord | None, errors: FileRecord | None, now: float
    ) -> BatchRecord:
        """End a batch that is finalizing or cancelling, with its files; its lines go.

        Lines without an answer count as failed from now on.
        """
        with self._transaction() as db:
            batch = self._one(db, batch_id)
            ending = batch.ending if batch.status is Status.FINALIZING else Status.CANCELLED
            assert ending is not None, "begin_to_end() says how a batch ends"
            for file in filter(None, (output, errors)):
                schema.insert(db, "files", file.model_dump())
            self._move(db, batch_id, batch.status, ending, now)
            db.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, "
                "failed = total - completed WHERE id = ?",
                (output and output.id, errors and errors.id, batch_id),
            )
            db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            return self._one(db, batch_id)

    def forget_batches(self, before: float) -> None:
        """Forget batches that were made before a time and have ended; their files stay."""
        marks = ", ".join("?" * len(ENDED))
        with self._transaction() as db:
            db.execute(
                f"DELETE FROM batches WHERE created_at < ? AND status IN ({marks})",
                (int(before), *ENDED),
            )

    # Lines

    def unanswered(self, batch_id: str) -> list[BatchLine]:
        rows = self._read(
            "SELECT * FROM lines WHERE batch = ? AND ok IS NULL ORDER BY number", batch_id
        )
        return [schema.line_of(row) for row in rows]

    def answer(self, answers: Sequence[Answer]) -> list[bool]:
        """Store answers and count them; for each whether it counted.

        One does not if its line has an answer, or its batch takes none any more.
        """
        with self._transaction() as db:
            return [self._answer(db, answer) for answer in answers]

    def failed_attempt(self, batch_id: str, number: int) -> int:
        """An engine failed on a line; how often that has happened to it."""
        with self._transaction() as db:
            row = db.execute(
                "UPDATE lines SET attempts = attempts + 1 WHERE batch = ? AND number = ? "
                "RETURNING attempts",
                (batch_id, number),
            ).fetchone()
        return 0 if row is None else int(row["attempts"])

    def answers(self, batch_id: str) -> Iterator[tuple[str, bool, bytes | None]]:
        """Of each line, in order: custom_id, whether it is good, and its answer if it has one.

        Read beside other transactions; nothing changes in a batch that ends.
        """
        with closing(schema.connect(self._path)) as db:
            last = 0
            while rows := db.execute(
                "SELECT number, custom_id, ok, answer FROM lines WHERE batch = ? AND number > ? "
                "ORDER BY number LIMIT ?",
                (batch_id, last, _ROWS_AT_ONCE),
            ).fetchall():
                for row in rows:
                    yield row["custom_id"], bool(row["ok"]), row["answer"]
                last = rows[-1]["number"]

    # Parts of transactions

    def _answer(self, db: sqlite3.Connection, answer: Answer) -> bool:
        stored = db.execute(
            "UPDATE lines SET ok = ?, answer = ? WHERE batch = ? AND number = ? AND ok IS NULL "
            "AND EXISTS (SELECT 1 FROM batches WHERE id = lines.batch AND status = ?)",
            (answer.ok, answer.text, answer.batch_id, answer.number, Status.IN_PROGRESS),
        )
        if stored.rowcount == 0:
            return False
        db.execute(
            "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
            "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
            "output_tokens = output_tokens + ? WHERE id = ?",
            (
                *(answer.ok, not answer.ok, answer.input_tokens, answer.cached_tokens),
                *(answer.output_tokens, answer.batch_id),
            ),
        )
        return True

    def _one(self, db: sqlite3.Connection, batch_id: str) -> BatchRecord:
        row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return schema.batch_of(row)

    def _move(
        self, db: sqlite3.Connection, batch_id: str, before: Status, after: Status, now: float
    ) -> bool:
        assert after in TRANSITIONS[before], (before, after)
        moved = db.execute(
            f"UPDATE batches SET status = ?, {stamp(after)} = ? WHERE id = ? AND status = ?",
            (after, int(now), batch_id, before),
        )
        return moved.rowcount == 1

    def _read_by_batches(self, db: sqlite3.Connection) -> set[str]:
        marks = ", ".join("?" * len(ENDED))
        rows = db.execute(
            f"SELECT input_file_id FROM batches WHERE status NOT IN ({marks})", [*ENDED]
        )
        return {row["input_file_id"] for row in rows}

    def _page(
        self,
        table: str,
        owner: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
        condition: str = "(? IS NULL OR ?)",
        value: str | None = None,
    ) -> list[sqlite3.Row]:
        """One row more than the limit, if there is one."""
        owned = "(? IS NULL OR owner = ?)"
        beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
        start = 2**62 if newest_first else 0
        if after is not None:
            found = self._read(
                f"SELECT seq FROM {table} WHERE id = ? AND {owned}", after, owner, owner
            )
            if not found:
                raise NotFound(f"There is no {after!r} to go on after.", param="after")
            start = found[0]["seq"]
        return self._read(
            f"SELECT * FROM {table} WHERE seq {beyond} ? AND {owned} AND {condition} "
            f"ORDER BY seq {order} LIMIT ?",
            *(start, owner, owner, value, value, limit + 1),
        )

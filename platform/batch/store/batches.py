"""Records of batches, and their transitions from state to state."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import asdict

from loomserve.platform.base.errors import BadRequest, Conflict, NotFound
from loomserve.platform.base.sqlite import Database
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import (
    CANCELLABLE,
    INPUT,
    TRANSITIONS,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LineError,
    stamp,
)
from loomserve.platform.batch.policy.quota import BatchQuota
from loomserve.platform.batch.store import schema


class BatchTable:
    """Records of batches, by id and owner; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, batch: BatchRecord, quota: BatchQuota | None = None) -> None:
        """Add a batch, within a quota if one is given. Raises BadRequest if its input file is not
        there, or not for batches; TooManyRequests if there are as many batches as the quota
        allows."""
        with self._database.transaction() as db:
            if quota is not None:
                quota.check_batches(_unended(db, batch.owner), _unended_lines(db))
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

    def get(self, owner: str | None, batch_id: str) -> BatchRecord:
        """An owner's batch, or anybody's (None). Raises NotFound if there is none, or it is
        another's."""
        rows = self._database.read(
            "SELECT * FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", batch_id, owner
        )
        if not rows:
            raise NotFound(f"No batch found with id '{batch_id}'.", param="batch_id")
        return schema.batch_of(rows[0])

    def page(
        self, owner: str | None, *, after: str | None, limit: int
    ) -> tuple[list[BatchRecord], bool]:
        """A page of an owner's batches, or of all (None), and whether there are more. Raises
        NotFound as :func:`.schema.page`."""
        rows, more = schema.page(self._database, "batches", owner, after, limit, True)
        return [schema.batch_of(row) for row in rows], more

    def unended(self) -> list[BatchRecord]:
        """All batches that have not ended, the oldest first."""
        rows = self._database.read(f"SELECT * FROM batches WHERE {schema.UNENDED} ORDER BY seq")
        return [schema.batch_of(row) for row in rows]

    def unended_lines(self) -> int:
        """Lines of all batches that have not ended, as far as their files have been read."""
        with self._database.transaction() as db:
            return _unended_lines(db)

    def counts(self) -> dict[BatchStatus, int]:
        rows = self._database.read("SELECT status, COUNT(*) AS n FROM batches GROUP BY status")
        return {BatchStatus(row["status"]): row["n"] for row in rows}

    def begin(self, batch_id: str, lines: Sequence[BatchLine], now: float) -> bool:
        """Let the lines of a batch be answered, whose file is right; False: it was cancelled
        meanwhile."""
        with self._database.transaction() as db:
            if not _move(db, batch_id, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, now):
                return False
            db.executemany(
                "INSERT INTO lines VALUES (:batch, :number, :custom_id, :model, :offset, :size, "
                ":max_tokens, :sequences, :attempts, NULL, NULL)",
                ({"batch": batch_id, **asdict(line)} for line in lines),
            )
            db.execute("UPDATE batches SET total = ? WHERE id = ?", (len(lines), batch_id))
        return True

    def fail(self, batch_id: str, errors: Sequence[LineError], now: float) -> bool:
        """End a batch whose file is wrong; False: it was cancelled meanwhile."""
        with self._database.transaction() as db:
            if not _move(db, batch_id, BatchStatus.VALIDATING, BatchStatus.FAILED, now):
                return False
            _set_errors(db, batch_id, errors)
        return True

    def give_up(self, batch_id: str, errors: Sequence[LineError], now: float) -> bool:
        """Fail a batch that cannot be worked on, where it stands; its lines stay for the operator.
        False: it has ended."""
        with self._database.transaction() as db:
            status = _one(db, batch_id).status
            if BatchStatus.FAILED not in TRANSITIONS[status]:
                return False
            _move(db, batch_id, status, BatchStatus.FAILED, now)
            _set_errors(db, batch_id, errors)
        return True

    def cancel(self, owner: str | None, batch_id: str, now: float) -> BatchRecord:
        """Accept no more answers to a batch's lines; a batch that is cancelling stays so. Raises
        NotFound if there is none, or it is another's; Conflict if it has ended, or is about to."""
        self.get(owner, batch_id)
        with self._database.transaction() as db:
            batch = _one(db, batch_id)
            if batch.status is not BatchStatus.CANCELLING:
                if batch.status not in CANCELLABLE:
                    raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
                _move(db, batch_id, batch.status, BatchStatus.CANCELLING, now)
            return _one(db, batch_id)

    def begin_to_end(
        self, batch_id: str, ending: BatchStatus, now: float, errors: Sequence[LineError] = ()
    ) -> bool:
        """Accept no more answers; the batch will end as ``ending``: completed, expired or failed.
        False: it is ending already, or was cancelled."""
        with self._database.transaction() as db:
            status = _one(db, batch_id).status
            if BatchStatus.FINALIZING not in TRANSITIONS[status]:
                return False
            _move(db, batch_id, status, BatchStatus.FINALIZING, now)
            db.execute("UPDATE batches SET ending = ? WHERE id = ?", (ending, batch_id))
            if errors:
                _set_errors(db, batch_id, errors)
        return True

    def finish(
        self, batch_id: str, output: FileRecord | None, errors: FileRecord | None, now: float
    ) -> BatchRecord:
        """End a batch that is finalizing or cancelling, add its files and delete its lines. Lines
        without an answer count as failed."""
        with self._database.transaction() as db:
            batch = _one(db, batch_id)
            ending = (
                batch.ending if batch.status is BatchStatus.FINALIZING else BatchStatus.CANCELLED
            )
            assert ending is not None, "begin_to_end() says how a batch ends"
            for file in filter(None, (output, errors)):
                schema.insert(db, "files", file.model_dump())
            _move(db, batch_id, batch.status, ending, now)
            db.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, "
                "failed = total - completed WHERE id = ?",
                (output and output.id, errors and errors.id, batch_id),
            )
            db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            return _one(db, batch_id)

    def forget(self, before: float) -> None:
        """Delete batches that ended and were made before a time; their files stay."""
        old, given = f"created_at < ? AND NOT {schema.UNENDED}", (int(before),)
        with self._database.transaction() as db:
            db.execute(
                f"DELETE FROM lines WHERE batch IN (SELECT id FROM batches WHERE {old})", given
            )
            db.execute(f"DELETE FROM batches WHERE {old}", given)


def _one(db: sqlite3.Connection, batch_id: str) -> BatchRecord:
    row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return schema.batch_of(row)


def _unended(db: sqlite3.Connection, owner: str) -> int:
    (count,) = db.execute(
        f"SELECT COUNT(*) FROM batches WHERE owner = ? AND {schema.UNENDED}", (owner,)
    ).fetchone()
    return int(count)


def _unended_lines(db: sqlite3.Connection) -> int:
    (lines,) = db.execute(
        f"SELECT COALESCE(SUM(total), 0) FROM batches WHERE {schema.UNENDED}"
    ).fetchone()
    return int(lines)


def _set_errors(db: sqlite3.Connection, batch_id: str, errors: Sequence[LineError]) -> None:
    record = _one(db, batch_id).model_copy(update={"errors": tuple(errors)})
    db.execute(
        "UPDATE batches SET errors = ? WHERE id = ?",
        (schema.batch_values(record)["errors"], batch_id),
    )


def _move(
    db: sqlite3.Connection, batch_id: str, before: BatchStatus, after: BatchStatus, now: float
) -> bool:
    assert after in TRANSITIONS[before], (before, after)
    moved = db.execute(
        f"UPDATE batches SET status = ?, {stamp(after)} = ? WHERE id = ? AND status = ?",
        (after, int(now), batch_id, before),
    )
    return moved.rowcount == 1

"""Lines of batches, and the answers to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loomserve.platform.base.sqlite import Database
from loomserve.platform.batch.policy.lines import BatchLine
from loomserve.platform.batch.policy.objects import BatchStatus
from loomserve.platform.batch.store import schema

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer to a line: the whole line of the output file (``ok``) or error file, without
    newline."""

    batch_id: str
    number: int
    ok: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class LineTable:
    """Lines of batches in progress; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def unanswered(self, batch_id: str) -> list[BatchLine]:
        """Lines of a batch that have no answer, in the order of the file."""
        rows = self._database.read(
            "SELECT * FROM lines WHERE batch = ? AND ok IS NULL ORDER BY number", batch_id
        )
        return [schema.line_of(row) for row in rows]

    def answer(self, answers: Sequence[StoredAnswer]) -> list[bool]:
        """Store answers, and return for each whether it counts. It does not if its line has an
        answer already, or its batch takes none any more."""
        with self._database.transaction() as db:
            return [_answer(db, answer) for answer in answers]

    def failed_attempt(self, batch_id: str, number: int) -> int:
        """Count that an engine failed on a line, and return how often that has happened."""
        with self._database.transaction() as db:
            row = db.execute(
                "UPDATE lines SET attempts = attempts + 1 WHERE batch = ? AND number = ? "
                "RETURNING attempts",
                (batch_id, number),
            ).fetchone()
        return 0 if row is None else int(row["attempts"])

    def answers(self, batch_id: str) -> Iterator[tuple[str, bool, bytes | None]]:
        """Yield each line's custom_id, whether its answer is good, and the answer if it has one.
        They are read beside other transactions: nothing changes in a batch that ends."""
        with self._database.reader() as db:
            last = 0
            while rows := db.execute(
                "SELECT number, custom_id, ok, answer FROM lines WHERE batch = ? AND number > ? "
                "ORDER BY number LIMIT ?",
                (batch_id, last, _ROWS_AT_ONCE),
            ).fetchall():
                for row in rows:
                    yield row["custom_id"], bool(row["ok"]), row["answer"]
                last = rows[-1]["number"]


def _answer(db: sqlite3.Connection, answer: StoredAnswer) -> bool:
    stored = db.execute(
        "UPDATE lines SET ok = ?, answer = ? WHERE batch = ? AND number = ? AND ok IS NULL "
        "AND EXISTS (SELECT 1 FROM batches WHERE id = lines.batch AND status = ?)",
        (answer.ok, answer.text, answer.batch_id, answer.number, BatchStatus.IN_PROGRESS),
    )
    if stored.rowcount == 0:
        return False
    db.execute(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
        "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
        "output_tokens = output_tokens + ? WHERE id = ?",
        (
            answer.ok,
            not answer.ok,
            answer.input_tokens,
            answer.cached_tokens,
            answer.output_tokens,
            answer.batch_id,
        ),
    )
    return True

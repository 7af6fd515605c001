"""Keeps operators' wishes in SQLite, for one run of the platform.

A controller takes over from the one before it with a number, the *epoch*, that grows; a write with
an earlier epoch is refused, so that one that hung and goes on undoes nothing.
"""

from __future__ import annotations

from pathlib import Path

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.base.sqlite import Database, SqlSchema
from loomserve.platform.fleet.wishes import Wishes

_BUSY_TIMEOUT_S = 5.0
_SCHEMA = SqlSchema(
    version=1,
    tables="""
CREATE TABLE wishes (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    epoch INTEGER NOT NULL,
    body TEXT
) STRICT;
INSERT INTO wishes (one, epoch) VALUES (1, 0);
""",
)


class WishesTakenOverError(LoomserveError):
    """Another controller has taken over."""


class WishStore:
    """The store in one folder, which is made if need be; its methods block."""

    def __init__(self, folder: Path) -> None:
        """Take over from an earlier controller of the run."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "wishes.sqlite"
        self._db = Database(path, _SCHEMA, busy_timeout_s=_BUSY_TIMEOUT_S)
        with self._db.transaction() as db:
            db.execute("UPDATE wishes SET epoch = epoch + 1")
            self._epoch, body = db.execute("SELECT epoch, body FROM wishes").fetchone()
        self.wishes = None if body is None else Wishes.model_validate_json(body)
        """As they were saved last; None: never in this run."""

    def save(self, wishes: Wishes) -> None:
        """Save them, unless they are what was saved last.

        Raises:
            WishesTakenOverError: another controller has taken over.
        """
        if wishes == self.wishes:
            return
        with self._db.transaction() as db:
            saved = db.execute(
                "UPDATE wishes SET body = ? WHERE epoch = ?",
                (wishes.model_dump_json(), self._epoch),
            )
            if not saved.rowcount:
                raise WishesTakenOverError("another controller keeps the operators' wishes")
        self.wishes = wishes

    def close(self) -> None:
        self._db.close()

"""Keeps operators' wishes in SQLite, for one run of the platform, and who carries them out.

A controller takes over from the one before it, of whichever run, with a generation, which all that
it orders bears. One that hung and goes on undoes nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from loomserve.platform.base.sqlite import Database, SqlSchema
from loomserve.platform.fleet.wishes import Wishes

_BUSY_TIMEOUT_S = 5.0
_SCHEMA = SqlSchema(
    version=2,
    tables="""
CREATE TABLE wishes (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    run TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
""",
)


def has_wishes(folder: Path, internal_token: str) -> bool:
    """Whether a controller of this run has kept any; nothing is taken over."""
    path = folder / "wishes.sqlite"
    if not path.exists():
        return False
    database = Database(path, _SCHEMA, busy_timeout_s=_BUSY_TIMEOUT_S)
    try:
        return bool(database.read("SELECT one FROM wishes WHERE run = ?", _run(internal_token)))
    finally:
        database.close()


def _run(internal_token: str) -> str:
    """What a run is known by, of which its token is not to be read."""
    return hashlib.sha256(internal_token.encode()).hexdigest()


class WishStore:
    """The store in one folder, which is made if need be; its methods block."""

    def __init__(self, folder: Path, internal_token: str) -> None:
        """Take over from an earlier controller.

        Args:
            folder: has what is kept; also of earlier runs of the platform.
            internal_token: the run's, which no other run has.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "wishes.sqlite"
        self._db = Database(path, _SCHEMA, busy_timeout_s=_BUSY_TIMEOUT_S)
        self._run = _run(internal_token)
        self.generation = self._db.take_over()
        """Of this controller: no other has it, and later ones have later ones."""
        kept = self._db.read("SELECT body FROM wishes WHERE run = ?", self._run)
        self.wishes = Wishes.model_validate_json(kept[0]["body"]) if kept else None
        """As they were saved last; None: never in this run."""

    def save(self, wishes: Wishes) -> None:
        """Save them, unless they are what was saved last.

        Raises:
            TakenOver: another controller has taken over.
        """
        if wishes == self.wishes:
            self.check_owner()
            return
        with self._db.transaction() as db:
            db.execute(
                "INSERT INTO wishes VALUES (1, ?, ?)"
                " ON CONFLICT (one) DO UPDATE SET run = excluded.run, body = excluded.body",
                (self._run, wishes.model_dump_json()),
            )
        self.wishes = wishes

    def check_owner(self) -> None:
        """
        Raises:
            TakenOver: another controller has taken over.
        """
        self._db.check_owner()

    def close(self) -> None:
        self._db.close()

"""Keeps the rebalancing controller's plans and state in SQLite, and lets one controller act.

Two must never act at once. A controller holds a lock on the folder as long as its process lives,
and has a generation; a write of an earlier generation is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from loomserve.platform.base.errors import LoomserveError, TakenOver
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.base.sqlite import Database, OtherVersionError, SqlSchema
from loomserve.platform.config import Config
from loomserve.platform.rebalancing.plans.history import History
from loomserve.platform.rebalancing.plans.plans import Plan
from loomserve.platform.rebalancing.plans.reports import Event, Kept
from loomserve.platform.rebalancing.policy.forecast import Corrections

_BUSY_TIMEOUT_S = 5.0
_MOST_EVENTS = 1000
# Some of this version have a column more, ``epoch``, which nothing reads.
_SCHEMA = SqlSchema(
    version=2,
    tables="""
CREATE TABLE controller (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    kept TEXT,
    corrections TEXT
) STRICT;
INSERT INTO controller (one) VALUES (1);
CREATE TABLE plans (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    body TEXT NOT NULL
) STRICT;
CREATE TABLE events (seq INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL) STRICT;
""",
)


class StoreError(LoomserveError):
    """Plans cannot be kept, so none is carried out; the message says what to do."""


class SupersededError(StoreError):
    """Another controller has taken over."""


def plans_folder(config: Config, base: Path) -> Path:
    """The folder of plans of a platform whose configuration lies in folder ``base``."""
    if config.rebalancing.folder is None:
        return cache_folder() / "rebalancing" / str(config.server.port)
    return (base / Path(config.rebalancing.folder).expanduser()).absolute()


class PlanStore:
    """The store in one folder; every method is one transaction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / "owner.lock", thread_local=False)
        self._db: Database | None = None
        self._written: dict[str, Plan] = {}

    @property
    def claimed(self) -> bool:
        return self._db is not None

    def claim(self) -> bool:
        """Become the controller that acts, until :meth:`release`; False: another one acts. Raises
        StoreError if the folder or its database cannot be used."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from None
        try:
            self._db = self._connect()
            self._db.take_over()
        except sqlite3.Error as error:
            self.release()
            raise self._unusable(str(error)) from None
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        database, self._db = self._db, None
        if database is not None:
            database.close()
        self._lock.release()

    def load(self) -> tuple[Kept | None, History]:
        """Raises StoreError if it was written by another version, or is damaged."""
        with self._transaction() as db:
            kept, corrections = db.execute("SELECT kept, corrections FROM controller").fetchone()
            bodies = [body for (body,) in db.execute("SELECT body FROM plans ORDER BY seq")]
        try:
            plans = tuple(Plan.model_validate_json(body) for body in bodies)
            self._written = {plan.id: plan for plan in plans}
            learnt = Corrections.model_validate_json(corrections) if corrections else Corrections()
            history = History(plans=plans, corrections=learnt)
            return (Kept.model_validate_json(kept) if kept else None), history
        except ValidationError as error:
            raise self._unusable(
                f"a plan in it cannot be read: {error.errors()[0]['msg']}"
            ) from None

    def save(self, kept: Kept, history: History, events: Sequence[Event] = ()) -> None:
        """Raises SupersededError if another controller has taken over; StoreError if it cannot be
        written."""
        plans = {plan.id: plan for plan in history.plans}
        with self._transaction() as db:
            db.execute(
                "UPDATE controller SET kept = ?, corrections = ?",
                (kept.model_dump_json(), history.corrections.model_dump_json()),
            )
            for gone in self._written.keys() - plans.keys():
                db.execute("DELETE FROM plans WHERE id = ?", (gone,))
            for plan in history.plans:
                if self._written.get(plan.id) != plan:
                    db.execute(
                        "INSERT INTO plans (id, body) VALUES (?, ?)"
                        " ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                        (plan.id, plan.model_dump_json()),
                    )
            db.executemany(
                "INSERT INTO events (body) VALUES (?)",
                [(event.model_dump_json(),) for event in events],
            )
            db.execute(
                "DELETE FROM events WHERE seq <= (SELECT MAX(seq) FROM events) - ?", (_MOST_EVENTS,)
            )
        self._written = plans

    def events(self, limit: int) -> list[Event]:
        """The latest events, the newest first."""
        with self._transaction() as db:
            rows = db.execute("SELECT body FROM events ORDER BY seq DESC LIMIT ?", (limit,))
            return [Event.model_validate_json(body) for (body,) in rows]

    def _connect(self) -> Database:
        path = self._folder / "plans.sqlite"
        try:
            return Database(path, _SCHEMA, busy_timeout_s=_BUSY_TIMEOUT_S)
        except OtherVersionError as error:
            raise self._unusable(f"{error.age} Loomserve wrote plans.sqlite there") from None
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._db is None:
            raise SupersededError("this controller does not act: another one does")
        try:
            with self._db.transaction() as db:
                yield db
        except TakenOver:
            raise SupersededError(f"another controller keeps its plans in {self._folder}") from None
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from None

    def _unusable(self, why: str) -> StoreError:
        return StoreError(
            f"plans cannot be kept in {self._folder} ({why}): make it usable, or set "
            "rebalancing.folder"
        )

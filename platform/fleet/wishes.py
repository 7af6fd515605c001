"""What operators wish of a fleet, kept in SQLite for one run of the platform.

A controller takes over from the one before it, of whichever run, with a generation, which all that
it orders bears. One that hung and goes on undoes nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.adapters.table import AdapterWish
from loomserve.platform.base.sqlite import Database, SqlSchema
from loomserve.platform.config import Alias, Model
from loomserve.platform.state import Presence
from loomserve.platform.state.roles import Role

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


class _Wish(BaseModel):
    model_config = ConfigDict(frozen=True)


class ModelWish(_Wish):
    """A model that should be there, or be unloaded."""

    model: Model
    replicas: int
    unload_by: float | None = None
    """It is being unloaded, by then, in monotonic seconds; None: it stays."""
    presence: Presence = Field(Presence.READY, description="Whether it sleeps, or has no engine.")
    roles: dict[str, Role] = Field(description="By device, where an operator has changed it.")
    fixed: bool = False
    """Whether an operator has set the number of replicas, not its load."""
    berth: tuple[str, ...] = ()
    """Its devices, where the platform chooses; none: the configuration says."""
    berth_why: str = Field("", description="For a person.")


class Wishes(_Wish):
    """All of one run of the platform."""

    models: tuple[ModelWish, ...] = ()
    drained: tuple[str, ...] = Field((), description="Replicas that take no new requests.")
    leaving: tuple[str, ...] = Field((), description="Replicas that are drained to be ended.")
    ending: tuple[str, ...] = Field((), description="Those that were drained so.")
    drained_nodes: tuple[str, ...] = Field((), description="Nodes that are to have nothing.")
    left_nodes: tuple[str, ...] = Field((), description="Those of them that Ray was told to leave.")
    pairs_off: tuple[tuple[str, str], ...] = ()
    """Borrower and lender, where the first may not borrow from the second."""
    aliases: dict[str, Alias] | None = None
    """All that there are; None: those of the configuration."""
    adapters: tuple[AdapterWish, ...] = ()
    last_adapter: int = Field(0, description="The highest number that an adapter has had.")
    draining_loans: tuple[str, ...] = Field((), description="Names of loans that are to end.")


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
        """Take over from an earlier controller; the folder may have wishes of earlier runs, too."""
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
        """Save them, unless they are what was saved last. Raises TakenOver if another controller
        has taken over."""
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
        """Raises TakenOver if another controller has taken over."""
        self._db.check_owner()

    def close(self) -> None:
        self._db.close()

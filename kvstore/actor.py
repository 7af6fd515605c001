"""The store as a Ray actor: Ray starts it again when it dies, and the arena outlives it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from loomserve.kvstore.arena import ArenaOwner
from loomserve.kvstore.eviction import POLICIES
from loomserve.kvstore.index import Index
from loomserve.kvstore.server import StoreServer
from loomserve.kvstore.ssd import SsdTier
from loomserve.kvstore.store import BlockStore
from loomserve.platform.errors import StartError

ACTOR_NAME = "loomserve-kvstore"
_EXTENTS = 64
_SMALLEST_EXTENT = 2**23
_SSD_SEGMENT_BYTES = 2**28
"""Space on SSD comes back in pieces of this size."""


class StorePlan(BaseModel):
    """Where the store of this node is, and how large; bytes."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    arena: Path
    memory: int
    ssd_folder: Path | None
    ssd: int
    eviction: str
    quotas: dict[str, int]

    @property
    def address(self) -> str:
        return f"ipc://{self.folder / 'store.sock'}"

    def connector_options(self, model: str) -> dict[str, str]:
        """``kv_connector_extra_config`` of an engine of this model."""
        return {
            "address": self.address,
            "arena": str(self.arena),
            "digests": str(self.folder / "digests"),
            "model": model,
        }


def arena_path(port: int) -> Path:
    """In shared memory, apart for each user and each platform on the machine."""
    owner = hashlib.sha256(f"{Path.home()}|{port}".encode()).hexdigest()[:8]
    return Path(f"/dev/shm/loomserve-kv-{port}-{owner}")


class Store:
    """Runs the store's server; the class that becomes the actor."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = StorePlan.model_validate(plan)
        self._plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server = StoreServer(open_store(self._plan), self._plan.address)
        self._server.start()

    def check_health(self) -> None:
        if not self._server.alive:
            raise RuntimeError("the KV store's thread ended")

    def stop(self) -> None:
        """End the store and give its memory back; what is on SSD stays."""
        self._server.stop()
        self._plan.arena.unlink(missing_ok=True)


def open_store(plan: StorePlan) -> BlockStore:
    """The store with all that an earlier one left.

    Raises:
        StartError: no room, or a folder of something else.
    """
    extent_bytes = max(_SMALLEST_EXTENT, plan.memory // _EXTENTS // 4096 * 4096)
    ssd = SsdTier(plan.ssd_folder, plan.ssd, _SSD_SEGMENT_BYTES) if plan.ssd_folder else None
    store = BlockStore(
        _arena(plan, extent_bytes),
        Index(POLICIES[plan.eviction]),
        ssd,
        (plan.ssd_folder or plan.folder) / "spaces.json",
        plan.quotas,
    )
    store.recover(time.monotonic())
    return store


def _arena(plan: StorePlan, extent_bytes: int) -> ArenaOwner:
    if plan.arena.exists():
        try:
            arena = ArenaOwner.reopen(plan.arena)
        except StartError:
            # An older version's, or cut short: nothing in it can be used.
            return ArenaOwner.create(plan.arena, plan.memory, extent_bytes)
        if (arena.capacity_bytes, arena.extent_bytes) == (
            plan.memory // extent_bytes * extent_bytes,
            extent_bytes,
        ):
            return arena
        arena.close()
    return ArenaOwner.create(plan.arena, plan.memory, extent_bytes)

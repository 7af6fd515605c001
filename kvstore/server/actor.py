"""The store as a Ray actor: Ray starts it again when it dies, and the arena outlives it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from loomserve.kvstore.index.eviction import POLICIES
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.server.server import StoreServer
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.storage.arena import ArenaOwner
from loomserve.kvstore.storage.ssd import SsdTier
from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder

ACTOR_NAME = "loomserve-kvstore"
_EXTENTS = 64
_SMALLEST_EXTENT = 2**23
_SSD_SEGMENT_BYTES = 2**28
"""Space on SSD comes back in pieces of this size."""
_WATCH_S = 1.0
_RETRY_S = 5.0
"""Between the attempts of a store that cannot start."""


class StorePlan(BaseModel):
    """Where the store of this node is, and how large; bytes."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    arena: Path
    memory: int
    ssd_folder: Path | None = None
    ssd: int = 0
    eviction: str = "lru"
    quotas: dict[str, int] = {}

    @property
    def socket(self) -> Path:
        return self.folder / "store.sock"

    @property
    def address(self) -> str:
        return f"ipc://{self.socket}"

    @property
    def spaces(self) -> Path:
        """What the namespaces mean, kept beside the blocks that live longest."""
        return (self.ssd_folder or self.folder) / "spaces.json"

    def kv_transfer_config(self, model: str) -> dict[str, Any]:
        """vLLM's option of this name, for an engine of this model."""
        return {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "loomserve.kvstore.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "address": self.address,
                "arena": str(self.arena),
                "digests": str(cache_folder() / "digests"),
                "model": model,
            },
        }


def arena_path(port: int) -> Path:
    """In shared memory, in a folder apart for each user and each platform on the machine."""
    return Path(f"/dev/shm/loomserve-{os.getuid()}/{port}/arena")


class Store:
    """Runs the store's server; the class that becomes the actor.

    An actor without a server leaves its process, so that Ray starts it again.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = StorePlan.model_validate(plan)
        self._server: StoreServer | None = None
        self._problem: str | None = None
        self._stopping = False
        try:
            _make_private(self._plan.folder)
            self._server = StoreServer(open_store(self._plan), self._plan.address)
            self._server.start()
        except StartError as error:
            self._problem = str(error)
        threading.Thread(target=self._leave_without_server, daemon=True).start()

    def problem(self) -> str | None:
        """Why the store could not start, in one sentence. A value, for Ray wraps exceptions."""
        return self._problem

    def stop(self) -> None:
        """End the store and give its memory back; what is on SSD stays."""
        self._stopping = True
        if self._server is None:
            return
        self._server.stop()
        plan = self._plan
        spaces = [plan.spaces] if plan.ssd_folder is None else []
        for left in (plan.arena, plan.socket, *spaces):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it may hold what is not ours
            plan.folder.rmdir()

    def _leave_without_server(self) -> None:
        while self._server is not None and self._server.alive:
            time.sleep(_WATCH_S)
        if self._problem is not None:
            # Whoever started it wants to know it first.
            time.sleep(_RETRY_S)
        if not self._stopping:
            os._exit(1)


def _make_private(folder: Path) -> None:
    """Make the folder, or see that it is ours alone: blocks are users' prompts.

    Raises:
        StartError: others can get into it.
    """
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, exist_ok=True)
        status = one.lstat()
        if (status.st_uid, stat.filemode(status.st_mode)) != (os.getuid(), "drwx------"):
            raise StartError(f"{one} must be a folder of nobody but you: remove it")


def open_store(plan: StorePlan) -> BlockStore:
    """The store with all that an earlier one left.

    Raises:
        StartError: no room, or a folder of something else.
    """
    extent_bytes = max(_SMALLEST_EXTENT, plan.memory // _EXTENTS // 4096 * 4096)
    # What fits an extent must fit a segment.
    segment_bytes = max(_SSD_SEGMENT_BYTES, extent_bytes)
    ssd = SsdTier(plan.ssd_folder, plan.ssd, segment_bytes) if plan.ssd_folder else None
    store = BlockStore(
        _arena(plan, extent_bytes),
        Index(POLICIES[plan.eviction]),
        ssd,
        plan.spaces,
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

"""Options of a store: its places and sizes, for its starter and its clients, and nodes' plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from loomserve.platform.base.paths import cache_folder


class _StoreSizes(BaseModel):
    """Sizes (bytes) of a store; ``ssd=0``: without SSD."""

    model_config = ConfigDict(frozen=True)

    memory: int
    ssd: int = 0
    ssd_folder: Path | None = None
    eviction: str = "lru"
    quotas: dict[str, int] = {}


class StoreOptions(_StoreSizes):
    """Places and sizes of a store; ``ssd_folder=None``: without SSD.

    ``node`` names it among those of other nodes, which reach it at ``host``; empty: it is the only
    one. ``directory_blocks`` bounds what it knows of the others' blocks.
    """

    folder: Path
    arena: Path
    node: str = ""
    host: str = ""
    directory_blocks: int = 2**20

    @property
    def socket(self) -> Path:
        return self.folder / "store.sock"

    @property
    def address(self) -> str:
        return f"ipc://{self.socket}"

    @property
    def spaces(self) -> Path:
        """File of the namespaces, beside the blocks that live longest."""
        return (self.ssd_folder or self.folder) / "spaces.json"

    def kv_transfer_config(self, model: str) -> dict[str, Any]:
        """Value of vLLM's option ``kv_transfer_config`` for an engine of ``model``."""
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
                "node": self.node,
            },
        }


class StorePlan(_StoreSizes):
    """What the configuration says of stores, from which each node makes its own options.

    ``port`` is the platform's; ``ssd_folder=None``: in the user's cache folder of the node;
    ``nodes``: those that have a store, empty: all.
    """

    port: int
    nodes: tuple[str, ...] = ()

    def here(self, node: str = "", host: str = "") -> StoreOptions:
        """Options of the store of the node that this process is on."""
        arena = arena_path(self.port)
        ssd_folder = (self.ssd_folder or cache_folder() / "kv") if self.ssd else None
        sizes = self.model_dump(exclude={"port", "nodes"}) | {"ssd_folder": ssd_folder}
        return StoreOptions(folder=arena.parent, arena=arena, node=node, host=host, **sizes)


def on_this_node(kv_transfer_config: dict[str, Any], node: str) -> dict[str, Any]:
    """An engine's ``kv_transfer_config`` that another node made, as it is on this one. Arena and
    socket have the same paths for the same user and port; digests are the node's own."""
    extra = kv_transfer_config["kv_connector_extra_config"]
    own = {"node": node, "digests": str(cache_folder() / "digests")}
    return {**kv_transfer_config, "kv_connector_extra_config": {**extra, **own}}


def arena_path(port: int) -> Path:
    """Path of the arena in shared memory, in a folder of the user and the platform on ``port``."""
    return Path(f"/dev/shm/loomserve-{os.getuid()}/{port}/arena")


def left_behind(port: int) -> int:
    """Bytes that the store of a platform on ``port`` left when it was killed; the next has them."""
    arena = arena_path(port)
    return arena.stat().st_size if arena.exists() else 0

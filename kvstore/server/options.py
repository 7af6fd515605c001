"""Where the store of a node lies and how large it is, for who starts it and who connects to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from loomserve.platform.base.paths import cache_folder


class StoreOptions(BaseModel):
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

"""State of the KV store."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel


class KvModelState(StateModel):
    """KV blocks of a model in the store; hits, misses and evictions since the store started."""

    model: str
    blocks_in_memory: int
    blocks_on_ssd: int
    bytes_in_memory: int
    bytes_on_ssd: int
    hit_blocks: int = Field(description="Blocks that engines looked up and found.")
    missed_blocks: int = Field(description="Blocks that engines looked up and did not find.")
    evicted_blocks: int = Field(description="Blocks that left memory to make room.")


class KvState(StateModel):
    """The KV store: behind ``GET /admin/v1/kv`` and ``loomserve admin kv``."""

    capacity_bytes: int = Field(description="Shared memory for blocks.")
    used_bytes: int
    ssd_capacity_bytes: int = Field(description="0 without an SSD tier.")
    ssd_used_bytes: int
    leases: int = Field(description="Requests that are about to read blocks.")
    writers: int = Field(description="Engines that are writing blocks.")
    corrupt_blocks: int = Field(description="Blocks whose checksum failed.")
    models: tuple[KvModelState, ...]

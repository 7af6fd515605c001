"""The section ``kvstore``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from loomserve.platform.config.base import Bytes, FieldError, Section

_SMALLEST_KV_STORE = 64 * 2**20


class KvStore(Section):
    """KV blocks that outlive the engine that made them, shared by all engines of a node."""

    memory: Bytes = Field(2**30, description="Shared memory for blocks (/dev/shm).")
    ssd: Bytes | None = Field(
        None, description="Space on SSD for blocks that leave memory; without it they are lost."
    )
    ssd_path: str | None = Field(
        None,
        description="Folder for them, relative to this file; null: kv in the user's cache folder.",
    )
    eviction: Literal["cost", "lru"] = Field(
        "cost",
        description="cost: what is cheap to compute again and seldom used leaves memory first; "
        "lru: what was not used for longest.",
    )
    isolate_tenants: bool | None = Field(
        None,
        description="Blocks of one API key are never read by another, in the store and in engines; "
        "null: so it is with two keys or server.api_keys_file, also without a store.",
    )

    @field_validator("memory")
    @classmethod
    def _holds_blocks(cls, memory: int) -> int:
        if memory < _SMALLEST_KV_STORE:
            raise ValueError(f"must be at least {_SMALLEST_KV_STORE // 2**20}MiB")
        return memory

    @model_validator(mode="after")
    def _path_has_its_space(self) -> KvStore:
        if self.ssd_path is not None and self.ssd is None:
            raise FieldError("is of no use without ssd: say how much space to use", "ssd_path")
        return self

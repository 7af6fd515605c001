"""Options of an engine's scheduler: one dictionary in vLLM's ``additional_config``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.config import KvStore, Model

ADDITIONAL_CONFIG = "loomserve"
"""The key of ``additional_config`` under which an engine's scheduler finds its options."""


class SchedulerOptions(BaseModel):
    """Options of one engine's scheduler; fields of ``models[].scheduling`` mean the same here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preemption: Literal["adaptive", "swap", "recompute"] = "recompute"
    queue: Literal["fair", "fcfs", "deadline", "sjf"] = "fcfs"
    swap_bytes: int = Field(0, ge=0, description="Swap space in the KV store.")
    deadlines: bool = True
    overlap_swap: bool = True
    prefetch_swap_in: bool = True
    chunked_recompute: bool = True
    peak_admission: bool = True


def scheduler_options(model: Model, store: KvStore | None) -> SchedulerOptions:
    given = model.scheduling
    return SchedulerOptions(
        preemption=given.preemption or ("adaptive" if store else "recompute"),
        # Without predicted lengths a fair queue is worse in all (benchmarks/adaptive.md).
        queue=given.queue or ("fcfs" if model.lengths is None else "fair"),
        swap_bytes=_swap_bytes(model, store) if store else 0,
        **given.model_dump(exclude={"preemption", "queue", "swap_space"}),
    )


def _swap_bytes(model: Model, store: KvStore) -> int:
    if model.scheduling.swap_space is not None:
        return model.scheduling.swap_space
    usable = min(store.memory, model.kvstore_quota or store.memory)
    return usable // 2 // len(model.devices)

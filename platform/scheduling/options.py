"""Options of an engine's scheduler: one dictionary in vLLM's ``additional_config``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from loomserve.platform.config import KvStore, Model
from loomserve.platform.config.scheduling import QUEUE_ORDERS, QueueName, Scheduling
from loomserve.platform.scheduling.policy.queue import QueuePolicy

ADDITIONAL_CONFIG = "loomserve"
"""The key of ``additional_config`` under which an engine's scheduler finds its options."""


class SchedulerOptions(Scheduling):
    """Options of one engine's scheduler: ``models[].scheduling`` with nothing left to be chosen."""

    preemption: Literal["adaptive", "swap", "recompute"] = "recompute"
    queue: QueueName = "fcfs"
    queue_options: dict[str, Any] = Field(default_factory=dict)
    swap_bytes: int = Field(0, ge=0, description="Swap space in the KV store.")

    def queue_policy(self) -> QueuePolicy:
        """A new one, without anything kept yet."""
        policy: QueuePolicy = QUEUE_ORDERS.make(self.queue, self.queue_options)
        return policy


def scheduler_options(model: Model, store: KvStore | None) -> SchedulerOptions:
    given = model.scheduling
    chosen = {
        "preemption": given.preemption or ("adaptive" if store else "recompute"),
        # Without predicted lengths a fair queue is worse in all (benchmarks/adaptive.md).
        "queue": given.queue or ("fcfs" if model.lengths is None else "fair"),
        "swap_bytes": _swap_bytes(model, store) if store else 0,
    }
    return SchedulerOptions.model_validate(given.model_dump(exclude={"swap_space"}) | chosen)


def _swap_bytes(model: Model, store: KvStore) -> int:
    if model.scheduling.swap_space is not None:
        return model.scheduling.swap_space
    usable = min(store.memory, model.kvstore_quota or store.memory)
    return usable // 2 // len(model.devices)

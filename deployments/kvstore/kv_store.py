"""Starts and stops the actor of the only KV store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from loomserve.kvstore.server.actor import ACTOR_NAME, StoreActor
from loomserve.kvstore.server.options import StoreOptions, StorePlan
from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Config

_NAMESPACE = "loomserve"
_START_TIMEOUT_S = 60.0
# The store first writes what is on its way to SSD.
_STOP_TIMEOUT_S = 30.0


def store_plan(config: Config, base: Path) -> StorePlan | None:
    """What a configuration in folder ``base`` says of stores; None: there is none."""
    wanted = config.kvstore
    if wanted is None:
        return None
    chosen = Path(wanted.ssd_path).expanduser() if wanted.ssd_path else None
    return StorePlan(
        port=config.server.port,
        memory=wanted.memory,
        ssd=wanted.ssd or 0,
        ssd_folder=(base / chosen).absolute() if chosen is not None else None,
        eviction=wanted.eviction,
        quotas={m.name: m.kvstore_quota for m in config.models if m.kvstore_quota is not None},
    )


def start_store(options: StoreOptions) -> Any:
    """Start the store's actor, which Ray restarts when it dies, and return its handle.
    ``StartError`` has the store's own message."""
    import ray  # the command sets Ray's environment before it imports Ray

    actor_options = {
        "name": ACTOR_NAME,
        "namespace": _NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    store = ray.remote(StoreActor).options(**actor_options)
    actor = store.remote(options.model_dump(mode="json"))
    problem = ray.get(actor.problem.remote(), timeout=_START_TIMEOUT_S)
    if problem is not None:
        ray.kill(actor)
        raise StartError(f"the KV store cannot start: {problem}")
    return actor


def stop_store(actor: Any) -> None:
    """Stop the store, which frees its memory; one that does not answer ends with Ray."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(actor.stop.remote(), timeout=_STOP_TIMEOUT_S)

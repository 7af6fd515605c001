"""Starts and stops the KV store's actor, and asks the store on behalf of the admin API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.actor import ACTOR_NAME, StoreActor
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.options import StoreOptions, StorePlan
from loomserve.kvstore.server.protocol import Done, Flush, Inspect, Pin, Request, StoreUsage
from loomserve.platform.base.errors import StartError, Unavailable
from loomserve.platform.config import Config
from loomserve.platform.state import KvState

_NAMESPACE = "loomserve"
_START_TIMEOUT_S = 60.0
# The store first writes what is on its way to SSD.
_STOP_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_MS = 1000
# An engine commits what it saved a moment after it has answered.
_PIN_ATTEMPTS, _PIN_WAIT_S = 20, 0.01

R = TypeVar("R")


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


def store_options(config: Config, base: Path) -> StoreOptions | None:
    """Options of the one store that a configuration in folder ``base`` asks for; None: no store."""
    plan = store_plan(config, base)
    return plan.here() if plan is not None else None


def start_store(options: StoreOptions) -> Any:
    """Start the store's actor, which Ray restarts when it dies, and return its handle.

    Raises:
        StartError: the store cannot start; the message is its own.
    """
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


async def read_usage(address: str) -> KvState:
    """Read the contents and use of the store at ``address``.

    Raises:
        Unavailable: it does not answer.
    """
    usage = await _ask(address, Inspect(), StoreUsage)
    return KvState.model_validate(msgspec.to_builtins(usage))


async def flush(address: str, model: str) -> int:
    """Forget the blocks of a model, or of all (empty name); returns how many were in memory.

    Raises:
        Unavailable: the store does not answer.
    """
    return (await _ask(address, Flush(model), Done)).blocks


async def pin(address: str, namespaces: Sequence[bytes], keys: bytes, *, pinned: bool) -> int:
    """Pin or unpin a chain in each of its ranks' namespaces; how many blocks of it are in memory.

    Blocks that an engine has just computed are awaited for a moment.

    Raises:
        Unavailable: the store does not answer.
    """
    wanted = len(keys) // KEY_BYTES
    for _ in range(_PIN_ATTEMPTS):
        done = [(await _ask(address, Pin(name, keys, pinned), Done)).blocks for name in namespaces]
        if min(done) == wanted:
            break
        await asyncio.sleep(_PIN_WAIT_S)
    return min(done)


async def _ask(address: str, request: Request, expected: type[R]) -> R:
    # A client belongs to one thread, and a pool runs each call in any of its threads.
    def blocking() -> R:
        with contextlib.closing(StoreClient(address, _ANSWER_TIMEOUT_MS)) as client:
            return client.ask(request, expected)

    try:
        return await asyncio.to_thread(blocking)
    except StoreAwayError as error:
        raise Unavailable(
            f"{error}; requests are served without it, try again shortly",
            reason="kv_store_away",
            retry_after_s=5,
        ) from None

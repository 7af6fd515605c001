"""Asks the KV store on behalf of operators: the only one, or those of all nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from loomserve.deployments.kvstore.node_stores import ask_stores
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import Done, Flush, Inspect, Pin, Request, StoreUsage
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.fleet.messages import KvAccess
from loomserve.platform.state import KvState
from loomserve.platform.state.kvstore import together

_ANSWER_TIMEOUT_MS = 1000
# An engine commits what it saved a moment after it has answered.
_PIN_ATTEMPTS, _PIN_WAIT_S = 20, 0.01

R = TypeVar("R")


class Stores(Protocol):
    """Those that are asked."""

    async def ask(self, request: Request, expected: type[R]) -> Mapping[str, R]:
        """Answers of those that answer, by the names of their nodes.

        Raises:
            Unavailable: none does.
        """


class OneStore:
    """The store at an address of this machine, which has no name."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def ask(self, request: Request, expected: type[R]) -> Mapping[str, R]:
        # A client belongs to one thread, and a pool runs each call in any of its threads.
        def blocking() -> R:
            with contextlib.closing(StoreClient(self._address, _ANSWER_TIMEOUT_MS)) as client:
                return client.ask(request, expected)

        try:
            return {"": await asyncio.to_thread(blocking)}
        except StoreAwayError as error:
            raise _away(str(error)) from None


class AllStores:
    """The stores of all nodes, asked by their actors."""

    async def ask(self, request: Request, expected: type[R]) -> Mapping[str, R]:
        answers = await ask_stores(request, expected)
        if not answers:
            raise _away("no node's KV store answers")
        return answers


def stores_of(access: KvAccess) -> Stores:
    """All that there are."""
    return AllStores() if access.each_node else OneStore(access.address)


async def read_usages(stores: Stores) -> dict[str, KvState]:
    """Read the contents and use of each store, by its node.

    Raises:
        Unavailable: none answers.
    """
    answers = await stores.ask(Inspect(), StoreUsage)
    return {node: _state(answer) for node, answer in answers.items()}


async def read_usage(stores: Stores) -> KvState:
    """Read the contents and use of all stores together.

    Raises:
        Unavailable: none answers.
    """
    return together(await read_usages(stores))


async def flush(stores: Stores, model: str) -> int:
    """Forget the blocks of a model, or of all (empty name); returns how many were in memory.

    Raises:
        Unavailable: no store answers.
    """
    return sum(done.blocks for done in (await stores.ask(Flush(model), Done)).values())


async def pin(stores: Stores, namespaces: Sequence[bytes], keys: bytes, *, pinned: bool) -> int:
    """Pin or unpin a chain in each of its ranks' namespaces; how many blocks of it are in memory.

    Of several nodes each pins what it has, and the most that one has counts. Blocks that an
    engine has just computed are awaited for a moment.

    Raises:
        Unavailable: no store answers.
    """
    wanted = len(keys) // KEY_BYTES
    for _ in range(_PIN_ATTEMPTS):
        done = [await stores.ask(Pin(name, keys, pinned), Done) for name in namespaces]
        blocks = min(max(of_one.blocks for of_one in each.values()) for each in done)
        if blocks == wanted:
            break
        await asyncio.sleep(_PIN_WAIT_S)
    return blocks


def _state(usage: Any) -> KvState:
    return KvState.model_validate(msgspec.to_builtins(usage))


def _away(why: str) -> Unavailable:
    return Unavailable(
        f"{why}; requests are served without it, try again shortly",
        reason="kv_store_away",
        retry_after_s=5,
    )

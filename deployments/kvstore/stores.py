"""Asks the KV store on behalf of operators: the only one, or those of all nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

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


class Stores:
    """The store of this machine, which has no name, or those of all nodes, by their names. Each
    call raises ``Unavailable`` if none answers."""

    def __init__(self, access: KvAccess) -> None:
        self._access = access

    async def usages(self) -> dict[str, KvState]:
        """Contents and use of each store."""
        answers = await self._ask(Inspect(), StoreUsage)
        return {node: answer.state for node, answer in answers.items()}

    async def usage(self) -> KvState:
        """Contents and use of all stores together."""
        return together(await self.usages())

    async def flush(self, model: str) -> int:
        """Forget the blocks of a model, or of all (empty name); returns how many were in memory."""
        return sum(done.blocks for done in (await self._ask(Flush(model), Done)).values())

    async def pin(self, namespaces: Sequence[bytes], keys: bytes, *, pinned: bool) -> int:
        """Pin or unpin a chain in each of its ranks' namespaces; returns its blocks in memory. Of
        several nodes each pins what it has, and the most that one has counts. Blocks that an engine
        has just computed are awaited for a moment."""
        wanted = len(keys) // KEY_BYTES
        for _ in range(_PIN_ATTEMPTS):
            done = [await self._ask(Pin(name, keys, pinned), Done) for name in namespaces]
            blocks = min(max(of_one.blocks for of_one in each.values()) for each in done)
            if blocks == wanted:
                break
            await asyncio.sleep(_PIN_WAIT_S)
        return blocks

    async def _ask(self, request: Request, expected: type[R]) -> Mapping[str, R]:
        if self._access.each_node:
            answers = await ask_stores(request, expected)
            if not answers:
                raise _away("no node's KV store answers")
            return answers

        # A client belongs to one thread, and a pool runs each call in any of its threads.
        def blocking() -> R:
            with contextlib.closing(StoreClient(self._access.address, _ANSWER_TIMEOUT_MS)) as one:
                return one.ask(request, expected)

        try:
            return {"": await asyncio.to_thread(blocking)}
        except StoreAwayError as error:
            raise _away(str(error)) from None


def _away(why: str) -> Unavailable:
    return Unavailable(
        f"{why}; requests are served without it, try again shortly",
        reason="kv_store_away",
        retry_after_s=5,
    )

"""A decode replica's client of the prefill replicas of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import aiohttp

from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER, PREFILL_PATH, LiveReplica
from loomserve.platform.run.sockets import LocalConnector
from loomserve.platform.state.roles import PrefillAwayError, Role
from loomserve.routers.decision import decide
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policies import load_aware
from loomserve.routers.snapshot import snapshot
from loomserve.routers.ticket import RoutingTicket

_CONNECT_TIMEOUT_S = 2.0
# Longer than a prompt waits behind others; one that is away is computed here.
_ANSWER_TIMEOUT_S = 120.0


class PrefillReplicas:
    """Client that sends each prompt to the least loaded prefill replica the controller knows."""

    def __init__(self, internal_token: str, load_limit: float) -> None:
        self._pick = partial(load_aware.pick, load_limit=load_limit)
        self.ledger = InFlight()
        self._peers: dict[str, LiveReplica] = {}
        self._failed: set[str] = set()
        self._open: dict[asyncio.Task[bytes], str] = {}
        self._session = aiohttp.ClientSession(
            headers={INTERNAL_TOKEN_HEADER: internal_token},
            connector=LocalConnector(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_ANSWER_TIMEOUT_S
            ),
        )

    def set_replicas(self, peers: Iterable[LiveReplica]) -> None:
        """Set the live replicas of the model; prompts at any other fail now."""
        self._peers = {peer.id: peer for peer in peers}
        self._failed.clear()
        for task, replica_id in self._open.items():
            if replica_id not in self._peers:
                task.cancel()

    async def prefill(self, message: bytes, prompt_tokens: int) -> bytes:
        """
        Raises:
            PrefillAwayError: there is no prefill replica, or the chosen one failed.
        """
        there = [
            snapshot(peer.id, peer.stats, self.ledger)
            for peer in self._peers.values()
            if peer.stats.role is Role.PREFILL
            and not peer.stats.draining
            and peer.id not in self._failed
        ]
        decision = decide(there, self._pick)
        if decision is None:
            raise PrefillAwayError("no prefill replica is there")
        with RoutingTicket(self.ledger, prompt_tokens=prompt_tokens) as ticket:
            ticket.book(next(one for one in there if one.id == decision.replica_id))
            return await self._ask(self._peers[decision.replica_id], message)

    async def _ask(self, peer: LiveReplica, message: bytes) -> bytes:
        task = asyncio.ensure_future(self._post(peer, message))
        self._open[task] = peer.id
        try:
            await asyncio.wait((task,))
            if task.cancelled():
                raise PrefillAwayError(f"replica {peer.id} reports no more")
            return task.result()
        finally:
            task.cancel()
            del self._open[task]

    async def _post(self, peer: LiveReplica, message: bytes) -> bytes:
        url = f"http://{peer.address}{PREFILL_PATH}"
        try:
            async with self._session.post(url, data=message) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self._failed.add(peer.id)
            raise PrefillAwayError(f"replica {peer.id} failed: {error!r}") from None

    async def close(self) -> None:
        await self._session.close()

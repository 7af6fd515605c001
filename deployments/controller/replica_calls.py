"""The controller's calls to replicas, on their own sockets."""

from __future__ import annotations

import json
from collections.abc import Sequence

import aiohttp
from pydantic import BaseModel

from loomserve.deployments.gateway.internal_client import InternalClient
from loomserve.platform.adapters.messages import (
    Adapter,
    AdapterOrder,
    AdapterReport,
    AdapterReports,
)
from loomserve.platform.base.errors import Conflict
from loomserve.platform.fleet.messages import ADAPTERS_PATH, AWAKE_PATH, LOAD_PATH, AwakeOrder
from loomserve.routers.snapshot import RoutingStats

_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 1.0
_REFUSED = 409


class ReplicaUnreachableError(Exception):
    """A replica does not answer: it ends, or starts anew."""


class ReplicaCalls:
    """Has replicas' engines sleep and wake, and load and unload adapters."""

    def __init__(self, internal_token: str, generation: int) -> None:
        """``generation``: the controller's."""
        self._token, self._generation = internal_token, generation
        self._made: InternalClient | None = None

    @property
    def _client(self) -> InternalClient:
        if self._made is None:
            self._made = InternalClient(self._token)
        return self._made

    async def set_awake(self, address: str, awake: bool) -> None:
        """Have a replica's engine wake or sleep; returns once it has. Raises Conflict if it has
        requests, or cannot sleep; ReplicaUnreachableError if nobody answers."""
        order = AwakeOrder(awake=awake, generation=self._generation)
        status, told = await self._put(address, AWAKE_PATH, order)
        if status == _REFUSED:
            raise Conflict(str(json.loads(told)["error"]["message"]))
        _check(status)

    async def set_adapters(
        self, address: str, adapters: Sequence[Adapter]
    ) -> tuple[AdapterReport, ...]:
        """Have a replica load these adapters and unload all others; what it says of each."""
        order = AdapterOrder(adapters=tuple(adapters))
        status, told = await self._put(address, ADAPTERS_PATH, order)
        _check(status)
        try:
            return AdapterReports.model_validate_json(told).reports
        except ValueError as error:
            raise ReplicaUnreachableError(repr(error)) from None

    async def _put(self, address: str, path: str, order: BaseModel) -> tuple[int, str]:
        """Status and body of the answer to an order; ReplicaUnreachableError: there is none."""
        try:
            return await self._client.request(
                "PUT", address, path, _TIMEOUT_S, order.model_dump_json()
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ReplicaUnreachableError(repr(error)) from None

    async def stats(self, address: str) -> RoutingStats:
        """A replica's state now, by its own clock; ReplicaUnreachableError: nobody answers."""
        try:
            told = await self._client.get(address, LOAD_PATH, _LOAD_TIMEOUT_S)
            return RoutingStats.model_validate_json(told)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ReplicaUnreachableError(repr(error)) from None

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()


def _check(status: int) -> None:
    """Raise ReplicaUnreachableError if an answer is an error."""
    if status >= 400:
        raise ReplicaUnreachableError(f"it answered {status}")

"""HTTP client of the platform's other processes: replicas, store, batch lane."""

from __future__ import annotations

import asyncio

import aiohttp

from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER
from loomserve.platform.http.other_gateways import DRAIN, gateways_here
from loomserve.platform.run.sockets import PlatformConnector

# A replica that Serve still lists but that refuses connections is dead or restarting.
_CONNECT_TIMEOUT_S = 2.0
_KEPT_S = 60.0


class InternalClient:
    """Keeps connections, in ``session``, to sockets that ask for the internal token."""

    def __init__(self, internal_token: str) -> None:
        self._internal_token = internal_token
        self.session = aiohttp.ClientSession(
            connector=PlatformConnector(internal_token, keepalive_timeout=_KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            auto_decompress=False,
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        await self.session.close()

    async def get(self, address: str, path: str, timeout_s: float) -> str:
        """Body of the answer to a GET request; raises aiohttp.ClientError or TimeoutError."""
        _, body = await self.request("GET", address, path, timeout_s)
        return body

    async def request(
        self, method: str, address: str, path: str, timeout_s: float, body: str | None = None
    ) -> tuple[int, str]:
        """Status and body of an answer. Raises what :meth:`get` does."""
        async with self.session.request(
            method,
            f"http://{address}{path}",
            data=body,
            headers={INTERNAL_TOKEN_HEADER: self._internal_token},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return response.status, await response.text()


async def drain_gateways(internal_token: str, node: str, timeout_s: float) -> None:
    """Have the gateways of this node, whose address is ``node``, end their requests, and wait for
    that at most so long; without Ray, by which they are told else."""
    client = InternalClient(internal_token)

    try:
        drains = (client.request("POST", each, DRAIN, timeout_s) for each in gateways_here(node))
        await asyncio.gather(*drains, return_exceptions=True)
    finally:
        await client.close()

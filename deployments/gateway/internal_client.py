"""HTTP client of the platform's other processes: replicas, store, batch lane."""

from __future__ import annotations

import aiohttp

from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER
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
        """The body of the answer to a GET request.

        Raises:
            aiohttp.ClientError: nobody can be reached there.
            TimeoutError: there was no answer in time.
        """
        async with self.session.get(
            f"http://{address}{path}",
            headers={INTERNAL_TOKEN_HEADER: self._internal_token},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            return await response.text()

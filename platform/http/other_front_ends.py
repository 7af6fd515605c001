"""The front ends of a platform among themselves: what they count together, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loomserve.platform.access.shared_counts import Counts, OnlyOne, SharedCounts
from loomserve.platform.config import Server
from loomserve.platform.http.guarded_app import GuardedApp
from loomserve.platform.http.protocol import INTERNAL, bounded_protocol
from loomserve.platform.http.server import HttpServer
from loomserve.platform.run.folder import own_run
from loomserve.platform.run.sockets import listen_in_place

_FOLDER = "front-ends"
_PATH = "/metrics"
_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 1.0

Part = tuple[dict[str, str], str | None]
"""Labels, and metrics as text that lack them; None: they could not be read."""
Get = Callable[[str, str, float], Awaitable[str]]
"""The body of the answer to a GET request: address, path, timeout in seconds."""


def take_place(server: Server) -> SharedCounts | None:
    """A place among the platform's front ends; None: there is but one.

    Raises:
        NoPlaceError: as many run as there may be.
    """
    if server.front_ends == 1:
        return None
    return SharedCounts(own_run().temporary / _FOLDER, server.front_ends)


class OtherFrontEnds:
    """What one front end has of the others, and they of it, on sockets of their own."""

    def __init__(
        self, place: SharedCounts | None, internal_token: str, node: str, get: Get
    ) -> None:
        """
        Args:
            place: of this one; None: there is no other.
            internal_token: what the sockets ask for.
            node: address of this node.
            get: asks others.
        """
        self._place = place
        self._token = internal_token
        self._node = node
        self._get = get
        self._http: HttpServer | None = None

    @property
    def counts(self) -> Counts:
        """What all count together."""
        return self._place or OnlyOne()

    @property
    def label(self) -> dict[str, str]:
        """What tells this one's metrics from those of others; none if there is no other."""
        return _label(self._place.place) if self._place is not None else {}

    async def listen(self, parts: Callable[[], Awaitable[Sequence[Part]]]) -> None:
        """Show ``parts``, this one's own metrics, to others."""
        if self._place is None:
            return

        async def show(_: Request) -> Response:
            return Response(msgspec.json.encode(await parts()))

        sock, _ = listen_in_place(_name(self._place.place), self._node)
        app = GuardedApp(Starlette(routes=[Route(_PATH, show)]), self._token)
        self._http = HttpServer(app, sock, protocol=bounded_protocol(INTERNAL))
        await self._http.start()

    async def parts(self) -> list[Part]:
        """The metrics of all others that run."""
        if self._place is None:
            return []
        of_each = await asyncio.gather(*map(self._ask, self._place.places))
        return [part for parts in of_each for part in parts]

    async def close(self) -> None:
        if self._http is not None:
            await self._http.stop(_STOP_TIMEOUT_S)
        if self._place is not None:
            self._place.close()

    async def _ask(self, place: int) -> list[Part]:
        try:
            answer = await self._get(f"{_name(place)}.{self._node}", _PATH, _TIMEOUT_S)
            parts: list[Part] = msgspec.json.decode(answer, type=list[Part])
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return [(_label(place), None)]
        return parts


def _name(place: int) -> str:
    return f"front-end-{place}"


def _label(place: int) -> dict[str, str]:
    return {"front_end": str(place)}

"""The gateway processes of a platform among themselves: shared counts and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loomserve.platform.access.shared_counts import Counts, SharedCounts
from loomserve.platform.config import Server
from loomserve.platform.http.protocol import INTERNAL
from loomserve.platform.http.server import GuardedApp, HttpServer
from loomserve.platform.run.folder import own_run
from loomserve.platform.run.node_gate import NodeGate
from loomserve.platform.run.sockets import listen_in_place, listen_locally

_FOLDER = "gateways"
_SOCKET = "gateway-"
_PATH = "/metrics"
DRAIN = "/drain"
"""Path that answers once the gateway process has ended all requests, and takes no more."""
_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 1.0

Part = tuple[dict[str, str], str | None]
"""Labels, and metrics as text that lack them; None: they could not be read."""
Get = Callable[[str, str, float], Awaitable[str]]
"""The body of the answer to a GET request: address, path, timeout in seconds."""


def take_place(server: Server) -> SharedCounts | None:
    """A place among this node's gateway processes; None: there is one. Raises NoPlaceError."""
    if server.front_ends == 1:
        return None
    return SharedCounts(own_run().temporary / _FOLDER, server.front_ends)


class OtherGateways:
    """What one gateway process has of the others, and they of it, on sockets of their own."""

    def __init__(
        self,
        place: SharedCounts | None,
        internal_token: str,
        node: str,
        get: Get,
        *,
        node_name: str | None = None,
    ) -> None:
        """``place``: None if the node has one gateway process; ``node``: this node's address;
        ``node_name``: its name in a cluster."""
        self.elsewhere: Mapping[str, str] = {}
        """In a cluster: the nodes of all others, by their addresses, as reported last."""
        self._place = place
        self._token = internal_token
        self._node, self._node_name = node, node_name
        self._get = get
        self._http: HttpServer | None = None
        self._gate: NodeGate | None = None

    @property
    def address(self) -> str:
        """Where others ask for this process's metrics; empty before it listens."""
        return self._gate.address if self._gate is not None else ""

    @property
    def counts(self) -> Counts:
        """What all count together."""
        return self._place or Counts()

    @property
    def label(self) -> dict[str, str]:
        """The labels of this process's metrics; none if there is no other."""
        is_alone = self._node_name is None and self._place is None
        return {} if is_alone else _label(self._number, self._node_name)

    @property
    def _number(self) -> int:
        return self._place.place if self._place is not None else 0

    async def listen(
        self, parts: Callable[[], Awaitable[Sequence[Part]]], drain: Callable[[], Awaitable[None]]
    ) -> None:
        """Show ``parts``, this one's own metrics, to others, and ``drain`` it for the command."""

        async def show(_: Request) -> Response:
            return Response(msgspec.json.encode(await parts()))

        async def drained(_: Request) -> Response:
            await drain()
            return Response()

        # On another node a socket of the same name is another one's.
        bind = listen_in_place if self._node_name is None else listen_locally
        sock, address = bind(_name(self._number), self._node)
        routes = [Route(_PATH, show), Route(DRAIN, drained, methods=["POST"])]
        app = GuardedApp(Starlette(routes=routes), self._token)
        self._http = HttpServer(app, sock, bounds=INTERNAL)
        await self._http.start()
        if self._node_name is not None:
            self._gate = await NodeGate.open(address, self._token)

    async def parts(self) -> list[Part]:
        """The metrics of all others that run."""
        if self._node_name is not None:
            asked = [(_label(_number_in(at), node), at) for at, node in self.elsewhere.items()]
        elif self._place is not None:
            asked = [(_label(n), f"{_name(n)}.{self._node}") for n in self._place.places]
        else:
            return []
        of_each = await asyncio.gather(*(self._ask(*each) for each in asked))
        return [part for parts in of_each for part in parts]

    async def close(self) -> None:
        if self._gate is not None:
            await self._gate.close()
        if self._http is not None:
            await self._http.stop(_STOP_TIMEOUT_S)
        if self._place is not None:
            self._place.close()

    async def _ask(self, label: dict[str, str], address: str) -> list[Part]:
        try:
            answer = await self._get(address, _PATH, _TIMEOUT_S)
            parts: list[Part] = msgspec.json.decode(answer, type=list[Part])
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return [(label, None)]
        return parts


def _name(place: int) -> str:
    return f"{_SOCKET}{place}"


def gateways_here(node: str) -> list[str]:
    """The addresses of the gateway processes on this node, whose address is ``node``."""
    return [f"{path.name}.{node}" for path in own_run().sockets.glob(f"{_SOCKET}*")]


def _number_in(address: str) -> int:
    """The number in the name of a socket: ``gateway-2-1f00ba42.NODE``."""
    return int(address.partition(".")[0].split("-")[1])


def _label(number: int, node: str | None = None) -> dict[str, str]:
    if node is None:
        return {"front_end": str(number)}
    return {"front_end": f"{node}/{number}", "node": node}

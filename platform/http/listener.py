"""Accepts connections, and shakes hands over TLS, within bounds of time and number."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from heapq import nsmallest

from loomserve.platform.base.descriptors import for_clients
from loomserve.platform.base.errors import Unavailable
from loomserve.platform.base.periodic import every
from loomserve.platform.http.protocol import BoundedProtocol, Bounds, too_many
from loomserve.platform.http.tls import LiveCertificate

_BACKLOG = 2048
_LOOK_S = 1.0
# Without file descriptors for more, trying again at once would only keep the processor busy.
_RETRY_S = 0.1
# Accepted before others have their turn.
_BURST = 16
# A connection that has had an answer is kept for the client's next request for so long at least.
_KEPT_S = 5.0
# Of all connections so many give way at once, since the search for them passes over all.
_GIVE_WAY = 1 / 32


class ConnectionListener:
    """Listening socket whose connections are given to a protocol, once they have shaken hands.

    A server of asyncio's would accept whatever comes before anybody could count it, with all file
    descriptors, and would not tell of handshakes. Where there are too many connections, those
    without a request give way, the oldest first, before a client is refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        bounds: Bounds,
        certificate: LiveCertificate | None,
        make_protocol: Callable[[], BoundedProtocol],
    ) -> None:
        """
        Args:
            sock: bound, and closed by :meth:`close`.
            bounds: those that shake hands are among its ``max_connections``.
            certificate: None: it speaks HTTP in clear text.
            make_protocol: makes what serves a connection.
        """
        self._socket = sock
        self._bounds = bounds
        self._certificate = certificate
        self._make_protocol = make_protocol
        # Connections that count, with their clients' addresses.
        self._there: dict[BoundedProtocol, str] = {}
        # Those that their protocols do not have yet.
        self._opening: dict[BoundedProtocol, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._tasks = [asyncio.create_task(self._accept())]
        if self._certificate is not None:
            self._tasks.append(asyncio.create_task(every(_LOOK_S, self._refresh)))

    @property
    def alive(self) -> bool:
        return not any(task.done() for task in self._tasks)

    async def close(self) -> None:
        """Accept no connection any more; those that have shaken hands stay."""
        ending = [*self._tasks, *self._opening.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError:
                self._make_room()
                await asyncio.sleep(_RETRY_S)
                continue
            address = peer[0] if peer else ""
            refusal = self._refusal(connection, address)
            if refusal is None or self._certificate is None:
                self._open(connection, address, refusal)
            else:
                # There is no way to say why before hands are shaken.
                connection.close()
            accepted += 1
            # What gives way, or is refused, has its descriptor until then.
            if accepted % _BURST == 0 or refusal is not None or len(self._there) >= self._room:
                await asyncio.sleep(0)

    @property
    def _room(self) -> int:
        most = self._bounds.max_connections
        return for_clients() if most is None else most

    def _refusal(self, connection: socket.socket, address: str) -> Unavailable | None:
        by_address = self._bounds.by_address
        if by_address is not None and by_address.open(address) >= by_address.most:
            return too_many(f"your address already has {by_address.most} connections")
        elsewhere = by_address.elsewhere if by_address is not None else 0
        there = len(self._there) + elsewhere
        # A new descriptor has the lowest number that is free.
        is_full = there >= self._room or connection.fileno() >= for_clients()
        if is_full and not self._make_room():
            return too_many(f"the server already has {there} connections")
        return None

    def _make_room(self) -> bool:
        """Close connections without a request; False: there is none."""
        now_s = asyncio.get_running_loop().time()
        ranks = {each: rank for each in self._there if (rank := _rank(each, now_s))}
        oldest = nsmallest(1 + int(_GIVE_WAY * len(ranks)), ranks, key=ranks.__getitem__)
        for each in oldest:
            self._ended(each)
            opening = self._opening.get(each)
            if opening is None:
                each.give_way()
            else:
                opening.cancel()
        return bool(oldest)

    def _open(self, connection: socket.socket, address: str, refusal: Unavailable | None) -> None:
        protocol = self._make_protocol()
        protocol.refusal, protocol.ended = refusal, self._ended
        if refusal is None:
            self._there[protocol] = address
            if self._bounds.by_address is not None:
                self._bounds.by_address.enter(address)
        opening = asyncio.create_task(self._hand_over(connection, protocol))
        self._opening[protocol] = opening
        opening.add_done_callback(partial(self._opened, protocol))

    def _opened(self, protocol: BoundedProtocol, _: asyncio.Task[None]) -> None:
        del self._opening[protocol]
        if protocol.transport is None:
            self._ended(protocol)

    def _ended(self, protocol: BoundedProtocol) -> None:
        address = self._there.pop(protocol, None)
        if address is not None and self._bounds.by_address is not None:
            self._bounds.by_address.leave(address)

    async def _hand_over(self, connection: socket.socket, protocol: BoundedProtocol) -> None:
        timeout_s = self._bounds.head_timeout_s if self._certificate is not None else None
        # What fails is the client's: it speaks no TLS, does not trust us, or is gone.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._certificate.context if self._certificate is not None else None,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
            )

    async def _refresh(self) -> None:
        assert self._certificate is not None
        self._certificate.refresh()


def _rank(connection: BoundedProtocol, now_s: float) -> tuple[bool, float] | None:
    """A connection's place among those that are closed for new clients, lowest first; None: it has
    a request or an answer under way."""
    shaken = connection.transport is not None
    if shaken and (not connection.is_idle or connection.transport.get_write_buffer_size()):
        return None
    used = connection.served is not None
    if used and now_s - connection.idle_since < _KEPT_S:
        return None
    return used, connection.idle_since

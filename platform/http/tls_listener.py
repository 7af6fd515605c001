"""Accepts connections and shakes hands over TLS, within bounds of time and number."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial

from loomserve.platform.base.periodic import every
from loomserve.platform.http.address_limit import AddressLimit
from loomserve.platform.http.tls import LiveCertificate

_BACKLOG = 2048
_LOOK_S = 1.0
# Without file descriptors for more, trying again at once would only keep the processor busy.
_RETRY_S = 0.1


@dataclass(frozen=True)
class TlsOptions:
    """How a server speaks TLS."""

    certificate: LiveCertificate
    handshake_timeout_s: float
    """Seconds from a connection's begin until its handshake must be done."""
    max_connections: int
    """Those that shake hands are among them; a client beyond them is hung up on."""
    by_address: AddressLimit
    """The same for one client's connections."""


class TlsListener:
    """Listening socket whose connections are given to a protocol once they have shaken hands.

    A server of asyncio's would not tell of a connection before, so nobody could count it.
    """

    def __init__(
        self,
        sock: socket.socket,
        options: TlsOptions,
        make_protocol: Callable[[], asyncio.Protocol],
        connected: Sized,
    ) -> None:
        """
        Args:
            sock: bound, and closed by :meth:`close`.
            options: certificate and bounds.
            make_protocol: makes what serves a connection.
            connected: the connections that have shaken hands and are open.
        """
        self._socket = sock
        self._options = options
        self._make_protocol = make_protocol
        self._connected = connected
        self._handshakes: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._tasks = [
            asyncio.create_task(self._accept()),
            asyncio.create_task(every(_LOOK_S, self._refresh)),
        ]

    @property
    def alive(self) -> bool:
        return not any(task.done() for task in self._tasks)

    async def close(self) -> None:
        """Accept no connection any more; those that have shaken hands stay."""
        ending = [*self._tasks, *self._handshakes]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            if self._is_one_too_many(peer[0]):
                connection.close()
                continue
            # The protocol counts the connection from the moment that hands are shaken.
            self._options.by_address.enter(peer[0])
            handshake = asyncio.create_task(self._shake_hands(connection))
            self._handshakes.add(handshake)
            handshake.add_done_callback(partial(self._shaken, peer[0]))

    def _is_one_too_many(self, address: str) -> bool:
        options = self._options
        return (
            len(self._handshakes) + len(self._connected) + options.by_address.elsewhere
            >= options.max_connections
            or options.by_address.open(address) >= options.by_address.most
        )

    def _shaken(self, address: str, handshake: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        self._options.by_address.leave(address)

    async def _shake_hands(self, connection: socket.socket) -> None:
        # What fails is the client's: it speaks no TLS, does not trust us, or is gone.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._options.certificate.context,
                ssl_handshake_timeout=self._options.handshake_timeout_s,
                ssl_shutdown_timeout=self._options.handshake_timeout_s,
            )

    async def _refresh(self) -> None:
        self._options.certificate.refresh()

"""An engine's sockets for clients on other nodes: TCP, encrypted, for who has the key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from loomserve.platform.run.engine_address import EngineNetwork
from loomserve.platform.run.lost_peers import LOSS_S

_BIND_TIMEOUT_S = 30.0
HEARTBEAT_MS = 1000
"""How often each end of a TCP connection asks the other whether it is there."""
SILENCE_MS = 3000
"""Without an answer for so long, the connection is closed."""


class NetworkSockets:
    """Binds an engine's two sockets to its node's address, too, if there is one."""

    def __init__(self, host: str | None) -> None:
        self._host = host
        self._server_key, self._server_secret = zmq.curve_keypair()
        self._client_key, self._client_secret = zmq.curve_keypair()
        self._endpoints: dict[str, str] = {}
        self._bound = threading.Condition()

    @contextmanager
    def bound(
        self, name: str, context: zmq.Context[Any], socket: zmq.Socket[Any]
    ) -> Iterator[None]:
        """Bind a ROUTER, ``input`` or ``output``, to a free port for as long as the block takes.

        What it is bound to already stays as it is: options are those of the next address that is
        bound. Its ``context`` has no other such sockets.
        """
        if self._host is None:
            yield
            return
        keeper = ThreadAuthenticator(context)
        keeper.start()
        try:
            keeper.configure_curve_callback(credentials_provider=self)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._server_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._server_secret)
            notice_loss(socket)
            socket.bind(f"tcp://{self._host}:*")
            with self._bound:
                self._endpoints[name] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                self._bound.notify_all()
            yield
        finally:
            keeper.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this key, in Z85, is let in; pyzmq's authenticator asks."""
        return key == self._client_key

    @property
    def address(self) -> EngineNetwork | None:
        """The address, once both sockets are bound. Raises TimeoutError if they are not, and will
        not be."""
        if self._host is None:
            return None
        with self._bound:
            if not self._bound.wait_for(lambda: len(self._endpoints) == 2, _BIND_TIMEOUT_S):
                raise TimeoutError(f"the engine does not listen at {self._host}")
        return EngineNetwork(
            self._endpoints["input"],
            self._endpoints["output"],
            self._server_key.decode(),
            self._client_key.decode(),
            self._client_secret.decode(),
        )


def notice_loss(socket: zmq.Socket[Any]) -> None:
    """Have a TCP connection be closed whose other end is gone without a word."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_MAXRT, LOSS_S * 1000)

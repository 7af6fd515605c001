"""Client of the store: its waits are bounded, and it stays quiet while the store is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
import zmq

from loomserve.kvstore.server.protocol import (
    MOST_TOGETHER,
    Abandon,
    Found,
    One,
    OneReply,
    Release,
    Replies,
    Reply,
    Request,
    Reserved,
    Several,
    encoder,
    reply_decoder,
)
from loomserve.kvstore.wire import Refused

_logger = logging.getLogger(__name__)

# A store that does not answer within this time counts as away: a step must not wait for it.
_TIMEOUT_MS = 250
# Seconds between requests to a store that is away.
_RETRY_S = 1.0
# Of the keys in one message, if it is of several requests.
_TOGETHER_BYTES = 2**20

R = TypeVar("R")


class StoreAwayError(Exception):
    """The store did not answer in time or refused, so the engine computes instead."""


class StoreRefusedError(StoreAwayError):
    """The store refused a request, and said why."""


class StoreClient:
    """Connection of one thread to the store at ``address`` (``ipc://...``)."""

    def __init__(self, address: str, timeout_ms: int = _TIMEOUT_MS) -> None:
        self._address = address
        self._timeout_ms = timeout_ms
        self._encoder = encoder()
        self._decoder = reply_decoder()
        self._socket: zmq.Socket[bytes] | None = None
        # A socket whose answer is late. Leases and slots in that answer are given back.
        self._unanswered: zmq.Socket[bytes] | None = None
        self._retry_at = 0.0

    def ask(self, request: Request, expected: type[R]) -> R:
        """Send a request and return its answer. Raises StoreAwayError if no answer came in time,
        after which calls raise at once for a second, or until that answer has come, or if it is
        not of the ``expected`` type; StoreRefusedError if the store refused."""
        if time.monotonic() < self._retry_at and not self._has_answered_late():
            raise StoreAwayError(f"the KV store at {self._address} is away")
        try:
            self._give_back()
            reply = self._exchange(request)
        except (zmq.ZMQError, msgspec.DecodeError) as error:
            # On the same socket, a late answer would be taken for that of the next request.
            if self._unanswered is not None:
                self._unanswered.close()
            self._unanswered, self._socket = self._socket, None
            self._retry_at = time.monotonic() + _RETRY_S
            raise StoreAwayError(f"the KV store at {self._address} does not answer") from error
        if isinstance(reply, Refused):
            raise StoreRefusedError(reply.message)
        if not isinstance(reply, expected):
            raise StoreAwayError(f"the KV store answered {type(reply).__name__}")
        return reply

    def tell(self, request: Request) -> None:
        """Send a request whose answer does not matter; a store that is away is passed over."""
        try:
            self.ask(request, object)
        except StoreAwayError as error:
            # Leases and writers end by themselves, and blocks that nobody wants are evicted.
            _logger.debug("%s", error)

    def ask_all(self, requests: Iterable[One]) -> Iterator[OneReply]:
        """Send requests together, as many as go into a message; yields the answer to each.
        ``StoreAwayError`` as of :meth:`ask`: what was sent before has been answered."""
        for together in _messages(requests):
            yield from self.ask(Several(together), Replies).replies

    def tell_all(self, requests: Iterable[One]) -> None:
        """:meth:`tell` several, together."""
        for together in _messages(requests):
            self.tell(Several(together))

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            self._socket = socket
        return self._socket

    def _exchange(self, request: Request) -> Reply:
        socket = self._connected()
        socket.send(self._encoder.encode(request))
        if not socket.poll(self._timeout_ms):
            raise zmq.Again
        reply: Reply = self._decoder.decode(socket.recv())
        return reply

    def _has_answered_late(self) -> bool:
        """Whether it was only slow."""
        return self._unanswered is not None and bool(self._unanswered.poll(0))

    def _give_back(self) -> None:
        """Give back slots and leases of an answer that came too late."""
        socket = self._unanswered
        if socket is None or not socket.poll(0):
            return
        self._unanswered = None
        with socket:
            late = self._decoder.decode(socket.recv())
        for reply in late.replies if isinstance(late, Replies) else (late,):
            if isinstance(reply, Reserved) and reply.writer:
                self._exchange(Abandon(reply.writer))
            elif isinstance(reply, Found) and reply.lease:
                self._exchange(Release([reply.lease]))

    def close(self) -> None:
        for socket in (self._socket, self._unanswered):
            if socket is not None:
                socket.close()
        self._socket = self._unanswered = None


def _messages(requests: Iterable[One]) -> Iterator[list[One]]:
    """What to send together, in order."""
    together, size = list[One](), 0
    for each in requests:
        keys = len(getattr(each, "keys", b""))
        if len(together) == MOST_TOGETHER or (together and size + keys > _TOGETHER_BYTES):
            yield together
            together, size = [], 0
        together.append(each)
        size += keys
    if together:
        yield together

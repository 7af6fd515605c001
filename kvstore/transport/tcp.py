"""Plain TCP: blocks go from slot to slot by scatter and gather, without a copy in between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from loomserve.kvstore.transport.channel import Channel
from loomserve.kvstore.transport.hello import greet
from loomserve.kvstore.transport.protocol import (
    FETCH_S,
    MOST_EVENTS_BYTES,
    MOST_FRAME_BYTES,
    Declined,
    EventFeed,
    FetchRequest,
    OpenSource,
    PeerAddress,
    PeerAnswer,
    PeerGoneError,
    PeerRefusedError,
    PeerRequest,
    Spoiled,
    Subscribe,
)
from loomserve.kvstore.transport.serving import PeerServer

_KEPT_CONNECTIONS = 2
"""To each peer, from one fetch to the next."""
_MESSAGE_S = 5.0
"""Seconds for a message; one that says that nothing happened comes each second."""


class TcpTransport:
    """Fetches blocks of peers, and serves them its own, where ``serve`` is called."""

    def __init__(self, token: str) -> None:
        """``token`` is what all stores of the run know, and nobody else."""
        self._token = token.encode()
        self._lock = threading.Lock()
        self._idle: defaultdict[PeerAddress, list[Channel]] = defaultdict(list)
        self._open: set[Channel] = set()
        self._closed = False
        self._server: PeerServer | None = None
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self, host: str, open_source: OpenSource, feed: EventFeed) -> PeerAddress:
        """See :class:`Transport`."""
        self._server = PeerServer(host, self._token, open_source, feed)
        return self._server.address

    def fetch(
        self, peer: PeerAddress, request: FetchRequest, into: Sequence[memoryview]
    ) -> tuple[int, float]:
        """See :class:`Transport`."""
        begin = time.monotonic()
        deadline = begin + FETCH_S
        with self._connection(peer, request, deadline) as (channel, answer):
            if isinstance(answer, Declined):
                raise PeerRefusedError(answer.message)
            if not 0 <= answer.blocks <= request.blocks:
                raise PeerGoneError(f"{answer.blocks} of {request.blocks} blocks")
            size = answer.blocks * request.slot_bytes
            channel.receive_into(_first_bytes(into, size), deadline)
            return answer.blocks, time.monotonic() - begin

    def spoiled(self, peer: PeerAddress, report: Spoiled) -> None:
        """See :class:`Transport`."""
        with contextlib.suppress(PeerGoneError):
            channel = self._connect(peer)
            try:
                channel.send_frame(self._encode(report), time.monotonic() + _MESSAGE_S)
            finally:
                self._end(channel)

    def follow(self, peer: PeerAddress, subscribe: Subscribe) -> TcpEventStream:
        """See :class:`Transport`."""
        channel = self._connect(peer)
        try:
            channel.send_frame(self._encode(subscribe), time.monotonic() + _MESSAGE_S)
        except PeerGoneError:
            self._end(channel)
            raise
        return TcpEventStream(channel, self._end)

    def close(self) -> None:
        """See :class:`Transport`."""
        with self._lock:
            self._closed = True
            channels = list(self._open)
        for channel in channels:
            channel.shut()
        if self._server is not None:
            self._server.close()
        with self._lock:
            idle = [channel for kept in self._idle.values() for channel in kept]
            self._idle.clear()
        for channel in idle:
            channel.close()

    @contextmanager
    def _connection(
        self, peer: PeerAddress, request: PeerRequest, deadline: float
    ) -> Iterator[tuple[Channel, PeerAnswer]]:
        """A connection on which the request is answered; it is kept if all goes well."""
        channel, answer = self._ask(peer, request, deadline)
        try:
            yield channel, answer
        except PeerRefusedError:
            self._keep(peer, channel)
            raise
        except BaseException:
            self._end(channel)
            raise
        self._keep(peer, channel)

    def _ask(
        self, peer: PeerAddress, request: PeerRequest, deadline: float
    ) -> tuple[Channel, PeerAnswer]:
        # One that was kept may have ended meanwhile, without a word about the peer's health.
        while (kept := self._kept(peer)) is not None:
            with contextlib.suppress(PeerGoneError):
                return kept, self._exchange(kept, request, deadline)
        channel = self._connect(peer)
        return channel, self._exchange(channel, request, deadline)

    def _exchange(self, channel: Channel, request: PeerRequest, deadline: float) -> PeerAnswer:
        try:
            channel.send_frame(self._encode(request), deadline)
            frame = channel.receive_frame(MOST_FRAME_BYTES, deadline)
            answer: PeerAnswer = msgspec.msgpack.decode(frame, type=PeerAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._end(channel)
            raise PeerGoneError(f"not an answer: {error}") from error
        except PeerGoneError:
            self._end(channel)
            raise
        return answer

    def _connect(self, peer: PeerAddress) -> Channel:
        channel = Channel.connect(peer)
        with self._lock:
            if self._closed:
                channel.close()
                raise PeerGoneError("this store has ended")
            self._open.add(channel)
        try:
            greet(channel, self._token)
        except PeerGoneError as error:
            self._end(channel)
            raise PeerGoneError(f"the KV store at {peer} says no hello: {error}") from error
        return channel

    def _kept(self, peer: PeerAddress) -> Channel | None:
        with self._lock:
            kept = self._idle[peer]
            return kept.pop() if kept else None

    def _keep(self, peer: PeerAddress, channel: Channel) -> None:
        with self._lock:
            if not self._closed and len(self._idle[peer]) < _KEPT_CONNECTIONS:
                self._idle[peer].append(channel)
                return
        self._end(channel)

    def forget(self, peer: PeerAddress) -> None:
        """End the connections that are kept to a peer which is no longer one."""
        with self._lock:
            kept = self._idle.pop(peer, [])
        for channel in kept:
            self._end(channel)

    def _end(self, channel: Channel) -> None:
        with self._lock:
            self._open.discard(channel)
        channel.close()


class TcpEventStream:
    """Announcements of one peer."""

    def __init__(self, channel: Channel, end: Callable[[Channel], None]) -> None:
        self._channel = channel
        self._end = end

    def next(self) -> bytes:
        """See :class:`EventStream`."""
        return self._channel.receive_frame(MOST_EVENTS_BYTES, time.monotonic() + _MESSAGE_S)

    def shut(self) -> None:
        """End it, also while another thread waits for a message."""
        self._channel.shut()

    def close(self) -> None:
        """See :class:`EventStream`."""
        self._end(self._channel)


def _first_bytes(views: Sequence[memoryview], size: int) -> list[memoryview]:
    """Views of the first ``size`` bytes of those of ``views``, one after the other."""
    first: list[memoryview] = []
    for view in views:
        if size <= 0:
            break
        first.append(view[:size])
        size -= first[-1].nbytes
    if size > 0:
        raise ValueError("the views have no room for all blocks")
    return first

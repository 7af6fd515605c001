"""Plain TCP: blocks go from slot to slot by scatter and gather, without a copy in between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from weakref import WeakSet

import msgspec

from loomserve.kvstore.transport.channel import Channel, greet
from loomserve.kvstore.transport.protocol import (
    FETCH_S,
    MESSAGE_S,
    Arrived,
    EventFeed,
    FetchRequest,
    OpenSource,
    PeerAddress,
    PeerAnswer,
    PeerGoneError,
    PeerRefusedError,
    PeerRequest,
    PeerSilentError,
    Subscribe,
    decoded,
)
from loomserve.kvstore.transport.serving import PeerServer
from loomserve.kvstore.wire import MOST_MESSAGE_BYTES, Corrupt, Refused

_KEPT_CONNECTIONS = 2
"""To each peer, from one fetch to the next."""
_WINDOW_BYTES = 2**20


class TcpTransport:
    """Fetches blocks of peers, and serves them its own, where ``serve`` is called. ``token`` is
    what all stores of the run know, and nobody else. For any number of threads."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._lock = threading.Lock()
        self._idle: defaultdict[PeerAddress, list[Channel]] = defaultdict(list)
        self._open: WeakSet[Channel] = WeakSet()
        self._closed = False
        self._server: PeerServer | None = None
        self._answers: msgspec.msgpack.Decoder[PeerAnswer] = msgspec.msgpack.Decoder(PeerAnswer)

    def serve(self, host: str, open_source: OpenSource, feed: EventFeed) -> PeerAddress:
        """Let peers fetch what the sources hold and hear what the feed says. Raises StartError if
        this node has no such address."""
        self._server = PeerServer(host, self._token, open_source, feed)
        return self._server.address

    def fetch(
        self,
        peer: PeerAddress,
        request: FetchRequest,
        into: Sequence[memoryview],
        arrived: Arrived,
    ) -> int:
        """Fetch blocks into the views, which have room for all; returns how many came. Raises
        PeerGoneError if it could not be reached, or was lost before all it had promised came;
        PeerRefusedError if it refused."""
        deadline = time.monotonic() + FETCH_S
        channel, answer = self._ask(peer, request, deadline)
        if isinstance(answer, Refused):
            self._keep(peer, channel)
            raise PeerRefusedError(answer.message)
        came = 0
        try:
            if not 0 <= answer.blocks <= request.blocks:
                raise PeerGoneError(f"{answer.blocks} of {request.blocks} blocks")
            for came in _received(channel, request.slot_bytes, answer.blocks, into, deadline):
                if not arrived(came):
                    break
        except BaseException:
            channel.close()
            raise
        if came == answer.blocks:
            self._keep(peer, channel)
        else:
            # The others are on their way.
            channel.close()
        return came

    def spoiled(self, peer: PeerAddress, report: Corrupt) -> None:
        """Tell a holder of a block that was not whole; what goes wrong is passed over."""
        with contextlib.suppress(PeerGoneError), contextlib.closing(self.follow(peer, report)):
            pass

    def follow(self, peer: PeerAddress, request: Subscribe | Corrupt) -> Channel:
        """Hear what a peer announces; ``PeerGoneError`` if it cannot be reached. Each second a
        frame comes; an empty one says that nothing happened."""
        channel = self._connect(peer)
        try:
            channel.send_message(request, time.monotonic() + MESSAGE_S)
        except PeerGoneError:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """End all connections. Calls under way raise :class:`PeerGoneError`."""
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

    def _ask(
        self, peer: PeerAddress, request: PeerRequest, deadline: float
    ) -> tuple[Channel, PeerAnswer]:
        while (kept := self._kept(peer)) is not None:
            try:
                return kept, self._exchange(kept, request, deadline)
            except PeerSilentError:
                raise
            except PeerGoneError:
                # It ended while it was kept, which says nothing about the peer's health.
                continue
        channel = self._connect(peer)
        return channel, self._exchange(channel, request, deadline)

    def _exchange(self, channel: Channel, request: PeerRequest, deadline: float) -> PeerAnswer:
        try:
            channel.send_message(request, deadline)
            frame = channel.receive_frame(MOST_MESSAGE_BYTES, deadline)
            return decoded(self._answers, frame, "an answer")
        except PeerGoneError:
            channel.close()
            raise

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
            channel.close()
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
        channel.close()

    def forget(self, peer: PeerAddress) -> None:
        """End the connections that are kept to a peer which is no longer one."""
        with self._lock:
            kept = self._idle.pop(peer, [])
        for channel in kept:
            channel.close()


def _received(
    channel: Channel, slot_bytes: int, blocks: int, into: Sequence[memoryview], deadline: float
) -> Iterator[int]:
    """How many blocks have been received, each time that some have: soon enough that their bytes
    are in the processor's cache still."""
    most = max(1, _WINDOW_BYTES // slot_bytes)
    came = 0
    window: list[memoryview] = []
    for view in into:
        while view and came < blocks:
            some = min(most - came % most, view.nbytes // slot_bytes, blocks - came)
            window.append(view[: some * slot_bytes])
            view = view[some * slot_bytes :]
            came += some
            if came % most == 0 or came == blocks:
                channel.receive_into(window, deadline)
                window.clear()
                yield came

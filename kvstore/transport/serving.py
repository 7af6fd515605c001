"""A store's side towards its peers: one thread a connection, and few of those that say no hello."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import msgspec

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.transport.channel import SILENT_S, Channel, admit
from loomserve.kvstore.transport.protocol import (
    FETCH_S,
    BlockSource,
    EventFeed,
    FetchRequest,
    OpenSource,
    PeerAddress,
    PeerGoneError,
    PeerRefusedError,
    PeerRequest,
    Sending,
    Subscribe,
    decoded,
)
from loomserve.kvstore.wire import MOST_MESSAGE_BYTES, Corrupt, Refused
from loomserve.platform.base.errors import StartError

_logger = logging.getLogger(__name__)

_MOST_STRANGERS = 32
"""Connections that have not said hello; the oldest gives way to the next."""
_MOST_CONNECTIONS = 512
_HEARTBEAT_S = 1.0


class PeerServer:
    """Listens at ``host`` and serves peers that know ``token``."""

    def __init__(self, host: str, token: bytes, open_source: OpenSource, feed: EventFeed) -> None:
        self._token = token
        self._open_source = open_source
        self._feed = feed
        self._lock = threading.Lock()
        self._stopping = False
        self._connections: dict[Channel, threading.Thread] = {}
        # Those that have not said hello, in the order in which they came.
        self._strangers: dict[Channel, None] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=64)
        except OSError as error:
            raise StartError(f"the KV store cannot listen on {host}: {error.strerror}") from error
        self.address = PeerAddress(host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="kv-peers", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        with self._lock:
            self._stopping = True
            connections = dict(self._connections)
        with contextlib.suppress(OSError):  # it wakes the acceptor
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in connections:
            channel.shut()
        self._acceptor.join(SILENT_S)
        for thread in connections.values():
            thread.join(2 * SILENT_S)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    _logger.warning("cannot take a connection of another KV store: %s", error)
                    time.sleep(0.1)  # too many open files, as a rule
                continue
            try:
                channel = Channel(sock)
            except OSError:
                sock.close()  # it is gone again
                continue
            self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        thread = threading.Thread(target=self._serve, args=(channel,), name="kv-peer", daemon=True)
        with self._lock:
            peers = len(self._connections) - len(self._strangers)
            if self._stopping or peers >= _MOST_CONNECTIONS:
                channel.close()
                return
            if len(self._strangers) >= _MOST_STRANGERS:
                next(iter(self._strangers)).shut()
            self._strangers[channel] = None
            self._connections[channel] = thread
        thread.start()

    def _serve(self, channel: Channel) -> None:
        try:
            admit(channel, self._token)
            with self._lock:
                del self._strangers[channel]
            with contextlib.closing(self._open_source()) as source:
                self._answer_all(channel, source)
        except PeerGoneError as error:
            _logger.debug("a connection of another KV store ended: %s", error)
        except Exception:
            _logger.exception("a connection of another KV store failed")
        finally:
            with self._lock:
                self._strangers.pop(channel, None)
                del self._connections[channel]
            channel.close()

    def _answer_all(self, channel: Channel, source: BlockSource) -> None:
        decoder: msgspec.msgpack.Decoder[PeerRequest] = msgspec.msgpack.Decoder(PeerRequest)
        while not self._stopping:
            frame = channel.wait_for_frame(MOST_MESSAGE_BYTES)
            request = decoded(decoder, frame, "a request")
            if isinstance(request, Subscribe):
                return self._announce(channel, request)
            self._carry_out(channel, source, request)

    def _carry_out(
        self, channel: Channel, source: BlockSource, request: FetchRequest | Corrupt
    ) -> None:
        if len(request.keys) % KEY_BYTES:
            raise PeerGoneError(f"keys are {KEY_BYTES} bytes each")
        if isinstance(request, Corrupt):
            source.spoiled(request.namespace, request.keys)
            return
        if request.blocks <= 0:
            raise PeerGoneError("a fetch of no blocks")
        # Later its blocks may be others'.
        deadline = time.monotonic() + FETCH_S
        try:
            with source.hold(request) as (blocks, views):
                channel.send_message(Sending(blocks), deadline)
                channel.send_views(views, deadline)
        except PeerRefusedError as error:
            channel.send_message(Refused(str(error)), deadline)

    def _announce(self, channel: Channel, heard: Subscribe) -> None:
        epoch, seq = heard.epoch, heard.seq
        while not self._stopping:
            frames, epoch, seq = self._feed(epoch, seq, _HEARTBEAT_S)
            # An empty one says that nothing happened.
            for frame in frames or [b""]:
                channel.send_frame(frame, time.monotonic() + FETCH_S)

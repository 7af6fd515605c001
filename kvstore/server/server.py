"""Server of the store: answers one request after another, and ticks the store between them."""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import zmq

from loomserve.kvstore.server.protocol import One, OneReply, Replies, Request, Several, encoder
from loomserve.kvstore.server.store import BlockStore
from loomserve.kvstore.wire import MOST_MESSAGE_BYTES, UNREADABLE, Refused
from loomserve.platform.base.processes import own_log

_logger = logging.getLogger(__name__)

_IDLE_MS = 100
# Threads that finish do not wake the socket, so waits are shorter while they work.
_BUSY_MS = 2
# Messages that wait for the store, or for a client: each has one request at a time.
_MOST_WAITING = 8


class StoreServer:
    """Thread that serves a store at ``address`` (``ipc://...``)."""

    def __init__(self, store: BlockStore, address: str) -> None:
        self._store = store
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A client that sends more is cut off; one that reads nothing loses answers.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        self._socket.bind(address)
        self._encoder = encoder()
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and close the store. Requests without an answer get none."""
        self._stopping.set()
        self._thread.join()
        self._socket.close()
        self._store.close()

    def _run(self) -> None:
        ticked_at = 0.0
        while not self._stopping.is_set():
            wait_ms = _BUSY_MS if self._store.busy else _IDLE_MS
            if self._socket.poll(wait_ms):
                self._serve(self._socket.recv_multipart())
            now = time.monotonic()
            if now - ticked_at >= wait_ms / 1000:
                ticked_at = now
                self._store.tick(now)

    def _serve(self, frames: list[bytes]) -> None:
        # Messages with other frames are not of a StoreClient, and are not answered.
        if len(frames) == 3:
            client, empty, message = frames
            self._socket.send_multipart([client, empty, self._answer(message)])

    def _answer(self, message: bytes) -> bytes:
        try:
            request = self._decoder.decode(message)
        except UNREADABLE as error:
            return self._encoder.encode(Refused(f"not a request: {error}"))
        if isinstance(request, Several):
            return self._encoder.encode(Replies([self._reply(each) for each in request.requests]))
        return self._encoder.encode(self._reply(request))

    def _reply(self, request: One) -> OneReply:
        try:
            return self._store.answer(request, time.monotonic())
        except Exception:
            _logger.exception("a request of an engine failed")
            return Refused(f"the KV store failed; {own_log()} says why")

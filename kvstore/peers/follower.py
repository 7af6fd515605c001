"""Follows what one peer announces, in a thread, for as long as it is a member."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from loomserve.kvstore.index.directory import Directory
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.peers.messages import Announcement, Member, well_formed
from loomserve.kvstore.storage.checksum import Space
from loomserve.kvstore.transport.channel import Channel
from loomserve.kvstore.transport.protocol import (
    MESSAGE_S,
    MOST_EVENTS_BYTES,
    PeerGoneError,
    Subscribe,
    decoded,
)
from loomserve.kvstore.transport.tcp import TcpTransport

_logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_LONGEST_RETRY_S = 2.0
_KEYS_AT_ONCE = 1000
"""Taken in while the store waits: a fraction of a millisecond."""


class Follower:
    """Keeps the directory's entries of a peer as it announces them. Where a message was missed, all
    contents are asked for; entries of a peer that cannot be reached are dropped."""

    def __init__(
        self,
        member: Member,
        transport: TcpTransport,
        directory: Directory,
        on_spaces: Callable[[Mapping[bytes, Space]], None],
    ) -> None:
        self.member = member
        self._transport = transport
        self._directory = directory
        self._on_spaces = on_spaces
        self._decoder = msgspec.msgpack.Decoder(Announcement)
        self._lock = threading.Lock()
        self._stream: Channel | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the directory gets nothing more of this peer."""
        self._stopping.set()
        with self._lock:
            if self._stream is not None:
                self._stream.shut()
        self._thread.join()

    def _run(self) -> None:
        retry_s = _RETRY_S
        while not self._stopping.is_set():
            try:
                stream = self._connect()
            except PeerGoneError as error:
                _logger.debug("%s", error)
                self._directory.drop(self.member.node)
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            retry_s = _RETRY_S
            try:
                self._hear(stream)
            except PeerGoneError as error:
                _logger.debug("node %s says no more: %s", self.member.node, error)
            finally:
                with self._lock:
                    self._stream = None
                stream.close()

    def _connect(self) -> Channel:
        heard = Subscribe(*self._directory.heard(self.member.node))
        stream = self._transport.follow(self.member.address, heard)
        with self._lock:
            self._stream = stream
            if self._stopping.is_set():
                stream.shut()
        return stream

    def _hear(self, stream: Channel) -> None:
        """Until the stream ends or a message is missing."""
        begun = self._directory.heard(self.member.node) != (0, 0)
        while True:
            frame = stream.receive_frame(MOST_EVENTS_BYTES, time.monotonic() + MESSAGE_S)
            if frame:
                begun = True
                if not self._take(frame):
                    return
            elif begun and self._directory.heard(self.member.node) == (0, 0):
                return  # a fetch failed meanwhile

    def _take(self, frame: bytes) -> bool:
        """Take a message in; False if it does not follow the last."""
        message = decoded(self._decoder, frame, "a message")
        if message.node != self.member.node or not well_formed(message):
            self._stopping.wait(_LONGEST_RETRY_S)
            raise PeerGoneError(f"not a message of node {self.member.node}")
        self._on_spaces(message.spaces)
        if message.whole:
            take_contents(self._directory, message)
            return True
        return self._directory.apply(message.node, message.epoch, message.seq, message.changes)


def take_contents(directory: Directory, message: Announcement) -> None:
    """Take all that a node has, which replaces what was known of it."""
    directory.begin(message.node, message.epoch, message.seq)
    keys = 0
    for change in message.changes:
        directory.add(message.node, [change])
        keys += len(change.keys) // KEY_BYTES
        if keys >= _KEYS_AT_ONCE:
            keys = 0
            time.sleep(0)  # else this thread keeps the interpreter from the store's

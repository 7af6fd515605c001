"""One TCP connection between two stores, whose waits are all bounded, and the hello on it.

By the hello each proves to the other that it knows the run's token, and never shows it::

    client  MAGIC, its nonce
    server  its nonce, HMAC(token, "server", both nonces)
    client  HMAC(token, "client", both nonces)

Both nonces are in each proof, so none is of use a second time. The server proves first: a client
tells nothing to whom only has the address. What follows is neither encrypted nor signed; a network
that others can write to needs a tunnel.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence

import msgspec

from loomserve.kvstore.transport.protocol import PeerAddress, PeerGoneError, PeerSilentError

SILENT_S = 2.0
"""A peer that acknowledges or sends nothing for so long, while it should, counts as gone."""
_TIMEVAL = struct.Struct("@ll")
_LENGTH = struct.Struct(">I")
# Far below the kernel's limit of views a call.
_VIEWS_A_CALL = 64


class Channel:
    """Sends and receives frames and blocks. Each call raises :class:`PeerGoneError` in time. Waits
    are the kernel's, so a transfer of megabytes is one call without the interpreter's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # Seconds and microseconds, for a wait without progress in one call.
        limit = _TIMEVAL.pack(int(SILENT_S), int(SILENT_S % 1 * 1e6))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000)),
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, 2),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    @classmethod
    def connect(cls, peer: PeerAddress) -> Channel:
        try:
            sock = socket.create_connection((peer.host.strip("[]"), peer.port), SILENT_S)
            return cls(sock)
        except OSError as error:
            raise PeerGoneError(f"the KV store at {peer} cannot be reached: {error}") from error

    def send(self, message: bytes, deadline: float) -> None:
        self.send_views([memoryview(message)], deadline)

    def send_views(self, views: Sequence[memoryview], deadline: float) -> None:
        _move(self._socket.sendmsg, views, deadline)

    def send_frame(self, message: bytes, deadline: float) -> None:
        self.send(_LENGTH.pack(len(message)) + message, deadline)

    def send_message(self, message: msgspec.Struct, deadline: float) -> None:
        self.send_frame(msgspec.msgpack.encode(message), deadline)

    def receive(self, size: int, deadline: float) -> bytes:
        into = bytearray(size)
        self.receive_into([memoryview(into)], deadline)
        return bytes(into)

    def receive_into(self, views: Sequence[memoryview], deadline: float) -> None:
        _move(self._receive, views, deadline)

    def receive_frame(self, most: int, deadline: float) -> bytes:
        """The next frame; one of more than ``most`` bytes ends the connection."""
        (size,) = _LENGTH.unpack(self.receive(_LENGTH.size, deadline))
        if size > most:
            raise PeerGoneError(f"a frame of {size} bytes, of which there may be {most}")
        return self.receive(size, deadline)

    def wait_for_frame(self, most: int) -> bytes:
        """The next frame, however long none begins; keep-alives find out whether the peer lives."""
        first = b""
        while not first:
            try:
                first = self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerGoneError(str(error)) from error
            if not first:
                raise PeerGoneError("the connection ended")
        return self.receive_frame(most, time.monotonic() + SILENT_S)

    def shut(self) -> None:
        """End the connection, also while another thread waits for it."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, into: list[memoryview]) -> int:
        got, *_ = self._socket.recvmsg_into(into, 0, socket.MSG_WAITALL)
        if not got:
            raise PeerGoneError("the connection ended")
        return got


def _move(
    call: Callable[[list[memoryview]], int], views: Sequence[memoryview], deadline: float
) -> None:
    """Have a system call move all bytes of the views."""
    # The next one is the last. Of nothing, nothing would come, as at the end.
    left = [view for view in views if view.nbytes][::-1]
    while left:
        if time.monotonic() > deadline:
            raise PeerGoneError("it took too long")
        try:
            moved = call(left[: -_VIEWS_A_CALL - 1 : -1])
        except BlockingIOError as error:
            raise PeerSilentError(f"nothing moved for {SILENT_S:.0f} s") from error
        except OSError as error:
            raise PeerGoneError(str(error)) from error
        while left and moved >= left[-1].nbytes:
            moved -= left.pop().nbytes
        if moved:
            left[-1] = left[-1][moved:]


MAGIC = b"LoomKVn2"
"""Name and version: stores of another version end the connection, and neither waits."""
HELLO_S = 2.0
NONCE_BYTES = 16
_PROOF_BYTES = 32


def greet(channel: Channel, token: bytes) -> None:
    """Say hello as a client; ``PeerGoneError``: the other is none of this run, or not in time."""
    deadline = time.monotonic() + HELLO_S
    mine = secrets.token_bytes(NONCE_BYTES)
    channel.send(MAGIC + mine, deadline)
    answer = channel.receive(NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"server", mine, theirs)):
        raise PeerGoneError("the peer does not know this run's token")
    channel.send(_proof(token, b"client", mine, theirs), deadline)


def admit(channel: Channel, token: bytes) -> None:
    """Say hello as a server; ``PeerGoneError`` as of :func:`greet`."""
    deadline = time.monotonic() + HELLO_S
    opening = channel.receive(len(MAGIC) + NONCE_BYTES, deadline)
    magic, theirs = opening[: len(MAGIC)], opening[len(MAGIC) :]
    if magic != MAGIC:
        raise PeerGoneError("the peer is no KV store of this version")
    mine = secrets.token_bytes(NONCE_BYTES)
    channel.send(mine + _proof(token, b"server", theirs, mine), deadline)
    proof = channel.receive(_PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(token, b"client", theirs, mine)):
        raise PeerGoneError("the peer does not know this run's token")


def _proof(token: bytes, who: bytes, clients: bytes, servers: bytes) -> bytes:
    return hmac.digest(token, who + clients + servers, "sha256")

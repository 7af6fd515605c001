"""Hello of two stores: each proves to the other that it knows the run's token, and never shows it.

::

    client  MAGIC, its nonce
    server  its nonce, HMAC(token, "server", both nonces)
    client  HMAC(token, "client", both nonces)

Both nonces are in each proof, so none is of use a second time. The server proves first: a client
tells nothing to whom only has the address. What follows is neither encrypted nor signed; a network
that others can write to needs a tunnel.
"""

from __future__ import annotations

import hmac
import secrets
import time

from loomserve.kvstore.transport.channel import Channel
from loomserve.kvstore.transport.protocol import PeerGoneError

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

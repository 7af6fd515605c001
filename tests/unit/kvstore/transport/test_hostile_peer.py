"""A real store, and peers that send whatever they like: nothing but sealed blocks comes out."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.protocol import Reserve, Reserved, decode_slots
from loomserve.kvstore.storage.checksum import BlockLayout, seed
from loomserve.kvstore.transport.channel import HELLO_S, MAGIC, Channel, greet
from loomserve.kvstore.transport.protocol import (
    FetchRequest,
    PeerAddress,
    PeerAnswer,
    PeerGoneError,
    PeerRequest,
    Sending,
    Subscribe,
)
from loomserve.kvstore.wire import MOST_MESSAGE_BYTES, Corrupt
from tests.unit.kvstore.server.test_nodes import TOKEN, Node, acquaint, node, within
from tests.unit.kvstore.server.test_server import LAYOUT, SPACE, chain
from tests.waiting import PATIENCE_S

FRAMES = 1500
MEMORY_BYTES = 64 * 2**20
SECRET = b"what an engine has not sealed"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "n1", "127.0.0.1") as one:
        one.network.set_members([])
        yield one


def address_of(store: Node) -> PeerAddress:
    return store.network.member.address


def authenticated(store: Node) -> Channel:
    """A peer that knows the token, and no manners."""
    channel = Channel.connect(address_of(store))
    greet(channel, TOKEN.encode())
    return channel


def soon() -> float:
    return time.monotonic() + 5


def fetch_raw(channel: Channel, request: PeerRequest) -> bytes:
    """All bytes that a request is answered with, the blocks' too."""
    channel.send_frame(msgspec.msgpack.encode(request), soon())
    answer = msgspec.msgpack.decode(channel.receive_frame(2**20, soon()), type=PeerAnswer)
    if not isinstance(answer, Sending) or not isinstance(request, FetchRequest):
        return b""
    return channel.receive(answer.blocks * request.slot_bytes, soon())


def test_only_sealed_blocks_of_the_named_namespace_can_be_read(store: Node) -> None:
    keys, written = chain("sealed", 6), chain("being written", 3)
    store.engine.save(keys)
    room = store.engine.reserve(written)
    for slot in decode_slots(room.slots):
        view = store.engine.arena.view(slot, LAYOUT.slot_bytes)
        view[: len(SECRET)] = np.frombuffer(SECRET, np.uint8)
    other = BlockLayout(3, 10_000)
    mine = b"o" * 16
    store.engine.client.ask(Reserve(mine, b"", "other", 3, 10_000), Reserved)
    channel = authenticated(store)
    source = random.Random(3)
    read = asked = 0
    until = time.monotonic() + PATIENCE_S
    # A store that others keep from the cores declines for a second.
    while asked < 500 or (read <= 50 and time.monotonic() < until):
        asked += 1
        request = FetchRequest(
            source.choice((SPACE, SPACE, mine, b"x" * 16)),
            source.choice((keys, keys[:KEY_BYTES], written, keys[:32] + written, bytes(64))),
            source.choice((0, 0, 1, 3, 5)),
            source.choice((LAYOUT.slot_bytes, LAYOUT.slot_bytes, other.slot_bytes, 4096, 2**30)),
        )
        if request.blocks <= 0:
            continue
        got = fetch_raw(channel, request)
        assert SECRET not in got
        for at in range(len(got) // LAYOUT.slot_bytes):
            view = np.frombuffer(got, np.uint8)[at * LAYOUT.slot_bytes :][: LAYOUT.slot_bytes]
            position = request.first + at
            key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            assert LAYOUT.check(view, seed(SPACE, key)), "it is the block that was named"
            read += 1
        assert not len(got) % LAYOUT.slot_bytes
    assert read > 50
    channel.close()
    within(5, lambda: store.engine.usage().leases == 0)


def test_whatever_a_peer_sends_the_store_lives_and_serves(
    store: Node, caplog: pytest.LogCaptureFixture
) -> None:
    keys = chain("mine", 12)
    store.engine.save(keys)
    source = random.Random(7)
    before = psutil.Process().memory_info().rss
    channel: Channel | None = None
    for at in range(FRAMES):
        try:
            if channel is None:
                known = source.random() < 0.7
                channel = authenticated(store) if known else stranger(store, source)
                continue
            channel.send(message(source, keys), soon())
        except PeerGoneError:
            if channel is not None:
                channel.close()
            channel = None
        if source.random() < 0.2 and channel is not None:
            channel.close()
            channel = None
        if at % 300 == 0:
            assert store.engine.read(keys) == 12
    if channel is not None:
        channel.close()
    assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
    assert store.engine.read(keys) == 12
    assert len(fetch_raw(authenticated(store), whole(keys))) == 12 * LAYOUT.slot_bytes
    within(15, lambda: store.engine.usage().leases == 0)
    assert "failed" not in caplog.text, "it foresees all of them"


def whole(keys: bytes) -> FetchRequest:
    return FetchRequest(SPACE, keys, 0, LAYOUT.slot_bytes)


def stranger(store: Node, source: random.Random) -> Channel:
    channel = Channel.connect(address_of(store))
    channel.send(source.choice((b"GET / HTTP/1.1\r\n\r\n", MAGIC, bytes(500), b"\xff")), soon())
    return channel


def message(source: random.Random, keys: bytes) -> bytes:
    """A frame, in order or not."""
    requests = (
        whole(keys),
        FetchRequest(SPACE, source.randbytes(64), source.randrange(6), 2**39),
        FetchRequest(SPACE, keys, 2**31, LAYOUT.slot_bytes),
        FetchRequest(SPACE, keys[:-1], 0, LAYOUT.slot_bytes),
        Corrupt(SPACE, keys[: 16 * source.randrange(12)]),
        Corrupt(source.randbytes(16), source.randbytes(15)),
        Subscribe(source.randrange(2**62), source.randrange(2**62)),
    )
    body = bytearray(msgspec.msgpack.encode(source.choice(requests)))
    kind = source.random()
    if kind < 0.3:
        for _ in range(source.randrange(1, 4)):
            body[source.randrange(len(body))] = source.randrange(256)
    elif kind < 0.4:
        body = bytearray(source.choice((b"\xdd\xff\xff\xff\xff" + b"\x91" * 50, b"\x91" * 100_000)))
    length = len(body)
    if kind > 0.9:
        length = source.choice((0, 1, 2**32 - 1, MOST_MESSAGE_BYTES + 1, len(body) + 5))
    return struct.pack(">I", length) + bytes(body)


def test_who_says_no_hello_is_cut_off_and_keeps_no_peer_out(store: Node, tmp_path: Path) -> None:
    keys = chain("there", 3)
    store.engine.save(keys)
    address = address_of(store)
    silent = [socket.create_connection(address) for _ in range(100)]
    begin = time.monotonic()
    with node(tmp_path, "n2", "127.0.0.2") as other:
        acquaint(store, other)
        within(5, lambda: other.knows(keys) == 3)
        other.wait_for(keys, 3)
    for one in silent:
        one.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
        one.close()
    # Were one cut off after the other, it would take longer.
    assert time.monotonic() - begin < 100 * HELLO_S


def test_a_hello_of_another_time_is_of_no_use(store: Node) -> None:
    """What was recorded of a good hello does not open the door, nor does the server's own proof."""
    address = address_of(store)
    with socket.create_connection(address) as raw:
        raw.settimeout(5)
        raw.sendall(MAGIC + b"n" * 16)
        answer = raw.recv(48, socket.MSG_WAITALL)
        raw.sendall(answer[16:])
        assert raw.recv(1) == b""
    assert TOKEN.encode() not in answer
    with socket.create_connection(address) as raw:
        raw.settimeout(5)
        raw.sendall(MAGIC + b"n" * 16)
        other = raw.recv(48, socket.MSG_WAITALL)
        assert other != answer, "another nonce, another proof"


def test_a_peer_that_reads_nothing_holds_no_blocks_for_long(store: Node) -> None:
    keys = chain("large", 180)
    store.engine.save(keys)
    channel = authenticated(store)
    for _ in range(20):  # more than the kernel keeps for it
        channel.send_frame(msgspec.msgpack.encode(whole(keys)), soon())
    within(15, lambda: store.engine.usage().leases == 0)
    channel.close()
    assert store.engine.read(keys) == 180

"""The store's real socket and a client that sends whatever it likes: others are served on."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from loomserve.kvstore.server import grants, operators, spaces
from loomserve.kvstore.server.client import StoreAwayError, StoreRefusedError
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import (
    Abandon,
    Commit,
    Done,
    Flush,
    Found,
    Inspect,
    Lookup,
    One,
    Pin,
    Release,
    Replies,
    Reserve,
    Reserved,
    Several,
    reply_decoder,
)
from loomserve.kvstore.server.server import StoreServer
from loomserve.kvstore.wire import MOST_MESSAGE_BYTES, Corrupt, Refused
from tests.unit.kvstore.server.test_server import (
    LAYOUT,
    SPACE,
    Engine,
    chain,
    options_in,
    started,
)

FRAMES = 5_000
MEMORY_BYTES = 64 * 2**20


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    return options_in(tmp_path)


@pytest.fixture
def server(options: StoreOptions) -> Iterator[StoreServer]:
    running = started(options)
    yield running
    running.stop()


class HostileClient:
    """Sends frames of all kinds, and learns ids and chains from what it is answered."""

    def __init__(self, options: StoreOptions, known: list[bytes]) -> None:
        self._options, self._known = options, known
        self._random = random.Random(5)
        self._encode = msgspec.msgpack.Encoder().encode
        self._answers = reply_decoder()
        self._ids = [0, 1, -1, 2**62]
        self.refused = self.answered = 0
        self._connect()

    def _connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._options.address)

    def close(self) -> None:
        self._socket.close()

    def strike(self) -> None:
        kind = self._random.random()
        if kind < 0.01:
            self._socket.send_multipart(
                [self._bytes(50) for _ in range(self._random.randrange(1, 6))]
            )
        elif kind < 0.015:
            # It is cut off for this.
            self._socket.send_multipart([b"", bytes(MOST_MESSAGE_BYTES + 1)])
            self._socket.close()
            self._connect()
        elif kind < 0.02:
            self._no_zmq_at_all()
        else:
            self._socket.send_multipart([b"", self._message()])
            self._learn()

    def _no_zmq_at_all(self) -> None:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(self._options.socket))
            raw.sendall(self._bytes(300))

    def _learn(self) -> None:
        assert self._socket.poll(10_000), "the store answers whatever it is sent"
        answer = self._answers.decode(self._socket.recv_multipart()[-1])
        self.answered += 1
        self.refused += isinstance(answer, Refused)
        for reply in answer.replies if isinstance(answer, Replies) else (answer,):
            if isinstance(reply, Found):
                self._ids.append(reply.lease)
            elif isinstance(reply, Reserved):
                self._ids.append(reply.writer)

    def _message(self) -> bytes:
        if self._random.random() < 0.1:
            return self._random.choice(
                (
                    self._bytes(2000),
                    b"\xc6\xff\xff\xff\xff",  # four billion bytes that do not come
                    b"\xdd\xff\xff\xff\xff" + b"\x91" * 50,
                    b"\x91" * 100_000,
                    b"\x81\xa4type\xa6Lookup",
                )
            )
        several = self._random.random() < 0.2
        together = [self._request() for _ in range(self._random.randrange(1, 4))]
        message = bytearray(self._encode(Several(together) if several else together[0]))
        kind = self._random.random()
        if kind < 0.2:
            del message[self._random.randrange(len(message)) :]
        elif kind < 0.5:
            for _ in range(self._random.randrange(1, 4)):
                message[self._random.randrange(len(message))] = self._random.randrange(256)
        return bytes(message)

    def _request(self) -> One:
        pick = self._random.choice
        namespace = SPACE if self._random.random() < 0.8 else self._random.randbytes(16)
        keys = pick((*self._known, self._random.randbytes(64), b"", self._random.randbytes(15)))
        number = pick((0, 1, 2, 30_000, 2**20, 2**31))
        return pick(
            (
                Lookup(namespace, keys, number, pick((0.001, 1.0, 3600.0)), True),
                Reserve(namespace, keys, pick(("model", "", "x" * 512)), 2, pick((30_000, 64))),
                Reserve(namespace, keys, "model", max(1, number), max(1, number)),
                Commit(self._id(), pick((0.03, 1e6)), 3600.0),
                Abandon(self._id()),
                Release([self._id() for _ in range(self._random.randrange(20))]),
                Corrupt(namespace, keys),
                Pin(namespace, keys, pick((True, False))),
                Flush(pick(("", "model", "none"))),
                Inspect(),
            )
        )

    def _id(self) -> int:
        """One that it was given, or a neighbour, which another client may have."""
        return self._random.choice(self._ids) + self._random.choice((0, 0, 1, -1, 2, -2))

    def _bytes(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randrange(most))


def test_whatever_a_client_sends_the_store_lives_and_others_keep_their_blocks(
    options: StoreOptions, server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    mine, written = chain("mine", 12), chain("written", 3)
    engine = Engine.of(options)
    with closing(engine.client):
        engine.save(mine)
        lease = engine.client.ask(Lookup(SPACE, mine, 0, 600.0, False), Found).lease
        room = engine.reserve(written)
        before = psutil.Process().memory_info().rss
        hostile = HostileClient(options, [mine, mine[:64], written, chain("theirs", 2)])
        for at in range(FRAMES):
            hostile.strike()
            if at % 1000 == 0:
                assert engine.read(mine) == 12
        hostile.close()
        assert server.alive
        assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
        assert engine.read(mine) == 12
        assert engine.usage().writers >= 1
        assert engine.client.ask(Commit(room.writer, 0.03), Done).blocks == 3, "it is still ours"
        engine.client.ask(Release([lease]), Done)
    assert "request of an engine failed" not in caplog.text, "it foresees all of them"
    assert hostile.answered > 0.9 * FRAMES
    assert 0.2 * FRAMES < hostile.refused < 0.9 * FRAMES, "requests in order are carried out"


def test_ids_of_other_clients_cannot_be_guessed_from_ones_own(
    options: StoreOptions, server: StoreServer
) -> None:
    engine = Engine.of(options)
    with closing(engine.client):
        engine.save(chain("a", 2))
        ids = {engine.look(chain("a", 2)).lease for _ in range(50)}
        ids |= {engine.reserve(chain(f"b{at}", 1)).writer for at in range(50)}
        assert len(ids) == 100
        assert not any(id_ + near in ids for id_ in ids for near in range(1, 1000))


def test_leases_pins_and_kinds_of_blocks_are_bounded(
    options: StoreOptions, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "MOST_LEASES", 5)
    monkeypatch.setattr(operators, "_MOST_PINS", 3)
    engine = Engine.of(options)
    ours = chain("a", 2)
    with closing(engine.client):
        engine.save(ours)
        given = [engine.look(ours) for _ in range(8)]
        assert [found.lease > 0 for found in given] == [True] * 5 + [False] * 3
        assert given[-1] == Found(0, 0, 0, b"", 0.0)
        engine.client.ask(Release([given[0].lease]), Done)
        assert engine.look(ours).lease
        for at in range(3):
            engine.client.ask(Pin(SPACE, ours + chain(f"p{at}", 1), True), Done)
        with pytest.raises(StoreRefusedError, match="unpin some"):
            engine.client.ask(Pin(SPACE, ours, True), Done)
        monkeypatch.setattr(spaces, "_MOST_SPACES", 4)
        for at in range(3):
            engine.client.ask(Reserve(bytes([at]) * 16, b"", "m", LAYOUT.layers, 64), Reserved)
        with pytest.raises(StoreRefusedError, match="may be no more"):
            engine.client.ask(Reserve(b"x" * 16, b"", "m", LAYOUT.layers, 64), Reserved)
        assert engine.read(ours) == 0, "there are as many leases as there may be"
        engine.client.ask(Release([found.lease for found in given]), Done)
        assert engine.read(ours) == 2


def test_a_message_that_is_too_long_is_cut_off_and_the_next_client_is_served(
    options: StoreOptions, server: StoreServer
) -> None:
    engine = Engine.of(options)
    engine.client._timeout_ms = 200
    with closing(engine.client):
        engine.save(chain("a", 1))
        with pytest.raises(StoreAwayError):
            engine.client.ask(Lookup(SPACE, bytes(MOST_MESSAGE_BYTES), 0, 1.0, False), Found)
    other = Engine.of(options)
    with closing(other.client):
        assert other.read(chain("a", 1)) == 1

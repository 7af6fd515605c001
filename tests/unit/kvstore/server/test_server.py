"""Server and client over a real socket: whatever the one suffers, the other lives on."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import (
    MOST_TOGETHER,
    Abandon,
    Commit,
    Done,
    Found,
    Inspect,
    Lookup,
    One,
    Release,
    Replies,
    Reply,
    Request,
    Reserve,
    Reserved,
    Several,
    StoreUsage,
    decode_slots,
)
from loomserve.kvstore.server.server import StoreServer
from loomserve.kvstore.storage.arena import Arena
from loomserve.kvstore.storage.checksum import BlockLayout, seed
from loomserve.kvstore.wire import Refused
from loomserve.platform.state.kvstore import KvState
from tests.unit.kvstore.sealing import seal_layer
from tests.unit.stopping import stop
from tests.waiting import PATIENCE_S, within

SPAWN = multiprocessing.get_context("spawn")
SPACE = b"n" * 16
LAYOUT = BlockLayout(2, 30_000)
# Two hundred slots and a few more.
MEMORY = 2**24


def options_in(folder: Path, *, ssd: int = 0) -> StoreOptions:
    return StoreOptions(
        folder=folder,
        arena=folder / "arena",
        memory=MEMORY,
        ssd_folder=folder / "ssd" if ssd else None,
        ssd=ssd,
        eviction="lru",
        quotas={},
    )


def started(options: StoreOptions) -> StoreServer:
    server = StoreServer(open_store(options), options.address)
    server.start()
    return server


def serve_until_killed(options: StoreOptions, pipe: Connection) -> None:
    started(options)
    pipe.send("up")
    signal.pause()


def chain(name: str, blocks: int) -> bytes:
    return b"".join(
        hashlib.sha256(f"{name} {block}".encode()).digest()[:KEY_BYTES] for block in range(blocks)
    )


def content(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(LAYOUT.block_bytes)


@dataclass
class Engine:
    """Saves and reads over the socket, with an arena of its own mapping."""

    client: StoreClient
    arena: Arena

    @classmethod
    def of(cls, options: StoreOptions) -> Engine:
        return cls(
            StoreClient(options.address, timeout_ms=round(1000 * PATIENCE_S)),
            Arena.attach(options.arena),
        )

    def reserve(self, keys: bytes) -> Reserved:
        request = Reserve(SPACE, keys, "model", LAYOUT.layers, LAYOUT.layer_bytes)
        return self.client.ask(request, Reserved)

    def save(self, keys: bytes) -> None:
        room = self.reserve(keys)
        for at, slot in enumerate(decode_slots(room.slots), room.first):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            view = self.arena.view(slot, LAYOUT.slot_bytes)
            view[: LAYOUT.block_bytes] = np.frombuffer(content(key), np.uint8)
            for layer in range(LAYOUT.layers):
                seal_layer(LAYOUT, view, layer, seed(SPACE, key))
        self.client.ask(Commit(room.writer, 0.03), Done)

    def look(self, keys: bytes) -> Found:
        return self.client.ask(Lookup(SPACE, keys, 0, 10.0, True), Found)

    def read(self, keys: bytes) -> int:
        """How many blocks are found, each with its own bytes."""
        found = self.look(keys)
        slots = decode_slots(found.slots)
        for at, slot in enumerate(slots):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            view = self.arena.view(slot, LAYOUT.slot_bytes)
            assert LAYOUT.check(view, seed(SPACE, key))
            assert view[: LAYOUT.block_bytes].tobytes() == content(key)
        self.client.ask(Release([found.lease]), Done)
        return len(slots)

    def usage(self) -> KvState:
        return self.client.ask(Inspect(), StoreUsage).state

    def wait_for_ssd(self, blocks: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.usage().models[0].blocks_on_ssd < blocks:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_memory(self, keys: bytes, blocks: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.look(keys).in_memory < blocks:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    return options_in(tmp_path)


@pytest.fixture
def server(options: StoreOptions) -> Iterator[StoreServer]:
    server = started(options)
    yield server
    server.stop()


def test_two_engines_share_what_one_of_them_saved(
    options: StoreOptions, server: StoreServer
) -> None:
    one, other = Engine.of(options), Engine.of(options)
    keys = chain("a", 20)
    assert one.read(keys) == 0
    one.save(keys)
    assert other.read(keys) == 20
    assert other.read(keys[: 7 * KEY_BYTES]) == 7
    assert other.read(chain("b", 20)) == 0


def test_many_engines_at_once_each_get_their_own_answers(
    options: StoreOptions, server: StoreServer
) -> None:
    wrong: list[int] = []

    def engine(number: int) -> None:
        own = Engine.of(options)
        keys = chain(str(number), number + 1)
        own.save(keys)
        wrong.extend(number for _ in range(50) if own.read(keys) != number + 1)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_requests_sent_together_are_answered_each_in_order(
    options: StoreOptions, server: StoreServer
) -> None:
    engine = Engine.of(options)
    chains = [chain(str(number), 1) for number in range(2 * MOST_TOGETHER + 3)]
    requests: list[One] = [
        Reserve(SPACE, keys, "model", LAYOUT.layers, LAYOUT.layer_bytes) for keys in chains
    ]
    requests.insert(3, Reserve(SPACE, chain("other", 1), "model", LAYOUT.layers + 1, 64))
    replies = list(engine.client.ask_all(requests))
    refused = replies.pop(3)
    assert isinstance(refused, Refused)
    rooms = [reply for reply in replies if isinstance(reply, Reserved)]
    assert len(rooms) == len(chains)
    assert [len(decode_slots(room.slots)) for room in rooms] == [1] * len(chains)
    engine.client.tell_all(Abandon(room.writer) for room in rooms)
    assert engine.usage().writers == 0


def test_what_is_sent_together_is_bounded_in_bytes(
    options: StoreOptions, server: StoreServer
) -> None:
    engine = Engine.of(options)
    long = b"k" * KEY_BYTES * 2**15
    requests = [Lookup(SPACE, long, 0, 1.0, False)] * 12
    assert [type(reply) for reply in engine.client.ask_all(requests)] == [Found] * 12


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b""],
        [b"", b"garbage"],
        [b"", os.urandom(1000)],
        [b"", msgspec.msgpack.encode({"type": "Lookup"})],
        [b"", msgspec.msgpack.encode({"type": "Nothing"})],
        [b"", b"\x91" * 100_000],
        [b"only one"],
        [b"", b"one", b"too many"],
        [b"", msgspec.msgpack.encode(Lookup(b"short", b"", 0, 1.0, False))],
        [b"", msgspec.msgpack.encode(Lookup(SPACE, b"", -1, 1.0, False))],
        [b"", msgspec.msgpack.encode(Lookup(SPACE, b"", 0, 1.0, False, pid=2**31))],
        [b"", msgspec.msgpack.encode(Lookup(SPACE, b"", 0, float("inf"), False))],
        [b"", msgspec.msgpack.encode(Lookup(SPACE, b"", 0, float("nan"), False))],
        [b"", msgspec.msgpack.encode(Reserve(SPACE, b"", "model", 0, 1))],
        [b"", msgspec.msgpack.encode(Reserve(SPACE, b"", "model", 1, -1))],
        [b"", msgspec.msgpack.encode(Reserve(SPACE, b"k", "model", 1, 1))],
        [b"", msgspec.msgpack.encode(Reserve(SPACE, b"k" * 16, "model", 2**39, 2**39))],
        [b"", msgspec.msgpack.encode(Several([Inspect()] * (MOST_TOGETHER + 1)))],
        [b"", msgspec.msgpack.encode({"type": "Several", "requests": [Several([])]})],
    ],
    ids=range(19),
)
def test_garbage_is_refused_or_dropped_and_others_are_served(
    options: StoreOptions, server: StoreServer, frames: list[bytes]
) -> None:
    engine = Engine.of(options)
    engine.save(chain("a", 3))
    stranger: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(options.address)
        stranger.send_multipart(frames)
        if len(frames) == 2:
            assert stranger.poll(5000)
            assert msgspec.msgpack.decode(stranger.recv_multipart()[1])["type"] == "Refused"
    assert engine.read(chain("a", 3)) == 3
    assert server.alive
    assert engine.usage().leases == engine.usage().writers == 0


def test_a_client_that_dies_before_its_answer_disturbs_nobody(
    options: StoreOptions, server: StoreServer
) -> None:
    engine = Engine.of(options)
    engine.save(chain("a", 3))
    dying: zmq.Socket[bytes]
    for _ in range(20):
        with zmq.Context.instance().socket(zmq.REQ) as dying:
            dying.setsockopt(zmq.LINGER, 0)
            dying.connect(options.address)
            dying.send(msgspec.msgpack.encode(Lookup(SPACE, chain("a", 3), 0, 10.0, False)))
    assert engine.read(chain("a", 3)) == 3
    assert server.alive


def test_a_store_that_is_away_costs_one_short_wait_a_second(options: StoreOptions) -> None:
    client = StoreClient(options.address, timeout_ms=50)
    begin = time.monotonic()
    with pytest.raises(StoreAwayError, match="does not answer"):
        client.ask(Inspect(), StoreUsage)
    assert 0.04 < time.monotonic() - begin < PATIENCE_S
    begin, waits = time.monotonic(), 0
    for _ in range(100):
        with pytest.raises(StoreAwayError, match=r"is away|does not answer") as away:
            client.ask(Inspect(), StoreUsage)
        waits += "does not answer" in str(away.value)
    assert waits <= time.monotonic() - begin


def test_a_client_finds_the_store_that_came_back_and_what_it_kept(options: StoreOptions) -> None:
    first = started(options)
    engine = Engine.of(options)
    engine.save(chain("a", 3))
    first.stop()
    engine.client._timeout_ms = 50
    with pytest.raises(StoreAwayError):
        engine.look(chain("a", 3))
    second = started(options)
    time.sleep(1.0)
    engine.client._timeout_ms = round(1000 * PATIENCE_S)
    assert engine.read(chain("a", 3)) == 3
    second.stop()


def test_a_late_answer_is_not_taken_for_the_next_questions(options: StoreOptions) -> None:
    slow: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    slow.bind(options.address)
    client = StoreClient(options.address, timeout_ms=50)
    with pytest.raises(StoreAwayError, match="does not answer"):
        client.ask(Release([1]), Done)
    late, empty, _ = slow.recv_multipart()

    def answer() -> None:
        slow.send_multipart([late, empty, msgspec.msgpack.encode(Done(1))])
        client_id, *_ = slow.recv_multipart()
        slow.send_multipart([late, empty, msgspec.msgpack.encode(Done(1))])
        slow.send_multipart([client_id, empty, msgspec.msgpack.encode(Done(2))])

    answering = threading.Thread(target=answer)
    answering.start()
    time.sleep(1.0)
    client._timeout_ms = round(1000 * PATIENCE_S)
    assert client.ask(Release([2]), Done) == Done(2)
    answering.join()
    slow.close(linger=0)


def test_room_and_leases_of_an_answer_that_came_too_late_are_given_back(
    options: StoreOptions,
) -> None:
    process = start_child(options)
    assert process.pid is not None
    engine = Engine.of(options)
    engine.save(chain("a", 3))
    impatient = [StoreClient(options.address, timeout_ms=50) for _ in range(3)]
    shape = ("model", LAYOUT.layers, LAYOUT.layer_bytes)
    stop(process.pid)
    requests: list[tuple[Request, type[Reply]]] = [
        (Reserve(SPACE, chain("b", 2), *shape), Reserved),
        (Lookup(SPACE, chain("a", 3), 0, 60.0, False), Found),
        (Several([Reserve(SPACE, chain(each, 1), *shape) for each in "cd"]), Replies),
    ]
    try:
        for client, (request, reply) in zip(impatient, requests, strict=True):
            with pytest.raises(StoreAwayError, match="does not answer"):
                client.ask(request, reply)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    within(5, lambda: (engine.usage().writers, engine.usage().leases) == (3, 1))
    time.sleep(1.0)  # they ask a store that was away only once a second
    for client in impatient:
        client._timeout_ms = round(1000 * PATIENCE_S)
        client.ask(Release([]), Done)
        client.close()
    assert (engine.usage().writers, engine.usage().leases) == (0, 0)
    killed(process)


def test_a_store_that_was_only_slow_is_asked_again_once_it_has_answered(
    options: StoreOptions,
) -> None:
    slow: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    slow.bind(options.address)
    client = StoreClient(options.address, timeout_ms=50)
    with pytest.raises(StoreAwayError, match="does not answer"):
        client.ask(Release([1]), Done)
    client._retry_at = math.inf
    with pytest.raises(StoreAwayError, match="is away"):
        client.ask(Release([1]), Done)
    *sender, _ = slow.recv_multipart()
    done = msgspec.msgpack.encode(Done(1))
    slow.send_multipart([*sender, done])
    assert client._unanswered is not None
    assert client._unanswered.poll(10_000)
    client._timeout_ms = 10_000

    def answer() -> None:
        *sender, _ = slow.recv_multipart()
        slow.send_multipart([*sender, done])

    answering = threading.Thread(target=answer)
    answering.start()
    assert client.ask(Release([2]), Done) == Done(1)
    answering.join()
    client.close()
    slow.close(linger=0)


def test_a_refusal_or_a_wrong_answer_does_not_silence_the_client(
    options: StoreOptions, server: StoreServer
) -> None:
    client = StoreClient(options.address, timeout_ms=round(1000 * PATIENCE_S))
    with pytest.raises(StoreAwayError, match="too long"):
        client.ask(Commit(1, 0.0), Done)
    with pytest.raises(StoreAwayError, match="answered StoreUsage"):
        client.ask(Inspect(), Done)
    assert client.ask(Release([]), Done) == Done(0)


def test_an_answer_that_cannot_be_read_counts_as_none(options: StoreOptions) -> None:
    broken: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    broken.bind(options.address)

    def answer() -> None:
        broken.recv()
        broken.send(b"garbage")

    answering = threading.Thread(target=answer)
    answering.start()
    client = StoreClient(options.address, timeout_ms=round(1000 * PATIENCE_S))
    with pytest.raises(StoreAwayError, match="does not answer"):
        client.ask(Inspect(), StoreUsage)
    answering.join()
    broken.close(linger=0)


def test_a_store_that_hangs_costs_short_waits_and_is_used_again(options: StoreOptions) -> None:
    process = start_child(options)
    assert process.pid is not None
    engine = Engine.of(options)
    engine.save(chain("a", 3))
    engine.client._timeout_ms = 100
    stop(process.pid)
    try:
        begin, waits = time.monotonic(), 0
        for _ in range(1000):
            with pytest.raises(StoreAwayError) as away:
                engine.look(chain("a", 3))
            waits += "does not answer" in str(away.value)
        assert waits <= 1 + time.monotonic() - begin
        took = []
        # More than the kernel queues for one that accepts none.
        for _ in range(200):
            begin = time.monotonic()
            another = StoreClient(options.address, timeout_ms=1)
            with pytest.raises(StoreAwayError), closing(another):
                another.ask(Inspect(), StoreUsage)
            took.append(time.monotonic() - begin)
        assert sorted(took[100:])[50] < 0.5
    finally:
        os.kill(process.pid, signal.SIGCONT)
    engine.client._timeout_ms = round(1000 * PATIENCE_S)
    time.sleep(1.0)
    assert engine.read(chain("a", 3)) == 3
    killed(process)


def killed(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def start_child(options: StoreOptions) -> multiprocessing.process.BaseProcess:
    here, there = SPAWN.Pipe()
    # A daemon: a test that fails must not keep its store, for whose end pytest would wait.
    process = SPAWN.Process(target=serve_until_killed, args=(options, there), daemon=True)
    process.start()
    assert here.recv() == "up"
    return process


def save_more(engine: Engine, committed: list[bytes]) -> None:
    """For a tenth of a second and more; all of it has room in memory."""
    for number in range(100):
        keys = chain(f"more {number}", 1)
        engine.save(keys)
        committed.append(keys)
        time.sleep(0.002)


def test_a_killed_stores_successor_has_all_that_was_committed_and_nothing_else(
    tmp_path: Path,
) -> None:
    options = options_in(tmp_path, ssd=2**26)
    process = start_child(options)
    engine = Engine.of(options)
    # More than half of memory, so that blocks are being written to SSD too.
    committed = [chain(str(number), 5) for number in range(30)]
    for keys in committed:
        engine.save(keys)
    unfinished = chain("unfinished", 5)
    engine.reserve(unfinished)
    engine.reserve(committed[0] + unfinished)
    engine.look(committed[1])

    killer = threading.Timer(0.05, killed, (process,))
    killer.start()
    engine.client._timeout_ms = 200
    with pytest.raises(StoreAwayError):
        save_more(engine, committed)
    killer.join()
    # What it has asked for last, the successor would get.
    engine.client.close()
    server = started(options)
    after = Engine.of(options)
    assert [after.read(keys) for keys in committed] == [
        len(keys) // KEY_BYTES for keys in committed
    ]
    assert after.read(unfinished) == 0
    assert after.look(committed[0] + unfinished).resident == 5
    assert after.usage().writers == 0
    server.stop()


def test_what_a_store_killed_while_it_writes_to_ssd_has_there_outlives_shared_memory(
    tmp_path: Path,
) -> None:
    options = options_in(tmp_path, ssd=2**26)
    process = start_child(options)
    engine = Engine.of(options)
    chains = [chain(str(number), 5) for number in range(30)]
    for keys in chains:
        engine.save(keys)
    engine.wait_for_ssd(30)
    told = engine.usage().models[0].blocks_on_ssd
    killed(process)
    options.arena.unlink()
    server = started(options)
    after = Engine.of(options)
    there = {keys: after.look(keys).resident for keys in chains}
    # Of one chain the end may have been written and the beginning not.
    assert sum(there.values()) > told - 5
    for keys, blocks in there.items():
        after.wait_for_memory(keys, blocks)
        assert after.read(keys) == blocks
    server.stop()


def test_blocks_on_ssd_outlive_the_loss_of_shared_memory(tmp_path: Path) -> None:
    options = options_in(tmp_path, ssd=2**26)
    process = start_child(options)
    engine = Engine.of(options)
    chains = [chain(str(number), 5) for number in range(30)]
    for keys in chains:
        engine.save(keys)
    engine.wait_for_ssd(150)
    killed(process)
    options.arena.unlink()
    server = started(options)
    after = Engine.of(options)
    for keys in chains:
        after.wait_for_memory(keys, 5)
        assert after.read(keys) == 5
    server.stop()


def test_requests_and_replies_survive_the_wire() -> None:
    requests: list[Request] = [Lookup(SPACE, b"k" * 32, 1, 2.5, True), Release([2**61])]
    for request in requests:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
    reply = Found(2, 3, 2**61, b"\x00" * 8, 0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply) == reply

"""The sender over real sockets; outputs are bytes, and nobody computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from loomserve.platform.engine.core import output_sender
from loomserve.platform.engine.core.addresses import BEAT, DEAD, HELLO, READY
from loomserve.platform.engine.core.engine_clients import NOBODY, EngineClients
from loomserve.platform.engine.core.output_sender import OutputSender, WakingQueue
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state.load_report import (
    LOAD_PERIOD_S,
    LoadBook,
    LoadReport,
    read_load_report,
)
from tests.waiting import PATIENCE_S

# A busy machine must not make a client silent.
SILENCE_S = 60.0
QUEUED = 64


class Engine:
    """What the sender tells, and a thread that runs it."""

    def __init__(self, address: str, silence_s: float) -> None:
        self.queue: WakingQueue = WakingQueue()
        self.clients = EngineClients(silence_s)
        self.loads = LoadBook()
        self.left: list[int] = []
        self.unwanted_outputs: list[Any] = []
        self.ahead_s = 0.0
        """How far the sender's clock is."""
        self.stood_at: float | None = None
        """Since when no other time passes for it."""
        sender = OutputSender(self.queue, self.clients, self, self._now)
        self.thread = threading.Thread(target=sender.run, args=(address, QUEUED), daemon=True)
        self.thread.start()

    def _now(self) -> float:
        return (self.stood_at or time.monotonic()) + self.ahead_s

    def ready_response(self) -> bytes:
        return b"facts"

    def beat(self) -> bytes:
        return b"beat"

    def encode(self, outputs: Any) -> Sequence[Any]:
        return [outputs]

    def gone(self, index: int) -> None:
        self.left.append(index)

    def unwanted(self, outputs: Any) -> None:
        self.unwanted_outputs.append(outputs)

    def index(self, identity: bytes) -> int:
        index = self.clients.index_of(identity)
        assert index is not None
        return index


class Client:
    def __init__(self, context: zmq.Context[Any], address: str, identity: bytes) -> None:
        self.identity = identity
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(address)
        self.loads: list[LoadReport] = []
        """Those that came with outputs."""

    def hello(self, connection: bytes = b"") -> list[bytes]:
        self.socket.send_multipart([HELLO, connection] if connection else [HELLO])
        return self.receive()

    def receive(self) -> list[bytes]:
        assert self.socket.poll(1000 * PATIENCE_S), "nothing came"
        first, *rest = self.socket.recv_multipart()
        load = read_load_report(first)
        if load is None or not rest:
            return [first, *rest]
        self.loads.append(load)
        return rest


@pytest.fixture
def address(tmp_path: Path) -> str:
    return EngineAddress.in_folder(tmp_path).output


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def engine(address: str) -> Iterator[Engine]:
    engine = Engine(address, SILENCE_S)
    yield engine
    engine.queue.put(DEAD)
    engine.thread.join(PATIENCE_S)
    assert not engine.thread.is_alive()


def until(condition: Any, within_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_clients_are_greeted_and_get_their_own(
    engine: Engine, context: zmq.Context[Any], address: str
) -> None:
    one, other = Client(context, address, b"one"), Client(context, address, b"other")
    assert one.hello() == [READY, b"facts"]
    assert other.hello() == [READY, b"facts"]
    assert one.hello() == [BEAT, b"beat"]
    for number in range(3):
        engine.queue.put((engine.index(b"one"), b"for one %d" % number))
        engine.queue.put((engine.index(b"other"), b"for other %d" % number))
    engine.queue.put((NOBODY, b"for anybody"))
    assert [one.receive() for _ in range(4)] == [
        [b"for one 0"], [b"for one 1"], [b"for one 2"], [b"for anybody"],
    ]  # fmt: skip
    assert [other.receive() for _ in range(3)] == [
        [b"for other 0"], [b"for other 1"], [b"for other 2"],
    ]  # fmt: skip
    engine.queue.put(DEAD)
    assert one.receive() == other.receive() == [DEAD]


def test_outputs_bring_the_load_and_who_has_none_is_told_now_and_then(
    engine: Engine, context: zmq.Context[Any], address: str
) -> None:
    busy, idle = Client(context, address, b"busy"), Client(context, address, b"idle")
    busy.hello()
    idle.hello()
    index = engine.index(b"busy")
    steps = 40
    began = time.monotonic()
    for step in range(1, steps + 1):
        engine.loads.took(index)
        engine.loads.measured(step, running=step, waiting=0, kv_usage=0.0)
        engine.queue.put((index, b"token"))
        # The first load may come before the first output.
        while (received := busy.receive()) != [b"token"]:
            assert step == 1
            assert read_load_report(received[0]) is not None
        time.sleep(LOAD_PERIOD_S / 20)
    periods = (time.monotonic() - began) / LOAD_PERIOD_S
    assert [load.counted for load in busy.loads] == list(range(1, steps + 1))
    assert [load.running for load in busy.loads] == list(range(1, steps + 1))
    told: list[LoadReport] = []
    while not told or told[-1].steps < steps:
        (frame,) = idle.receive()
        load = read_load_report(frame)
        assert load is not None
        told.append(load)
    assert len(told) <= periods + 2
    assert {load.counted for load in told} == {0}
    assert told[-1].running == steps


def test_an_output_does_not_wait_for_the_next_look_at_silence(
    engine: Engine, context: zmq.Context[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_sender, "_PERIOD_MS", 3000 * PATIENCE_S)
    client = Client(context, address, b"one")
    client.hello()
    for number in range(20):
        engine.queue.put((engine.index(b"one"), b"%d" % number))
        assert client.receive() == [b"%d" % number]


def test_who_is_gone_is_noticed_without_outputs_and_who_is_only_silent_is_not_let_go(
    engine: Engine,
    context: zmq.Context[Any],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_sender, "_PROBE_AFTER_S", 0.5)
    gone, slow = Client(context, address, b"gone"), Client(context, address, b"slow")
    gone.hello()
    slow.hello()
    index = engine.index(b"gone")
    gone.socket.close()
    until(lambda: engine.left == [index])
    assert slow.receive() == [BEAT, b"beat"]
    assert slow.hello() == [BEAT, b"beat"]
    assert engine.left == [index]


def test_who_is_silent_is_let_go_and_begins_anew(
    engine: Engine, context: zmq.Context[Any], address: str
) -> None:
    silent, heard = Client(context, address, b"silent"), Client(context, address, b"heard")
    silent.hello()
    heard.hello()
    index = engine.index(b"silent")
    engine.stood_at = time.monotonic()
    deadline = time.monotonic() + PATIENCE_S
    while not engine.left:
        assert time.monotonic() < deadline
        # Less than what the sender takes for its own absence.
        engine.ahead_s += 0.25
        assert heard.hello() == [BEAT, b"beat"]
    assert engine.left == [index]
    assert engine.ahead_s > 0.9 * SILENCE_S
    engine.queue.put((index, b"late"))
    until(lambda: engine.unwanted_outputs == [b"late"])
    said = silent.hello()
    while said == [BEAT, b"beat"]:  # as a probe, before it was let go
        said = silent.receive()
    assert said == [READY, b"facts"]
    assert engine.index(b"silent") != index


def test_who_has_closed_its_socket_is_let_go_with_the_next_output(
    engine: Engine, context: zmq.Context[Any], address: str
) -> None:
    client = Client(context, address, b"one")
    client.hello()
    index = engine.index(b"one")
    client.socket.close()

    def left() -> bool:
        engine.queue.put((index, b"token"))
        return engine.left == [index]

    until(left)


def test_who_comes_back_under_its_identity_takes_over(
    engine: Engine, context: zmq.Context[Any], address: str
) -> None:
    first = Client(context, address, b"one")
    assert first.hello(b"first") == [READY, b"facts"]
    index = engine.index(b"one")
    # Else it would connect again, and take over itself.
    first.socket.close()
    second = Client(context, address, b"one")
    assert second.hello(b"second") == [READY, b"facts"]
    assert engine.left == [index]
    engine.queue.put((engine.index(b"one"), b"token"))
    assert second.receive() == [b"token"]


def test_who_does_not_read_is_let_go_and_stops_nobody(
    engine: Engine, context: zmq.Context[Any], address: str
) -> None:
    slow, quick = Client(context, address, b"slow"), Client(context, address, b"quick")
    slow.hello()
    quick.hello()
    index = engine.index(b"slow")
    large = b"." * 2**17
    for number in range(8 * QUEUED):
        engine.queue.put((index, large))
        engine.queue.put((engine.index(b"quick"), b"%d" % number))
        assert quick.receive() == [b"%d" % number]
    assert engine.left == [index]
    assert engine.unwanted_outputs


def test_a_sender_that_lives_has_done_more_at_each_turn_and_one_that_hangs_has_not(
    engine: Engine, context: zmq.Context[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it has front ends, and outputs for them."""
    for _ in range(3):
        done = engine.queue.turn()
        until(lambda done=done: engine.queue.done > done)
    client, goes_on = Client(context, address, b"one"), threading.Event()
    client.hello()

    def hangs(outputs: Any) -> Sequence[Any]:
        goes_on.wait(PATIENCE_S)
        return [outputs]

    monkeypatch.setattr(engine, "encode", hangs)
    engine.queue.put((engine.index(b"one"), b"token"))
    until(engine.queue.empty)
    assert len({engine.queue.turn() for _ in range(5)}) == 1
    goes_on.set()
    done = engine.queue.turn()
    until(lambda: engine.queue.done > done)
    assert client.receive() == [b"token"]


def test_a_queue_wakes_its_reader_after_each_put() -> None:
    queue: WakingQueue = WakingQueue()
    poller = zmq.Poller()
    poller.register(queue.wakeup, zmq.POLLIN)
    assert not poller.poll(0)
    for round_ in range(2):
        queue.put_nowait(round_)
        queue.put_nowait(round_)
        assert poller.poll(0)
        assert list(queue.take_all()) == [round_, round_]
        assert not poller.poll(0)

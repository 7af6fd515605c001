"""A replica as a front end knows it, and the connection to its engine.

The connection is two DEALER sockets, which end and reconnect together. It sends HELLO every second
on the output socket and hears BEAT. A connection that has ended is reopened after a pause with new
sockets; what the old ones held is not sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreReadyResponse, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

from loomserve.platform.engine.core.addresses import BEAT, DEAD, HELLO, HELLO_PERIOD_S, READY
from loomserve.platform.engine.core.network_sockets import notice_loss
from loomserve.platform.engine.process.attentive_clock import PeerClock, ToldWork, Work
from loomserve.platform.engine.process.peer_process import (
    PeerProcess,
    PeerState,
    nobody_listens,
    seen_process,
)
from loomserve.platform.front_end.engine.open_requests import OpenRequest
from loomserve.platform.front_end.policy.continuation import (
    ContinuationBounds,
    Loss,
    ReplicaView,
    loss,
)
from loomserve.platform.front_end.policy.send_times import SendTimes
from loomserve.platform.run.engine_address import EngineAddress, EngineNetwork
from loomserve.platform.state.load_report import LoadReport, read_load_report

Clock = Callable[[], float]

# An engine that answers and steps more often than that is not looked at.
_LATE_S = 1.0
_log = logging.getLogger(__name__)
# An engine that is not there yet, or not again, is not asked more often than that.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# Messages that wait for an engine that does not read, and for an event loop that is busy.
_MOST_UNSENT = 1000
_MOST_UNREAD = 10_000
# What has been sent before a connection is closed on purpose gets so long to arrive.
_LINGER_MS = 500
_CONNECT_TIMEOUT_MS = 2000
# How often the engine's process is looked at, where it has requests and where it has none, and
# looked for while it cannot be seen.
_POLL_INTERVAL_S, _REST_INTERVAL_S = 0.05, 0.5
_SEEK_S = 1.0


class ConnectedReplica:
    """One replica of a model, for as long as the platform has it."""

    def __init__(
        self,
        replica_id: str,
        index: int,
        address: EngineAddress,
        identity: bytes,
        events: Any,
        clock: Clock,
    ) -> None:
        """``index`` is its number in statistics, unique in this front end; ``events`` is the
        ``ReplicaSetClient``, by its ``on_...`` methods, whose module imports this one."""
        self.id = replica_id
        self.index = index
        self.open: dict[str, OpenRequest] = {}
        """By their id on the wire."""
        self.facts: EngineCoreReadyResponse | None = None
        """What the engine said of itself; None: it does not take requests."""
        self.draining = False
        self.load = (0, 0)
        """Its running and waiting requests from all senders, as reported last."""
        self.empty, self.busy = asyncio.Event(), asyncio.Event()
        self.empty.set()
        self._events = events
        self._told = ToldWork(clock)
        self._clock = PeerClock(clock, self._work)
        self._heard_at = self._stepped_at = self._clock()
        self.steps = -1
        """Of the engine since its start, as reported last."""
        self._hangs = False
        self._unwanted: list[str] = []
        self._sends = SendTimes()
        self.connection = EngineConnection(identity, address, self)

    def tick(self) -> None:
        """Advance its clock; called a few times a second."""
        now = self._clock()
        late = now - self._heard_at > _LATE_S or (
            bool(self.open) and now - self._stepped_at > _LATE_S
        )
        self._clock.tick(late=late)

    def _work(self) -> Work | None:
        process = self.connection.process
        return process.work() if process is not None else self._told()

    def usable(self, bounds: ContinuationBounds) -> bool:
        if self.facts is None:
            return False
        # Each choice of a replica asks all of them, and nearly all are well.
        now = self._clock()
        is_well = (
            not self.draining
            and now - self._heard_at <= bounds.silence_s
            and now - self._stepped_at <= bounds.hang_s
        )
        return is_well or self.loss(bounds) is None

    def loss(self, bounds: ContinuationBounds) -> Loss | None:
        """Why its requests have to leave it, if they have to."""
        # Its requests leave a loop that hangs, which is not well for that.
        busy = len(self.open) or int(self._hangs)
        view = ReplicaView(self._heard_at, self._stepped_at, busy, self.draining)
        lost = loss(view, self._clock(), bounds)
        self._hangs = self._hangs or lost is Loss.HUNG
        return lost

    def add(self, request: OpenRequest, frames: Sequence[Any]) -> bool:
        """Send a request; False: its connection ends."""
        if not self.connection.send((EngineCoreRequestType.ADD.value, *frames)):
            return False
        self._sends.sent(time.monotonic())
        if not self.open:
            self._stepped_at = self._clock()
        self.open[request.wire_id] = request
        self.empty.clear()
        self.busy.set()
        return True

    def drop(self, wire_id: str, *, abort: bool) -> None:
        """A request has ended or leaves; with ``abort``, :meth:`flush` aborts it at the engine."""
        self.open.pop(wire_id, None)
        if not self.open:
            self.empty.set()
            self.busy.clear()
        if abort:
            self._unwanted.append(wire_id)

    def flush(self, encoder: MsgpackEncoder) -> None:
        """Send collected aborts to the engine."""
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, []
            self.connection.send((EngineCoreRequestType.ABORT.value, *encoder.encode(unwanted)))

    # What its connection reports

    def ready(self, response: EngineCoreReadyResponse) -> None:
        """The engine takes requests; again on one connection: it has forgotten those before."""
        self._heard_at = self._stepped_at = self._clock()
        self._hangs = False
        self._sends = SendTimes()
        forgotten, self.facts = self.facts is not None, response
        if forgotten:
            self._events.on_forgotten(self)
        else:
            self._events.on_connected(self)

    def beat(self, steps: int, running: int, waiting: int, cpu_s: float | None = None) -> None:
        """The engine lives: its steps, its requests from all senders, and its CPU seconds."""
        if cpu_s is not None:
            self._told.told(cpu_s)
        self._heard_at = self._clock()
        self.load = running, waiting
        if steps != self.steps or not running + waiting:
            self._hangs = False
        if steps != self.steps or not (self.open or self._hangs):
            self.steps, self._stepped_at = steps, self._heard_at

    def stopped(self) -> None:
        """Its process is stopped; called repeatedly while it is."""
        # Silence that need not be waited for, until it beats.
        self._heard_at = -math.inf

    def outputs(self, frames: Sequence[Any]) -> None:
        """vLLM's EngineCoreOutputs, encoded."""
        self._heard_at = self._clock()
        self._events.on_outputs(self, frames)

    def loaded(self, load: LoadReport) -> None:
        """The engine's load after the outputs before."""
        self.load = load.running, load.waiting
        until = self._sends.counted(load.counted, time.monotonic())
        self._events.on_loaded(self, load, until)

    def gone(self, *, ended: bool) -> None:
        """The connection has ended after the engine was ready; ``ended``: so has its process."""
        self.facts = None
        self._unwanted.clear()
        self._events.on_gone(self, ended=ended)


class EngineConnection:
    """The connection to the engine at an address, from :meth:`open` to :meth:`close`."""

    def __init__(self, identity: bytes, address: EngineAddress, replica: ConnectedReplica) -> None:
        self.address = address
        self._identity = identity
        self._replica = replica
        self.process: PeerProcess | None = None
        """The engine's, while it can be seen."""
        self._input: zmq.asyncio.Socket | None = None
        self._broken = asyncio.Event()
        self._answered = asyncio.Event()
        self._ready = False
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"to {self.address.output}")

    async def close(self) -> None:
        """End it; the replica hears nothing more."""
        self._ready = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send(self, frames: Sequence[Any]) -> bool:
        """Send vLLM's frames without waiting; False: the connection ends, or has ended."""
        if self._input is None:
            return False
        if _sent(self._input, frames):
            return True
        self._broken.set()
        return False

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            ended = await self._connected()
            pause_s = _FIRST_PAUSE_S if self._ready else min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._ready:
                self._ready = False
                self._replica.gone(ended=ended)
            await asyncio.sleep(pause_s)

    async def _connected(self) -> bool:
        """Returns when the connection has ended, and whether the engine's process has."""
        self._broken.clear()
        self._answered.clear()
        network = self.address.from_here
        there = network or self.address
        with ExitStack() as opened:
            try:
                inputs, outputs, monitor = self._sockets(opened, network)
                inputs.connect(there.input)
                outputs.connect(there.output)
                self._input = inputs
                ends = self._receive(outputs), self._watch_process(there.output)
                breaks = self._say_hello(outputs), monitor.recv_multipart(), self._broken.wait()
                if await _first_of(ends, breaks):
                    return True
            except Exception:  # whatever it is, its requests have to go on elsewhere
                _log.exception("the connection to the engine at %s failed", self.address.output)
            finally:
                self._input = None
                process, self.process = self.process, None
                if process is not None:
                    opened.callback(process.close)
            if process is None:
                return self._ready and await nobody_listens(there.output)
            return process.state() is PeerState.ENDS

    def _sockets(
        self, opened: ExitStack, network: EngineNetwork | None
    ) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Input, output, and a monitor of the output's disconnection."""
        context = zmq.asyncio.Context.instance()
        made: list[zmq.asyncio.Socket] = []
        for linger_ms in (_LINGER_MS, 0):
            made.append(socket := context.socket(zmq.DEALER))
            opened.callback(socket.close, linger=linger_ms)
            socket.set(zmq.IDENTITY, self._identity)
            socket.set(zmq.SNDHWM, _MOST_UNSENT)
            socket.set(zmq.RCVHWM, _MOST_UNREAD)
            # ZMQ would try again for ever, ten times a second, and deliver what is outdated.
            socket.set(zmq.RECONNECT_IVL, -1)
            if network is not None:
                _over_network(socket, network)
        inputs, outputs = made
        monitor = outputs.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        opened.callback(monitor.close, linger=0)
        opened.callback(outputs.disable_monitor)
        return inputs, outputs, monitor

    async def _watch_process(self, address: str) -> None:
        """Returns when the engine's process begins to end, where that can be seen."""
        await self._answered.wait()
        while (process := seen_process(address)) is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(_SEEK_S)
        self.process = process
        while (state := process.state()) is not PeerState.ENDS:
            if state is PeerState.STOPPED:
                self._replica.stopped()
            if self._replica.open:
                await asyncio.sleep(_POLL_INTERVAL_S)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._replica.busy.wait(), _REST_INTERVAL_S)

    async def _say_hello(self, outputs: zmq.asyncio.Socket) -> None:
        connection = uuid.uuid4().bytes
        while True:
            # One that cannot be sent says no more than those that wait.
            _sent(outputs, [HELLO, connection])
            await asyncio.sleep(HELLO_PERIOD_S)

    async def _receive(self, outputs: zmq.asyncio.Socket) -> None:
        """Returns when the engine says that it ends."""
        while True:
            frames = await outputs.recv_multipart(copy=False)
            first = frames[0].buffer
            if len(frames) == 1 and first == DEAD:
                return
            if len(frames) == 2 and first == BEAT:
                self._replica.beat(*msgspec.msgpack.decode(frames[1].buffer))
            elif len(frames) == 2 and first == READY:
                self._ready = True
                self._answered.set()
                self._replica.ready(
                    msgspec.msgpack.decode(frames[1].buffer, type=EngineCoreReadyResponse)
                )
            elif self._ready:
                self._take(frames)

    def _take(self, frames: Sequence[Any]) -> None:
        load = read_load_report(frames[0].buffer)
        if load is not None:
            frames = frames[1:]
        if frames:
            self._replica.outputs(frames)
        if load is not None:
            self._replica.loaded(load)


async def _first_of(*groups: Sequence[Awaitable[Any]]) -> bool:
    """Run all until one is done; whether that one is in the first group."""
    tasks = [[asyncio.ensure_future(each) for each in group] for group in groups]
    every = list(chain.from_iterable(tasks))
    try:
        ended, _ = await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        return not ended.isdisjoint(tasks[0])
    finally:
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)


def _over_network(socket: zmq.asyncio.Socket, network: EngineNetwork) -> None:
    """Give a socket the keys that the engine asks for, and have it notice a lost network."""
    socket.set(zmq.CURVE_SERVERKEY, network.server_key.encode())
    socket.set(zmq.CURVE_PUBLICKEY, network.client_key.encode())
    socket.set(zmq.CURVE_SECRETKEY, network.client_secret.encode())
    socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    notice_loss(socket)


def _sent(socket: zmq.asyncio.Socket, frames: Sequence[Any]) -> bool:
    """Whether the frames were sent, or queued, at once."""
    sent = socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
    # pyzmq tries at once, and has the future of what must not wait done.
    assert isinstance(sent, asyncio.Future)
    return sent.exception() is None

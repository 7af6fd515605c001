"""A front end's connection to one engine: two DEALER sockets, which end and come back together.

It says HELLO every second on the output socket, to be known there, and to hear BEAT. A connection
that has ended is opened anew after a pause, with new sockets: what the old ones held is not sent.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreReadyResponse

from loomserve.platform.engine.core.addresses import (
    BEAT,
    DEAD,
    HELLO,
    HELLO_PERIOD_S,
    READY,
)
from loomserve.platform.engine.core.network_sockets import notice_loss
from loomserve.platform.engine.process.peer_process import (
    PeerProcess,
    PeerState,
    nobody_listens,
    seen_process,
)
from loomserve.platform.run.engine_address import EngineAddress, EngineNetwork
from loomserve.platform.state.told_load import ToldLoad, load_of

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
# How often the engine's process is looked at, and looked for while it cannot be seen.
_LOOK_S = 0.05
_SEEK_S = 1.0


class Listener(Protocol):
    """What a connection tells, on the event loop."""

    def ready(self, response: EngineCoreReadyResponse) -> None:
        """The engine takes requests; again on one connection: it has forgotten those before."""

    def beat(self, steps: int, running: int, waiting: int, cpu_s: float | None = None) -> None:
        """It lives, has taken so many steps, and has so many requests, whoever sent them.

        ``cpu_s`` is the time on cores that its process has had.
        """

    def stopped(self) -> None:
        """Its process is stopped; told again and again while it is."""

    def outputs(self, frames: Sequence[Any]) -> None:
        """vLLM's EngineCoreOutputs, encoded."""

    def loaded(self, load: ToldLoad) -> None:
        """Its load after the outputs before."""

    def gone(self, *, ended: bool) -> None:
        """The connection has ended after the engine was ready.

        ``ended``: so has the engine's process, certainly.
        """


class EngineConnection:
    """The connection to the engine at an address, from :meth:`open` to :meth:`close`."""

    def __init__(self, identity: bytes, address: EngineAddress, listener: Listener) -> None:
        """``identity`` is the front end's, and unique."""
        self.address = address
        self._identity = identity
        self._listener = listener
        self.process: PeerProcess | None = None
        """The engine's, while it can be seen."""
        self._input: zmq.asyncio.Socket | None = None
        self._broken = asyncio.Event()
        self._answered = asyncio.Event()
        self._ready = False
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to connect; only within a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"to {self.address.output}")

    async def close(self) -> None:
        """End it; the listener is told nothing more."""
        self._ready = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send(self, frames: Sequence[Any]) -> bool:
        """Send vLLM's frames to the engine's input; False: the connection ends, or has.

        It never waits: an engine that does not read for so long that messages pile up is left.
        """
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
                self._listener.gone(ended=ended)
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
        """Input, output, and what tells that the output has been disconnected."""
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
                self._listener.stopped()
            await asyncio.sleep(_LOOK_S)

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
                self._listener.beat(*msgspec.msgpack.decode(frames[1].buffer))
            elif len(frames) == 2 and first == READY:
                self._ready = True
                self._answered.set()
                self._listener.ready(
                    msgspec.msgpack.decode(frames[1].buffer, type=EngineCoreReadyResponse)
                )
            elif self._ready:
                self._take(frames)

    def _take(self, frames: Sequence[Any]) -> None:
        load = load_of(frames[0].buffer)
        if load is not None:
            frames = frames[1:]
        if frames:
            self._listener.outputs(frames)
        if load is not None:
            self._listener.loaded(load)


async def _first_of(*groups: Sequence[Awaitable[Any]]) -> bool:
    """Run all until one is done; whether that is one of the first group."""
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
    """Make a socket one that the engine lets in, and that tells when the engine is cut off."""
    socket.set(zmq.CURVE_SERVERKEY, network.server_key.encode())
    socket.set(zmq.CURVE_PUBLICKEY, network.client_key.encode())
    socket.set(zmq.CURVE_SECRETKEY, network.client_secret.encode())
    socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    notice_loss(socket)


def _sent(socket: zmq.asyncio.Socket, frames: Sequence[Any]) -> bool:
    """Whether these frames could be sent, or be kept to be sent, at once."""
    sent = socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
    # pyzmq tries at once, and has the future of what must not wait done.
    assert isinstance(sent, asyncio.Future)
    return sent.exception() is None

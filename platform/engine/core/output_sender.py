"""The engine's output socket: outputs go out, clients are heard, and lost ones noticed.

Each message of outputs has the engine's load with it. A client without outputs gets the load a
few times a second while it changes.

One thread runs it. It waits for the queue and for the socket at once, so that neither a token nor a
``HELLO`` waits for the other, and never for a client: what one does not take in time is lost,
and the client with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, Queue
from typing import Any, Protocol

import zmq

from loomserve.platform.engine.core.addresses import BEAT, DEAD, HELLO, READY
from loomserve.platform.engine.core.engine_clients import NOBODY, EngineClients
from loomserve.platform.state.load_report import LOAD_PERIOD_S, LoadBook

# How often silence is looked for.
_PERIOD_MS = 250
# If this thread was away for so long, so may have been what it should have heard.
_AWAY_S = 1.0
# A client that is silent for so long is sent something, which fails if nobody is there.
_PROBE_AFTER_S = 5.0
# How long the word of the engine's end may take to leave.
_LINGER_MS = 1000
# Of the queue: nothing to send, but the reader has come by.
_TURN = b"turn"

AlsoBound = Callable[[zmq.Context[Any], zmq.Socket[bytes]], AbstractContextManager[None]]


class WakingQueue(Queue[Any]):
    """Queue with a file descriptor, ``wakeup``, that can be read from after each ``put``."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        """Items that its reader has done with."""
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        os.eventfd_write(self.wakeup, 1)

    def turn(self) -> int:
        """Have the reader come by, if it can; returns ``done``. So a reader that lives has done
        with more by the next call."""
        done = self.done
        self.put(_TURN)
        return done

    def take_all(self) -> Iterator[Any]:
        """Yield what is in the queue, and what comes meanwhile."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        with suppress(Empty):
            while True:
                item = self.get_nowait()
                if item != _TURN:
                    yield item
                self.done += 1


class SenderEvents(Protocol):
    """Calls of the sender to its engine, in the sender's thread."""

    loads: LoadBook

    def ready_response(self) -> bytes:
        """Body of ``READY``."""

    def beat(self) -> bytes:
        """Body of ``BEAT``."""

    def encode(self, outputs: Any) -> Sequence[Any]:
        """Frames of outputs."""

    def gone(self, index: int) -> None:
        """The client with this index is gone: nobody awaits its requests."""

    def unwanted(self, outputs: Any) -> None:
        """These outputs are for a client that is gone."""


def bound_router(context: zmq.Context[Any], address: str, queued: int = 0) -> zmq.Socket[bytes]:
    """A ROUTER whose sends fail where nobody is, or more than ``queued`` messages wait."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # Who comes back under its identity takes over from its own dead connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if queued:
        socket.setsockopt(zmq.SNDHWM, queued)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.bind(address)
    return socket


class OutputSender:
    """Sends ``(index, outputs)`` from a queue to clients, until ``DEAD`` is in the queue."""

    def __init__(
        self,
        queue: WakingQueue,
        clients: EngineClients,
        events: SenderEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._clients, self._events = queue, clients, events
        self._clock = clock
        self._socket: zmq.Socket[bytes]

    def run(self, address: str, queued: int, also: AlsoBound = lambda *_: nullcontext()) -> None:
        """Bind, and send until the end. ``queued`` messages may wait for one client, which is gone
        with more. ``also`` binds the socket to other addresses too."""
        with (
            zmq.Context() as context,
            bound_router(context, address, queued) as self._socket,
            also(context, self._socket),
        ):
            self._run()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._queue.wakeup, zmq.POLLIN)
        looked_at = self._clock()
        while True:
            poller.poll(_PERIOD_MS if self._clients else None)
            if not self._send_queued():
                return
            self._hear()
            self._send_loads(now := self._clock())
            if (now - looked_at) * 1000 >= _PERIOD_MS:
                if now - looked_at > _AWAY_S:
                    self._clients.excuse(now)
                looked_at = now
                self._look_for_silence(now)

    def _send_queued(self) -> bool:
        """Send what is there; returns whether the engine lives."""
        loads, now = self._events.loads, self._clock()
        for item in self._queue.take_all():
            if item == DEAD:
                for identity in self._clients:
                    self._send(identity, [DEAD])
                return False
            index, outputs = item
            receiver = self._clients.identity_of(index)
            if receiver is not None:
                version = loads.version
                frame = loads.frame(self._clients.index_of(receiver) or index)
                self._send(receiver, [frame, *self._events.encode(outputs)])
                self._clients.sent(receiver, version, now)
            elif index != NOBODY:
                self._events.unwanted(outputs)
        return True

    def _send_loads(self, now: float) -> None:
        loads = self._events.loads
        version = loads.version
        for identity in self._clients.unsent(version, now, LOAD_PERIOD_S):
            index = self._clients.index_of(identity)
            if index is not None:
                self._send(identity, [loads.frame(index)])
                self._clients.sent(identity, version, now)

    def _hear(self) -> None:
        with suppress(zmq.Again):
            while True:
                identity, *words = self._socket.recv_multipart(zmq.NOBLOCK)
                if words[:1] == [HELLO]:
                    self._answer(identity, b"".join(words[1:]))

    def _answer(self, identity: bytes, connection: bytes) -> None:
        heard = self._clients.hello(identity, connection, self._clock())
        if heard.replaced is not None:
            self._events.gone(heard.replaced)
        if heard.first:
            self._send(identity, [READY, self._events.ready_response()])
        else:
            self._send(identity, [BEAT, self._events.beat()])

    def _send(self, identity: bytes, frames: Sequence[Any]) -> None:
        if self._sent(identity, frames):
            return
        # A send that may not wait does not look at what was taken meanwhile; this does.
        self._socket.getsockopt(zmq.EVENTS)
        if not self._sent(identity, frames):
            self._let_go(identity)

    def _sent(self, identity: bytes, frames: Sequence[Any]) -> bool:
        """Whether the message could be queued; not if nobody reads there, or nobody is there."""
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def _look_for_silence(self, now: float) -> None:
        for identity in self._clients.silent(now):
            self._let_go(identity)
        for identity in self._clients.probe(now, _PROBE_AFTER_S):
            self._send(identity, [BEAT, self._events.beat()])

    def _let_go(self, identity: bytes) -> None:
        index = self._clients.retire(identity)
        if index is not None:
            self._events.gone(index)

"""The engine's end of the channel to its replica."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import ValidationError

from loomserve.platform.base.descriptors import raise_limit
from loomserve.platform.devices.shortage import prefer_for_killing
from loomserve.platform.engine.core.messages import (
    ADAPTERS,
    ERRORS,
    FACTS,
    HEAD,
    METRICS,
    MOVE,
    MOVED,
    RPC,
    SLEEP,
    START,
    STATS,
    STOP,
    TURN,
    WAKE,
    EngineFacts,
    EngineStart,
)

_logger = logging.getLogger(__name__)

# How long the engine may take to end in good order once its replica is gone.
_LEAVE_S = 5.0


class ControlledCore(Protocol):
    """The engine as its replica's calls see it."""

    meter: Any

    def between_steps(self, work: Any) -> None: ...

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> Any: ...

    def facts(self) -> EngineFacts: ...

    def move_requests(self, to: str, most: int) -> int: ...

    def moved(self) -> tuple[int, int]: ...

    def set_adapters(self, wanted: Any) -> dict[str, Any]: ...

    def fall_asleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def stop(self) -> None: ...


Core = TypeVar("Core", bound=ControlledCore)


def be_engine(
    descriptor: int, make: Callable[[EngineStart], Core], run: Callable[[Core], object]
) -> None:
    """Have this process be the engine that its replica asks for, until the engine's end.

    Args:
        descriptor: of this process's end of the channel to its replica.
        make: makes the engine.
        run: steps it until the replica stops it or an error does.
    """
    raise_limit()
    prefer_for_killing()
    # A terminal sends it to all processes; the replica decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = ControlLink(socket.socket(fileno=descriptor))
    start = link.awaited_start()
    watch = link.end_with_replica()
    try:
        core = make(start)
    except BaseException as error:
        _logger.exception("the engine did not start")
        link.failed(error)
        raise SystemExit(1) from None
    watch.core = core
    link.started(core.facts())
    run(core)
    # An interpreter that ends in order takes a second of a core, for memory that is given back.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class ControlLink:
    """Frames between the replica and this process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._start_id = 0
        self._sending = threading.Lock()

    def awaited_start(self) -> EngineStart:
        """The first call of all: how to make the engine."""
        call_id, method, (given,) = self._receive()
        assert method == START, f"{method} comes before {START}"
        self._start_id = call_id
        return EngineStart.model_validate(given)

    def started(self, facts: EngineFacts) -> None:
        """Tell that the engine is ready."""
        self._send(self._start_id, "", facts.model_dump(mode="json"))

    def failed(self, error: BaseException) -> None:
        """Tell why there will be no engine."""
        if isinstance(error, ValidationError):
            # Its own first line only counts the mistakes.
            told = error.errors()[0]["msg"].removeprefix("Value error, ")
            self._send(self._start_id, ValueError.__name__, told)
        else:
            self._fail(self._start_id, error)

    def end_with_replica(self) -> _ReplicaWatch:
        """Take calls in a thread, and end this process with the replica; the engine comes later."""
        watch = _ReplicaWatch(self)
        threading.Thread(target=watch.run, name="control", daemon=True).start()
        return watch

    def _receive(self) -> Any:
        """The next frame.

        Raises:
            EOFError: the replica is gone.
        """
        (length,) = HEAD.unpack(self._exactly(HEAD.size))
        return msgspec.msgpack.decode(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            some = self._socket.recv(length - len(received))
            if not some:
                raise EOFError
            received += some
        return bytes(received)

    def _send(self, call_id: int, kind: str, value: Any) -> None:
        self._write(msgspec.msgpack.encode((call_id, kind, value)))

    def _write(self, body: bytes) -> None:
        # Without a replica this process ends soon.
        with self._sending, suppress(OSError):
            self._socket.sendall(HEAD.pack(len(body)) + body)

    def _fail(self, call_id: int, error: BaseException) -> None:
        name = type(error).__name__
        if name in ERRORS:
            self._send(call_id, name, str(error))
        else:
            self._send(call_id, RuntimeError.__name__, f"{name}: {error}")

    def answer(self, call_id: int, work: Callable[..., Any], *given: Any) -> None:
        """Do the work, and send what it returns or raises."""
        try:
            body = msgspec.msgpack.encode((call_id, "", work(*given)))
        except Exception as error:
            self._fail(call_id, error)
        else:
            self._write(body)


class _ReplicaWatch:
    """Takes the replica's calls; without a replica there is no engine."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self.core: ControlledCore | None = None

    def run(self) -> None:
        try:
            while True:
                self._take(*self._link._receive())
        except (EOFError, OSError):
            _logger.warning("the replica is gone; its engine ends")
        if self.core is not None:
            self.core.stop()
            time.sleep(_LEAVE_S)
        os._exit(1)

    def _take(self, call_id: int, method: str, args: list[Any]) -> None:
        core, answer = self.core, self._link.answer
        if core is None:
            answer(call_id, _refuse, "the engine is not ready")
        elif method == STATS:
            # At once: a step may take long, and heartbeats go on.
            answer(call_id, lambda: core.meter.read().model_dump())
        elif method == METRICS:
            answer(call_id, core.meter.page)
        elif method == FACTS:
            answer(call_id, lambda: core.facts().model_dump(mode="json"))
        elif method == MOVED:
            answer(call_id, core.moved)
        elif method == MOVE:
            core.between_steps(lambda: answer(call_id, core.move_requests, *args))
        elif method == ADAPTERS:
            core.between_steps(lambda: answer(call_id, core.set_adapters, *args))
        elif method == SLEEP:
            core.between_steps(lambda: answer(call_id, core.fall_asleep, *args))
        elif method == WAKE:
            core.between_steps(lambda: answer(call_id, core.wake))
        elif method == TURN:
            core.between_steps(lambda: answer(call_id, lambda: None))
        elif method == STOP:
            core.stop()
            answer(call_id, lambda: None)
        elif method == RPC:
            name, *given = args
            call = (name, None, tuple(given))
            core.between_steps(lambda: answer(call_id, core.collective_rpc, *call))
        else:
            answer(call_id, _refuse, f"an engine does not answer {method!r}")


def _refuse(why: str) -> None:
    raise ValueError(why)

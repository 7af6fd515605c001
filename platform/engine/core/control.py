"""The engine's end of the channel to its replica."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import ValidationError

from loomserve.platform.base.descriptors import raise_limit
from loomserve.platform.devices.shortage import prefer_for_killing
from loomserve.platform.engine.core.messages import ERRORS, HEAD, EngineFacts, EngineStart
from loomserve.platform.engine.core.output_sender import WakingQueue

_logger = logging.getLogger(__name__)

# How long the engine may take to end in good order once its replica is gone.
_LEAVE_S = 5.0


class ControlledCore(Protocol):
    """The engine as its replica's calls see it."""

    meter: Any
    output_queue: WakingQueue

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


# What the replica may call: at once, for a step may take long and heartbeats go on; or between two
# steps.
_AT_ONCE: Mapping[str, Callable[[Any], Any]] = {
    "stats": lambda core: core.meter.read().model_dump(),
    "metrics": lambda core: core.meter.page(),
    "moved": lambda core: core.moved(),
    "stop": lambda core: core.stop(),
}
_BETWEEN_STEPS: Mapping[str, Callable[..., Any]] = {
    "collective_rpc": lambda core, name, *given: core.collective_rpc(name, None, given),
    "move_requests": lambda core, to, most: core.move_requests(to, most),
    "set_adapters": lambda core, wanted: core.set_adapters(wanted),
    "sleep": lambda core, level: core.fall_asleep(level),
    "turn": lambda core: core.output_queue.turn(),
    "wake_up": lambda core: core.wake(),
}


def be_engine(
    descriptor: int, make: Callable[[EngineStart], Core], run: Callable[[Core], object]
) -> None:
    """Have this process be the engine that its replica asks for, until the engine's end.
    ``descriptor`` is this process's end of the channel to its replica. ``run`` steps the engine
    until the replica stops it or an error does."""
    raise_limit()
    prefer_for_killing()
    # A terminal sends it to all processes; the replica decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = ControlLink(socket.socket(fileno=descriptor))
    start = link.awaited_start()
    threading.Thread(target=link.serve, name="control", daemon=True).start()
    try:
        core = make(start)
    except BaseException as error:
        _logger.exception("the engine did not start")
        link.failed(error)
        raise SystemExit(1) from None
    link.started(core)
    run(core)
    # An interpreter that ends in order takes a second of a core, for memory that is given back.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class ControlLink:
    """Frames between the replica and this process; without a replica there is no engine."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._start_id = 0
        self._sending = threading.Lock()
        self._core: ControlledCore | None = None

    def awaited_start(self) -> EngineStart:
        call_id, method, (given,) = self._receive()
        assert method == "start", f"{method} comes before start"
        self._start_id = call_id
        return EngineStart.model_validate(given)

    def started(self, core: ControlledCore) -> None:
        """Tell that the engine is ready, which answers calls from now on."""
        self._core = core
        self._send(self._start_id, "", core.facts().model_dump(mode="json"))

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ValidationError):
            # Its own first line only counts the mistakes.
            told = error.errors()[0]["msg"].removeprefix("Value error, ")
            self._send(self._start_id, ValueError.__name__, told)
        else:
            self._fail(self._start_id, error)

    def serve(self) -> None:
        """Take calls, and end this process with the replica."""
        try:
            while True:
                self._take(*self._receive())
        except (EOFError, OSError):
            _logger.warning("the replica is gone; its engine ends")
        if self._core is not None:
            self._core.stop()
            time.sleep(_LEAVE_S)
        os._exit(1)

    def _take(self, call_id: int, method: str, args: list[Any]) -> None:
        core = self._core
        if core is None:
            self._fail(call_id, ValueError("the engine is not ready"))
        elif method in _AT_ONCE:
            self._answer(call_id, _AT_ONCE[method], core)
        elif method in _BETWEEN_STEPS:
            work = partial(self._answer, call_id, _BETWEEN_STEPS[method], core, *args)
            core.between_steps(work)
        else:
            self._fail(call_id, ValueError(f"an engine does not answer {method!r}"))

    def _receive(self) -> Any:
        """The next frame; raises ``EOFError`` if the replica is gone."""
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

    def _answer(self, call_id: int, work: Callable[..., Any], *given: Any) -> None:
        """Do the work, and send what it returns or raises."""
        try:
            self._send(call_id, "", work(*given))
        except Exception as error:
            self._fail(call_id, error)

    def _fail(self, call_id: int, error: BaseException) -> None:
        name = type(error).__name__
        if name in ERRORS:
            self._send(call_id, name, str(error))
        else:
            self._send(call_id, RuntimeError.__name__, f"{name}: {error}")

    def _send(self, call_id: int, kind: str, value: Any) -> None:
        body = msgspec.msgpack.encode((call_id, kind, value))
        # Without a replica this process ends soon.
        with self._sending, suppress(OSError):
            self._socket.sendall(HEAD.pack(len(body)) + body)

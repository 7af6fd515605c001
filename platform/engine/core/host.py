"""An engine's process as its replica has it: started, called, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.plain_reason import first_line
from loomserve.platform.base.processes import own_log
from loomserve.platform.engine.core.messages import ERRORS, HEAD, EngineFacts, EngineStart
from loomserve.platform.engine.process.engine_process import EngineProcess, start_process
from loomserve.platform.engine.process.peer_process import POLL_INTERVAL_S, until_wedged
from loomserve.platform.engine.process.policy.silence import WEDGED_S
from loomserve.platform.fleet.messages import MovedRequests, MoveOrder
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state import ReplicaLoad

_log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.02
# A call's answer is refused beyond it; the engine's are some kilobytes.
_LONGEST_FRAME = 64 * 2**20
# Clients move a request within a step; one that has not in this time stays.
_MOVING_S = 10.0


class EngineEnded(RuntimeError):  # noqa: N818 - a state, not a mistake
    """The engine's process has ended; the message says how."""


class EngineHost:
    """One engine's process, for the event loop that started it. The loop's thread must live as long
    as the engine."""

    def __init__(self, process: EngineProcess, address: EngineAddress) -> None:
        self.address = address
        self.facts: EngineFacts
        """Once it is ready."""
        self._process = process
        self._writer: asyncio.StreamWriter
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ids = count()
        self._reading: asyncio.Task[None]
        self._ended_for = ""

    @classmethod
    async def start(
        cls,
        start: EngineStart,
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        fork: bool = True,
    ) -> EngineHost:
        """Start an engine, and wait until it is ready, at most ``timeout_s``. ``environment`` is
        added to this process's own; ``fork``: whether it may be forked. Raises StartError if it
        cannot start, or takes too long."""
        ours, process = await start_process(
            environment, timeout_s, fork=fork, simulated=start.simulated
        )
        host = cls(process, start.address)
        reader, host._writer = await asyncio.open_connection(sock=ours)
        host._reading = asyncio.create_task(host._read(reader))
        try:
            facts = await host.call("start", start.model_dump(mode="json"), timeout_s=timeout_s)
        except TimeoutError:
            await host.stop(0)
            raise StartError(
                f"the engine was not ready after {timeout_s:.0f} s: look into {own_log()} for what "
                "it was doing, or give it more time"
            ) from None
        except Exception as error:
            await host.stop(0)
            raise StartError(f"the engine cannot start: {first_line(error)}") from None
        except BaseException:
            process.kill()
            raise
        host.facts = EngineFacts.model_validate(facts)
        host.address = start.address.with_network(host.facts.network)
        return host

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not self._reading.done()

    async def call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        """Call the engine with what can be said in JSON, by a name of ``control.py``. Raises
        EngineEnded if it has ended, or does before it answers; TimeoutError if it has not
        answered in time; what the method raised, which is one of ``messages.ERRORS``."""
        if self._reading.done():
            raise EngineEnded(await self._how_it_ended())
        call_id = next(self._ids)
        self._answers[call_id] = answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                body = msgspec.msgpack.encode((call_id, method, args))
                self._writer.write(HEAD.pack(len(body)) + body)
                with contextlib.suppress(ConnectionError):  # then the reader has ended, too
                    await self._writer.drain()
                return await answer
        finally:
            self._answers.pop(call_id, None)

    async def collective_rpc(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of the engine's workers, or ``loans.…`` of its scheduler."""
        answers: list[Any] = await self.call("collective_rpc", method, *args, timeout_s=timeout_s)
        return answers

    async def move_requests(self, to: str, most: int, *, timeout_s: float) -> int:
        """Have clients take up to ``most`` requests to the replica ``to``; returns how many left.
        The others go on here. The engine has ``timeout_s`` to choose them, and clients again to
        move them."""
        await self.call("move_requests", to, most, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            left, undecided = await self.call("moved", timeout_s=timeout_s)
            if not undecided or time.monotonic() > deadline:
                return int(left)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def set_adapters(
        self, wanted: Sequence[Mapping[str, Any]], *, timeout_s: float
    ) -> tuple[dict[int, str], int]:
        """Have the engine load adapters, and unload all others that no request is computed with. As
        of :meth:`EngineAdapters.set`, with numbers as the keys of ``problems``."""
        said = await self.call("set_adapters", list(wanted), timeout_s=timeout_s)
        return {int(number): why for number, why in said["problems"].items()}, said["left"]

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        """Have the engine give memory back, until :meth:`wake` or its next request. ``level`` is
        vLLM's, of a GPU: with 2 the weights are dropped, too. Raises ValueError if it has requests,
        or lends."""
        await self.call("sleep", level, timeout_s=timeout_s)

    async def wake(self, *, timeout_s: float) -> None:
        await self.call("wake_up", timeout_s=timeout_s)

    async def turn(self) -> int:
        """Return once the engine is between two steps, or idle. Returns what its thread that sends
        outputs has done so far, which is more at each call unless that hangs."""
        done: int = await self.call("turn", timeout_s=None)
        return done

    async def stats(self, timeout_s: float) -> ReplicaLoad:
        """The engine's load as of its last step, even while a step takes long."""
        return ReplicaLoad.model_validate(await self.call("stats", timeout_s=timeout_s))

    async def metrics(self, timeout_s: float) -> str:
        page: str = await self.call("metrics", timeout_s=timeout_s)
        return page

    async def ended(self) -> str:
        """Wait for the engine's end; returns how it ended, as a sentence's end."""
        await asyncio.wait([self._reading])
        return await self._how_it_ended()

    async def end_if_wedged(
        self,
        tell: Callable[[str], Awaitable[object]],
        *,
        limit_s: float = WEDGED_S,
        look_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Kill the engine once it has stood still for long, after ``tell`` was told why. Returns
        when it has ended. :meth:`ended` then says the same. The other arguments are those of
        :func:`~loomserve.platform.engine.process.peer_process.until_wedged`."""
        with contextlib.suppress(EngineEnded):
            why = await until_wedged(self.pid, self.turn, limit_s=limit_s, look_s=look_s)
            await tell(why)
            self._ended_for = why
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """End the engine: in good order within the time, else at once. Clients are told."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EngineEnded, TimeoutError, *ERRORS.values()):
            if timeout_s > 0:
                await self.call("stop", timeout_s=timeout_s)
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(_POLL_INTERVAL_S)
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self.address.remove()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take answers until the engine's end, then fail all calls that wait for one."""
        try:
            while True:
                (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if length > _LONGEST_FRAME:
                    raise ConnectionError("what the engine said is too long")
                self._take(*msgspec.msgpack.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            how = await self._how_it_ended()
        except asyncio.CancelledError:
            how = "was stopped"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineEnded(how))

    def _take(self, call_id: int, kind: str, value: Any) -> None:
        answer = self._answers.get(call_id)
        if answer is None or answer.done():
            return
        if kind:
            answer.set_exception(ERRORS.get(kind, RuntimeError)(value))
        else:
            answer.set_result(value)

    async def _how_it_ended(self) -> str:
        for _ in range(int(1 / _POLL_INTERVAL_S)):
            if (code := self._process.poll()) is not None:
                break
            await asyncio.sleep(_POLL_INTERVAL_S)
        else:
            return "its process does not speak to the replica any more"
        if self._ended_for:
            return f"{self._ended_for}, so it was killed"
        if code == -signal.SIGKILL:
            return "its process was ended by SIGKILL"
        how = f"ended with status {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return f"its process {how}; {own_log()} says why"


class MoveOrders:
    def __init__(self, engine: EngineHost, told: Callable[[], Awaitable[None]]) -> None:
        """``told`` is called when there is something new to tell in ``last``."""
        self.last: MovedRequests | None = None
        """The last order, and what came of it."""
        self._engine, self._told = engine, told
        self._task: asyncio.Task[None] | None = None

    def apply(self, order: MoveOrder | None) -> None:
        """Carry an order out, unless that has been done, or one is under way."""
        known = self.last is not None and order is not None and self.last.order == order.id
        if order is not None and not known and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._carry_out(order))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _carry_out(self, order: MoveOrder) -> None:
        left, problem = 0, ""
        try:
            left = await self._engine.move_requests(order.to, order.requests, timeout_s=_MOVING_S)
        except Exception as error:
            _log.warning("no requests could be moved to %s: %r", order.to, error)
            problem = f"the engine could not be asked for its requests: {error!r}"
        self.last = MovedRequests(order=order.id, requests=left, problem=problem)
        with contextlib.suppress(Exception):  # the next heartbeat tells it, too
            await self._told()

"""An engine's process as the replica that started it has it: started, called, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from loomserve.platform.base.errors import StartError
from loomserve.platform.engine.core.messages import (
    ADAPTERS,
    ERRORS,
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
from loomserve.platform.engine.process.engine_process import EngineProcess, start_process
from loomserve.platform.engine.process.policy.silence import WEDGED_S
from loomserve.platform.engine.process.wedge_watch import LOOK_S, until_wedged
from loomserve.platform.run.engine_address import EngineAddress
from loomserve.platform.state import ReplicaLoad

_LOOK_S = 0.02
# A call's answer is refused beyond it; the engine's are some kilobytes.
_LONGEST_FRAME = 64 * 2**20


class EngineEnded(RuntimeError):  # noqa: N818 - a state, not a mistake
    """The engine's process has ended; the message says how."""


class EngineHost:
    """One engine's process. All of it is used in the event loop that started it, whose thread must
    live as long as the engine is to."""

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
        """Start an engine, and wait until it is ready.

        Args:
            start: how to make it.
            environment: what its process has beyond this process's own.
            timeout_s: for all of it.
            fork: whether its process may be forked.

        Raises:
            StartError: it cannot start, or takes too long.
        """
        ours, process = await start_process(
            environment, timeout_s, fork=fork, simulated=start.simulated
        )
        host = cls(process, start.address)
        reader, host._writer = await asyncio.open_connection(sock=ours)
        host._reading = asyncio.create_task(host._read(reader))
        try:
            facts = await host.call(START, start.model_dump(mode="json"), timeout_s=timeout_s)
        except TimeoutError:
            await host.stop(0)
            raise StartError(
                f"the engine was not ready after {timeout_s:.0f} s: look into its log for what it "
                "was doing, or give it more time"
            ) from None
        except Exception as error:
            await host.stop(0)
            raise StartError(f"the engine cannot start: {_first_line(error)}") from None
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
        """Call the engine: ``collective_rpc`` with a name, or another method of ``messages``.

        Args:
            method: answered at once, but for ``collective_rpc``, ``move_requests``,
                ``set_adapters``, ``sleep``, ``turn`` and ``wake_up``, which wait for a step's end.
            args: what can be said in JSON, as is the answer.
            timeout_s: for the answer; None: without end.

        Raises:
            EngineEnded: it has ended, or does before it answers.
            TimeoutError: it has not answered in time.
            Exception: what the method raised: one of ``messages.ERRORS``.
        """
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
        answers: list[Any] = await self.call(RPC, method, *args, timeout_s=timeout_s)
        return answers

    async def move_requests(self, to: str, most: int, *, timeout_s: float) -> int:
        """Have front ends take some requests to another replica, as far as that takes them.

        Args:
            to: the replica's id.
            most: how many requests.
            timeout_s: for the engine to choose them, and again for front ends to move them.

        Returns:
            How many have left; the others go on here.
        """
        await self.call(MOVE, to, most, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            left, undecided = await self.call(MOVED, timeout_s=timeout_s)
            if not undecided or time.monotonic() > deadline:
                return int(left)
            await asyncio.sleep(_LOOK_S)

    async def set_adapters(
        self, wanted: Sequence[Mapping[str, Any]], *, timeout_s: float
    ) -> tuple[dict[int, str], int]:
        """Have the engine load adapters, and unload all others that no request is computed with.

        Args:
            wanted: of each adapter ``id``, ``name`` (by which its KV is told apart) and ``path``.
            timeout_s: for it.

        Returns:
            By number why some cannot be loaded, and how many are still there for their requests.

        Raises:
            ValueError: it was started without adapters.
        """
        said = await self.call(ADAPTERS, list(wanted), timeout_s=timeout_s)
        return {int(number): why for number, why in said["problems"].items()}, said["left"]

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        """Have the engine give memory back, until :meth:`wake` or its next request.

        Args:
            level: vLLM's, of a GPU: with 2 the weights are dropped, too.
            timeout_s: for it.

        Raises:
            ValueError: it has requests, or lends.
        """
        await self.call(SLEEP, level, timeout_s=timeout_s)

    async def wake(self, *, timeout_s: float) -> None:
        """Have the engine take its memory again."""
        await self.call(WAKE, timeout_s=timeout_s)

    async def turn(self) -> None:
        """Returns once the engine is between two steps, or idle."""
        await self.call(TURN, timeout_s=None)

    async def stats(self, timeout_s: float) -> ReplicaLoad:
        """The engine's load as of its last step, even while a step takes long."""
        return ReplicaLoad.model_validate(await self.call(STATS, timeout_s=timeout_s))

    async def metrics(self, timeout_s: float) -> str:
        """The engine's own metrics, as Prometheus reads them."""
        page: str = await self.call(METRICS, timeout_s=timeout_s)
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
        look_s: float = LOOK_S,
    ) -> None:
        """Kill the engine once it has stood still for long, after ``tell`` was told why; returns
        when it has ended. :meth:`ended` then says the same.

        Args as of :func:`~loomserve.platform.engine.process.wedge_watch.until_wedged`.
        """
        with contextlib.suppress(EngineEnded):
            why = await until_wedged(self.pid, self.turn, limit_s=limit_s, look_s=look_s)
            await tell(why)
            self._ended_for = why
            self._process.kill()

    async def stop(self, timeout_s: float) -> None:
        """End the engine: in good order within the time, else at once. Front ends are told."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EngineEnded, TimeoutError, *ERRORS.values()):
            if timeout_s > 0:
                await self.call(STOP, timeout_s=timeout_s)
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(_LOOK_S)
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self.address.remove()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take answers until the engine's end, by which whoever waits for one is told of it."""
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
        for _ in range(int(1 / _LOOK_S)):
            if (code := self._process.poll()) is not None:
                break
            await asyncio.sleep(_LOOK_S)
        else:
            return "its process does not speak to the replica any more"
        if self._ended_for:
            return f"{self._ended_for}, so it was killed"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with status {code}; its log says why"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

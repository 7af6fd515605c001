"""The process of an offline model: an actor of the batch lane's, which dies with it.

Its computing threads are in the kernel's idle class: they run on cores that nothing else wants at
that moment, so that an engine on the same cores always goes first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from loomserve.deployments.worker_launcher import py_executable
from loomserve.platform.base.errors import BadRequest, RequestError
from loomserve.platform.batch.offline.worker import (
    OfflineAnswer,
    OfflineFacts,
    OfflineLine,
    WorkerGoneError,
)

_ALIVE_S = 60.0
_TITLE = "ray::OfflineProcess"


class OfflineProcess:
    """The actor's class. Errors travel as values, because Ray wraps exceptions."""

    def __init__(
        self, source: str, revision: str | None, cores: Sequence[int], kv_bytes: int
    ) -> None:
        self._source = source
        self._revision = revision
        self._cores = cores
        self._kv_bytes = kv_bytes
        # Threads inherit both from the one that starts them, torch's too.
        self._compute = ThreadPoolExecutor(1, "static-batches", run_last_on, (cores,))
        self._tokenizer = ThreadPoolExecutor(1, "tokenizer", run_last_on, (cores,))
        self._running: dict[str, int] = {}
        self._left: set[int] = set()

    async def load(self) -> OfflineFacts:
        self._lines, facts = await self._in(self._compute, self._load)
        found: OfflineFacts = facts
        return found

    def _load(self) -> Any:
        # torch takes seconds to import, and starts threads of its own.
        from loomserve.platform.batch.offline.executor import OfflineExecutor
        from loomserve.platform.batch.offline.lines import OfflineLines
        from loomserve.platform.devices.machine import cpu_dtype

        executor = OfflineExecutor(
            self._source,
            threads=len(self._cores),
            kv_bytes=self._kv_bytes,
            dtype=cpu_dtype(),
            revision=self._revision,
        )
        facts = OfflineFacts(executor.context, executor.token_bytes)
        return OfflineLines(self._source, executor, self._revision), facts

    async def prompt_tokens(self, line: OfflineLine) -> int | BadRequest:
        try:
            return len((await self._in(self._tokenizer, self._lines.read, line)).prompt)
        except BadRequest as error:
            return error

    async def run(self, lines: Sequence[OfflineLine]) -> Sequence[OfflineAnswer] | None:
        from loomserve.platform.batch.offline.executor import OutOfMemoryError

        self._running = {line.id: at for at, line in enumerate(lines)}
        self._left = set()
        try:
            requests = [await self._in(self._tokenizer, self._lines.read, one) for one in lines]
            found = await self._in(self._compute, self._lines.run, requests, self._who_left)
        except OutOfMemoryError:
            return None
        finally:
            self._running = {}
        return [
            await self._in(self._tokenizer, self._lines.answer, *one)
            for one in zip(lines, requests, found, strict=True)
        ]

    async def answer(self) -> None:
        """Show that the process is not stopped."""

    async def leave(self, line_id: str) -> None:
        if line_id in self._running:
            self._left.add(self._running[line_id])

    def _who_left(self) -> Collection[int]:
        return frozenset(self._left)

    async def _in(self, threads: ThreadPoolExecutor, work: Any, *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *given)


def run_last_on(cores: Sequence[int]) -> None:
    """Run this thread, and threads that it starts, on these cores when nothing else would run."""
    os.sched_setaffinity(0, cores)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class RayOfflineWorker:
    """The :class:`~loomserve.platform.batch.offline.worker.OfflineWorker` that asks the actor."""

    def __init__(
        self,
        source: str,
        revision: str | None,
        cores: Sequence[int],
        kv_bytes: int,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """``resources``: what the actor asks Ray for, to be on its device; None: any place."""
        actor = ray.remote(OfflineProcess).options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            resources=dict(resources or {}),
            runtime_env={"py_executable": py_executable(_TITLE)},
        )
        self._actor = actor.remote(source, revision, list(cores), kv_bytes)

    async def facts(self) -> OfflineFacts:
        facts: OfflineFacts = await self._ask(self._actor.load)
        return facts

    async def prompt_tokens(self, line: OfflineLine) -> int:
        tokens: int | RequestError = await self._ask(self._actor.prompt_tokens, line)
        if isinstance(tokens, RequestError):
            raise tokens
        return tokens

    async def run(self, lines: Sequence[OfflineLine]) -> Sequence[OfflineAnswer] | None:
        answers: Sequence[OfflineAnswer] | None = await self._ask(self._actor.run, lines)
        return answers

    async def leave(self, line_id: str) -> None:
        await self._ask(self._actor.leave, line_id)

    def stop(self) -> None:
        ray.kill(self._actor)

    async def _ask(self, method: Any, *given: Any) -> Any:
        # A batch may take hours, so only the process itself is asked within a time.
        asked = asyncio.ensure_future(method.remote(*given))
        try:
            while not (await asyncio.wait((asked,), timeout=_ALIVE_S))[0]:
                async with asyncio.timeout(_ALIVE_S):
                    await self._actor.answer.remote()
            return asked.result()
        except TimeoutError:
            raise WorkerGoneError(f"its process has not answered for {_ALIVE_S:g} s") from None
        except RayError as error:
            raise WorkerGoneError(str(error).splitlines()[-1]) from None
        finally:
            asked.cancel()

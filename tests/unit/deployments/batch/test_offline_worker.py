"""The process of an offline model: behind everything else, and told who has left."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.deployments.batch import offline_worker
from loomserve.deployments.batch.offline_worker import (
    OfflineProcess,
    RayOfflineWorker,
    run_last_on,
)
from loomserve.platform.base.errors import BadRequest
from loomserve.platform.batch.offline.worker import OfflineAnswer, OfflineLine, WorkerGoneError
from tests.waiting import PATIENCE_S

CORE = min(os.sched_getaffinity(0))


def place() -> tuple[int, set[int]]:
    return os.sched_getscheduler(0), os.sched_getaffinity(0)


def test_threads_that_compute_and_those_that_they_start_come_after_all_others() -> None:
    def of_a_further_thread() -> list[tuple[int, set[int]]]:
        found: list[tuple[int, set[int]]] = []
        thread = threading.Thread(target=lambda: found.append(place()))
        thread.start()
        thread.join()
        return [place(), *found]

    before = place()
    with ThreadPoolExecutor(1, initializer=run_last_on, initargs=([CORE],)) as threads:
        assert threads.submit(of_a_further_thread).result() == [(os.SCHED_IDLE, {CORE})] * 2
    assert place() == before


class Lines:
    """A model whose batch goes on until all but the first have left it."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, line: OfflineLine) -> str:
        self.may_read.wait(PATIENCE_S)
        if line.id == "bad":
            raise BadRequest("no", param="prompt")
        return line.id

    def run(self, requests: Sequence[str], left: Callable[[], Collection[int]]) -> list[list[int]]:
        until = time.monotonic() + PATIENCE_S
        while len(left()) < len(requests) - 1:
            assert time.monotonic() < until
            time.sleep(0.005)
        return [[at] * (0 if at in left() else 3) for at in range(len(requests))]

    def answer(self, line: OfflineLine, request: str, tokens: Sequence[int]) -> OfflineAnswer:
        assert line.id == request
        return OfflineAnswer(request.encode(), len(tokens))


def process() -> Any:
    made: Any = OfflineProcess("demo", None, [CORE], 1)
    made._lines = Lines()
    return made


def lines(*names: str) -> list[OfflineLine]:
    return [OfflineLine(name, "/v1/completions", {"model": "m"}) for name in names]


def test_a_batch_is_told_who_leaves_it_even_before_it_computes() -> None:
    async def scenario() -> None:
        made = process()
        made._lines.may_read.clear()
        running = asyncio.create_task(made.run(lines("a", "b", "c")))
        await asyncio.sleep(0)
        await made.leave("b")
        made._lines.may_read.set()
        await asyncio.sleep(0.05)
        await made.leave("not here")
        assert not running.done()
        await made.leave("c")
        assert [one.tokens for one in await running] == [3, 0, 0]
        # Who has left one batch is awaited in the next.
        again = asyncio.create_task(made.run(lines("b", "x")))
        await asyncio.sleep(0.05)
        assert not again.done()
        await made.leave("x")
        assert [one.tokens for one in await again] == [3, 0]

    asyncio.run(scenario())


def test_a_refusal_travels_as_a_value_and_arrives_whole() -> None:
    refused = asyncio.run(process().prompt_tokens(*lines("bad")))
    assert isinstance(refused, BadRequest)
    assert pickle.loads(pickle.dumps(refused)).body() == refused.body()


def test_a_batch_may_take_long_and_a_process_that_is_stopped_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offline_worker, "_ALIVE_S", 0.05)

    class Method:
        """An actor's method, which takes so long."""

        def __init__(self, takes_s: float) -> None:
            self.takes_s = takes_s

        async def remote(self, *given: object) -> str:
            await asyncio.sleep(self.takes_s)
            return "done"

    async def run(answers_s: float) -> object:
        worker = RayOfflineWorker.__new__(RayOfflineWorker)
        worker._actor = SimpleNamespace(run=Method(0.5), answer=Method(answers_s))
        return await worker.run(lines("a"))

    assert asyncio.run(run(0.0)) == "done"
    with pytest.raises(WorkerGoneError, match=r"not answered for 0\.05 s"):
        asyncio.run(run(60.0))

"""Engines of :mod:`benchmarks.weave`, without the platform, and what each has served."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS, token_times
from benchmarks.workload import PrefixRequest
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog
from loomserve.platform.state.lending_options import LENDING_CONFIG

CONTEXT = 512
STEP_TOKENS = 256


@dataclass(frozen=True)
class Served:
    """One model's requests of one run; milliseconds.

    Attributes:
        output_tokens: that came while the run lasted.
        seconds: how long it lasted.
        tpot_ms: of each request that was answered.
        ttft_ms: of each that had a first token.
        given_up: requests that were due and not answered when the run ended.
    """

    output_tokens: int
    seconds: float
    tpot_ms: list[float]
    ttft_ms: list[float]
    given_up: int = 0

    @property
    def throughput(self) -> float:
        return self.output_tokens / self.seconds


class Engine:
    """A real engine in processes of its own, whose worker is bound to ``cores``.

    ``blocks`` are of KV memory, one of which is vLLM's placeholder; ``options`` are vLLM's.
    """

    def __init__(self, cores: Sequence[int], blocks: int, places: int, **options: Any) -> None:
        os.environ.update(
            VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, cores)),
            OMP_NUM_THREADS="1",
            VLLM_USE_V2_MODEL_RUNNER="0",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(catalog.resolve("demo", Path.cwd())),
                dtype=cpu_dtype(),
                enforce_eager=True,
                block_size=BLOCK_TOKENS,
                max_model_len=CONTEXT,
                max_num_seqs=places,
                max_num_batched_tokens=STEP_TOKENS,
                kv_cache_memory_bytes=blocks * BLOCK_BYTES,
                pipeline_parallel_size=len(cores),
                **options,
            )
        )
        self._names = itertools.count()

    async def call(self, method: str, *args: Any) -> Any:
        return (await self._llm.collective_rpc(f"loans.{method}", args=args))[0]

    async def forget(self) -> None:
        """Empty the prefix cache, once requests that were given up have left.

        Raises:
            RuntimeError: they have not within half a minute.
        """
        for _ in range(300):
            if await self._llm.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("requests that were given up are still with the engine")

    async def serve(
        self, requests: Sequence[PrefixRequest], seed: str, ended: asyncio.Event | None = None
    ) -> Served:
        """All requests to their end, or what there is of them when ``ended`` is set."""
        begin = time.monotonic()
        times: list[list[float]] = [[] for _ in requests]
        tasks = [
            asyncio.create_task(self._serve(one, begin, seed, of))
            for one, of in zip(requests, times, strict=True)
        ]
        if ended is None:
            await asyncio.gather(*tasks)
        else:
            await ended.wait()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return served_of(requests, times, begin, time.monotonic())

    async def _serve(self, one: PrefixRequest, begin: float, seed: str, times: list[float]) -> None:
        """Add to ``times`` when each of its tokens came."""
        await asyncio.sleep(begin + one.at_s - time.monotonic())
        name = str(next(self._names))
        await token_times(self._llm, one.prompt(seed), one.output_tokens, name, times)

    def close(self) -> None:
        self._llm.shutdown()


def served_of(
    requests: Sequence[PrefixRequest], times: Sequence[Sequence[float]], begin: float, end: float
) -> Served:
    """What came of requests between two times, by when the tokens of each came."""
    whole = [len(of) == one.output_tokens for of, one in zip(times, requests, strict=True)]
    return Served(
        output_tokens=sum(map(len, times)),
        seconds=end - begin,
        tpot_ms=[
            1000 * (of[-1] - of[0]) / (len(of) - 1)
            for of, complete in zip(times, whole, strict=True)
            if complete and len(of) > 1
        ],
        ttft_ms=[
            1000 * (of[0] - begin - one.at_s) for of, one in zip(times, requests, strict=True) if of
        ],
        given_up=sum(
            not complete and one.at_s < end - begin
            for complete, one in zip(whole, requests, strict=True)
        ),
    )


def woven(core: int, blocks: int, places: int, **lending: Any) -> Engine:
    return Engine(
        [core],
        blocks,
        places,
        distributed_executor_backend=_executor(),
        worker_cls="loomserve.platform.lending.engine.cpu_worker.RemoteAttentionWorker",
        scheduler_cls="loomserve.platform.lending.engine.scheduler.make_scheduler",
        additional_config={"loomserve": {"queue": "fcfs"}, LENDING_CONFIG: lending},
    )


def plain(cores: Sequence[int], blocks: int, places: int) -> Engine:
    worker = "loomserve.platform.engine.worker.NonSpinningWorker"
    return Engine(
        cores, blocks, places, worker_cls=worker, distributed_executor_backend=_executor()
    )


def stock(core: int, blocks: int, places: int) -> Engine:
    """vLLM as it comes."""
    return Engine([core], blocks, places)


def _executor() -> type:
    # vLLM takes no name of a class for more than one stage.
    from loomserve.platform.engine.executor import NonSpinningExecutor

    return NonSpinningExecutor


@asynccontextmanager
async def loan(hot: Engine, cold: Engine) -> AsyncIterator[int]:
    """While open, the hot engine may place requests with the cold one."""
    name = f"weave-{time.monotonic_ns()}"
    path = f"/dev/shm/loomserve-ring-{name}"
    await cold.call("lend", name, path, await hot.call("borrowing"))
    side = await hot.call("borrow", name, path)
    try:
        yield side
    finally:
        await hot.call("end_loan", side)
        await cold.call("end_lending", name)

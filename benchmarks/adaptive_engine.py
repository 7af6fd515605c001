"""Engines of :mod:`benchmarks.adaptive`, each in a process of its own, and what they serve."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS, offline_engine
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.policy.hints import EXPECTED, Expected

BLOCKS = 2048 // BLOCK_TOKENS
"""KV memory of each engine, but for stock vLLM with all memory."""
CONTEXT = 1536
STEP_TOKENS = 512
COUNTS = ("swapped_out", "swapped_in", "recomputed", "lost_tokens", "decision_s")
"""Of our scheduler."""
_VOCABULARY = (1000, 40000)


@dataclass(frozen=True)
class Length:
    """Tokens of a prompt and of its answer; and the latter as the scheduler is told, if it is."""

    prompt: int
    answer: int
    predicted: Expected | None = None


@dataclass(frozen=True)
class Setting:
    lengths: str
    max_output: int
    batch_limit: int


@dataclass(frozen=True)
class Served:
    """All requests of a set by one arm; ``counts`` are what the scheduler counted meanwhile."""

    seconds: float
    answers: list[list[int]]
    turnaround_s: float
    weighted_turnaround: float
    computed_ratio: float
    counts: dict[str, float]

    @property
    def throughput(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.answers),
            "seconds": self.seconds,
            "tokens_per_second": self.throughput,
            "turnaround_s": self.turnaround_s,
            "weighted_turnaround": self.weighted_turnaround,
            "computed_ratio": self.computed_ratio,
            **self.counts,
        }

    def differs_from(self, other: Served) -> int:
        """Requests whose answers are not the same tokens."""
        return sum(a != b for a, b in zip(self.answers, other.answers, strict=True))


class Engine:
    """A real engine within this process; with the KV store and our scheduler, or without."""

    def __init__(
        self,
        kv_transfer_config: dict[str, Any] | None,
        places: int,
        swap_bytes: int,
        blocks: int = BLOCKS,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # limits and options change between runs
        ours: dict[str, Any] = {}
        if kv_transfer_config is not None:
            ours["scheduler_cls"] = "loomserve.platform.engine.scheduler.make_scheduler"
        self._llm = offline_engine(
            str(catalog.resolve("demo", Path.cwd())),
            kv_transfer_config,
            max_model_len=CONTEXT,
            max_num_seqs=places,
            logits_processors=["benchmarks.answer_end:AnswerEnd"],
            max_num_batched_tokens=STEP_TOKENS,
            # One is vLLM's placeholder.
            num_gpu_blocks_override=blocks + 1,
            kv_cache_memory_bytes=(blocks + 1) * BLOCK_BYTES,
            disable_log_stats=False,
            **ours,
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._swap_bytes = swap_bytes
        self._requests = itertools.count()
        self._computed = 0
        self._count_computed()

    def _count_computed(self) -> None:
        schedule = self._scheduler.schedule

        def counted(*args: Any) -> Any:
            scheduled = schedule(*args)
            self._computed += scheduled.total_num_scheduled_tokens
            return scheduled

        self._scheduler.schedule = counted

    def serve(
        self,
        lengths: Sequence[Length],
        setting: Setting,
        rate: float | None,
        options: Mapping[str, Any] | None,
        seed: str,
    ) -> Served:
        """All requests to their end, so many a second, or all sent at once; tokens by ``seed``."""
        from benchmarks.answer_end import ANSWER_TOKENS

        self._use(setting.batch_limit, options)
        source = random.Random(seed)
        counted, computed = self._counts(), self._computed
        waiting = deque(
            (0.0 if rate is None else number / rate, length)
            for number, length in enumerate(lengths)
        )
        sent: dict[str, float] = {}
        finished: dict[str, Any] = {}
        begin = time.monotonic()
        while waiting or self._engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= time.monotonic() - begin:
                at_s, length = waiting.popleft()
                ids = [source.randrange(*_VOCABULARY) for _ in range(length.prompt)]
                asked: dict[str, Any] = {ANSWER_TOKENS: length.answer}
                if length.predicted is not None:
                    asked[EXPECTED] = [length.predicted.tokens, length.predicted.high]
                sent[self._send(ids, setting.max_output, asked)] = begin + at_s
            finished |= {one.request_id: one for one in self._engine.step() if one.finished}
        seconds = time.monotonic() - begin
        took = {name: finished[name].metrics.last_token_ts - at for name, at in sent.items()}
        return Served(
            seconds=seconds,
            answers=[list(finished[name].outputs[0].token_ids) for name in sent],
            turnaround_s=statistics.fmean(took.values()),
            weighted_turnaround=statistics.fmean(
                took[name] / (one.metrics.last_token_ts - one.metrics.scheduled_ts)
                for name, one in finished.items()
            ),
            computed_ratio=(self._computed - computed)
            / sum(length.prompt + length.answer - 1 for length in lengths),
            counts={name: after - counted[name] for name, after in self._counts().items()},
        )

    def _send(self, prompt: list[int], most: int, extra: dict[str, Any]) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        name = str(next(self._requests))
        self._engine.add_request(
            name,
            TokensPrompt(prompt_token_ids=prompt),
            SamplingParams(
                temperature=0,
                max_tokens=most,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=extra,
            ),
        )
        return name

    def _use(self, batch_limit: int, options: Mapping[str, Any] | None) -> None:
        self._llm.reset_prefix_cache()
        self._scheduler.most_running = batch_limit
        if options is not None:
            from loomserve.platform.scheduling.options import SchedulerOptions

            self._scheduler.use(SchedulerOptions(**options, swap_bytes=self._swap_bytes))

    def _counts(self) -> dict[str, float]:
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        figures = self.figures()
        return {
            "preemptions": metrics["vllm:num_preemptions"].value,
            **{name: figures[name] for name in COUNTS if name in figures},
        }

    def figures(self) -> dict[str, float]:
        """What our scheduler counts and how far its predictions are off; nothing for vLLM's."""
        connector = self._scheduler.connector
        found: dict[str, float] = connector.get_kv_connector_stats().reduce() if connector else {}
        return found


class EngineProcess:
    """An engine in a process of its own, which it binds to a core; idle between calls."""

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=args)

    def call(self, method: str, *args: Any) -> Any:
        return self._pool.submit(_call, method, *args).result()

    def close(self) -> None:
        self._pool.shutdown()


_engine: Engine


def _start(*args: Any) -> None:
    global _engine
    # vLLM binds its workers only, and this process is worker and all. Core 0 is everyone's.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    _engine = Engine(*args)


def _call(method: str, *args: Any) -> Any:
    return getattr(_engine, method)(*args)

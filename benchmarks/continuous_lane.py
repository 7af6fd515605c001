"""The same requests by vLLM's continuous batching: really, or step by step by a fitted model."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import BLOCK_TOKENS, offline_engine
from benchmarks.static_lane import LaneRequest
from loomserve.platform.costs.step_time import OnlineModel, Step, TimedStep
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    SimulatedRequest,
    Simulator,
)

STEP_TOKENS = 512
PLACES = 64
_VOCABULARY = (1000, 40000)


class ContinuousEngine:
    """A vLLM engine within this process, on one core, with so many tokens of KV memory."""

    def __init__(self, kv_tokens: int, token_bytes: int, context: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        blocks = kv_tokens // BLOCK_TOKENS
        self._llm = offline_engine(
            str(catalog.resolve("demo", Path.cwd())),
            None,
            core=max(os.sched_getaffinity(0)),
            max_model_len=context,
            max_num_seqs=PLACES,
            max_num_batched_tokens=STEP_TOKENS,
            # One is vLLM's placeholder.
            num_gpu_blocks_override=blocks + 1,
            kv_cache_memory_bytes=(blocks + 1) * BLOCK_TOKENS * token_bytes,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        self._engine = self._llm.llm_engine
        scheduler = self._engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def seen(*args: Any) -> Any:
            self._scheduled = schedule(*args)
            return self._scheduled

        scheduler.schedule = seen

    def serve(
        self, requests: Sequence[LaneRequest], clock: Callable[[], float]
    ) -> tuple[dict[str, float], list[TimedStep]]:
        """When each request ended, and the steps."""
        coming = sorted(requests, key=lambda one: one.known.arrived_s, reverse=True)
        finished: dict[str, float] = {}
        steps: list[TimedStep] = []
        now = 0.0
        while coming or self._engine.has_unfinished_requests():
            if not self._engine.has_unfinished_requests():
                now = max(now, coming[-1].known.arrived_s)
            while coming and coming[-1].known.arrived_s <= now:
                self._send(coming.pop())
            begin = clock()
            outputs = self._engine.step()
            seconds = clock() - begin
            now += seconds
            if step := self._step():
                steps.append((step, seconds))
            finished |= {one.request_id: now for one in outputs if one.finished}
        return finished, steps

    def _send(self, request: LaneRequest) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        source = random.Random(request.known.id)
        ids = source.choices(range(*_VOCABULARY), k=request.known.input_tokens)
        self._engine.add_request(
            request.known.id,
            TokensPrompt(prompt_token_ids=ids),
            SamplingParams(
                temperature=0,
                max_tokens=request.output_tokens,
                min_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )

    def _step(self) -> Step | None:
        """What vLLM scheduled last."""
        out = self._scheduled
        computed = {one.req_id: one.num_computed_tokens for one in out.scheduled_new_reqs}
        cached = out.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tokens = out.num_scheduled_tokens
        return Step.of((computed[name], tokens[name]) for name in tokens) if tokens else None


def simulated(
    requests: Iterable[LaneRequest], steps: OnlineModel, kv_tokens: int
) -> dict[str, float]:
    """When each request would end."""

    def nothing(tokens: int) -> float:
        return 0.0

    limits = Limits(kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS, 1, PLACES, STEP_TOKENS)
    simulator = Simulator(
        [
            SimulatedRequest(
                one.known.id,
                one.known.arrived_s,
                one.known.input_tokens,
                one.output_tokens,
                one.output_tokens,
            )
            for one in requests
        ],
        limits,
        Policies(),
        Costs(nothing, nothing, lambda step: 0.0),
    )
    now = 0.0
    while (due := simulator.due_s) is not None:
        now = max(now, due)
        step = simulator.schedule(now)
        now += steps.seconds(Step.of((share.computed, share.tokens) for share in step.shares))
        simulator.end(step, now)
    return {name: times.finished_s for name, times in simulator.times.items()}


def fitted(steps: Iterable[TimedStep]) -> OnlineModel:
    model = OnlineModel()
    for step, seconds in steps:
        model.learn(step, seconds)
    return model

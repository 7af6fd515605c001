"""Times the steps of a vLLM engine, for profiles and in production."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from loomserve.platform.config import Device
from loomserve.platform.costs.step_time import Step, TimedStep
from loomserve.platform.devices.binding import engine_environment, on_cores
from loomserve.platform.devices.gpus import FREE_AT_START
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.engine.blocking_wait import sleep_instead_of_spinning


def step_of(scheduled: SchedulerOutput) -> Step:
    tokens, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
    new = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
    total, requests = scheduled.total_num_scheduled_tokens, len(tokens)
    if total == requests:
        # One token of each: the sums are those of all alike.
        context = sum(cached.num_computed_tokens) + sum(new.values())
        return Step(total, requests, context, context + total / 2)
    computed = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return Step.of((computed[request], count) for request, count in tokens.items())


class StepClock:
    """Clock of steps, from a step's schedule to its output; ``now`` is monotonic seconds. A step
    that vLLM schedules while the one before still runs begins when that one ends."""

    def __init__(self) -> None:
        self._running: deque[tuple[SchedulerOutput, float]] = deque()
        self._last_end = 0.0
        self.last_s = 0.0
        """Seconds of the step that ended last, of those that computed something."""

    def began(self, scheduled: SchedulerOutput, now: float) -> None:
        if scheduled.total_num_scheduled_tokens:
            self._running.append((scheduled, now))

    def ended(self, scheduled: SchedulerOutput, now: float) -> TimedStep | None:
        """End a step whose output is there; None if it computed nothing, or loaded KV meanwhile."""
        if not scheduled.total_num_scheduled_tokens:
            return None
        _, began = self._running.popleft()
        self.last_s = seconds = now - max(began, self._last_end)
        self._last_end = now
        return None if scheduled.has_sync_kv_loads else (step_of(scheduled), seconds)


class _TimingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler that keeps every step in ``timed``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = StepClock()
        self.timed: list[TimedStep] = []

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        scheduled = super().schedule(throttle_prefills)
        self._clock.began(scheduled, time.perf_counter())
        return scheduled

    def update_from_output(self, scheduler_output: SchedulerOutput, *output: Any) -> Any:
        timed = self._clock.ended(scheduler_output, time.perf_counter())
        if timed is not None:
            self.timed.append(timed)
        return super().update_from_output(scheduler_output, *output)


class _TimingAsyncScheduler(_TimingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same with a step in flight while the next is scheduled."""


def timing_scheduler(vllm_config: VllmConfig, **options: Any) -> _TimingScheduler:
    """Value of vLLM's ``scheduler_cls`` for an engine that is profiled."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    kind = _TimingAsyncScheduler if asynchronous else _TimingScheduler
    return kind(vllm_config=vllm_config, **options)


class ProfiledEngine:
    """Engine of vLLM within this process, bound to a device as the platform's engines are.

    vLLM binds only workers in other processes, so this binds the calling thread until the engine is
    closed, and lets torch compute with as many threads as the device has cores.

    ``options`` are vLLM's own, and override the defaults here.
    """

    def __init__(self, model: str, device: Device, **options: Any) -> None:
        os.environ.update(
            engine_environment(device),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the scheduler's samples are read in this process
            VLLM_USE_V2_MODEL_RUNNER="0",
        )
        from vllm import LLM

        bound_to: dict[str, Any] = {"gpu_memory_utilization": FREE_AT_START}
        if device.kind == "cpu":
            torch.set_num_threads(len(device.cores))
            # The platform's engines do so too: a spinning thread takes time on the worker's core.
            sleep_instead_of_spinning()
            bound_to = {
                "dtype": cpu_dtype(),
                "worker_cls": "loomserve.platform.engine.worker.NonSpinningWorker",
            }
        with ExitStack() as bound:
            bound.enter_context(on_cores(device))
            self._engine = LLM(
                model=model,
                scheduler_cls=f"{__name__}.{timing_scheduler.__name__}",
                use_tqdm_on_load=False,
                **{**bound_to, **options},
            ).llm_engine
            self._bound = bound.pop_all()
        self.core = self._engine.engine_core.engine_core
        self.config: VllmConfig = self._engine.vllm_config
        self._requests = 0

    @property
    def timed(self) -> list[TimedStep]:
        """All steps so far; the caller may clear it."""
        timed: list[TimedStep] = self.core.scheduler.timed
        return timed

    @property
    def capacity(self) -> int:
        cache = self.config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    def add(self, prompt: Sequence[int], outputs: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._requests += 1
        self._engine.add_request(
            str(self._requests),
            TokensPrompt(prompt_token_ids=list(prompt)),
            SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False),
        )

    def steps(self) -> Iterator[None]:
        while self._engine.has_unfinished_requests():
            self._engine.step()
            yield

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        self._bound.close()


@dataclass(frozen=True)
class Scene:
    """Few steps of a workload: requests decode, and after two steps others prefill beside them.

    ``decodes`` are contexts, and ``prefills`` are contexts with the number of tokens to compute
    after them. The engine's prefix cache may still hold the KV of a context.
    """

    decodes: Sequence[list[int]]
    prefills: Sequence[tuple[list[int], int]]


_DECODE_STEPS = 4
_PREFILLS_AFTER = 2
_MOST_PREFILLS = 3
_REPEATED_SCENES = 6
_FRESH_SCENES = 12
# Shares of the KV cache's tokens: repeated contexts, those of a round, all of a scene.
_REPEATED, _FRESH, _FULL = 0.1, 0.7, 0.9
# Enough for any regressor; engines on GPUs take more steps in a minute.
_MOST_SAMPLES = 6000


class Workload:
    """Workload of scenes that cover an engine's steps: batch sizes, contexts, prefills, mixes.

    The contexts of a round are prefixes of texts that fill most of the KV cache and stay there. So
    a long context costs its prefill only once, and the requests of a step read different memory, as
    users' requests do. Steps are recorded as the engine schedules them. Every round repeats the
    same few scenes among fresh ones, in random order: their steps tell the machine's noise, and
    drift affects all kinds of steps alike.
    """

    def __init__(self, engine: ProfiledEngine) -> None:
        config = engine.config
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._vocabulary = config.model_config.get_vocab_size()
        self._block: int = config.cache_config.block_size
        self._longest = config.model_config.max_model_len - _DECODE_STEPS
        self._largest = config.scheduler_config.max_num_batched_tokens
        self._most_requests = config.scheduler_config.max_num_seqs
        texts = self._texts(self._most_requests, _REPEATED)
        self._repeated = [self._scene(texts) for _ in range(_REPEATED_SCENES)]

    def run(self, until: float, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
        """Play at least three rounds, until ``clock`` says ``until``; yields the number of samples.

        The repeated scenes are played once before without being counted, as first steps are slow.
        """
        self._play(self._repeated)
        self._engine.timed.clear()
        rounds = 0
        while (rounds < 3 or clock() < until) and len(self._engine.timed) < _MOST_SAMPLES:
            texts = self._texts(self._up_to(self._most_requests), _FRESH)
            fresh = [self._scene(texts) for _ in range(_FRESH_SCENES)]
            self._play(self._repeated + fresh)
            rounds += 1
            yield len(self._engine.timed)

    def _play(self, scenes: Sequence[Scene]) -> None:
        for number in self._random.permutation(len(scenes)):
            scene = scenes[number]
            for context in scene.decodes:
                self._engine.add([*context, *self._tokens(1)], _DECODE_STEPS)
            if not scene.decodes:
                self._prefill(scene)
            for step, _ in enumerate(self._engine.steps(), 1):
                if step == _PREFILLS_AFTER and scene.decodes:
                    self._prefill(scene)

    def _prefill(self, scene: Scene) -> None:
        for context, tokens in scene.prefills:
            self._engine.add([*context, *self._tokens(tokens)], 1)

    def _texts(self, number: int, share: float) -> list[list[int]]:
        """Texts of random lengths, which together take ``share`` of the KV cache."""
        shares = self._random.dirichlet(np.ones(number)) * share * self._engine.capacity
        return [self._tokens(min(self._longest - 1, int(tokens))) for tokens in shares]

    def _scene(self, texts: list[list[int]]) -> Scene:
        kind = self._random.choice(["decode", "prefill", "both"])
        order = [self._prefix(texts[number]) for number in self._random.permutation(len(texts))]
        decodes: list[list[int]] = []
        prefills: list[tuple[list[int], int]] = []
        if kind != "prefill":
            # Half of the time all of them, as engines that preempt are full.
            most = len(order) if self._random.random() < 0.5 else self._up_to(len(order))
            decodes, order = order[:most], order[most:]
        if kind != "decode":
            number = int(self._random.integers(1, _MOST_PREFILLS + 1))
            contexts = [*order, [], [], []][:number]
            held = sum(map(len, [*decodes, *contexts]))
            room = max(1, int(_FULL * self._engine.capacity - held) // number)
            for context in contexts:
                most = min(self._largest, self._longest - len(context), room)
                prefills.append((context, self._up_to(most)))
        return Scene(decodes, prefills)

    def _prefix(self, text: list[int]) -> list[int]:
        """Prefix of whole blocks, as only those stay in the prefix cache; half of the time all."""
        share = 1.0 if self._random.random() < 0.5 else self._random.random()
        return text[: int(share * len(text)) // self._block * self._block]

    def _up_to(self, most: int) -> int:
        """Random number from 1 to ``most``; its logarithm is uniform."""
        return int(math.exp(self._random.uniform(0, math.log(most + 1))))

    def _tokens(self, number: int) -> list[int]:
        tokens: list[int] = self._random.integers(self._vocabulary, size=number).tolist()
        return tokens

"""A real engine's schedule, step by step, is the simulator's at the same times."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import BLOCK_TOKENS, offline_engine
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.policy.hints import DEADLINE, EXPECTED, deadline_of, expected_of
from loomserve.platform.scheduling.policy.preemption import Preemption, PreemptionMode, Victim
from loomserve.platform.scheduling.simulator import (
    Costs,
    Limits,
    Policies,
    SimulatedRequest,
    StepShare,
)
from tests.integration.cores import core
from tests.simulations import Simulation, replay

pytestmark = pytest.mark.engine

BLOCKS = 16
PLACES = 8
STEP_TOKENS = 128
REQUESTS = 32
EVERY_S = 0.05
POLICIES = {
    "fair, adaptive": Policies("fair", "adaptive"),
    "fair, adaptive, whoever fits just now": Policies("fair", "adaptive", peak_admission=False),
    "fair, adaptive, without chunks": Policies("fair", "adaptive", chunked_recompute=False),
    "sjf, swap": Policies("sjf", "swap"),
    "deadline, recompute": Policies("deadline", "recompute"),
}
# Copies are quick here: only little swap space makes some requests leave in the other mode.
SWAP_BLOCKS = {"adaptive": 6, "swap": 40, "recompute": 0}
EXPECTED_MODES: dict[str, set[PreemptionMode]] = {
    "adaptive": {PreemptionMode.SWAP, PreemptionMode.RECOMPUTE},
    "swap": {PreemptionMode.SWAP},
    "recompute": {PreemptionMode.RECOMPUTE},
}


class RecordedCosts(Costs):
    """Of the victims alone; copies are quick here, whatever is predicted of others."""

    def worth_swapping(self, tokens: int) -> bool:
        return True


@dataclass
class Recorded:
    """What an engine did; ``requests`` with the lengths of the answers that they got.

    ``victims`` are all that the preemption policy was asked about.
    """

    limits: Limits
    requests: list[SimulatedRequest] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    shares: list[list[StepShare]] = field(default_factory=list)
    preempted: list[dict[str, PreemptionMode]] = field(default_factory=list)
    victims: list[Victim] = field(default_factory=list)

    def modes(self) -> Counter[PreemptionMode]:
        return Counter(mode for modes in self.preempted for mode in modes.values())

    def simulated(self, policies: Policies) -> Simulation:
        # What is predicted changes with what was measured, so it is part of the record.
        swap_s = iter([victim.swap_s for victim in self.victims])
        recompute_s = iter([victim.recompute_s for victim in self.victims])
        costs = RecordedCosts(
            swap_s=lambda tokens: next(swap_s, 0.0),
            recompute_s=lambda tokens: next(recompute_s, 0.0),
            step_s=lambda step: 0.0,
        )
        times = [*self.starts, self.starts[-1]]
        return replay(self.requests, times, self.limits, policies, costs)


def recording(kind: type[Any]) -> type[Any]:
    """The scheduler, which keeps in ``recorded`` what it does."""

    class Recording(kind):  # type: ignore[misc]
        recorded: Recorded

        def schedule(self, throttle_prefills: bool = False) -> Any:
            self.now, self.left = time.monotonic(), dict[str, PreemptionMode]()
            scheduled = super().schedule(throttle_prefills)
            computed = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
            cached = scheduled.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            self.recorded.starts.append(self.now)
            self.recorded.shares.append(
                [
                    StepShare(name, computed[name], tokens)
                    for name, tokens in scheduled.num_scheduled_tokens.items()
                ]
            )
            self.recorded.preempted.append(self.left)
            return scheduled

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super()._preempt_request(request, *args, **kwargs)
            self.left[request.request_id] = self.mode_of(request)

        def mode_of(self, request: Any) -> PreemptionMode:
            return PreemptionMode.RECOMPUTE

        def arrived_s(self, request: Any) -> float:
            return float(time.monotonic() - (time.time() - request.arrival_time))

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            self.recorded.requests.append(
                SimulatedRequest(
                    name=request.request_id,
                    arrived_s=self.arrived_s(request),
                    prompt_tokens=request.num_prompt_tokens,
                    output_tokens=request.num_output_tokens,
                    max_tokens=request.max_tokens,
                    deadline_s=deadline_of(request.sampling_params.extra_args),
                    expected=expected_of(request.sampling_params.extra_args),
                )
            )
            return super()._free_request(request, *args, **kwargs)

    return Recording


def recording_ours() -> type[Any]:
    from loomserve.platform.engine.scheduler import AdaptiveScheduler
    from loomserve.platform.scheduling.options import SchedulerOptions

    class RecordingOurs(recording(AdaptiveScheduler)):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # The store is swap space only: what is computed again, is computed whole.
            setattr(self.costs, "worth_loading", lambda tokens: False)  # noqa: B010
            setattr(self.costs, "worth_swapping", lambda tokens: True)  # noqa: B010

        def use(self, options: SchedulerOptions) -> None:
            super().use(options)
            decided: Preemption = self.swap.mode_of

            def mode_of(victim: Victim, free_bytes: int) -> PreemptionMode:
                self.recorded.victims.append(victim)
                return decided(victim, free_bytes)

            self.swap.mode_of = mode_of

        def _put_in_order(self, now: float) -> None:
            self.now = now
            super()._put_in_order(now)

        def mode_of(self, request: Any) -> PreemptionMode:
            swapped = request.request_id in self.swap
            return PreemptionMode.SWAP if swapped else PreemptionMode.RECOMPUTE

        def arrived_s(self, request: Any) -> float:
            return float(self.order.seen(request).arrived_s)

    return RecordingOurs


def engine_of(scheduler: type[Any], kv_transfer_config: dict[str, Any] | None) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the record is read in this process
    return offline_engine(
        str(catalog.resolve("demo", Path.cwd())),
        kv_transfer_config,
        core=core(),
        dtype="float32",
        scheduler_cls=scheduler,
        max_model_len=256,
        max_num_seqs=PLACES,
        max_num_batched_tokens=STEP_TOKENS,
        num_gpu_blocks_override=BLOCKS + 1,
        kv_cache_memory_bytes=64 * 2**20,
        enable_prefix_caching=False,
    )


def serve(
    llm: Any, scheduler: Any, block_bytes: int, swap_blocks: int, *, predicted: bool = False
) -> Recorded:
    """Requests of random lengths come one by one, and end at certain tokens.

    ``predicted``: most have a prediction, which many exceed.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    scheduler.recorded = Recorded(
        Limits(BLOCKS, BLOCK_TOKENS, block_bytes, PLACES, STEP_TOKENS, swap_blocks * block_bytes)
    )
    engine = llm.llm_engine
    source = random.Random(7)
    begin = time.monotonic()
    sent = 0
    while sent < REQUESTS or engine.has_unfinished_requests():
        while sent < min(REQUESTS, (time.monotonic() - begin) / EVERY_S):
            prompt = [source.randrange(1000, 40000) for _ in range(source.randint(4, 100))]
            extra: dict[str, Any] = {}
            if sent % 3 == 0:
                extra[DEADLINE] = time.monotonic() + source.uniform(0.5, 10)
            if predicted and sent % 4:
                tokens = source.uniform(1, 30)
                extra[EXPECTED] = [tokens, tokens + source.uniform(0, 20)]
            parameters = SamplingParams(
                temperature=1.0,
                max_tokens=source.randint(1, 80),
                stop_token_ids=list(range(0, 49152, 40)),
                detokenize=False,
                extra_args=extra,
            )
            engine.add_request(str(sent), TokensPrompt(prompt_token_ids=prompt), parameters)
            sent += 1
        if engine.has_unfinished_requests():
            engine.step()
        else:
            time.sleep(0.001)
    recorded: Recorded = scheduler.recorded
    return recorded


def served_by_vllm() -> Recorded:
    from vllm.v1.core.sched.scheduler import Scheduler

    llm = engine_of(recording(Scheduler), None)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return serve(llm, scheduler, block_bytes=1, swap_blocks=0)


def served_by_ours(kv_transfer_config: dict[str, Any]) -> dict[str, Recorded]:
    from loomserve.platform.scheduling.options import SchedulerOptions

    llm = engine_of(recording_ours(), kv_transfer_config)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    block_bytes = scheduler.costs.block_bytes
    found = {}
    for name, policies in POLICIES.items():
        swap_blocks = SWAP_BLOCKS[policies.preemption]
        scheduler.use(
            SchedulerOptions(
                preemption=policies.preemption,
                queue=policies.queue,
                chunked_recompute=policies.chunked_recompute,
                peak_admission=policies.peak_admission,
                swap_bytes=swap_blocks * block_bytes,
                overlap_swap=False,
                prefetch_swap_in=False,
            )
        )
        # Slack depends on times that the engine predicts, and of which there is no record.
        predicted = policies.queue != "deadline"
        found[name] = serve(llm, scheduler, block_bytes, swap_blocks, predicted=predicted)
    return found


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """vLLM binds its process to a core, and cannot be started twice in one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


@pytest.fixture(scope="module")
def recorded_by_ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    folder = tmp_path_factory.mktemp("kv")
    store_options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-swap-{os.getpid()}"),
        memory=256 * 2**20,
    )
    server = StoreServer(open_store(store_options), store_options.address)
    server.start()
    try:
        found: dict[str, Recorded] = in_a_process(
            served_by_ours, store_options.kv_transfer_config("demo")
        )
        return found
    finally:
        server.stop()
        store_options.arena.unlink(missing_ok=True)


def assert_agreement(recorded: Recorded, policies: Policies) -> None:
    assert len(recorded.requests) == REQUESTS
    # Which of them, depends on the machine's speed where both may be taken.
    assert set() < recorded.modes().keys() <= EXPECTED_MODES[policies.preemption]
    simulated = recorded.simulated(policies)
    steps = zip(simulated.steps, recorded.preempted, recorded.shares, strict=True)
    for step, preempted, shares in steps:
        assert (step.preempted, step.shares) == (preempted, shares)
    assert simulated.times.keys() == {one.name for one in recorded.requests}


@pytest.mark.slow
def test_vllms_own_schedule_is_the_simulated_one() -> None:
    assert_agreement(in_a_process(served_by_vllm), Policies())


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_an_engines_schedule_is_the_simulated_one(
    recorded_by_ours: dict[str, Recorded], name: str
) -> None:
    assert_agreement(recorded_by_ours[name], POLICIES[name])

"""Heavy preemption in a real vLLM: the same tokens whichever way KV leaves, and nothing is lost."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import BLOCK_TOKENS, offline_engine
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Flush, Inspect, StoreUsage
from loomserve.platform.config import parse
from loomserve.platform.costs.transfer_time import TransferTimes
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.options import SchedulerOptions, scheduler_options
from loomserve.platform.scheduling.policy.hints import BACKGROUND, DEADLINE, EXPECTED
from tests.integration.conftest import StoredEngine, with_store
from tests.integration.cores import core
from tests.waiting import within

pytestmark = pytest.mark.timeout(600)

SWAP_SPACE = 128 * 2**20
# Else too few would have to leave.
ADAPTIVE = SchedulerOptions(
    preemption="adaptive", queue="fair", swap_bytes=SWAP_SPACE, peak_admission=False
)
REQUESTS = 20


@dataclass
class SchedulingEngine(StoredEngine):
    """An engine of 33 KV blocks within this process, and its store."""

    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def stats(self) -> dict[str, float]:
        half = self.scheduler.connector.connector_scheduler
        numbers: dict[str, float] = half.policy.stats().reduce()
        return numbers

    def begin(self, options: SchedulerOptions) -> None:
        """Nothing is known of any prompt, and nothing is counted."""
        self.scheduler.use(options)
        assert self.llm.reset_prefix_cache()
        self.ask_store(Flush(""), Done)
        self._before = self.counted()

    def counted(self) -> dict[str, float]:
        return {
            name: number for name, number in self.stats().items() if not name.startswith("swap_")
        }

    def since_begin(self, name: str) -> float:
        return self.counted()[name] - self._before[name]

    def add(self, name: str, prompt: Sequence[int], **parameters: Any) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        whole = RequestOutputKind.FINAL_ONLY
        parameters = {"temperature": 0, "ignore_eos": True, "output_kind": whole, **parameters}
        self.llm.llm_engine.add_request(
            name, TokensPrompt(prompt_token_ids=list(prompt)), SamplingParams(**parameters)
        )

    def finish(self, steps: int = 10**6) -> dict[str, Any]:
        """Outputs by request, in the order of their ends, after at most so many steps."""
        done: dict[str, Any] = {}
        while self.llm.llm_engine.has_unfinished_requests() and steps:
            steps -= 1
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = output
        return done


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulingEngine]:
    folder = tmp_path_factory.mktemp("kv")
    store_options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-scheduler-test-{os.getpid()}"),
        memory=256 * 2**20,
        eviction="cost",
    )
    with with_store(SchedulingEngine(None, store_options)) as engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            engine.llm = offline_engine(
                str(catalog.resolve("demo", folder)),
                store_options.kv_transfer_config("demo"),
                core=core(),
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=16,
                max_num_batched_tokens=256,
                kv_cache_memory_bytes=48 * 2**20,
                disable_log_stats=False,
                worker_cls="loomserve.platform.engine.worker.NonSpinningWorker",
                scheduler_cls="loomserve.platform.engine.scheduler.make_scheduler",
                additional_config={"loomserve": ADAPTIVE.model_dump()},
            )
        yield engine


def prompts(seed: int, number: int) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(1000, 40000) for _ in range(source.randrange(10, 130))]
        for _ in range(number)
    ]


def answers(
    engine: SchedulingEngine, seed: int = 1, number: int = REQUESTS
) -> dict[str, list[int]]:
    source = random.Random(seed)
    for at, prompt in enumerate(prompts(seed, number)):
        engine.add(f"{seed}-{at}", prompt, max_tokens=source.randrange(16, 90))
    outputs = engine.finish()
    assert len(outputs) == number
    return {name.split("-")[1]: list(o.outputs[0].token_ids) for name, o in outputs.items()}


@pytest.fixture(scope="module", name="expected")
def _expected(engine: SchedulingEngine) -> dict[str, list[int]]:
    """As vLLM answers by itself: computed again after preemption, first come, first served."""
    engine.begin(SchedulerOptions(overlap_swap=False))
    expected = answers(engine)
    assert engine.since_begin("recomputed") >= 5
    assert engine.since_begin("swapped_out") == 0
    return expected


OPTIONS = {
    "fair": ADAPTIVE,
    "fcfs": ADAPTIVE.model_copy(update={"queue": "fcfs"}),
    "deadline": ADAPTIVE.model_copy(update={"queue": "deadline", "prefetch_swap_in": False}),
    "sjf": ADAPTIVE.model_copy(update={"queue": "sjf", "overlap_swap": False}),
    "small swap space": ADAPTIVE.model_copy(update={"swap_bytes": 12 * 2**20}),
    "swap": ADAPTIVE.model_copy(update={"preemption": "swap", "swap_bytes": 32 * 2**20}),
    "prefill apart": ADAPTIVE.model_copy(update={"chunked_recompute": False}),
    "recompute": ADAPTIVE.model_copy(update={"preemption": "recompute"}),
}
# What these do besides has tests of its own below, and the small swap space has both ways.
SLOW = {"fcfs", "deadline", "sjf", "swap", "recompute"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, options in OPTIONS.items()
    ],
)
def test_tokens_are_the_same_however_requests_make_room(
    engine: SchedulingEngine, expected: dict[str, list[int]], options: SchedulerOptions
) -> None:
    engine.begin(options)
    assert answers(engine) == expected
    preempted = engine.since_begin("swapped_out") + engine.since_begin("recomputed")
    assert preempted >= 3
    assert engine.since_begin("swapped_out") == engine.since_begin("swapped_in")
    assert engine.since_begin("lost_tokens") == 0
    if options.preemption == "recompute":
        assert engine.since_begin("swapped_out") == 0
    elif options.swap_bytes == SWAP_SPACE:
        assert engine.since_begin("recomputed") == 0
    elif options.preemption == "adaptive":
        # The swap space was full at times.
        assert engine.since_begin("recomputed") > 0
        assert engine.since_begin("swapped_out") > 0
    assert engine.stats()["swap_used_bytes"] == 0


def test_tokens_are_the_same_with_the_options_that_the_platform_has_by_default(
    engine: SchedulingEngine, expected: dict[str, list[int]]
) -> None:
    # Admission keeps room for what answers may come to, so few have to leave.
    config = parse("""
        devices: [{name: core0, kind: cpu, cores: [0]}]
        kvstore: {memory: 256MiB}
        models: {chat: {source: demo, devices: [core0]}}
    """)
    options = scheduler_options(config.models[0], config.kvstore)
    assert options.preemption == "adaptive"
    assert options.swap_bytes == SWAP_SPACE
    engine.begin(options)
    assert answers(engine) == expected
    assert engine.since_begin("lost_tokens") == 0
    assert engine.stats()["swap_used_bytes"] == 0


@pytest.mark.slow
def test_fewer_leave_where_it_is_known_how_long_answers_are(
    engine: SchedulingEngine, expected: dict[str, list[int]]
) -> None:
    def preempted(options: SchedulerOptions) -> float:
        engine.begin(options)
        assert answers(engine) == expected
        learnt = engine.since_begin("swapped_out") + engine.since_begin("recomputed")
        assert answers(engine) == expected
        return engine.since_begin("swapped_out") + engine.since_begin("recomputed") - learnt

    # With swap space memory may be as full as without.
    without = ADAPTIVE.model_copy(update={"swap_bytes": 0})
    foreseen = preempted(without.model_copy(update={"peak_admission": True}))
    assert foreseen < preempted(without) / 2


def test_no_more_blocks_are_saved_as_they_fill_than_are_copied_beside_a_step(
    engine: SchedulingEngine,
) -> None:
    scheduler, (prompt,) = engine.scheduler, prompts(9, 1)
    measured = scheduler.costs.transfer_times
    long = (prompt * 20)[:400]
    for bytes_per_s, saved in ((1e12, 400 // 32), (1e5, 1)):
        engine.begin(ADAPTIVE)
        scheduler.costs.transfer_times = TransferTimes(bytes_per_s, bytes_per_s)
        # Long ago, so that one block is copied to see how fast the link is.
        scheduler.swap.copied_out_at = -math.inf
        engine.add(f"link-{bytes_per_s}", long, max_tokens=4)
        engine.finish()

        def saved_blocks() -> int:
            # The store's own lines of a block take less than one block in all.
            used = engine.ask_store(Inspect(), StoreUsage).state.used_bytes
            return int(used // scheduler.costs.block_bytes)

        # Blocks are committed beside the next step.
        within(30, lambda saved=saved: saved_blocks() >= saved)
        time.sleep(1.0)  # one that is too many may still come
        assert saved_blocks() == saved
    scheduler.costs.transfer_times = measured


def test_nothing_stays_leased_once_all_have_come_back(engine: SchedulingEngine) -> None:
    # What was swapped out is kept for ten seconds, for whoever comes back.
    within(15, lambda: not engine.ask_store(Inspect(), StoreUsage).state.leases)


def swap_someone_out(engine: SchedulingEngine, seed: int) -> list[str]:
    """Requests, one of which has been swapped out and waits."""
    names = [f"{seed}-{at}" for at in range(16)]
    for name, prompt in zip(names, prompts(seed, 16), strict=True):
        engine.add(name, prompt, max_tokens=80)
    while not engine.scheduler.swap:
        assert not engine.finish(steps=1)
    return names


def test_a_client_that_leaves_while_its_request_is_swapped_out_leaves_nothing(
    engine: SchedulingEngine,
) -> None:
    engine.begin(ADAPTIVE)
    names = swap_someone_out(engine, 31)
    (gone,) = engine.scheduler.swap
    external = next(name for name in names if gone.startswith(name))
    engine.llm.llm_engine.abort_request([external])
    engine.finish(steps=1)
    assert gone not in engine.scheduler.swap
    assert gone not in engine.scheduler.connector.connector_scheduler.swapped
    assert set(engine.finish()) == {name for name in names if name != external}


@pytest.mark.slow
def test_with_the_store_away_what_was_swapped_out_is_computed_again(
    engine: SchedulingEngine,
) -> None:
    engine.begin(SchedulerOptions(overlap_swap=False))
    expected = answers(engine, seed=32, number=16)
    engine.begin(ADAPTIVE)
    source = random.Random(32)
    for at, prompt in enumerate(prompts(32, 16)):
        engine.add(f"32-{at}", prompt, max_tokens=source.randrange(16, 90))
    done: dict[str, Any] = {}
    while not engine.scheduler.swap:
        done |= engine.finish(steps=1)
    assert engine.server is not None
    engine.server.stop()
    done |= engine.finish()
    engine.start_store()
    assert {
        name.split("-")[1]: list(o.outputs[0].token_ids) for name, o in done.items()
    } == expected


def test_several_answers_a_grammar_and_logprobs_survive_preemption(
    engine: SchedulingEngine,
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def outputs(options: SchedulerOptions) -> dict[str, list[Any]]:
        engine.begin(options)
        texts = prompts(33, 14)
        for at, prompt in enumerate(texts[:8]):
            engine.add(f"plain-{at}", prompt, max_tokens=70)
        for at, prompt in enumerate(texts[8:10]):
            engine.add(f"several-{at}", prompt, max_tokens=40, n=3, temperature=0.8, seed=7)
        for at, prompt in enumerate(texts[10:12]):
            grammar = StructuredOutputsParams(regex=r"([a-z]{3} ){12}")
            engine.add(f"grammar-{at}", prompt, max_tokens=60, structured_outputs=grammar)
        for at, prompt in enumerate(texts[12:]):
            engine.add(f"logprobs-{at}", prompt, max_tokens=50, logprobs=1, prompt_logprobs=1)
        done = engine.finish()
        assert len(done) == 14
        assert all(len(done[f"several-{at}"].outputs) == 3 for at in range(2))
        assert all(len(done[f"logprobs-{at}"].outputs[0].logprobs) == 50 for at in range(2))
        return {
            name: [list(one.token_ids) for one in sorted(o.outputs, key=lambda one: one.index)]
            for name, o in done.items()
        }

    plain = outputs(SchedulerOptions(overlap_swap=False))
    assert outputs(ADAPTIVE) == plain
    assert engine.since_begin("swapped_out") >= 3


def test_a_deadline_that_nears_is_served_first_and_can_be_ignored(
    engine: SchedulingEngine,
) -> None:
    def place(options: SchedulerOptions) -> int:
        engine.begin(options)
        for at, prompt in enumerate(prompts(34, 18)):
            engine.add(f"plain-{at}", prompt[:20] * 2, max_tokens=30)
        text = prompts(35, 1)[0][:20] * 10
        soon = {DEADLINE: time.monotonic() + 60}
        engine.add("urgent", text, max_tokens=30, extra_args=soon)
        return list(engine.finish()).index("urgent")

    deadline = ADAPTIVE.model_copy(update={"queue": "deadline"})
    assert place(deadline) <= 15 < place(ADAPTIVE.model_copy(update={"deadlines": False}))


def running(engine: SchedulingEngine) -> list[str]:
    """Names of the requests that run, in the order in which they are served."""
    return [request.request_id.partition("-")[0] for request in engine.scheduler.running]


def test_the_shortest_predicted_answer_is_served_first(engine: SchedulingEngine) -> None:
    def started(extra: dict[str, Any] | None) -> bool:
        engine.begin(ADAPTIVE.model_copy(update={"queue": "sjf"}))
        for at, prompt in enumerate(prompts(39, 18)):
            engine.add(f"plain-{at}", prompt[:10], max_tokens=20)
        engine.add("long", prompts(40, 1)[0][:10], max_tokens=40, extra_args=extra)
        early = engine.finish(steps=2)
        at_once = "long" in running(engine)
        assert len(early | engine.finish()) == 19, "it ends although it exceeds its prediction"
        return at_once

    assert started({EXPECTED: [3.5, 8]})
    assert not started(None)


def test_in_a_queue_too_long_to_look_at_in_each_step_a_short_newcomer_goes_first(
    engine: SchedulingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.begin(ADAPTIVE.model_copy(update={"queue": "sjf"}))
    for at, prompt in enumerate(prompts(42, 90)):
        engine.add(f"plain-{at}", prompt[:10], max_tokens=6)
    done = engine.finish(steps=2)
    monkeypatch.setattr(engine.scheduler.order, "_sort_all_at", math.inf)
    engine.add("long", prompts(43, 1)[0][:10], max_tokens=30)
    engine.add("short", prompts(44, 1)[0][:10], max_tokens=3)
    done |= engine.finish()
    in_order = list(done)
    assert len(in_order) == 92
    # Of sixteen places, none is free before.
    assert in_order.index("short") <= 2 * 16
    assert in_order.index("long") > 2 * 16


def test_of_two_deadlines_the_one_with_the_longer_predicted_answer_is_served_first(
    engine: SchedulingEngine,
) -> None:
    def order(**lengths: int) -> list[str]:
        engine.begin(ADAPTIVE.model_copy(update={"queue": "deadline"}))
        for name, deadline_s in (("early", 1000.0), ("late", 1000.05)):
            extra: dict[str, Any] = {DEADLINE: time.monotonic() + deadline_s}
            if lengths:
                extra[EXPECTED] = [lengths[name]] * 2
            engine.add(name, prompts(41, 1)[0][:10], max_tokens=900, extra_args=extra)
        engine.finish(steps=3)
        found = running(engine)
        engine.llm.llm_engine.abort_request(["early", "late"])
        engine.finish()
        return found

    assert order() == ["early", "late"]
    # As long as a step takes more than 0.06 ms, of which no engine is capable.
    assert order(early=10, late=850) == ["late", "early"]
    assert not engine.scheduler.order._hints, "nothing is kept of requests that are gone"


def test_resetting_the_prefix_cache_under_running_requests_keeps_nothing_in_swap_space(
    engine: SchedulingEngine,
) -> None:
    engine.begin(ADAPTIVE)
    for at, prompt in enumerate(prompts(36, 4)):
        engine.add(f"36-{at}", prompt[:BLOCK_TOKENS], max_tokens=20)
    assert not engine.finish(steps=5)
    assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    assert not engine.scheduler.swap
    assert len(engine.finish()) == 4


@pytest.mark.parametrize(
    "queue", ["fair", *(pytest.param(q, marks=pytest.mark.slow) for q in ("fcfs", "sjf"))]
)
def test_background_requests_make_way_for_all_others_and_lose_nothing(
    engine: SchedulingEngine, queue: str
) -> None:
    background = {BACKGROUND: 1}
    texts = prompts(37, 16)

    def answers_of(outputs: dict[str, Any]) -> dict[str, list[int]]:
        return {name: list(o.outputs[0].token_ids) for name, o in outputs.items()}

    engine.begin(ADAPTIVE)
    for at, prompt in enumerate(texts):
        engine.add(f"37-{at}", prompt[:40], max_tokens=40)
    alone = answers_of(engine.finish())
    engine.begin(ADAPTIVE.model_copy(update={"queue": queue}))
    for at, prompt in enumerate(texts):
        engine.add(f"37-{at}", prompt[:40], max_tokens=40, extra_args=background)
    done = engine.finish(steps=12)
    assert len(engine.scheduler.running) == 16, "all places are taken"
    for at, prompt in enumerate(prompts(38, 4)):
        engine.add(f"38-{at}", prompt, max_tokens=8)
    done |= engine.finish()
    in_order = list(done)
    assert max(in_order.index(f"38-{at}") for at in range(4)) < 4
    assert {name: tokens for name, tokens in answers_of(done).items() if name in alone} == alone

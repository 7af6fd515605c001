"""The scheduler over vLLM's own, without a worker: each step's tokens come from the test."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from loomserve.platform.engine.options.engine_config import look_at_class
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.engine.scheduler import AdaptiveScheduler, make_scheduler
from loomserve.platform.engine.scheduling.device_time import take_device_s
from loomserve.platform.engine.scheduling.step_hooks import StepHooks
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.scheduling.policy.hints import BACKGROUND
from tests.integration import tiny_llama

BLOCKS, SIZE = 33, 32
OPTIONS = {
    "vLLM's own": SchedulerOptions(),
    "fair": SchedulerOptions(queue="fair"),
    "sjf, by peak memory": SchedulerOptions(queue="sjf", preemption="adaptive"),
    "prompts apart": SchedulerOptions(queue="fair", chunked_recompute=False),
    "never computed twice": SchedulerOptions(queue="deadline", preemption="swap"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save(folder, vocabulary=1000, context=1024)
    look_at_class({"model": str(folder)})
    return folder


def scheduler_of(model: Path, options: SchedulerOptions, seats: int = 16) -> AdaptiveScheduler:
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=256,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        additional_config={"loomserve": options.model_dump()},
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return make_scheduler(
        config,
        kv_cache_config=KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=SIZE,
    )


def add(
    scheduler: AdaptiveScheduler,
    name: str,
    prompt: int,
    answer: int,
    grammar: StructuredOutputsParams | None = None,
    priority: int = 0,
    **extra: Any,
) -> Request:
    init_none_hash(sha256)
    source = random.Random(name)
    request = Request(
        request_id=name,
        prompt_token_ids=[source.randrange(1000) for _ in range(prompt)],
        sampling_params=SamplingParams(
            max_tokens=answer, ignore_eos=True, extra_args=extra, structured_outputs=grammar
        ),
        pooling_params=None,
        priority=priority,
        block_hasher=get_request_block_hasher(SIZE, sha256),
    )
    scheduler.add_request(request)
    return request


def step(scheduler: AdaptiveScheduler) -> list[str]:
    """A step, in which each request whose prompt is computed is given a token; who has ended."""
    return [one.request_id for one in stepped(scheduler) if one.finished]


def stepped(scheduler: AdaptiveScheduler) -> list[EngineCoreOutput]:
    """The outputs of such a step."""
    scheduled = scheduler.schedule()
    names = list(scheduled.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[
            [7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests
        ],
    )
    outputs = scheduler.update_from_output(scheduled, output)
    return [one for each in outputs.values() for one in each.outputs]


def test_all_the_time_of_steps_is_told_with_the_last_outputs(model: Path) -> None:
    scheduler = scheduler_of(model, OPTIONS["fair"])
    for name, answer in (("a", 3), ("b", 9), ("c", 30)):
        add(scheduler, name, 50, answer)
    told: dict[str, float] = {}
    while scheduler.has_unfinished_requests():
        for output in stepped(scheduler):
            seconds = take_device_s(output)
            assert (seconds is not None) == output.finished
            told[output.request_id] = seconds or 0.0
    assert told["a"] < told["b"] < told["c"]
    assert sum(told.values()) == pytest.approx(scheduler.swap.totals["step_s"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_all_requests_end_and_leave_nothing_however_memory_is_shared(
    model: Path, options: SchedulerOptions
) -> None:
    scheduler = scheduler_of(model, options)
    source = random.Random(1)
    for at in range(40):
        extra = {BACKGROUND: 1} if at % 5 == 0 else {}
        add(scheduler, str(at), source.randrange(10, 130), source.randrange(16, 90), **extra)
    ended: list[str] = []
    for _ in range(1000):
        ended += step(scheduler)
        assert len(scheduler.running) <= 16
    assert sorted(ended) == sorted(map(str, range(40)))
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    assert not scheduler.order._hints
    assert not scheduler.order._out_of_turn
    assert scheduler.swap.totals["recomputed"] > 0 or options.preemption == "swap"


def test_in_the_order_of_arrival_background_requests_come_after_all_others(model: Path) -> None:
    scheduler = scheduler_of(model, OPTIONS["vLLM's own"], seats=1)
    ended: list[str] = []
    for number in range(2):
        for name in ("first", "background", "second"):
            extra = {BACKGROUND: 1} if name == "background" else {}
            add(scheduler, f"{name} {number}", prompt=40, answer=2, **extra)
        ended += step(scheduler)
    while scheduler.has_unfinished_requests():
        ended += step(scheduler)
    others = ["first 0", "second 0", "first 1", "second 1"]
    assert ended == [*others, "background 0", "background 1"]


@pytest.mark.parametrize("options", ["vLLM's own", "fair", "sjf, by peak memory"])
def test_requests_are_served_in_the_order_of_their_priorities(model: Path, options: str) -> None:
    scheduler = scheduler_of(model, OPTIONS[options], seats=1)
    ended: list[str] = []
    for name, priority in [("0", 0), ("later", 5), ("soon", -2), ("0 too", 0), ("soonest", -9)]:
        add(scheduler, name, prompt=40, answer=3, priority=priority)
    add(scheduler, "background", prompt=40, answer=3, priority=-99, **{BACKGROUND: 1})
    while scheduler.has_unfinished_requests():
        ended += step(scheduler)
    assert ended == ["soonest", "soon", "0", "0 too", "later", "background"]


def test_running_requests_that_sit_a_step_out_keep_their_seats(model: Path) -> None:
    scheduler = scheduler_of(model, OPTIONS["prompts apart"], seats=2)
    for name, answer in [("a", 3), ("b", 6), ("c", 3), ("d", 3)]:
        add(scheduler, name, prompt=40, answer=answer)
    ended: list[str] = []
    while scheduler.has_unfinished_requests():
        ended += step(scheduler)
        assert len(scheduler.running) <= 2
        assert scheduler.most_running == 2
    assert sorted(ended) == ["a", "b", "c", "d"]


class AcceptsAll(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar of any text, which notes what it is given."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None: ...

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None: ...

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None: ...


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_request_whose_grammar_is_not_there_yet_keeps_nobody_waiting(
    model: Path, options: SchedulerOptions
) -> None:
    scheduler = scheduler_of(model, options, seats=1)
    late = add(scheduler, "late", 40, 2, StructuredOutputsParams(regex="a*"))
    assert late.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    add(scheduler, "first", 40, 2, **{BACKGROUND: 1})
    assert [name for _ in range(3) for name in step(scheduler)] == ["first"]
    late.structured_output_request.grammar = AcceptsAll()
    assert [name for _ in range(3) for name in step(scheduler)] == ["late"]
    assert not scheduler.has_unfinished_requests()


END_OF_REASONING = 9


class Reasons:
    """Reasoning up to a token, as vLLM's parsers tell it."""

    def __init__(self, tokenizer: object) -> None: ...

    def is_reasoning_end(self, tokens: list[int]) -> bool:
        return False

    def is_reasoning_end_streaming(self, tokens: list[int], last: list[int]) -> bool:
        return END_OF_REASONING in last


@pytest.mark.parametrize(
    ("reasoner", "tokens", "accepted"),
    [
        (None, [1, 2], [1, 2, 7]),
        (Reasons, [1, END_OF_REASONING, 3, 4], [3, 4, 7]),
        (Reasons, [1, END_OF_REASONING], [7]),
        (Reasons, [1, 2], []),
    ],
)
def test_a_request_goes_on_first_and_its_grammar_knows_what_was_answered_but_no_reasoning(
    model: Path, reasoner: type | None, tokens: list[int], accepted: list[int]
) -> None:
    scheduler = scheduler_of(model, OPTIONS["vLLM's own"], seats=1)
    scheduler.structured_output_manager.reasoner_cls = reasoner
    scheduler.structured_output_manager.tokenizer = None
    add(scheduler, "other", 40, 2)
    any_text = StructuredOutputsParams(regex=".*")
    late = add(scheduler, "late", 40, len(tokens) + 1, any_text, **{RESUMED: tokens})
    late.structured_output_request.grammar = grammar = AcceptsAll()
    assert step(scheduler) == ["late"]
    assert grammar.accepted == accepted
    assert list(late.output_token_ids) == [*tokens, 7]


class Recorder(StepHooks):
    def __init__(self) -> None:
        self.may_start = True
        self.kept = False
        self.calls: list[str] = []

    def before_schedule(self) -> bool:
        self.calls.append("before_schedule")
        return self.may_start

    def before_update(self, scheduled_tokens: int) -> None:
        self.calls.append(f"before_update {scheduled_tokens}")

    def after_update(self, scheduled_tokens: int) -> None:
        self.calls.append(f"after_update {scheduled_tokens}")

    def keeps_kv(self, request: Request) -> bool:
        return self.kept

    def on_free(self, request: Request) -> None:
        self.calls.append(f"on_free {request.request_id}")


def test_hooks_take_part_in_a_step_in_order(model: Path) -> None:
    scheduler, hooks = scheduler_of(model, OPTIONS["fair"]), Recorder()
    scheduler.hooks = (hooks,)
    add(scheduler, "a", prompt=10, answer=1)
    assert step(scheduler) == ["a"]
    assert hooks.calls == ["before_schedule", "before_update 10", "on_free a", "after_update 10"]


def test_nobody_starts_in_a_step_that_a_hook_needs_for_others(model: Path) -> None:
    scheduler, hooks = scheduler_of(model, OPTIONS["fair"]), Recorder()
    scheduler.hooks = (hooks,)
    add(scheduler, "a", prompt=10, answer=5)
    step(scheduler)
    hooks.may_start = False
    for name in "bc":
        add(scheduler, name, prompt=10, answer=5)
    step(scheduler)
    assert [one.request_id for one in scheduler.running] == ["a"]
    assert [one.request_id for one in scheduler.waiting] == ["b", "c"]
    hooks.may_start = True
    step(scheduler)
    assert len(scheduler.running) == 3


@pytest.mark.parametrize("kept", [True, False])
def test_a_request_that_a_hook_preempts_goes_on_and_is_counted_if_its_kv_is_lost(
    model: Path, kept: bool
) -> None:
    scheduler, hooks = scheduler_of(model, OPTIONS["fair"]), Recorder()
    scheduler.hooks, hooks.kept = (hooks,), kept
    add(scheduler, "a", prompt=40, answer=5)
    step(scheduler)
    scheduler.preempt(scheduler.requests["a"])
    assert scheduler.swap.totals["recomputed"] == (not kept)
    ended = [name for _ in range(10) for name in step(scheduler)]
    assert ended == ["a"]

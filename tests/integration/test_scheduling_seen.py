"""What vLLM tells its front end of a request's schedule becomes metrics and the replica's load."""

from __future__ import annotations

import time

import pytest
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from loomserve.platform.disaggregation.engine.prefill_decode import FirstOutputs
from loomserve.platform.engine.load import LoadMeter
from loomserve.platform.engine.turnaround import Turnaround
from loomserve.platform.state import SchedulingState

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType
SCHEDULING = {
    "queue": "fair", "preemption": "adaptive", "swapped_out": 5, "swapped_in": 4, "recomputed": 3,
    "swap_used_bytes": 2, "swap_capacity_bytes": 10, "step_time_error": None,
    "swap_time_error": 0.5,
}  # fmt: skip


@pytest.fixture
def turnaround() -> Turnaround:
    return Turnaround()


@pytest.fixture
def processor(turnaround: Turnaround) -> FirstOutputs:
    return FirstOutputs(OutputProcessor(None, log_stats=True), turnaround)


def add(processor: FirstOutputs, request_id: str) -> None:
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=8, detokenize=False),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=request_id,
    )
    processor.add_request(request, None)


def output(
    request_id: str, *events: tuple[EngineCoreEventType, float], last: bool = False
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id,
        [7],
        finish_reason=FinishReason.LENGTH if last else None,
        events=[EngineCoreEvent(kind, at) for kind, at in events] or None,
    )


def take_in(
    processor: FirstOutputs, *outputs: EngineCoreOutput, waiting: int = 0, skipped: int = 0
) -> IterationStats:
    stats = IterationStats()
    processor.process_outputs(list(outputs), time.monotonic(), stats)
    processor.update_scheduler_stats(
        SchedulerStats(num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped)
    )
    return stats


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"loomserve_{name}", labels) or 0.0


def test_a_requests_schedule_is_measured_when_it_finishes(
    processor: FirstOutputs, turnaround: Turnaround
) -> None:
    names = [f"{name}_count" for name in ("weighted_turnaround", "request_preemptions")]
    before = [metric(name) for name in names], metric("request_preemptions_sum")
    add(processor, "r")
    now = time.monotonic()
    take_in(processor, output("r", (QUEUED, now), (SCHEDULED, now + 1e-4)))
    again = (PREEMPTED, now + 2e-4), (SCHEDULED, now + 3e-4)
    take_in(processor, output("r", *again))
    take_in(processor, output("r", *again, last=True))
    assert [metric(name) for name in names] == [count + 1 for count in before[0]]
    assert metric("request_preemptions_sum") == before[1] + 2
    assert turnaround.mean_weighted_turnaround >= 1


def test_whoever_has_no_output_waits_as_long_as_the_engine_says_that_some_do(
    processor: FirstOutputs, turnaround: Turnaround
) -> None:
    for request_id in ("first", "second"):
        add(processor, request_id)
    now = time.monotonic()
    started = output("first", (QUEUED, now), (SCHEDULED, now))
    for counts in ({"waiting": 1}, {"skipped": 1}):
        take_in(processor, started, **counts)
        assert turnaround.oldest_waiting_s(now + 9) > 9
    take_in(processor, output("first"), output("second", (SCHEDULED, now)))
    assert turnaround.oldest_waiting_s(now + 9) == 0
    take_in(processor, output("second"), waiting=1)  # the first one was preempted
    assert turnaround.oldest_waiting_s(now + 9) > 9
    processor.abort_requests(["first"], internal=True)
    assert turnaround.oldest_waiting_s(now + 9) == 0


def test_a_request_starts_where_its_prompt_is_computed(
    processor: FirstOutputs, turnaround: Turnaround
) -> None:
    now = time.monotonic()
    queued, started, decoded = now - 3, now - 2, now - 1
    elsewhere = (QUEUED, queued), (SCHEDULED, started)
    here = (QUEUED, started), (SCHEDULED, decoded)
    for request_id, seen in (("its first token, too", True), ("its KV only", False)):
        add(processor, request_id)
        first = output(request_id, *elsewhere)
        processor.handed_over(request_id, first, seen=seen)
        if seen:
            take_in(processor, first)
        own = output(request_id, *here)
        take_in(processor, own)
        stats = processor.request_states[request_id].stats
        assert (stats.queued_ts, stats.scheduled_ts) == (queued, started)


def test_the_load_tells_what_the_scheduler_and_the_queue_said_last(turnaround: Turnaround) -> None:
    meter = LoadMeter()
    logger = meter.stat_logger(None)
    assert meter.read(turnaround).scheduling is None
    logger.record(SchedulerStats(kv_connector_stats={"loads": 1}), None)
    assert meter.read(turnaround).scheduling is None
    logger.record(SchedulerStats(kv_connector_stats={"scheduling": SCHEDULING}), None)
    logger.record(SchedulerStats(), None)
    turnaround.arrived("done", 0.0)
    turnaround.scheduled("done", 3.0)
    turnaround.finished("done", 4.0)
    turnaround.arrived("waits", time.monotonic() - 60)
    turnaround.step(waiting=1)
    load = meter.read(turnaround)
    assert load.scheduling == SchedulingState.model_validate(SCHEDULING)
    assert load.scheduling.model_dump() == SCHEDULING
    assert load.weighted_turnaround == 4
    assert 60 <= load.oldest_waiting_s < 120


def test_the_load_tells_the_pace_of_requests_that_have_ended(turnaround: Turnaround) -> None:
    meter = LoadMeter()
    logger = meter.stat_logger(None)
    iteration = IterationStats()
    logger.record(None, iteration)
    assert meter.read(turnaround).pace is None
    ended = FinishedRequestStats(
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=120,
        num_cached_tokens=20,
        num_generation_tokens=41,
        prefill_time=0.5,
        decode_time=2.0,
        inference_time=2.5,
    )
    iteration.finished_requests = [ended, ended]
    logger.record(None, iteration)
    pace = meter.read(turnaround).pace
    assert pace is not None
    assert pace.prefill_token_s == pytest.approx(0.005)
    assert pace.output_token_s == pytest.approx(0.05)
    assert pace.request_s == pytest.approx(2.5)
